# SPDX-License-Identifier: Apache-2.0
"""Files of torchq.save: safetensors, digests, older versions, threads, the saved report."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn

import torchq
import torchq.nn as tnn
from torchq.attributes.json_text import read_json
from torchq.serialization import read_state
from torchq.serialization.tensor_file import write_tensors


@pytest.fixture
def small(tmp_path: Path) -> tuple[nn.Module, nn.Module, torch.Tensor, Path]:
    """A float model, its conversion, an input, and the file."""
    make, shape, _, _ = models.CASES["sequential"]
    model, x = models.randomize(make()), torch.randn(shape)
    converted = torchq.quantize(model, [x, 2 * x], x)
    torchq.save(converted, tmp_path / "model")
    return model, converted, x, tmp_path / "model"


@pytest.mark.parametrize("installed", [True, False])
def test_the_format_is_always_safetensors(
    installed: bool, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, converted, x, path = small
    if installed:
        read = pytest.importorskip("safetensors.torch").load_file(path)
        state = converted.state_dict()
        assert all(torch.equal(state[name], v) for name, v in read.items() if name in state)
        assert {"0.layer.weight", "torchq_graph.0.bias"} <= state.keys() & read.keys()
    else:
        monkeypatch.setitem(sys.modules, "safetensors", None)
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    before = path.read_bytes()
    torchq.save(converted, path)
    assert path.read_bytes() == before and before[8:9] == b"{"
    assert torch.equal(torchq.load(path, model)(x), converted(x))


def test_files_without_a_digest_load(small: Any) -> None:
    """Other tools write them, from the tensors of one of ours."""
    model, converted, x, path = small
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    del header["__metadata__"]["digest"], header["__metadata__"]["torchq_format"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert torch.equal(torchq.load(path, model)(x), converted(x))


@pytest.mark.parametrize(
    ("key", "now", "before", "lacks"),
    [
        ("torchq_graph", b'"version":3', b'"version":1', "torchq_call"),
        ("0.spec", b'"class":"QuantizedLeaf"', b'"class":"Swapped"', ("torchq_call", "torchq_gr")),
    ],
)
def test_files_of_the_last_version_say_what_to_do(
    key: str, now: bytes, before: bytes, lacks: Any, small: Any
) -> None:
    """Its graphs took other arguments, and nothing told which calls take them."""
    model, _, _, path = small
    state = read_state(path)
    text = bytes(state[key].tolist())
    assert now in text
    state[key] = torch.tensor(list(text.replace(now, before)), dtype=torch.uint8)
    state = {name: value for name, value in state.items() if not name.startswith(lacks)}
    write_tensors("test", path, state)
    with pytest.raises(ValueError, match=r"[Qq]uantize the model again"):
        torchq.load(path, model)


def test_archives_of_torch_save_are_refused(small: Any) -> None:
    """Their reader takes as much memory as they name."""
    model, _, _, path = small
    torch.save(read_state(path), path)
    with pytest.raises(ValueError, match=r"is an archive of torch.save.*safetensors.torch.save"):
        torchq.load(path, model)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\x7f", "\x9b31m", "a\b", "a\r"])
def test_names_that_a_terminal_obeys_are_refused(name: str, tmp_path: Path) -> None:
    """They would reach it by `torchq inspect`, `torchq.explain` and errors."""
    path = tmp_path / "file"
    with pytest.raises(ValueError, match="must be printable, got "):
        write_tensors("test", path, {name: torch.ones(2)})
    header = json.dumps({name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})
    for text in (header.encode(), json.dumps(json.loads(header), ensure_ascii=False).encode()):
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
        with pytest.raises(ValueError, match="header is not one of safetensors"):
            read_state(path)
    assert read_json(rb'["a\\u001b", "a\\b", "a\t\n"]') == ["a\\u001b", "a\\b", "a\t\n"]
    state = {"0.spec": torch.tensor(list(json.dumps({"class": name}).encode()), dtype=torch.uint8)}
    write_tensors("test", path, state)
    with pytest.raises(ValueError, match="spec"):
        torchq.load(path, nn.Sequential(nn.Linear(2, 2)))


class Colored(nn.Module):
    """Cannot be captured, and says so in red."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise NotImplementedError("\x1b[31mno export\x1b[0m")
        return self.layer(x)


def test_colors_of_a_models_errors_stay_out_of_the_report(tmp_path: Path) -> None:
    x = torch.randn(8, 4)
    qmodel = torchq.quantize(Colored().eval(), [x])
    torchq.save(qmodel, tmp_path / "m")
    loaded = torchq.load(tmp_path / "m", Colored().eval())
    text = str(torchq.explain(loaded))
    assert "no export" in text and "\x1b" not in text
    assert torch.equal(loaded(x), qmodel(x))


def test_copies_in_threads(small: Any) -> None:
    """ast.parse of CPython 3.11 fails in threads, so nothing here may call it."""
    model, converted, x, path = small
    expected, pickled = converted(x), pickle.dumps(converted)
    ways: list[Callable[[], nn.Module]] = [
        lambda: torchq.load(path),
        lambda: torchq.load(path, model),
        lambda: pickle.loads(pickled),
        lambda: copy.deepcopy(converted),
    ]
    with ThreadPoolExecutor(4) as pool:
        for way in ways:
            made = [pool.submit(way) for _ in range(24)]
            assert all(torch.equal(future.result()(x), expected) for future in made)


def test_quantize_in_threads() -> None:
    """torch.export patches what all threads share; a model without its graph would say so."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 8)
    expected = torchq.quantize(model, [x])(x)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(torchq.quantize, model, [x]) for _ in range(12)]
        for future in made:
            qmodel = future.result()
            assert torch.equal(qmodel(x), expected) and torchq.explain(qmodel).graphs


def test_the_report_is_saved(small: Any, tmp_path: Path) -> None:
    model, converted, _, path = small
    loaded = torchq.load(path, model)
    assert torchq.explain(loaded).rows == torchq.explain(converted).rows
    with pytest.raises(ValueError, match=r"model must come from torchq.prepare"):
        torchq.explain(model)
    state = read_state(path)
    state["torchq_report"] = torch.tensor([1, 2], dtype=torch.uint8)
    write_tensors("test", tmp_path / "other", state)
    with pytest.raises(ValueError, match=r"the file's report must be rows that torchq.save wrote"):
        torchq.load(tmp_path / "other", model)


def test_others_can_read_the_file(tmp_path: Path) -> None:
    """The mode is that of any file the process creates, as its umask says."""
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    plain.touch()
    torchq.save(tnn.QMaxPool2d(torchq.QParams.per_tensor(0.1), 2), saved)
    assert saved.stat().st_mode == plain.stat().st_mode
