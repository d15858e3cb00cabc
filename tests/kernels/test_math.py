# SPDX-License-Identifier: Apache-2.0
"""csrc/kernels/math.h against float64: stated errors, special values, the same bits on all tiers.

The functions are reached as post-ops: `sum:1:0:f32+eltwise_tanh` of a zero accumulator is tanh of a
float32 source.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import torchq

ops = torch.ops.torchq

INF, NAN = math.inf, math.nan
SQRT_HALF = math.sqrt(0.5)


def run(chain: str, x: Tensor) -> Tensor:
    """The eltwise chain of a float32 vector."""
    channels = 48
    rows = -(-x.numel() // channels)
    src = functional.pad(x, (0, rows * channels - x.numel())).reshape(rows, channels)
    packed = ops.pack_linear(torch.zeros(channels, 4, dtype=torch.int8))
    text = f"sum:1:0:f32+{chain}"
    one = torch.ones(())
    folded = ops.fold(one, one, None, None, None, channels, 6, text, [])
    zero = torch.zeros(rows, 4, dtype=torch.uint8)
    multiplier, offset, params = folded
    dst = ops.linear(
        zero, *packed, multiplier, offset, None, None, 4, 6, text, params, [src.contiguous()]
    )
    return dst.reshape(-1)[: x.numel()]


def gelu(x: Tensor) -> Tensor:
    return x * torch.special.erfc(-x * SQRT_HALF) / 2


# chain: the function in float64, an absolute error, a relative error
ULP, HALF_ULP = 2.0**-23, 2.0**-24
DENORMAL = 2.0**-149
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "eltwise_exp": (torch.exp, DENORMAL, ULP),
    "eltwise_log": (torch.log, 0, ULP),
    "eltwise_tanh": (torch.tanh, 0, 2 * ULP),
    "eltwise_logistic": (torch.sigmoid, 2.0**-126, 2 * ULP),
    "eltwise_gelu_erf": (gelu, 0, 0),
    "eltwise_gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), 0, 0),
    "eltwise_mish": (functional.mish, 2.0**-100, 3 * ULP),
    "eltwise_soft_relu:1": (lambda x: functional.softplus(x, threshold=700), DENORMAL, 2 * ULP),
    "eltwise_soft_relu:-0.5": (
        lambda x: functional.softplus(-0.5 * x, threshold=700) / -0.5,
        2 * DENORMAL,
        2 * ULP,
    ),
    "eltwise_swish:1": (functional.silu, 2.0**-110, 2 * ULP),
    "eltwise_elu:1": (functional.elu, 0, ULP),
    "eltwise_sqrt": (torch.sqrt, 0, HALF_ULP),
    "eltwise_pow:1:3": (lambda x: x**3, DENORMAL, 6 * HALF_ULP),
    "eltwise_pow:1:-2.5": (lambda x: x**-2.5, DENORMAL, 5.5 * HALF_ULP),
    "eltwise_pow:1:10": (lambda x: x**10, DENORMAL, 13 * HALF_ULP),
    "eltwise_pow:1:0.25": (lambda x: x**0.25, 0, 3.25 * HALF_ULP),
    "eltwise_pow:2:0.5": (lambda x: 2 * x**0.5, 0, HALF_ULP),
}


def grid() -> Tensor:
    """Dense around 0, all magnitudes of float32, both signs."""
    near = torch.linspace(-20, 20, 400_001)
    wide = torch.linspace(-110, 110, 100_001)
    exponents = 2.0 ** torch.linspace(-149, 127.999, 60_000, dtype=torch.float64)
    return torch.cat([near, wide, exponents.float(), -exponents.float()])


@pytest.mark.parametrize("chain", FUNCTIONS)
def test_error(chain: str):
    function, absolute, relative = FUNCTIONS[chain]
    x = grid()
    got = run(chain, x).double()
    want = function(x.double())
    assert torch.equal(got.isnan(), want.isnan())
    error, allowed = (got - want).abs(), absolute + relative * want.abs()
    if relative == 0:  # gelu: absolute in the tail, where float32 holds less and less of 1 - Phi
        allowed = 2e-7 * x.double().abs().clamp(min=1)
    largest = torch.finfo(torch.float32).max
    overflows = (want.abs() > largest * (1 - 16 * ULP)) & (got.isinf() | (want.abs() > largest))
    assert torch.equal(got[overflows], torch.sign(want[overflows]) * INF)
    wrong = ~(error <= allowed) & ~overflows & want.isfinite()
    assert not wrong.any(), (x[wrong], got[wrong], want[wrong])


@pytest.mark.parametrize(
    ("chain", "function"), [("eltwise_tanh", torch.tanh), ("eltwise_logistic", torch.sigmoid)]
)
def test_gates_of_recurrent_layers(chain: str, function: Callable[[Tensor], Tensor]):
    x = grid()
    assert (run(chain, x).double() - function(x.double())).abs().max() < 2e-6


@pytest.mark.parametrize("chain", FUNCTIONS)
def test_tiers_agree(chain: str, isa: str):
    x = torch.cat([grid()[::17], torch.tensor([INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 3.4e38])])
    got = run(chain, x)
    with torchq.use_isa("reference"):
        want = run(chain, x)
    assert torch.equal(got.view(torch.int32), want.view(torch.int32)) or torch.equal(
        got.nan_to_num(7, 8, 9).view(torch.int32), want.nan_to_num(7, 8, 9).view(torch.int32)
    )


SPECIAL = {
    "eltwise_exp": {INF: INF, -INF: 0.0, 0.0: 1.0, 89.0: INF, -105.0: 0.0},
    "eltwise_log": {INF: INF, 0.0: -INF, -1.0: NAN, -INF: NAN, 1.0: 0.0},
    "eltwise_tanh": {INF: 1.0, -INF: -1.0, 0.0: 0.0, 20.0: 1.0},
    "eltwise_logistic": {INF: 1.0, -INF: 0.0, 0.0: 0.5},
    "eltwise_gelu_erf": {INF: INF, -INF: NAN, 0.0: 0.0},
    "eltwise_gelu_tanh": {INF: INF, -INF: NAN, 0.0: 0.0},
    "eltwise_mish": {INF: INF, -INF: NAN, 0.0: 0.0},
    "eltwise_soft_relu:1": {INF: INF, -INF: 0.0, -200.0: 0.0},
    "eltwise_swish:1": {INF: INF, -INF: NAN, 0.0: 0.0},
    "eltwise_elu:0.5": {INF: INF, -INF: -0.5, 0.0: 0.0},
    "eltwise_sqrt": {INF: INF, -1.0: NAN, 0.0: 0.0},
    "eltwise_abs": {-INF: INF},
    "eltwise_relu": {-INF: 0.0, INF: INF},
    "eltwise_hardswish:0.2:0.5": {INF: INF, -INF: NAN},
    "eltwise_pow:1:3": {INF: INF, -INF: -INF, 0.0: 0.0, -2.0: -8.0},
    "eltwise_pow:1:-3": {INF: 0.0, -INF: -0.0, 0.0: INF, -2.0: -0.125},
    "eltwise_pow:1:4": {-INF: INF, -2.0: 16.0},
    "eltwise_pow:1:0.5": {-INF: INF, -1.0: NAN, 4.0: 2.0},
    "eltwise_pow:1:1.5": {-INF: INF, -1.0: NAN, INF: INF, 0.0: 0.0},
    "eltwise_pow:1:-1.5": {-INF: 0.0, -1.0: NAN, INF: 0.0, 0.0: INF},
    "eltwise_pow:3:0": {-INF: 3.0, NAN: 3.0, 5.0: 3.0},
    "eltwise_round": {0.5: 0.0, 1.5: 2.0, 2.5: 2.0, -0.5: -0.0, -INF: -INF},
}


@pytest.mark.parametrize("chain", SPECIAL)
def test_special_values(chain: str, isa: str):
    values = {NAN: NAN} | SPECIAL[chain]
    got = run(chain, torch.tensor(list(values)))
    for x, y, want in zip(values, got.tolist(), values.values(), strict=True):
        same = math.isnan(want) and math.isnan(y)
        assert same or (y == want and math.copysign(1, y) == math.copysign(1, want)), (x, y, want)
