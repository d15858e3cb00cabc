# SPDX-License-Identifier: Apache-2.0
"""TORCHQ_VERBOSE=1 prints one line per executed op."""

import os
import re
import subprocess
import sys

PROGRAM = """
import torch
import torchq.functional as TF
from torchq import Attr
x = torch.zeros(1, 8, 6, 6, dtype=torch.uint8)
attr = Attr()
attr.post_ops.append_eltwise("relu")
with __import__("torchq").use_isa("reference"):
    TF.conv2d(x, torch.zeros(5, 8, 3, 3, dtype=torch.int8), attr=attr)
    TF.max_pool(x, 2)
    TF.add(x, x, Attr())
"""
LINES = (
    "conv,uint8[1, 8, 6, 6] -> float32[1, 5, 4, 4] geometry:[3, 3, 1, 1, 0, 0, 0, 0, 1, 1, 1, 8] "
    "post_ops:eltwise_relu,gemm:reference,",
    "max_pool,uint8[1, 8, 6, 6] -> uint8[1, 8, 3, 3],max_pool:reference,",
    "add,uint8[1, 8, 6, 6] uint8[1, 8, 6, 6] -> uint8[1, 8, 6, 6],add:reference,",
)


def run(verbose: str) -> list[str]:
    environment = {**os.environ, "TORCHQ_VERBOSE": verbose}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return result.stdout.splitlines()


def test_one_line_per_op() -> None:
    lines = run("1")
    assert len(lines) == len(LINES)
    for line, expected in zip(lines, LINES, strict=True):
        assert line.startswith(f"torchq,exec,{expected}")
        assert re.fullmatch(r"[0-9.e+-]+", line.rsplit(",", 1)[1])


def test_silent_by_default() -> None:
    assert run("0") == []
