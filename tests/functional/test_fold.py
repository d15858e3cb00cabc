# SPDX-License-Identifier: Apache-2.0
"""fold and fold_output_scales against the oracle's folding, bit for bit, and every error."""

from __future__ import annotations

import math
from typing import Any

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import LinearShape
from reference_post_ops import bind, foldable
from torch import Tensor

from torchq.runtime.library import dtype_code

ops = torch.ops.torchq

DTYPES = (U8, S8, S32, F32)
N = 37
SHAPE = LinearShape(1, N, 50)


def zero_point(value: int) -> Tensor:
    return torch.tensor(value, dtype=S32)


def fold(**changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A legal call, with changes."""
    args: dict[str, Any] = {
        "src_scale": torch.tensor(0.02),
        "weight_scale": torch.linspace(0.001, 0.01, N),
        "bias": torch.linspace(-2, 2, N),
        "dst_scale": torch.tensor(0.05),
        "dst_zero_point": zero_point(3),
        "channels": N,
        "dst_dtype": U8,
        "post_ops": "",
        "post_op_values": [],
    }
    args |= changes
    code = args["dst_dtype"]
    args["dst_dtype"] = dtype_code(code) if isinstance(code, torch.dtype) else code
    return ops.fold(*args.values())


def fold_output_scales(**changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    args: dict[str, Any] = {
        "output_scales": torch.linspace(-0.01, 0.01, N),
        "bias": torch.linspace(-200, 200, N),
        "channels": N,
        "dst_dtype": 0,
        "post_ops": "",
        "post_op_values": [],
    }
    return ops.fold_output_scales(*(args | changes).values())


def check(got: tuple[Tensor, Tensor, Tensor], want: reference.Folded, chain: str, zp: float):
    multiplier, offset, params = got
    assert_same(multiplier, want.multiplier.expand(N).contiguous(), "multiplier")
    assert_same(offset, want.offset.expand(N).contiguous(), "offset")
    if not chain:
        assert params.shape == (0,)
        return
    parts = [torch.tensor([float(zp)]), *want.sums]
    if "clip" in chain.split("+")[-1]:
        parts += [want.lo, want.hi]
    assert_same(params, torch.cat([p.reshape(-1) for p in parts]), "params")


@pytest.mark.parametrize("chain", cases.FOLDED_CHAINS, ids=lambda c: c or "none")
@pytest.mark.parametrize("dst", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_folded(chain: str, dst: torch.dtype, seed: int):
    for per_channel, bias in ((False, F32), (True, F32), (True, None)):
        if per_channel and dst == F32:
            continue
        args = cases.sample(SHAPE, U8, dst, chain, bias, per_channel, seed=seed)
        scales = args["src_scale"], args["weight_scale"], args["bias"], args.get("dst_scale")
        zp = args.get("dst_zero_point")
        values = args["post_op_values"]
        got = ops.fold(*scales, zp, N, dtype_code(dst), chain, values)
        zp = 0 if zp is None else zp
        want = reference.fold(*scales, zp, chain, values, N, dst)
        check(got, want, chain, float(zp))


@pytest.mark.parametrize("chain", cases.FOLDED_CHAINS, ids=lambda c: c or "none")
@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_folded_output_scales(chain: str, dst: torch.dtype):
    for bias in (F32, None):
        args = cases.sample(SHAPE, U8, dst, chain, bias, output_scales=True)
        scales, values = args["output_scales"], args["post_op_values"]
        zp = args.get("dst_zero_point")
        given = (scales, args["bias"], N, dtype_code(dst), chain, values)
        for zero in (None, zp):
            number = 0.0 if zero is None else float(zero)
            want = reference.fold_output_scales(scales, args["bias"], chain, values, N, dst, number)
            check(ops.fold_output_scales(*given, zero), want, chain, number)


@pytest.mark.parametrize("chain", cases.FLOAT_CHAINS)
@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_float_chains_keep_real_units(chain: str, dst: torch.dtype):
    args = cases.sample(SHAPE, U8, dst, chain, per_channel_dst=True)
    assert not foldable(bind(chain, args["post_op_values"], args["post_op_srcs"]))
    scales = args["src_scale"], args["weight_scale"]
    dst_scale, zp = args.get("dst_scale"), args.get("dst_zero_point")
    values = args["post_op_values"]
    got = ops.fold(*scales, args["bias"], dst_scale, zp, N, dtype_code(dst), chain, values)
    assert_same(got[0], reference.f32(scales[0].double() * scales[1].double()))
    assert_same(got[1], args["bias"])
    parts = [torch.tensor([0.0 if zp is None else float(zp)])]
    parts += [value.expand(N) for value in values]
    if dst_scale is not None:
        parts.append(reference.f32(1 / dst_scale.double()))
    assert_same(got[2], torch.cat(parts))


def test_rounds_to_float32_once():
    """Products of three float32 in float64: rounding in between would show in half of these."""
    rng = torch.Generator().manual_seed(1)
    n = 10000
    src, dst = torch.tensor(0.0173), torch.rand(n, generator=rng) + 0.01
    weight, bias = torch.rand(n, generator=rng), torch.randn(n, generator=rng)
    got = ops.fold(src, weight, bias, dst, zero_point(77), n, 0, "", [])
    want = reference.fold(src, weight, bias, dst, 77, "", [], n, U8)
    assert_same(got[0], want.multiplier)
    assert_same(got[1], want.offset)
    assert (got[0] != src * weight / dst).any()


def test_bounds_saturate_and_round_half_to_even():
    for bounds in ("-3e38:3e38", "-1000:1000", "0.25:1.25", "-0.75:0.75"):
        for dst in (U8, S8, S32):
            zp = 3
            chain = f"eltwise_clip:{bounds}"
            scale = torch.tensor(0.5)
            got = ops.fold(scale, scale, None, scale, zero_point(zp), N, dtype_code(dst), chain, [])
            check(got, reference.fold(scale, scale, None, scale, zp, chain, [], N, dst), chain, zp)


def test_denormal_scales_are_legal():
    tiny = torch.tensor(1e-40)
    got = ops.fold(tiny, torch.tensor(0.3), None, None, None, N, 6, "", [])
    want = reference.fold(tiny, torch.tensor(0.3), None, None, 0, "", [], N, F32)
    assert_same(got[0], want.multiplier.contiguous())
    assert got[0].any()


def test_tiny_destination_scales_of_chains_in_real_units():
    """Their reciprocal is a parameter: infinite, it would saturate every result."""
    for scale in (torch.tensor(1e-40), torch.full((N,), 1e-40)):
        with pytest.raises(ValueError, match=r"fold: 1 / dst_scale must be a finite float32, got "):
            fold(src_scale=torch.tensor(1e-41), dst_scale=scale, post_ops="eltwise_abs")


def test_no_channels():
    for op in (fold, fold_output_scales):
        name = "weight_scale" if op is fold else "output_scales"
        for size in (0, 1):
            changes = {name: torch.ones(size), "bias": None, "channels": 0}
            multiplier, offset, params = op(**changes, post_ops="sum+eltwise_clip:0:1")
            assert (multiplier.shape, offset.shape, params.shape) == ((0,), (0,), (1,))


# Errors

BAD = [0.0, -1.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ("src_scale", "weight_scale", "dst_scale"))
def test_scales_must_be_finite_and_positive(name: str, value: float):
    message = rf"torchq\.fold: {name} must be finite and greater than 0, got .* at index 0\. Check"
    with pytest.raises(ValueError, match=message):
        fold(**{name: torch.tensor(value)})
    if name != "src_scale":
        scales = torch.ones(N)
        scales[-1] = value
        with pytest.raises(ValueError, match=f"{name} must be .* at index {N - 1}"):
            fold(**{name: scales})


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_other_values_must_be_finite(value: float):
    values = torch.zeros(N)
    values[5] = value
    for op in (fold, fold_output_scales):
        with pytest.raises(ValueError, match=r"torchq\.fold\w*: bias must be finite, got.*index 5"):
            op(bias=values)
        with pytest.raises(ValueError, match=r"post_op_values must be finite, got.*index 5"):
            op(post_ops="binary_add:2", post_op_values=[values])
    with pytest.raises(ValueError, match=r"output_scales must be finite, got.*index 5"):
        fold_output_scales(output_scales=values)


@pytest.mark.parametrize("name", ("weight_scale", "dst_scale", "bias"))
@pytest.mark.parametrize("count", (2, N - 1, N + 1))
def test_counts(name: str, count: int):
    with pytest.raises(ValueError, match=rf"torchq\.fold: {name} must have .*{N}.*got {count}"):
        fold(**{name: torch.ones(count)})
    if name != "dst_scale":
        name = "output_scales" if name == "weight_scale" else name
        with pytest.raises(ValueError, match=rf"{name} must have .*{N}.*got {count}"):
            fold_output_scales(**{name: torch.ones(count)})


def test_a_bias_does_not_broadcast():
    for op in (fold, fold_output_scales):
        with pytest.raises(ValueError, match=rf"bias must have .*{N} values.*got 1"):
            op(bias=torch.ones(1))


@pytest.mark.parametrize(
    ("dst", "value"), [(U8, -1), (U8, 256), (S8, -129), (S8, 128), (F32, 1)], ids=str
)
def test_zero_point_lies_in_the_destination(dst: torch.dtype, value: int):
    scale = {} if dst != F32 else {"dst_scale": None}
    with pytest.raises(ValueError, match=r"torchq\.fold: .*zero.point"):
        fold(dst_dtype=dst, dst_zero_point=zero_point(value), **scale)
    with pytest.raises(ValueError, match=r"torchq\.fold_output_scales: dst_zero_point must lie"):
        code = dtype_code(dst)
        ops.fold_output_scales(torch.ones(1), None, N, code, "", [], zero_point(value))


@pytest.mark.parametrize("value", (-(2**31), -129, 128, 1000, 2**31 - 1))
def test_zero_point_of_an_int32_destination(value: int):
    """Any int32 lies in its range."""
    _, offset, _ = fold(dst_dtype=S32, dst_zero_point=zero_point(value), bias=None)
    assert (offset == torch.tensor(float(value))).all()


UNKNOWN = ("eltwise_sin", "binary_xor:2", "binary_add", "prelu", "dw_conv", "eltwise", "summit")
MALFORMED = (
    "sum:x", "sum:1:0.5", "eltwise_relu:0:0:1:2", "eltwise_clip:0:6:1:", "binary_add:two",
    "sum:0.5:", "+sum", "sum++sum", "sum+", "sum:1 ", " sum", "nonsense",
)  # fmt: skip


@pytest.mark.parametrize("chain", UNKNOWN)
def test_unknown_post_ops(chain: str):
    for op in (fold, fold_output_scales):
        with pytest.raises(
            ValueError, match=r"torchq\.fold\w*: post_ops: .*must be|needs the mask"
        ):
            op(post_ops=chain, post_op_values=[torch.ones(1)])


@pytest.mark.parametrize("chain", MALFORMED)
def test_malformed_post_ops(chain: str):
    with pytest.raises(ValueError, match=r"torchq\.fold: post_ops"):
        fold(post_ops=chain, post_op_values=[torch.ones(1)] * chain.count("binary"))


def test_too_many_post_ops():
    with pytest.raises(ValueError, match="33 entries; at most 32"):
        fold(post_ops="+".join(["eltwise_linear:1"] * 33))
    fold(post_ops="+".join(["eltwise_linear:1"] * 32))


def test_number_of_post_op_values():
    for chain, count in (("binary_add:2", 0), ("binary_add:2", 2), ("", 1), ("sum", 1)):
        with pytest.raises(ValueError, match=f"post_op_values must have .*got {count}"):
            fold(post_ops=chain, post_op_values=[torch.ones(N)] * count)
    with pytest.raises(ValueError, match=f"post_op_values must have 1 or {N} values.*got 3"):
        fold(post_ops="binary_add:2", post_op_values=[torch.ones(3)])
    with pytest.raises(ValueError, match=r"post_op_values must have 1 .*got 37"):
        fold(post_ops="binary_add:0", post_op_values=[torch.ones(N)])


def test_dtypes():
    with pytest.raises(NotImplementedError, match=r"torchq\.fold: dst_dtype must be 0.*got 5\."):
        fold(dst_dtype=5)
    for name in ("src_scale", "weight_scale", "dst_scale", "bias"):
        with pytest.raises(TypeError, match=rf"torchq\.fold: {name} must be float32, got float64"):
            fold(**{name: torch.ones(N if name == "bias" else 1, dtype=torch.float64)})
    with pytest.raises(TypeError, match="dst_zero_point must be int32, got int64"):
        fold(dst_zero_point=torch.tensor(3))
    with pytest.raises(ValueError, match="weight_scale must be contiguous, got strides"):
        fold(weight_scale=torch.ones(2 * N)[::2])
    with pytest.raises(ValueError, match=r"channels must lie in .*, got -1"):
        fold(channels=-1)


def test_a_float_destination_has_no_scale():
    with pytest.raises(ValueError, match=r"float32 destination has no scale.*Leave them out"):
        fold(dst_dtype=F32, dst_zero_point=None)


def test_overflow_of_float32_is_an_error():
    huge = torch.tensor(1e30)
    with pytest.raises(ValueError, match=r"channel 0 folds to multiplier inf.*Check its scales"):
        fold(src_scale=huge, weight_scale=huge)
    with pytest.raises(ValueError, match="offset"):
        fold(bias=torch.full((N,), 1e38), dst_scale=torch.tensor(1e-3))


def test_a_folded_sum_scale_that_float32_cannot_hold():
    with pytest.raises(ValueError, match="folds sum 0 to scale inf, which float32 cannot hold"):
        fold(
            dst_scale=torch.tensor(1e-39),
            src_scale=torch.tensor(1e-39),
            bias=None,
            post_ops="sum:1",
        )
