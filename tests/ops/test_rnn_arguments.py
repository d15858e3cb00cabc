# SPDX-License-Identifier: Apache-2.0
"""torchq::rnn inside PyTorch: the errors of each argument, and its fake kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import F32
from rnn_cases import CASES, Case, inputs, make

ERRORS = {
    "src must be uint8, int8 or, for a dynamic layer, float32": lambda x: (
        x | {"src": x["src"].int()}
    ),
    "src must have 12 features": lambda x: x | {"src": x["src"][..., :5].contiguous()},
    "src must be [T, N, inputs]": lambda x: x | {"src": x["src"][0]},
    "src must have at least one step": lambda x: x | {"src": x["src"][:0]},
    "h_0 must have shape [1, 2, 20]": lambda x: x | {"h_0": x["h_0"][:, :1]},
    "h_0 must be float32 or uint8": lambda x: x | {"h_0": x["h_0"].double()},
    "h_0 must be finite": lambda x: x | {"h_0": x["h_0"] * torch.inf},
    "c_0 must have shape [1, 2, 20]": lambda x: x | {"c_0": x["c_0"][..., :3]},
    "weight_src must have shape": lambda x: x | {"weight_src": x["weight_src"][:1]},
    "weight_state must be int8": lambda x: x | {"weight_state": x["weight_state"].int()},
    "bias must have": lambda x: x | {"bias": x["bias"][:7]},
    "extra must have": lambda x: x | {"extra": torch.zeros(5)},
    "weight_projection must come": lambda x: x | {"weight_projection": x["weight_src"]},
    "pair_bounds must have": lambda x: x | {"pair_bounds": x["pair_bounds"][:1]},
    "scales must be normal": lambda x: x | {"scales": torch.tensor([0.0, 1.0])},
    "zero_points must lie": lambda x: x | {"zero_points": torch.tensor([0, 300, 0]).int()},
    "geometry must be": lambda x: x | {"geometry": [9, *x["geometry"][1:]]},
    "geometry's lo and hi": lambda x: x | {"geometry": [*x["geometry"][:5], -128, 127]},
    "dst_dtype and h_n_dtype must": lambda x: x | {"dst_dtype": 1},
    "batch_sizes must be positive": lambda x: packed(x, [2, 3]),
    "batch_sizes must sum": lambda x: packed(x, [2, 1]),
}
NAMES = [
    *("src", "batch_sizes", "h_0", "c_0", "weight_src", "compensation_src", "multiplier_src"),
    *("weight_state", "compensation_state", "multiplier_state", "bias", "extra"),
    *("weight_projection", "compensation_projection", "multiplier_projection", "pair_bounds"),
    *("scales", "zero_points", "geometry", "dst_dtype", "state_dtype", "h_n_dtype"),
]


def packed(x: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    return x | {"src": x["src"].flatten(0, 1), "batch_sizes": torch.tensor(sizes)}


def arguments(case: Case) -> dict[str, Any]:
    layer = make(case)
    values = {name: getattr(layer, name, None) for name in NAMES}
    src, h_0, c_0 = inputs(case, layer)
    bounds = [layer.pair_bound_src, layer.pair_bound_state, layer.pair_bound_projection]
    values |= {"src": src, "h_0": h_0, "c_0": c_0, "dst_dtype": 6, "h_n_dtype": 6}
    values |= {"pair_bounds": [b for b in bounds if b is not None]}
    return values | {"state_dtype": layer.state_code}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    given = arguments(Case("lstm", 12, 20, steps=2, batch=2))
    torch.ops.torchq.rnn(*given.values())
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        torch.ops.torchq.rnn(*ERRORS[message](given).values())
    assert str(caught.value).startswith(f"torchq.rnn: {message}")


def test_a_source_with_grad_is_refused() -> None:
    given = arguments(Case("gru", 12, 20, src=F32))
    given["src"].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.ops.torchq.rnn(*given.values())


@pytest.mark.parametrize("case", [CASES[2], CASES[5], CASES[7], CASES[9], CASES[14]], ids=str)
def test_opcheck(case: Case) -> None:
    given = arguments(case)
    torch.library.opcheck(torch.ops.torchq.rnn.default, tuple(given.values()))
    sizes = {"src": given["src"].flatten(0, 1), "batch_sizes": torch.full([case.steps], case.batch)}
    torch.library.opcheck(torch.ops.torchq.rnn.default, tuple((given | sizes).values()))
