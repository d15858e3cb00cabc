# SPDX-License-Identifier: Apache-2.0
"""TorchScript of converted models: results of any class, and the ways to write Python."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchq

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:torchq.*calibration has seen too little",
    "ignore:.*torch.jit.*deprecated",  # DeprecationWarning in torch 2.13, FutureWarning in 2.15
    "ignore:torch.meshgrid:UserWarning",
    "ignore:.*is deprecated.*:DeprecationWarning:torch.*",
)


@dataclass
class Found:
    """As libraries return: some fields are None, others are tuples."""

    scores: Tensor
    loss: Tensor | None = None
    features: tuple[Tensor, ...] | None = None


Pair = namedtuple("Pair", "scores features")
torch.export.register_dataclass(Found)
RESULTS: dict[str, Callable[..., Any]] = {
    "dataclass": lambda z, y: Found(z, features=(y, z)),
    "named tuple": Pair,
    "dict": lambda z, y: {"scores": z, "features": y},
    "ordered dict": lambda z, y: OrderedDict(scores=z, features=y),
    "list": lambda z, y: [z, y],
}


class Finds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 4), kind

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return RESULTS[self.kind](self.b(y), y)


@pytest.mark.parametrize("kind", RESULTS)
def test_scripts_results_of_classes(kind: str, tmp_path: Path) -> None:
    """Scripts return the tensors in the order of the fields; the model returns its class."""
    model, x = Finds(kind).eval(), torch.randn(3, 8)
    converted = torchq.quantize(model, [x, 2 * x], x)
    expected = converted(x)
    assert type(expected) is type(model(x))
    torch.jit.script(converted).save(tmp_path / "model.pt")
    found = torch.jit.load(tmp_path / "model.pt")(x)
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if b is not None)
    program = torch.export.export(converted, (x,)).module()
    assert torch.equal(tree_leaves(program(x))[0], tree_leaves(expected)[0])


PICKED = torch.tensor([3, 0, 3])
SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "axis": lambda y: y - y.mean(axis=-1, keepdims=True) + torch.sum(y, axis=1, keepdims=True),
    "norm": lambda y: y / y.norm(dim=-1, keepdim=True),
    "nonzero": lambda y: y + (y > 9).nonzero(as_tuple=True)[0].numel(),
    "ellipsis": lambda y: y[..., PICKED] + y[..., [1], :1] + y[None, ..., PICKED[:1]][0],
    "ellipsis_beside_new_dims": lambda y: y[..., None, PICKED],
    "meshgrid": lambda y: y[0] + torch.meshgrid(y[0, :, 0], y[0, 0], indexing="ij")[1],
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0, scale=2),
    "bool": lambda y: y * (y > 0).float().bool(),
    "tuples": lambda y: y + torch.tensor([(y.shape[1], 1, 2, 3), (y.shape[2], 4, 5, 6)])[1],
    "check": lambda y: checked(y),
    "backwards": lambda y: torch.stack(y.unbind(-1)[::-1], -1),
    "sizes_backwards": lambda y: y.reshape(y.shape[:1] + y.shape[:0:-1]),
    "complex": lambda y: torch.fft.ifft(torch.fft.fft(y) * (0.5 - 2j)).real,
}


def checked(y: Tensor) -> Tensor:
    torch._check(y.shape[1] * y.shape[2] == y[0].numel(), lambda: "sizes do not fit")
    return y + 1


class Spelled(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.fc, self.spelling = nn.Linear(8, 4), spelling

    def forward(self, x: Tensor) -> Tensor:
        return SPELLINGS[self.spelling](self.fc(x.to(self.fc.weight.dtype)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scripts_spellings_of_python(spelling: str) -> None:
    """TorchScript knows some of them under another name, and some in another form only."""
    model, x = Spelled(spelling).eval(), torch.randn(2, 3, 8)
    converted = torchq.quantize(model, [x])
    expected = converted(x)
    assert graph_of(converted) is not converted
    assert torch.equal(torch.jit.script(converted)(x), expected)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        y = self.fc(batch["x"])
        return {"y": y if batch.get("mask") is None else y * batch["mask"]}


def test_scripts_dicts() -> None:
    """A script takes the tensors of a call, in order."""
    batch = {"x": torch.randn(4, 8), "mask": torch.ones(4, 1)}
    model = torchq.quantize(Masked().eval(), [(batch,)])
    assert torch.equal(torch.jit.script(model)(*batch.values())["y"], model(batch)["y"])
