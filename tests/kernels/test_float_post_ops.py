# SPDX-License-Identifier: Apache-2.0
"""Every post-op of the float chain, alone and in chains, on every tier: linear and convolution.

Where a chain holds a transcendental function, the result lies between the oracle's two answers to
the function's stated error, which are the same but at rounding ties.
"""

from __future__ import annotations

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same, fold, make_call
from cases import ConvShape, LinearShape, random_q
from reference_post_ops import TRANSCENDENTAL
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr
from torchq.attributes.post_op import BINARY_ALGS, ELTWISE_ALGS
from torchq.attributes.post_ops import PostOps

LINEAR = LinearShape(9, 37, 20)
CONV = ConvShape(2, 5, 37, (5, 6), (3, 3), (1, 1), (1, 0), (0, 1), (1, 1), 1, "conv")
COEFFICIENTS = {
    "relu": ":0.1", "linear": ":0.7:-0.2", "clip": ":-0.5:0.8", "elu": ":0.7",
    "hardsigmoid": ":0.2:0.5", "hardswish": ":0.16666667:0.5", "pow": ":0.8:3",
    "soft_relu": ":1.5", "swish": ":1.702",
}  # fmt: skip
CHAINS = [f"eltwise_{alg}{COEFFICIENTS.get(alg, '')}" for alg in ELTWISE_ALGS]
MIXED = [
    "eltwise_tanh+sum:0.03+eltwise_linear:0.5:1",
    "eltwise_abs+eltwise_sqrt+binary_mul:2+eltwise_logistic:0:0:2",
    "sum:0.02+eltwise_swish:1+binary_add:0+eltwise_clip:0:3",
    "eltwise_linear:12:0:1+eltwise_round+eltwise_clip:-100:90",
    "eltwise_square+eltwise_linear:1:1+eltwise_log+prelu:2",
    "eltwise_gelu_erf+binary_max:0+binary_min:2+sum:0.01",
]


def within(got: Tensor, args: dict, shape, label: object = "") -> None:
    """Between the oracle's bounds; the oracle's own answer in all but a few places."""
    call = reference.linear if isinstance(shape, LinearShape) else reference.conv
    extra = {} if isinstance(shape, LinearShape) else shape.oracle
    low, want, high = (call(**args, **extra, side=side) for side in (-1, 0, 1))
    bad = ~((got >= low) & (got <= high)) & ~(got.isnan() & want.isnan())
    assert not bad.any(), (label, got[bad], low[bad], high[bad])
    if got.dtype != F32:
        assert (got != want).double().mean() < 0.01, label
        assert got.double().std() > 0 or want.double().std() == 0, label


def check(args: dict, shape, label: object = "") -> None:
    call = make_call(args, shape)
    if any(name in args["post_ops"] for name in TRANSCENDENTAL):
        within(call.run(), args, shape, label)
    else:
        call.check(label)


@pytest.mark.parametrize("chain", CHAINS + MIXED)
def test_chain(chain: str, isa: str):
    for shape, dst in ((LINEAR, U8), (LINEAR, F32), (CONV, S8)):
        args = cases.sample(shape, U8, dst, chain)
        if dst == F32:
            args["post_op_srcs"] = [s.clamp(-9, 9) for s in args["post_op_srcs"]]
        check(args, shape, (chain, shape, dst))


@pytest.mark.parametrize("alg", ELTWISE_ALGS)
def test_eltwise_scale(alg: str):
    first, *rest = (COEFFICIENTS.get(alg, "") + ":0:0").split(":")[:3]
    chain = ":".join([f"eltwise_{alg}{first}", *rest, "-2.5"])
    check(cases.sample(LINEAR, S8, S8, chain), LINEAR, chain)


def operand(shape: list[int], dtype: torch.dtype) -> Tensor:
    if dtype == F32:
        return torch.rand(shape) * 4 - 2
    return random_q(tuple(shape), dtype, 5) if dtype != S32 else torch.randint(-9, 9, shape).int()


@pytest.mark.parametrize("alg", [*BINARY_ALGS, "prelu"])
@pytest.mark.parametrize("shape", [LINEAR, CONV], ids=["linear", "conv"])
def test_binary(alg: str, shape, isa: str):
    name = alg if alg == "prelu" else f"binary_{alg}"
    all_dims = 3 if shape is LINEAR else 15
    masks = (0, 2, all_dims, 1) if shape is LINEAR else (0, 2, 15, 12, 8, 5)
    for mask, dtype in zip(masks, (F32, S32, S8, U8, F32, F32), strict=False):
        dtype = F32 if alg == "prelu" else dtype
        text = {F32: "", S32: ":s32", S8: ":s8", U8: ":u8"}[dtype]
        args = cases.sample(shape, U8, S8, "")
        sizes = [size if mask >> d & 1 else 1 for d, size in enumerate(shape.dst)]
        v = operand(sizes, dtype)
        srcs = [] if mask in (0, 2) else [v]
        args |= {
            "post_ops": f"{name}:{mask}{text}+eltwise_linear:3",
            "post_op_values": [v.reshape(-1)] if mask in (0, 2) else [],
            "post_op_srcs": srcs + [operand(list(shape.dst), S8) % 2] * (alg == "select"),
        }
        check(args, shape, (alg, mask, dtype))


def test_values_with_any_mask_are_given_once():
    """The functional API reshapes them to sources; those without values come from the caller."""
    conv = cases.sample(CONV, U8, S8, "")
    base = Attr().set_scales("weights", 0, 0.001).set_scales("dst", 0, 0.05)
    rows = torch.rand(CONV.dst[3])
    full = torch.rand(CONV.dst)
    base.post_ops.append_binary("mul", rows, 8).append_binary("add", None, 15)
    assert base.post_ops.num_srcs == 1
    window = {"padding": (1, 0), "padding_end": (0, 1)}
    got = TF.conv2d(
        conv["src"], conv["weight"], attr=base, dst_dtype=S8, post_op_srcs=[full], **window
    )
    want = reference.conv(
        conv["src"], conv["weight"], weight_scale=0.001, dst_scale=0.05, dst_dtype=S8,
        post_ops="binary_mul:8+binary_add:15", post_op_srcs=[rows.reshape(1, 1, 1, -1), full],
        **CONV.oracle,
    )  # fmt: skip
    assert_same(got, want)
    with pytest.raises(ValueError, match="post_op_srcs must be 1 tensors for 'binary_mul:8"):
        TF.conv2d(conv["src"], conv["weight"], attr=base, dst_dtype=S8, **window)
    with pytest.raises(ValueError, match=r"must be 5 values|must be 6 values|must be 7 values"):
        wrong = Attr().set_post_ops(PostOps().append_binary("mul", torch.rand(3), 8))
        TF.conv2d(conv["src"], conv["weight"], attr=wrong, dst_dtype=F32, **window)


def test_operands_of_the_wrong_shape_dtype_or_mask():
    args = cases.sample(LINEAR, U8, S8, "")
    for text, src, error, message in (
        ("binary_add:3", torch.rand(9, 1), ValueError, r"must have shape \[9, 37\]"),
        ("binary_add:1", torch.rand(9, 37), ValueError, r"must have shape \[9, 1\]"),
        ("binary_add:3:s8", torch.rand(9, 37), TypeError, r"must be int8 .* got float32"),
        ("binary_add:4", torch.rand(9, 37), ValueError, r"masks from 0 to 3"),
        ("prelu:-1", torch.rand(9, 37), ValueError, r"masks from 0 to 3"),
    ):
        changed = args | {"post_ops": text}
        params = fold(changed, LINEAR.n)[2]
        call = make_call(args)
        with pytest.raises(error, match=message):
            call.run(post_ops=text, post_op_params=params, post_op_srcs=[src])


def test_relu_of_minus_infinity_is_its_bound_in_both_forms(isa: str):
    """Folded or not: max(0, -inf) = 0, though 0 * -inf is not a number."""
    minus = torch.full(LINEAR.dst, -torch.inf)
    zero = torch.tensor(3, dtype=S32)
    for chain in ("sum:1:0:f32+eltwise_relu", "sum:1:0:f32+eltwise_relu+eltwise_linear:1:2"):
        args = cases.sample(LINEAR, U8, U8, "") | {"dst_zero_point": zero, "bias": None}
        args |= {"post_ops": chain, "post_op_srcs": [minus], "dst_scale": torch.tensor(0.5)}
        got = make_call(args).run()
        assert (got == (3 if chain.endswith("relu") else 7)).all()


@pytest.mark.parametrize("bad", [3e9, float("nan"), -3e9, float("inf")])
def test_bounds_made_by_hand_give_the_same_bits_on_every_path(bad: float):
    """Registers (whole panels) and tiles (tails) saturate alike, whatever lo and hi hold."""
    shape = LinearShape(7, 37, 20)
    args = cases.sample(shape, U8, S8, "eltwise_clip:0:6")
    call = make_call(args)
    for position in (0, 1, 40):  # zero point, lo, hi
        params = call.args["post_op_params"].clone()
        params[position] = bad
        results = []
        for tier in torchq.supported_isas():
            with torchq.use_isa(tier):
                results.append(call.run(post_op_params=params))
        assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("groups", [1, 16])
def test_operands_with_the_strides_of_dst_broadcast(isa: str, groups: int) -> None:
    """One image for all: its strides are those of dst, its size is not."""
    src, weight = random_q((3, 16, 4, 4), U8), random_q((16, 16 // groups, 1, 1), S8)
    operand = torch.randn(1, 16, 4, 4)
    attr = Attr().set_scales("src", 0, 0.01).set_post_ops(PostOps.parse("binary_add:14:f32"))
    dst = [
        TF.conv2d(src, weight, attr=attr, groups=groups, dst_dtype=F32, post_op_srcs=[given])
        for given in (operand, operand.contiguous(memory_format=torch.channels_last))
    ]
    assert torch.equal(dst[0], dst[1])


def test_operands_of_rows_with_the_strides_of_dst_broadcast(isa: str) -> None:
    src, weight = random_q((3, 8, 20), U8), random_q((16, 20), S8)
    rows = torch.randn(3, 8, 16)[..., :1]
    attr = Attr().set_scales("src", 0, 0.01).set_post_ops(PostOps.parse("binary_add:1:f32"))
    dst = [
        TF.linear(src, weight, attr=attr, dst_dtype=F32, post_op_srcs=[given])
        for given in (rows, rows.contiguous())
    ]
    assert torch.equal(dst[0], dst[1])
