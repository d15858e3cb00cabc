# SPDX-License-Identifier: Apache-2.0
"""Converts a network and writes what the C++ program takes: the archive, an input, its result.

    python examples/torchscript_cpp/export.py build/torchscript_cpp
    cmake -S examples/torchscript_cpp -B build/torchscript_cpp \\
          -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
    cmake --build build/torchscript_cpp
    build/torchscript_cpp/run $(python -c 'import torchq.ops as o; print(o.LIBRARY_PATH)') \\
          build/torchscript_cpp/{model,input,output}.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import torchq


def main(folder: Path) -> None:
    """Writes model.pt, input.pt and expected.pt."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()
    batch = torch.randn(8, 3, 64, 64)
    int8 = torchq.quantize(model, [batch], batch[:1])
    torch.jit.script(int8).save(folder / "model.pt")
    torch.save(batch, folder / "input.pt")
    torch.save(int8(batch), folder / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
