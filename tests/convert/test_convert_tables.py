# SPDX-License-Identifier: Apache-2.0
"""Functions that become tables, the ranges in front of them, and means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, names, sqnr
from models import Wired, conv, randomize
from test_convert_layers import X, convert
from torch import nn

import torchq
import torchq.nn as tnn

# Tables


def test_a_function_behind_a_matmul_is_its_table() -> None:
    """The bits are those of the layer and its table one after the other."""
    model = Wired(
        lambda m, x: m.d(F.hardswish(m.c(m.n(m.b(F.silu(m.a(x))))))),
        a=conv(), b=nn.Conv2d(8, 8, 3, groups=8), n=nn.BatchNorm2d(8),
        c=nn.ConvTranspose2d(8, 8, 2), d=conv(),
    )  # fmt: skip
    found = convert(model, bound=25)
    assert names(found) == ["QConv2d", "QConv2d", "QConvTranspose2d", "QConv2d"]
    rows = {row.name: row for row in torchq.explain(found).rows}
    assert rows["silu"].reason == "fused into a" and rows["hardswish"].reason == "fused into c"
    x = torch.randn(X)
    expected = found(x)
    graph = graph_of(found)
    for layer in (graph.a, graph.c):
        lookup, layer.lookup = layer.lookup, None
        layer.register_forward_hook(lambda module, args, dst, lookup=lookup: lookup(dst))
    assert torch.equal(found(x), expected)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(F.silu(y := m.a(x))) + m.c(y),
        lambda m, x: m.b(F.silu(y := m.a(x))).mean() + y,
        lambda m, x: m.b(F.silu(m.p(m.a(x)))),
        lambda m, x: m.b(F.silu(m.a(x) * m.c(x))),
    ],
    ids=["second layer", "read as float", "moved first", "product"],
)
def test_functions_that_stay_lookups(forward: Any) -> None:
    model = Wired(forward, a=conv(), b=conv(), c=conv(), p=nn.MaxPool2d(2))
    found = convert(model, bound=20)
    assert all(getattr(module, "lookup", None) is None for module in graph_of(found).modules())


# Ranges in front of functions


def test_a_range_before_a_function_is_chosen_by_its_results() -> None:
    """hardswish needs no levels below -3; a sum that reads the same values does."""
    alone = Wired(lambda m, x: m.b(F.hardswish(m.a(x))), a=conv(), b=conv())
    total = Wired(lambda m, x: m.b(F.hardswish(y := m.a(x)) + y), a=conv(), b=conv())
    both = Wired(
        lambda m, x: m.b(F.hardswish(y := m.a(x))) + m.c(y), a=conv(), b=conv(), c=conv()
    )  # fmt: skip
    x, lows = torch.randn(X), []
    for model in (alone, total, both):
        randomize(model).a.weight.data.mul_(8)
        converted = graph_of(torchq.quantize(model, [x], x))
        lows.append(-float(converted.a.dst_scale) * int(converted.a.dst_zero_point))
        assert float(model.a(x).min()) < -6
    assert -3.2 < lows[0] < -2.9
    assert all(low < -6 for low in lows[1:])


@pytest.mark.parametrize("between", [nn.AvgPool2d(3), nn.Upsample(scale_factor=2, mode="bilinear")])
def test_averages_in_front_of_a_function_see_all_values(between: nn.Module) -> None:
    """The range in front of an average is that of its source, not that of its result."""
    model = Wired(lambda m, x: m.b(F.relu6(m.p(m.a(x)))), a=conv(), b=conv(), p=between)
    nn.init.normal_(model.a.weight)
    convert(model, bound=28)


def test_a_range_before_a_prelu_of_one_slope() -> None:
    """Its parameter requires a gradient, which the search does not follow."""
    convert(Wired(lambda m, x: m.b(m.p(m.a(x))), a=conv(), p=nn.PReLU(), b=conv()))


# Means


MEANS = [
    lambda y: F.adaptive_avg_pool2d(y, 1).flatten(1),
    lambda y: y.mean((2, 3)),
    lambda y: y.mean([-1, -2], keepdim=True)[:, :, 0, 0],
    lambda y: F.avg_pool2d(y, 9).flatten(1),
]


@pytest.mark.parametrize("mean", MEANS)
def test_means_have_parameters_of_their_own(mean: Any) -> None:
    """A mean of 81 values covers less than they do: on their levels it would lose 3 bits."""
    model = Wired(lambda m, x: m.fc(mean(m.conv(x))), conv=conv(), fc=nn.Linear(8, 5))
    converted = convert(model, bound=33)
    _, pool, linear = graph_of(converted).children()
    assert "AvgPool2d" in type(pool).__name__ and isinstance(linear, tnn.QLinear)
    assert float(pool.dst_scale) * 5 < float(pool.src_scale)
    assert torch.equal(pool.dst_scale, linear.src_scale)
    assert pool(torch.zeros(1, 8, 9, 9, dtype=torch.uint8)).dtype == torch.uint8


def test_means_that_nobody_reads_as_int8() -> None:
    """They are float32, of int8 where that is there anyway."""
    model = Wired(
        lambda m, x: (m.b(y := m.a(x)), y.mean((2, 3))), a=conv(), b=conv()
    )  # fmt: skip
    x = torch.randn(X)
    converted = torchq.quantize(randomize(model), [x, 2 * x], x)
    assert names(converted) == ["QConv2d", "QConv2d", "QAdaptiveAvgPool2d"]
    (_, want), (_, got) = model(x), converted(x)
    assert got.dtype == torch.float32 and sqnr(want, got) > 35

    model = Wired(lambda m, x: m.a(x).mean((2, 3)), a=conv())
    converted = torchq.quantize(randomize(model), [x], x)
    assert names(converted) == ["QConv2d"]  # float32 already: nothing else reads it


def test_means_of_one_position_change_nothing() -> None:
    model = Wired(lambda m, x: m.b(F.adaptive_avg_pool2d(m.a(x), 1)), a=conv(), b=conv(k=1))
    converted = convert(model, 2, 8, 1, 1)
    pool = graph_of(converted).get_submodule("adaptive_avg_pool2d")
    assert pool.scales is None and "dst_scale" not in pool.state_dict()


def test_a_magnitude_is_float_up_to_the_layer_that_reads_it() -> None:
    """One step of 8 bits near zero becomes many behind a square root."""
    model = Wired(
        lambda m, x: m.b((m.a(x).square() + m.c(x).square()).sqrt()), a=conv(), b=conv(), c=conv()
    )
    found = convert(model, bound=35)
    rows = {row.name: row for row in torchq.explain(found).rows}
    assert "too coarse for its slope" in rows["sqrt"].reason
    assert not rows["add"].quantized and not rows["square"].quantized
    assert rows["a"].quantized and graph_of(found).a.dst_dtype == torch.float32
