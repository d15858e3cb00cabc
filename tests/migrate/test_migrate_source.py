# SPDX-License-Identifier: Apache-2.0
"""``torchq migrate``: every use of torch.ao and of PT2E with its line, and no file changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchq.__main__ import main
from torchq.migrate.source import find_uses

SOURCE = """\
import torch
import torch.ao.quantization as aq
from torch.ao.quantization import quantize_fx, get_default_qconfig as config
from torch.quantization import *
from torch.ao.quantization.quantize_fx import convert_fx
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e as ready
from torchao.quantization import quantize_

old = torch.quantization
model = aq.quantize_dynamic(model, {torch.nn.Linear})
class Model:
    def forward(self):
        self.stub = torch.ao.quantization.QuantStub()
        model.qconfig = config("x86")
        old.quantize_dynamic(model)
        quantize_fx.prepare_fx(model, aq.QConfigMapping(), (src,))
        aq.MinMaxObserver.with_args(reduce_range=True)
        quantize_(model)
        return ready(model, torch.ao.nn.quantized.Linear(3, 4)), aq.unheard_of
"""
EXPECTED = [
    (4, "torch.quantization.*", "one by one"),
    (5, "torch.ao.quantization.quantize_fx.convert_fx", "torchq.convert"),
    (6, "torchao.quantization.pt2e.quantize_pt2e.convert_pt2e", "torchq.from_pt2e"),
    (10, "torch.ao.quantization.quantize_dynamic", "torchq.quantize_dynamic"),
    (13, "torch.ao.quantization.QuantStub", "nothing"),
    (14, "torch.ao.quantization.get_default_qconfig", "torchq.QConfig"),
    (15, "torch.quantization.quantize_dynamic", "torchq.quantize_dynamic"),
    (16, "torch.ao.quantization.QConfigMapping", "overrides"),
    (16, "torch.ao.quantization.quantize_fx.prepare_fx", "torchq.prepare"),
    (17, "torch.ao.quantization.MinMaxObserver.with_args", "minmax"),
    (19, "torch.ao.nn.quantized.Linear", "torchq.nn"),
    (19, "torch.ao.quantization.unheard_of", "nothing of this name"),
    (19, "torchao.quantization.pt2e.quantize_pt2e.prepare_pt2e", "torchq.prepare"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("print 'x'\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\ns = '\xe9'\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text(SOURCE)
    (tmp_path / "notes.txt").write_text(SOURCE)
    return tmp_path


def test_every_use_with_its_line(folder: Path):
    uses = find_uses(folder / "model.py")
    assert [(use.line, use.name) for use in uses] == [row[:2] for row in EXPECTED]
    for use, (_, _, advice) in zip(uses, EXPECTED, strict=True):
        assert advice in use.advice, use


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    assert main(["migrate", str(folder)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EXPECTED) + 1 and last.startswith(f"{len(lines)} places in 2 files")
    assert lines[0].startswith(f"{folder / 'broken.py'}:1: not read: ")
    assert lines[1].startswith(f"{folder / 'model.py'}:4: torch.quantization.*: ")
    assert {path: path.read_bytes() for path in before} == before
    assert main(["migrate", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in rows] == [1, *(row[0] for row in EXPECTED)]
    assert rows[1].keys() == {"file", "line", "name", "advice"}


def test_nothing_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "clean.py").write_text("import torch\ntorch.nn.Linear(1, 2)\nfrom . import x\n")
    assert main(["migrate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing of torch.ao's quantization is used there\n"


def test_no_such_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["migrate", str(tmp_path / "none")]) == 2
    assert "PATH must be a file or folder" in capsys.readouterr().err


def test_most_public_names_have_advice(tmp_path: Path):
    names = [f"torch.ao.quantization.{name}" for name in torch.ao.quantization.__all__]
    (tmp_path / "all.py").write_text("\n".join(["import torch", *names]))
    uses = find_uses(tmp_path)
    assert [use.name for use in uses] == names
    without = [use.name for use in uses if "nothing of this name" in use.advice]
    assert len(without) < len(names) // 6, without
