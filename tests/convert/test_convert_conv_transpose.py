# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions of a model: modules, functions, what is folded and fused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, sqnr
from models import Wired
from torch import Tensor, nn

import torchq
import torchq.nn as tnn

CLASSES = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
FUNCTIONS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d
}  # fmt: skip
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def layers(model: nn.Module, x: Tensor, bound: float = 32) -> list[nn.Module]:
    """The converted model's modules in the order of calls; its result is near the float one's."""
    converted = torchq.quantize(models.randomize(model), [x, 2 * x], x, strict=True)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > bound
        other = torch.cat([x, x])
        assert sqnr(model(other), converted(other)) > bound
    graph = graph_of(converted)
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    return [graph.get_submodule(node.target) for node in calls]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "stride": 2},
     {"dilation": 2, "bias": False}],
    ids=str,
)  # fmt: skip
def test_with_batch_norm_and_relu(dims: int, options: dict[str, Any]) -> None:
    """The norm folds into the weight's output channels, inside of the groups."""
    x = torch.randn(2, 8, *[5] * dims)
    model = nn.Sequential(CLASSES[dims](8, 12, 3, **options), NORMS[dims](12), nn.ReLU())
    found = layers(model, x)
    assert [type(m).__name__ for m in found] == [f"QConvTranspose{dims}d"]
    assert "relu" in found[0].post_ops and found[0].weight_scale.numel() == 12


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_functions(dims: int) -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, *[3] * dims) / 8)
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            y = FUNCTIONS[dims](x, self.weight, self.bias, 2, 1, 1, 2)
            return FUNCTIONS[dims](F.relu(y), self.weight[:6, :2], stride=(2,) * dims)

    found = layers(Up(), torch.randn(2, 8, *[4] * dims))
    assert [type(m).__name__ for m in found] == [f"QConvTranspose{dims}d"] * 2
    assert found[0].dst_dtype == torch.uint8


def test_unet_is_int8_throughout() -> None:
    """Up, pad to the size of the skip connection, concatenate; a residual is a sum."""

    def forward(m: Any, x: Tensor) -> Tensor:
        down = F.relu(m.a(x))
        deep = F.relu(m.b(F.max_pool2d(down, 2)))
        up = m.up(deep)
        dy, dx = down.shape[2] - up.shape[2], down.shape[3] - up.shape[3]
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        y = torch.cat([down, up], 1)
        return m.last(m.c(y)) + m.skip(y)

    model = Wired(
        forward, a=models.conv(), b=models.conv(), up=nn.ConvTranspose2d(8, 8, 2, 2),
        c=models.conv(16), last=nn.ConvTranspose2d(8, 4, 3, padding=1), skip=models.conv(16, 4, 1),
    )  # fmt: skip
    found = layers(model, torch.randn(2, 8, 11, 13), 25)
    assert [type(m).__name__ for m in found if not isinstance(m, tnn.QConv2d)] == [
        "QMaxPool2d", "QConvTranspose2d", "QPad", "QCat", "QConvTranspose2d"
    ]  # fmt: skip
    assert sum("sum" in getattr(m, "post_ops", "") for m in found) == 1


def test_a_pad_in_front_stays() -> None:
    """Zeros in front of a transposed convolution are no padding of it."""
    model = Wired(lambda m, x: m.a(F.pad(m.c(x), (1, 1, 1, 1))), c=models.conv(),
                  a=nn.ConvTranspose2d(8, 4, 3, 2, padding=1))  # fmt: skip
    layers(model, torch.randn(2, 8, 6, 6))


def test_output_sizes_of_a_call() -> None:
    """Computed from sizes, as decoders that mirror their encoder do."""
    model = Wired(lambda m, x: m.a(x, output_size=(2 * x.shape[2], 2 * x.shape[3])),
                  a=nn.ConvTranspose2d(8, 8, 3, 2, 1)).eval()  # fmt: skip
    converted = torchq.quantize(model, [torch.randn(2, 8, 6, 6)], strict=True)
    with torch.no_grad():
        assert sqnr(model(x := torch.randn(2, 8, 7, 9)), converted(x)) > 28


def test_output_sizes_of_another_tensor() -> None:
    """The decoder gives what the encoder got: the padding of the output depends on the call."""
    model = Wired(lambda m, x: m.a(m.c(x), output_size=x.shape[2:]), c=nn.Conv2d(3, 8, 3, 2, 1),
                  a=nn.ConvTranspose2d(8, 3, 3, 2, 1)).eval()  # fmt: skip
    data = [2 * torch.rand(2, 3, 8, 8) - 1 for _ in range(8)]
    q = torchq.quantize(model, data, strict=True)
    assert all(row.quantized for row in torchq.explain(q).rows)
    for sizes in ((8, 8), (9, 8), (11, 12), (13, 15)):
        x = 2 * torch.rand(2, 3, *sizes) - 1
        with torch.no_grad():
            assert sqnr(model(x), q(x)) > 30, sizes


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_output_sizes_in_code_that_no_graph_takes(dims: int, tmp_path: Path) -> None:
    def forward(m: Any, x: Tensor, size: list[int]) -> Tensor:
        y = m.a(x, size)
        return y * 2 if float(y.sum()) > 1e9 else y

    model = Wired(forward, a=CLASSES[dims](8, 6, 3, 2, 1)).eval()
    x = torch.randn(1, 8, *[5] * dims)
    q = torchq.quantize(model, [(x, [10] * dims)] * 2, strict=True)
    torchq.save(q, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model)
    with torch.no_grad():
        for size in ([9] * dims, [10] * dims, [1, 6, *[9] * dims]):
            expected, result = model(x, size), q(x, size)
            assert result.shape == expected.shape and sqnr(expected, result) > 28
            assert torch.equal(loaded(x, size), result)
    scripted = torch.jit.script(q.a)
    assert torch.equal(scripted(x, output_size=[10] * dims), q.a(x, [10] * dims))
    with pytest.raises(ValueError, match="valid sizes range from"):
        q(x, [11] * dims)


def test_too_long_sums() -> None:
    model = nn.ConvTranspose2d(2000, 2, 6)
    with pytest.raises(RuntimeError, match="sums more than 65793 products"):
        torchq.quantize(nn.Sequential(model).eval(), [torch.randn(1, 2000, 2, 2)], strict=True)
