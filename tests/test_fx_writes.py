# SPDX-License-Identifier: Apache-2.0
"""What a model writes to parts of a tensor, for every kind of index: eager, scripted, exported."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import sqnr
from models import Wired
from torch import Tensor, fx, nn

import torchq

# Each writes to z, (4, 6, 8) of float32, and reads y, the same before.
WRITES: dict[str, Callable[[Any, Any], None]] = {}
UNSCRIPTED = {  # neither a view nor all tensors and ints
    "list", "tuple", "range", "true", "false", "mask_list", "slice_list", "list_value",
    "size_value",
}  # fmt: skip

# Methods in place, whose result nobody reads: torch.fx takes every method for one without effect,
# and so its eliminate_dead_code removes them. Nothing in torchq calls that.
METHODS = {
    "operator_of_a_view", "operator_behind_a_view", "operator_of_an_item_that_is_kept",
}  # fmt: skip


def write(function: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    WRITES[function.__name__] = function
    return function


def assigns(name: str, index: Any, value: Any) -> None:
    """``value`` may be a function of y."""

    def function(z: Any, y: Any) -> None:
        z[index] = value(y) if callable(value) else value

    function.__name__ = name
    write(function)


assigns("list", [0, 2], 5.0)
assigns("list_value", [0, 2], lambda y: y[1:3])
assigns("tuple", ((0, 1),), 5.0)
assigns("range", range(2), 5.0)
assigns("true", True, 5.0)
assigns("false", False, 5.0)
assigns("mask_list", [True, False, True, False], 5.0)
assigns("slice_list", (slice(None), [0, 2]), 5.0)
assigns("slices_tensor", (slice(None), slice(None), torch.tensor([1, 5])), lambda y: y[0, :, :2])
assigns("slice_tensors", (slice(None), torch.tensor([1, 3]), torch.tensor([2, 0])), 5.0)
assigns("slice_int_tensor", (slice(None), 3, torch.tensor([2, 0])), lambda y: y[1, 0, :2])
assigns("slice_mask", (slice(None), slice(None), torch.arange(8) > 2), 5.0)
assigns("tensor_slice", (torch.tensor([1, 3]), slice(None)), 5.0)
assigns("slice_tensor_slice", (slice(None), torch.tensor([1, 3]), slice(None)), lambda y: y[:, :2])
assigns("empty", (), 5.0)
assigns("int", 0, 5.0)
assigns("int_bool", 0, True)
assigns("negative", -1, 3)
assigns("ints", (0, 1, 2), 5.0)
assigns("ints_value", (0, 1, 2), lambda y: y[1, 1, 1])
assigns("slice", (slice(None), slice(1, None, 2)), lambda y: y[:, ::2])
assigns("ellipsis", (..., 0), lambda y: y[..., 1])
assigns("everything", ..., lambda y: y * 2)
assigns("everything_number", ..., 5.0)
assigns("everything_leading", ..., lambda y: y[None] * 2)
assigns("none", (None, 0), 7.0)
assigns("broadcast", slice(1, 3), lambda y: y[0])
assigns("mean", (slice(None), slice(-1, None)), lambda y: y.mean(1, keepdim=True))
assigns("leading", 0, lambda y: y[1:2])
assigns("leading_two", (0, 1), lambda y: y[1:2, 2:3])
assigns("leading_scalar", (0, 1, 2), lambda y: y[1:2, 1:2, 1])
assigns("leading_slice", slice(0, 2), lambda y: y[None, None, 1:3])
assigns("integers", 0, lambda y: (y[0] * 3).long())


@write
def tensor(z: Any, y: Any) -> None:
    z[torch.tensor([0, 2])] = y[1:3]


@write
def tensor_leading(z: Any, y: Any) -> None:
    z[torch.tensor([0, 2])] = y[None, 1:3]


@write
def tensor_number(z: Any, y: Any) -> None:
    z[torch.tensor([[0, 2], [1, 3]])] = 5


@write
def tensor_int(z: Any, y: Any) -> None:
    z[torch.tensor([0, 2]), 1] = y[1:3, 2]


@write
def int_tensor(z: Any, y: Any) -> None:
    z[0, torch.tensor([0, 2]), 1] = y[1:2, 1, 3:5]


@write
def scalar_tensor(z: Any, y: Any) -> None:
    z[torch.tensor(2)] = y[:1]


@write
def slice_tensor(z: Any, y: Any) -> None:
    z[:, torch.tensor([0, 2])] = y[:, [1, 3]]


@write
def mask(z: Any, y: Any) -> None:
    z[y > 0.1] = 5.0


@write
def mask_value(z: Any, y: Any) -> None:
    z[y > 0.1] = y[y > 0.1] * 2


@write
def mask_rows(z: Any, y: Any) -> None:
    z[torch.arange(4) % 2 == 0] = y[:1]


@write
def mask_leading(z: Any, y: Any) -> None:
    z[torch.arange(4) % 2 == 0, 1] = y[None, None, 0, 1:2]


@write
def scalar_mask(z: Any, y: Any) -> None:
    z[torch.tensor(True)] = 5.0


@write
def scalar_mask_value(z: Any, y: Any) -> None:
    z[y.sum() < 1e9] = y[None] * 2


@write
def scalar_mask_false(z: Any, y: Any) -> None:
    z[y.sum() > 1e9] = y[0]
    z[0, 0, 0] = 5.0


@write
def size(z: Any, y: Any) -> None:
    z[y.shape[0] - 1, : y.shape[1] // 2] = 5.0


@write
def size_value(z: Any, y: Any) -> None:
    z[0] = y.shape[0]


@write
def operator(z: Any, y: Any) -> None:
    z *= 2
    z += y[0]


@write
def operator_of_a_view(z: Any, y: Any) -> None:
    part = z[:, 1:3]
    part -= y[:, 3:5]
    part //= 0.25


@write
def operator_behind_a_view(z: Any, y: Any) -> None:
    part, rows = z[:, 1:3], z.view(-1, 8)
    z /= 2
    rows **= 2
    z[:, 3:4] = part[:, :1]


@write
def operator_of_an_item(z: Any, y: Any) -> None:
    z[:, 1:3] += y[:, 3:5]
    z[:2] *= 3


@write
def operator_of_an_item_that_is_kept(z: Any, y: Any) -> None:
    parts = [z[:, 1:3], z[:, 3:5]]
    parts[0] += y[:, 3:5]
    part = z[:, :1]
    parts[1][:, 1:] -= part
    part *= 2
    z[:, 5:6] = part + parts[0][:, :1]


@write
def operator_of_another_dtype(z: Any, y: Any) -> None:
    z += y.double()


@write
def operator_of_bits(z: Any, y: Any) -> None:
    chosen = y > 0
    same = chosen
    chosen &= y < 0.5
    z[same] = 5.0


@pytest.fixture(scope="module", params=WRITES)
def case(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Tensor, Tensor]:
    """Name, converted model, input and what the writes make of the converted layer's result."""
    torch.manual_seed(0)
    function, x = WRITES[request.param], torch.randn(4, 6, 8)

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.a(x)
        z = y * 1.0
        function(z, y)
        return y, z

    model = Wired(forward, a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [x], x)
    assert isinstance(converted, fx.GraphModule)
    y, found = converted(x)
    expected = y * 1.0
    function(expected, y)
    assert torch.equal(found, expected) and not (torch.equal(y, found) and request.param != "false")
    return request.param, converted, x, expected


def test_every_write_is_as_in_torch(case: tuple[str, nn.Module, Tensor, Tensor]) -> None:
    _, converted, x, expected = case
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x)[1], expected)
    y, found = converted(x[:, :4])
    with torch.no_grad():
        again = y * 1.0
        WRITES[case[0]](again, y)
    assert torch.equal(found, again)


@pytest.mark.parametrize("case", [name for name in WRITES if name not in METHODS], indirect=True)
def test_no_write_is_removed_as_unused(case: tuple[str, nn.Module, Tensor, Tensor]) -> None:
    _, converted, x, expected = case
    cleaned = pickle.loads(pickle.dumps(converted))
    cleaned.graph.eliminate_dead_code()
    cleaned.recompile()
    assert torch.equal(cleaned(x)[1], expected)


def test_writes_script(case: tuple[str, nn.Module, Tensor, Tensor]) -> None:
    name, converted, x, expected = case
    if name in UNSCRIPTED:
        with pytest.raises(RuntimeError):
            torch.jit.script(converted)
        return
    scripted, buffer = torch.jit.script(converted), io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    for module in (scripted, torch.jit.load(buffer), torch.jit.freeze(scripted)):
        assert torch.equal(module(x)[1], expected)


def test_writes_export(case: tuple[str, nn.Module, Tensor, Tensor]) -> None:
    _, converted, x, expected = case
    exported = torch.export.export(converted, (x,)).module()
    assert torch.equal(exported(x)[1], expected)


def test_sizes_that_are_written_to_a_constant_are_guarded(tmp_path: Path) -> None:
    """The code goes on with that tensor, which is no node."""

    def forward(m: Any, x: Tensor) -> Tensor:
        shapes = torch.empty((1, 2), dtype=torch.long)
        shapes[0, 0] = x.shape[1]
        shapes[0, 1] = 3
        return m.a(x) * shapes.prod(1)

    model, x = Wired(forward, a=nn.Linear(8, 8)).eval(), torch.randn(4, 6, 8)
    quantized = torchq.quantize(model, [x], x)
    torchq.save(quantized, tmp_path / "model")
    for found in (quantized, torchq.load(tmp_path / "model")):
        with torch.no_grad():
            for other in (x, x[:2]):
                assert sqnr(model(other), found(other)) > 30
        with pytest.raises(RuntimeError, match="size or condition was 6, got 3"):
            found(x[:, :3])
