# SPDX-License-Identifier: Apache-2.0
"""Numbers of CPUs: one row for each core, which TORCHQ_CPU chooses and which changes no bit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch
from fresh import python
from torch import nn

import torchq

CSRC = Path(__file__).parents[2] / "csrc"
CPUS = re.findall(r'\.name = "(\w+)"|like\(\w+, "(\w+)"\)', (CSRC / "runtime/cpu.cpp").read_text())
NAMES = sorted({name or other for name, other in CPUS})


def digest() -> str:
    """Return that of products with few to many rows, from L1 to L3, and of recurrent layers."""
    torch.manual_seed(0)
    found = hashlib.sha256()
    for rows, inputs, outputs in ((1, 512, 768), (3, 768, 2048), (12, 96, 160), (70, 200, 64)):
        src = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8)
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        found.update(torchq.functional.linear(src, weight, dst_dtype=torch.int32).numpy().tobytes())
    attr = torchq.Attr().set_rnn_data_qparams(63, 128).set_rnn_weights_qparams(0, 200.0)
    for layer, batch in ((nn.LSTM(64, 96), 1), (nn.GRU(48, 128), 1), (nn.LSTM(32, 64), 7)):
        quantized = getattr(torchq.nn, f"Q{type(layer).__name__}").from_float(layer, attr=attr)
        src = torch.randint(0, 256, (9, batch, layer.input_size), dtype=torch.uint8)
        found.update(quantized(src)[0].numpy().tobytes())
    return found.hexdigest()


PROGRAM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torchq
from test_cpu_tuning import digest
print(torchq.cpu_info()["tuned_for"])
for tier in torchq.supported_isas():
    with torchq.use_isa(tier):
        print(digest())
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_row_gives_the_same_bits(name: str) -> None:
    run = python(PROGRAM, TORCHQ_CPU=name)
    used, *digests = run.stdout.split()
    assert used == name and {*digests} == {digest()}, run.stderr


def test_the_rows_are_those_of_known_cores() -> None:
    assert {"zen3", "zen4", "zen5", "icelake", "graniterapids", "neoverse_v2", "unknown"} < {*NAMES}
    assert torchq.cpu_info()["tuned_for"] in NAMES


def test_an_unknown_row_raises_with_the_first_op() -> None:
    code = "import torchq\ntry: torchq.isa()\nexcept ValueError as error: print(error)"
    run = python(code, TORCHQ_CPU="zen9")
    assert "TORCHQ_CPU must be one of zen3, zen4" in run.stdout and "got zen9" in run.stdout


def test_kernels_and_ops_hold_no_number_of_a_cpu() -> None:
    """Sizes of caches and questions for the CPU stand in cpu_tuning.h and cpu.cpp."""
    wrong = []
    for folder in ("kernels", "ops", "isa", "epilogue"):
        for file in sorted((CSRC / folder).rglob("*.[ch]*")):
            code = re.sub(r"//.*", "", file.read_text())
            found = re.findall(r"\d \* 1024\b|__builtin_cpu\w*", code)
            if file.name != "cpu_tuning.h":
                wrong += [f"{file.relative_to(CSRC)}: {text}" for text in found]
    assert wrong == ["isa/avx512_vnni.h: __builtin_cpu_supports"], wrong  # of an instruction
