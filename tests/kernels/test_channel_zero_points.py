# SPDX-License-Identifier: Apache-2.0
"""Zero points of the destination per channel, against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import cases
import pytest
import reference
import reference_matmul
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import ConvShape, LinearShape
from geometries import ConvTransposeShape, conv_transpose

import torchq.functional as TF
from torchq import Attr, PostOps

SHAPES: list[Any] = [
    LinearShape(7, 37, 21),
    ConvShape(2, 6, 21, (5, 7), (3, 3), (2, 1), (1, 1), (0, 2), (1, 1), 1, "dense"),
    ConvShape(1, 20, 20, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 5, "groups"),
    ConvShape(1, 37, 37, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 37, "depthwise"),
    conv_transpose("strided", (6, 21), (5, 7), 3, 2, 1),
]


def attr_of(args: dict[str, Any], weight_mask: int) -> Attr:
    attr = Attr().set_scales("src", 0, args["src_scale"])
    attr.set_scales("weights", weight_mask, args["weight_scale"])
    attr.set_zero_points("src", 0, args["src_zero_point"]).set_scales("dst", 2, args["dst_scale"])
    attr.set_zero_points("dst", 2, args["dst_zero_point"])
    return attr.set_post_ops(PostOps.parse(args["post_ops"], args["post_op_values"]))


def sample(shape: Any, dst: torch.dtype, chain: str) -> dict[str, Any]:
    """Zero points over all of an 8-bit range."""
    args = cases.sample(shape, S8 if dst == U8 else U8, dst, chain, per_channel_dst=True)
    limits = torch.iinfo(S8 if dst == S32 else dst)
    zero = torch.randint(limits.min, limits.max + 1, (shape.channels,), dtype=S32)
    return args | {"dst_zero_point": zero}


def run(shape: Any, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the results of torchq and of the oracle."""
    groups = getattr(shape, "groups", 1)
    more = (args["bias"], attr_of(args, 1 if groups == 1 else 3), args["dst_dtype"])
    operands, srcs = (args["src"], args["weight"]), args["post_op_srcs"]
    if isinstance(shape, LinearShape):
        return TF.linear(*operands, *more, srcs), reference.linear(**args)
    begin, end = shape.oracle["padding"]
    window = {"stride": shape.stride, "padding": begin, "padding_end": end}
    window |= {"dilation": shape.dilation, "groups": groups}
    window |= {"attr": more[1], "dst_dtype": more[2], "post_op_srcs": srcs}
    if isinstance(shape, ConvTransposeShape):
        dst = TF.conv_transpose2d(*operands, more[0], **window)
        return dst, reference.conv_transpose(**args, **shape.oracle)
    return TF.conv2d(*operands, more[0], **window), reference.conv(**args, **shape.oracle)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chain", cases.FOLDED_CHAINS, ids=lambda chain: chain or "none")
def test_against_the_oracle(shape: Any, chain: str, isa: str):
    for dst in (U8, S8, S32):
        if dst == S32 and isinstance(shape, ConvShape) and shape.groups > 1:
            continue
        got, want = run(shape, sample(shape, dst, chain))
        assert_same(got, want, (shape, chain, dst))


@pytest.mark.parametrize("batch", ((), (2,)), ids=str)
def test_matmul(batch: tuple[int, ...], isa: str):
    for dst, chain in itertools.product((U8, S8), ("", "eltwise_relu", "sum:0.5")):
        src = cases.random_q((*batch, 5, 24), U8)
        weight = cases.random_q((*batch, 24, 18), S8)
        limits = torch.iinfo(dst)
        zero = torch.randint(limits.min, limits.max + 1, (18,), dtype=S32)
        olds = [cases.random_q((*batch, 5, 18), dst)] if chain == "sum:0.5" else []
        want = reference_matmul.matmul(
            src, weight, None, 9, weight_scale=1e-3, dst_scale=0.5, dst_zero_point=zero,
            dst_dtype=dst, post_ops=chain, post_op_srcs=olds,
        )  # fmt: skip
        attr = Attr().set_zero_points("src", 0, 9).set_scales("weights", 0, 1e-3)
        attr.set_scales("dst", 0, 0.5).set_zero_points("dst", 1 << (src.dim() - 1), zero)
        attr.set_post_ops(PostOps.parse(chain))
        assert_same(TF.matmul(src, weight, None, attr, dst, olds), want, (dst, chain))


def test_exact_accumulators_are_shifted_by_channel():
    src, weight = cases.random_q((4, 9), U8), cases.random_q((5, 9), S8)
    zero = torch.tensor([0, -5, 2**30, 7, -(2**30)], dtype=S32)
    dst = TF.linear(src, weight, None, Attr().set_zero_points("dst", 2, zero), S32)
    assert torch.equal(dst.long(), src.long() @ weight.long().T + zero)


@pytest.mark.parametrize("chain", ["eltwise_tanh", "eltwise_relu:0.1", "sum:1:0:f32"])
def test_chains_that_do_not_fold_are_refused(chain: str):
    attr = Attr().set_zero_points("dst", 2, [1, 2, 3]).set_post_ops(PostOps.parse(chain))
    src, weight = cases.random_q((4, 9), U8), cases.random_q((3, 9), S8)
    with pytest.raises(NotImplementedError, match=r"post-ops that fold.*nearest supported is mask"):
        TF.linear(src, weight, attr=attr, dst_dtype=U8, post_op_srcs=[torch.zeros(4, 3)] * 9)


@pytest.mark.parametrize(
    ("attr", "other"),
    [
        (Attr().set_scales("src", 1, [0.1, 0.2, 0.3, 0.4]), "scales of src per row"),
        (Attr().set_scales("weights", 1, [0.1, 0.2], groups=(4, 1)), "per group of k"),
    ],
    ids=str,
)
def test_matmul_names_what_was_asked_for(attr: Attr, other: str):
    """Not the chain that rows and groups become."""
    attr = attr.set_zero_points("dst", 2, [1, 2, 3])
    src, weight = cases.random_q((4, 8), U8), cases.random_q((8, 3), S8)
    with pytest.raises(NotImplementedError, match=f"must come without .*{other}") as error:
        TF.matmul(src, weight, attr=attr, dst_dtype=U8)
    assert "post_ops" not in str(error.value)


def test_op_errors():
    one, zero = torch.ones(1), torch.tensor([1, 2, 3], dtype=S32)
    fold = torch.ops.torchq.fold
    for text in ("eltwise_tanh", "eltwise_relu", "sum:1:0:f32", "sum"):
        with pytest.raises(NotImplementedError, match="per channel must come with post_ops that"):
            fold(one, one, None, one, zero, 3, 0, text, [])
    with pytest.raises(ValueError, match=r"must lie in \[0, 255\].*got 256 at index 2"):
        fold(one, one, None, one, zero + 253, 3, 0, "", [])
    with pytest.raises(ValueError, match="dst_zero_point must have 3 values"):
        fold(one, one, None, one, zero[:2], 3, 0, "", [])
    with pytest.raises(ValueError, match=r"dst_zero_point must lie in \[0, 0\]"):
        fold(one, one, None, None, zero, 3, 6, "", [])
    attr = Attr().set_zero_points("dst", 2, [1, 2, 256])
    with pytest.raises(ValueError, match="256"):
        TF.linear(cases.random_q((4, 9), U8), cases.random_q((3, 9), S8), None, attr, U8)
    with pytest.raises(ValueError, match="must be an integer to have a scale or zero point"):
        TF.linear(cases.random_q((4, 9), U8), cases.random_q((3, 9), S8), None, attr, F32)
