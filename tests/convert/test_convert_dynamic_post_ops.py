# SPDX-License-Identifier: Apache-2.0
"""Functions and additions behind dynamic linear layers become their post-ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
import torchq.functional as TF

DYNAMIC = torchq.QConfig(dynamic=True)


class Block(nn.Module):
    """A feed-forward block with its skip connection."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.up, self.function, self.down = nn.Linear(24, 48), function, nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function(self.up(x)))


FUNCTIONS = {
    "gelu": (nn.GELU(), "gelu_erf"),
    "gelu tanh": (nn.GELU("tanh"), "gelu_tanh"),
    "relu": (nn.ReLU(), "relu"),
    "relu6": (nn.ReLU6(), "clip:0:6"),
    "silu": (nn.SiLU(), "swish:1"),
    "tanh": (nn.Tanh(), "tanh"),
    "sigmoid": (nn.Sigmoid(), "logistic"),
    "mish": (nn.Mish(), "mish"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_block_is_two_ops(name: str):
    function, alg = FUNCTIONS[name]
    model, x = Block(function).eval(), torch.randn(3, 5, 24)
    q = torchq.quantize(model, example_inputs=x, config=DYNAMIC)
    reasons = {row.name: row.reason for row in torchq.explain(q).rows}
    assert reasons["function"] == "fused into up" and reasons["add"] == "fused into down"
    up, down = (q.get_submodule(layer).layer for layer in ("up", "down"))
    for src in (x, torch.randn(1, 7, 24), torch.randn(4, 1, 24)):
        hidden = up(src, f"eltwise_{alg}")
        assert torch.equal(q(src), down(hidden, "sum:1:0:f32", [src]))
        assert torch.equal(q(src), src + down(hidden))
        torch.testing.assert_close(hidden, function(up(src)), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.jit.script(q)(x), q(x))


class Other(nn.Module):
    """Sums that no layer computes: of another shape, of what is made later, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x) + torch.sin(x * 2)  # the sine is computed behind the layer
        z = self.second(y) + row
        return F.gelu(z), z


def test_what_is_no_post_op():
    model, x = Other().eval(), torch.randn(4, 8)
    row = torch.randn(1, 8)
    q = torchq.quantize(model, example_inputs=(x, row), config=DYNAMIC)
    for src, other in ((x, row), (torch.randn(2, 8), torch.randn(1, 8))):
        for got, expected in zip(q(src, other), model(src, other), strict=True):
            assert torchq.sqnr(expected, got) > 30


class Late(nn.Module):
    """Each layer is the other operand of the other's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x) + self.b(x))


def test_a_sum_of_two_layers_belongs_to_the_second():
    model, x = Late().eval(), torch.randn(4, 8)
    q = torchq.quantize(model, example_inputs=x, config=DYNAMIC)
    a, b = q.a.layer, q.b.layer
    assert torch.equal(q(x), b(x, "sum:1:0:f32+eltwise_relu", [a(x)]))


def test_an_override_keeps_a_function():
    model, x = Block(nn.GELU()).eval(), torch.randn(3, 24)
    q = torchq.quantize(model, example_inputs=x, config=DYNAMIC, overrides={"function": None})
    up, down = q.up.layer, q.down.layer
    assert torch.equal(q(x), x + down(F.gelu(up(x))))


def test_compare_sees_the_fused_result():
    model, x = Block(nn.GELU()).eval(), torch.randn(6, 24)
    prepared = torchq.prepare(model, x, DYNAMIC)
    rows = torchq.compare(prepared, torchq.convert(prepared), [x]).layers
    assert {row.name for row in rows} >= {"up", "down"} and all(row.sqnr > 30 for row in rows)


def test_functional_names_the_op():
    with pytest.raises(ValueError, match="post_op_srcs"):
        chain = torchq.PostOps().append_sum(1.0, 0, "f32")
        weight = torch.ones(2, 3, dtype=torch.int8)
        TF.dynamic_linear(torch.ones(1, 3), weight, 1.0, post_ops=chain)
