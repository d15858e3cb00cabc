# SPDX-License-Identifier: Apache-2.0
"""What is read and then written in place: a converted graph reads it later, and the old values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import sqnr, tensors
from models import Wired
from torch import Tensor, fx, nn

import torchq

READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone(),
    "flip": lambda x: x.flip(0),
    "indices": lambda x: x[[2, 1, 0, 3]],
    "pad": lambda x: F.pad(x, (0, 0)),
    "pool": lambda x: F.max_pool1d(x[None], 1)[0],
    "concatenation": lambda x: torch.cat([x, x]),
    "norm": lambda x: F.layer_norm(x, (8,)),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "zero": lambda x: x.zero_(),
    "relu": lambda x: F.relu(x, inplace=True),
    "operator": lambda x: x.__iadd__(3),
    "item": lambda x: x.__setitem__(0, 3.0),
    "out": lambda x: torch.mul(x, -2, out=x),
}


def check(forward: Any, traced: bool = True) -> None:
    torch.manual_seed(0)
    model = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    data = [torch.randn(4, 8) for _ in range(4)]
    converted = torchq.quantize(model, copy.deepcopy(data))
    assert isinstance(converted, fx.GraphModule) == traced
    for x in (data[0], data[1]):
        given, got = x.clone(), x.clone()
        with torch.no_grad():
            expected, found = model(given), converted(got)
        pairs = zip(tensors((expected, given)), tensors((found, got)), strict=True)
        assert all(torch.equal(a, b) or sqnr(a, b) > 25 for a, b in pairs)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_what_was_read_before_a_write_is_as_it_was(read: str, write: str) -> None:
    def of_the_argument(m: Any, x: Tensor) -> Any:
        y = READS[read](x)
        WRITES[write](x)
        return m.a(y), y

    def of_a_layer(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        y = READS[read](x)
        WRITES[write](x)
        return m.b(y)

    check(of_the_argument)
    check(of_a_layer)


def test_a_layer_that_ends_behind_a_write() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        x.zero_()
        z: Tensor = m.b(y.relu())
        return z

    check(forward)


def test_a_part_of_what_was_read_is_written() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.flip(0)
        x[:, :2].add_(1)
        z: Tensor = m.a(y)
        return z

    check(forward, traced=False)


MAYBE: dict[str, Callable[[Any], Any]] = {  # copies, but not of one row
    "contiguous": lambda y: y.t().contiguous(),
    "reshape": lambda y: y.t().reshape(-1),
    "flatten": lambda y: y.t().flatten(),
    "expand": lambda y: y[:1].expand(len(y), 8).contiguous(),
    "twice": lambda y: y.t().contiguous().view(2, 4, -1).transpose(0, 1).contiguous().mT[..., :1],
}


@pytest.mark.parametrize("other", MAYBE)
@pytest.mark.parametrize("write", ["zero", "relu", "operator", "item"])
@pytest.mark.parametrize("to_copy", [True, False])
def test_a_copy_that_is_none_for_one_row(other: str, write: str, to_copy: bool) -> None:
    """A graph made of four rows would leave the other name as it is, also where both are one."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        z = MAYBE[other](y)
        WRITES[write](z if to_copy else y)
        return m.b(y), z

    torch.manual_seed(0)
    model = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    rows = torch.randn(4, 8)
    converted = torchq.quantize(model, [rows, *(row[None] for row in rows)])
    assert write == "item" or isinstance(converted, fx.GraphModule)
    with torch.no_grad():
        for x in (rows, rows[:1], rows[1:3]):
            for expected, found in zip(model(x), converted(x), strict=True):
                assert sqnr(expected, found) > 25 or torch.equal(expected, found)
