# SPDX-License-Identifier: Apache-2.0
"""Steps that ``torchq quantize`` has in common for all models, and its summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchq
from torchq.commands.samples import shown
from torchq.models.inputs import Inputs
from torchq.models.state import as_before

Sample = TypeVar("Sample")


def static(model: nn.Module, batches: Sequence[Inputs], config: torchq.QConfig) -> nn.Module:
    """Calibrate and convert, with progress."""
    prepared = torchq.prepare(model, batches[0], config)
    torchq.calibrate(prepared, shown("calibrate", batches), progress=False)
    return torchq.convert(prepared)


def outputs(
    title: str, model: nn.Module, run: Callable[[Sample], object], samples: Sequence[Sample]
) -> list[object]:
    """Return what ``run`` computes of each sample; the model keeps its state."""
    with torch.inference_mode(), as_before(model):
        return [run(sample) for sample in shown(title, samples)]


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers; 0 where they are packed, as in torch.ao."""
    tensors = list(model.state_dict().values())
    if not tensors or not all(isinstance(value, Tensor) for value in tensors):
        return 0
    sizes = {value.data_ptr(): value.numel() * value.element_size() for value in tensors}
    return sum(sizes.values())


def summarize(qmodel: nn.Module, output: Path, before: int) -> None:
    """Print the size of what was written, and how many layers are int8."""
    after = stored_bytes(output)
    origin = f", from {before / 1e6:.3g} MB" if before else ""
    print(f"{output}: {after / 1e6:.3g} MB{origin}")
    layers = [row for row in torchq.explain(qmodel).rows if row.is_matmul]
    left = [row for row in layers if not row.quantized]
    print(f"{len(layers) - len(left)} of {len(layers)} layers in int8")
    for row in left[:5]:
        print(f"    float: {row.name or '(the model)'}: {row.reason}")
    if len(left) > 5:
        print(f"    float: {len(left) - 5} more; torchq.explain lists them")


def stored_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the weights in a folder."""
    if path.is_file():
        return path.stat().st_size
    kinds = (".safetensors", ".bin")
    return sum(p.stat().st_size for p in path.rglob("*") if p.suffix in kinds)


def print_accuracy(expected: Sequence[object], got: Sequence[object], data: str) -> None:
    """Print the SQNR of all outputs, where there are any; ``data`` says how much gave them."""
    if expected:
        decibels = torchq.sqnr(list(expected), list(got))
        print(f"{decibels:.1f} dB output SQNR against the given model, on {data}")


def batches_text(batches: Sequence[Inputs]) -> str:
    """Return how many batches there are, and how many rows, where each begins with a tensor."""
    first = [next(iter(tree_leaves(batch)), None) for batch in batches]
    sizes = [len(x) for x in first if isinstance(x, Tensor) and x.dim() > 0]
    text = counted(len(batches), "batch", "es")
    return f"{text}, {counted(sum(sizes), 'row')}" if len(sizes) == len(batches) else text


def counted(number: int, word: str, ending: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {word}{ending * (number != 1)}"
