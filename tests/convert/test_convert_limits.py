# SPDX-License-Identifier: Apache-2.0
"""Sizes beyond what an op sums exactly: such a layer stays float, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query[:, :4], key, value)


CASES = {
    "attention": (Attends, (1, 65800, 4), "scaled_dot_product_attention", "65793 keys"),
    "pool": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                   nn.Linear(2, 3)), (1, 1, 2900, 2900), "1", "8388608 positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layer_beyond_the_limits_stays_float(name: str) -> None:
    make, shape, row, reason = CASES[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    converted = torchq.quantize(model, [x])
    with torch.no_grad():
        assert torchq.sqnr(model(x), converted(x)) > 20
    rows = {each.name: each for each in torchq.explain(converted).rows}
    assert not rows[row].quantized and reason in rows[row].reason


class Pools(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.layer, self.code = nn.Conv2d(1, 2, 1), nn.Linear(2, 3), code

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.code(self.conv(x)))


class Spelled(Attends):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        return (query[:, :4] @ key.transpose(1, 2)).softmax(-1) @ value


class Products(Attends):
    """Linear attention: a product over positions."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.layer(x).chunk(3, -1)
        return query[:, :4] @ (key.relu().transpose(1, 2) @ value / x.shape[1])


PIXELS = "x.shape[2] * x.shape[3] is at most 8388608"
KEYS, SQUARE = (1, 65800, 4), (1, 1, 2900, 2900)
LATER: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "attention": (Attends, KEYS, "to 65793"),
    "spelled": (Spelled, KEYS, "to 65793"),
    "product": (Products, (1, 33100, 4), "to 33025"),
    "mean": (lambda: Pools(lambda x: x.mean((2, 3))), SQUARE, PIXELS),
    "pool": (lambda: Pools(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)), SQUARE,
             PIXELS),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_a_call_beyond_the_limits_runs_own_code(name: str, dynamic: bool, tmp_path: Path) -> None:
    """The example was small: the limit is one of the guards."""
    make, shape, limit = LATER[name]
    if dynamic and name not in ("attention", "spelled"):
        pytest.skip("it has no dynamic form")
    torch.manual_seed(0)
    model, x, large = make().eval(), torch.randn(1, *[12] * (len(shape) - 1)), torch.randn(shape)
    x = x[..., :4] if len(shape) == 3 else x[:, :1]
    converted = torchq.quantize(model, [x], config=torchq.QConfig(dynamic=dynamic))
    (graph,) = torchq.explain(converted).graphs
    assert limit in ", ".join(graph.guards)
    with torch.no_grad():
        assert torchq.sqnr(model(x), converted(x)) > 20
        with pytest.warns(
            UserWarning, match=f"takes calls where .*at most {limit.split()[-1]}, but x has"
        ):
            assert torchq.sqnr(model(large), converted(large)) > 10  # calibrated on few
        torchq.save(converted, tmp_path / "q")
        with pytest.warns(
            UserWarning, match=f"takes calls where .*at most {limit.split()[-1]}, but x has"
        ):
            torchq.load(tmp_path / "q", model)(large)


def test_limits_do_not_bound_what_is_exported() -> None:
    converted = torchq.quantize(Attends().eval(), [torch.randn(1, 9, 4)])
    sizes = {"x": {1: torch.export.Dim("keys", min=4, max=1 << 20)}}
    program = torch.export.export(converted, (torch.randn(1, 9, 4),), dynamic_shapes=sizes)
    x = torch.randn(1, 30, 4)
    assert torch.equal(program.module()(x), converted(x))
