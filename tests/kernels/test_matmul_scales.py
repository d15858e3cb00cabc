# SPDX-License-Identifier: Apache-2.0
"""Scales and zero points of torchq::matmul that differ by row or by group of k, on every tier."""

from __future__ import annotations

from typing import Any

import pytest
import reference_matmul
import torch
from calls import F32, S8, S32, U8, assert_same
from test_matmul import DTYPES, attributes, operands, parameters

import torchq.functional as TF
from torchq import Attr, PostOps


@pytest.mark.parametrize("dst", DTYPES, ids=str)
@pytest.mark.parametrize("group", (2, 8, 16, 24))
def test_scales_per_group_of_k(isa: str, group: int, dst: torch.dtype):
    for batch, chain in (((), ()), ""), (((2,), (2,)), "eltwise_relu:0.1"):
        src, weight = operands((9, 48, 21), S8, S8, batch)
        args = parameters(48, 21, dst)
        scales = 0.002 + 0.008 * torch.rand(48 // group, 21)
        expected = reference_matmul.matmul_by_groups(
            src, weight, args["bias"], args["src_scale"], scales, -3, 6, args.get("dst_scale"),
            args.get("dst_zero_point", 0), dst, chain,
        )  # fmt: skip
        dims = weight.dim()
        attr = attributes(args, (dims, dims), {"src": -3, "weights": 6}, chain)
        attr.set_scales("weights", 3 << (dims - 2), scales.reshape(-1), (group, 1))
        assert_same(TF.matmul(src, weight, args["bias"], attr, dst), expected, (batch, chain))


@pytest.mark.parametrize("dst", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (((), ()), ((2,), (2,)), ((3, 2), ())), ids=str)
def test_source_scales_per_row(isa: str, dst: torch.dtype, batch: Any):
    """A post-op in front of the bias; (M, K) in groups (1, K) is the same as M."""
    src, weight = operands((6, 33, 18), S8, U8, batch)
    args = parameters(33, 18, dst) | {"src_scale": None, "weight_zero_point": 7}
    for name in ("bias", "int32", "none"):
        bias = {"bias": args["bias"], "int32": torch.arange(18, dtype=S32), "none": None}[name]
        for all_rows in (True, False):
            rows = 0.01 + 0.03 * torch.rand((*src.shape[:-1], 1) if all_rows else (6, 1))
            real = name == "bias"
            values = [args["bias"], torch.rand(18)] if real else [torch.rand(18)]
            more = "eltwise_relu:0.1+binary_mul:2"
            dims = torch.broadcast_shapes(src.shape[:-1], (*weight.shape[:-2], 1))
            expected = reference_matmul.matmul(
                src, weight, **args | {"bias": None if real else bias}, src_zero_point=-3,
                dst_dtype=dst, post_ops=f"binary_mul:1+{'binary_add:2+' * real}{more}",
                post_op_values=values, post_op_srcs=[rows.expand(*dims, 1)],
            )  # fmt: skip
            attr = attributes(args | {"src_scale": 1.0}, (weight.dim(), expected.dim()))
            attr.set_zero_points("src", 0, -3).set_zero_points("weights", 0, 7)
            columns = f"eltwise_relu:0.1+binary_mul:{1 << (expected.dim() - 1)}"
            attr.set_post_ops(PostOps.parse(columns, values[-1:]))
            mask = (1 << (src.dim() - 1)) - 1 if all_rows else 1 << (src.dim() - 2)
            for groups in (None, (1, 33)):
                given = mask if groups is None else mask | 1 << (src.dim() - 1)
                attr.set_scales("src", given, rows.reshape(-1), groups)
                got = TF.matmul(src, weight, bias, attr, dst)
                assert_same(got, expected, (name, all_rows, groups))


@pytest.mark.parametrize("dst", DTYPES, ids=str)
def test_everything_per_group_of_k(isa: str, dst: torch.dtype):
    """Scales and zero points of both operands, each in groups of its own size."""
    k, n = 48, 20
    for batch, weight_dtype in (((), ()), S8), (((2,), (2,)), U8):
        src, weight = operands((7, k, n), U8, weight_dtype, batch)
        args = parameters(k, n, dst)
        per_k = {"scales": (8, 12), "zeros": (24, 16), "columns": 4}
        draw = torch.Generator().manual_seed(5)
        src_scale = 0.01 + 0.02 * torch.rand(k // 8, generator=draw)
        weight_scale = 0.002 + 0.008 * torch.rand(k // 12, n // 4, generator=draw)
        src_zero = torch.randint(0, 256, (k // 24,), generator=draw).int()
        limits = torch.iinfo(weight_dtype)
        weight_zero = torch.randint(limits.min, limits.max + 1, (k // 16, n), generator=draw).int()
        size = 4  # gcd(8, 12, 24, 16)
        expected = reference_matmul.matmul_by_groups(
            src, weight, args["bias"], src_scale.repeat_interleave(8)[::size],
            weight_scale.repeat_interleave(12, 0).repeat_interleave(4, 1)[::size],
            src_zero.repeat_interleave(24)[::size],
            weight_zero.repeat_interleave(16, 0)[::size],
            args.get("dst_scale"), args.get("dst_zero_point", 0), dst, "eltwise_relu",
        )  # fmt: skip
        column, both = 1 << (src.dim() - 1), 3 << (weight.dim() - 2)
        attr = attributes(args, (weight.dim(), expected.dim()), text="eltwise_relu")
        attr.set_scales("src", column, src_scale, (1, 8))
        attr.set_scales("weights", both, weight_scale.reshape(-1), (12, 4))
        attr.set_zero_points("src", column, src_zero, (1, 24))
        attr.set_zero_points("weights", both, weight_zero.reshape(-1), (16, 1))
        assert str(attr) == str(Attr.parse(str(attr)))
        assert_same(TF.matmul(src, weight, args["bias"], attr, dst), expected, per_k)


def test_one_scale_per_k_and_only_per_k(isa: str):
    """Masks without groups; weights that share a group's scale among all columns."""
    src, weight = operands((3, 6, 18), S8, S8)
    src_scale, weight_scale = torch.rand(6) + 0.5, torch.rand(2) + 0.5
    attr = Attr().set_scales("src", 2, src_scale).set_scales("weights", 1, weight_scale, (3, 1))
    expected = reference_matmul.matmul_by_groups(
        src, weight, None, src_scale, weight_scale.repeat_interleave(3)[:, None].expand(6, 18),
        0, 0, None, 0, F32, "",
    )  # fmt: skip
    assert_same(TF.matmul(src, weight, None, attr), expected)
    empty = TF.matmul(src[:, :0], weight[:0], None, Attr().set_scales("src", 2, torch.ones(0)))
    assert_same(empty, torch.zeros(3, 18))


def test_more_columns_than_kernels_count():
    src, weight = torch.zeros(0, 0, dtype=U8), torch.zeros(0, 2**31, dtype=S8)  # without bytes
    with pytest.raises(ValueError, match=r"torchq.matmul: dst must have at most 2147483583 col"):
        TF.matmul(src, weight, None, None, torch.int32)


def test_zero_points_in_one_group_of_k(isa: str):
    """Masks that name K, but with all of it in one group, and groups of columns."""
    src, weight = operands((3, 6, 18), U8, S8)
    zero = torch.tensor([-7, 90], dtype=torch.int32)
    columns = zero.repeat_interleave(9)
    expected = (src.int() - 200) @ (weight.int() - columns)
    for mask, groups in ((3, (6, 9)), (2, (1, 9))):
        attr = Attr().set_zero_points("src", 2, [200], (1, 6))
        attr.set_zero_points("weights", mask, zero, groups)
        assert_same(TF.matmul(src, weight, None, attr), expected.float(), (mask, groups))
    for arg, mask in (("src", 2), ("weights", 1), ("weights", 3)):
        attr = Attr().set_zero_points(arg, mask, torch.zeros(0, dtype=torch.int32))
        assert_same(TF.matmul(src[:, :0], weight[:0], None, attr), torch.zeros(3, 18), (arg, mask))


def test_scales_per_row_and_per_group_of_k(isa: str):
    src, weight = operands((5, 12, 17), U8, S8, ((2,), ()))
    rows, bias = torch.rand(5) + 0.1, torch.randn(17)
    scales = torch.rand(3, 17) + 0.1
    expected = reference_matmul.matmul_by_groups(
        src, weight, None, torch.tensor(1.0), scales, 0, 0, None, 0, F32,
        "binary_mul:1+binary_add:2", [bias], [rows.reshape(1, 5, 1).expand(2, 5, 1)],
    )  # fmt: skip
    attr = Attr().set_scales("src", 2, rows).set_scales("weights", 3, scales.reshape(-1), (4, 1))
    assert_same(TF.matmul(src, weight, bias, attr), expected)


@pytest.mark.parametrize("dst", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (((), ()), ((2,), (2,)), ((3, 1), (2,))), ids=str)
@pytest.mark.parametrize("weight_dtype", (S8, U8), ids=str)
def test_source_scales_per_row_and_group_of_k_at_once(
    isa: str, weight_dtype: torch.dtype, batch: Any, dst: torch.dtype
):
    """Each group of each row has its own; weights of blocks, and post-ops behind the bias."""
    m, k, n = 13, 48, 37
    src, weight = operands((m, k, n), U8, weight_dtype, batch)
    args = parameters(k, n, dst)
    draw = torch.Generator().manual_seed(7)
    scales = 0.01 + 0.03 * torch.rand((*src.shape[:-1], k // 16), generator=draw)
    blocks = 0.002 + 0.008 * torch.rand((k // 8, n), generator=draw)
    zeros = torch.randint(0, 100, (k // 24,), generator=draw).int()
    more = torch.rand(n, generator=draw)
    lead = torch.broadcast_shapes(src.shape[:-1], (*weight.shape[:-2], 1))
    rows = scales.repeat_interleave(2, -1).expand(*lead, -1).movedim(-1, 0)[..., None]
    full = (1 << src.dim()) - 1
    attr = attributes(args | {"src_scale": 1.0}, (weight.dim(), len(lead) + 1))
    attr.set_scales("src", full, scales.reshape(-1), (1, 16))
    attr.set_scales("weights", 3 << weight.dim() - 2, blocks.reshape(-1), (8, 1))
    attr.set_zero_points("src", 1 << src.dim() - 1, zeros, (1, 24)).set_zero_points("weights", 0, 7)
    attr.set_post_ops(PostOps.parse(f"eltwise_relu:0.1+binary_mul:{1 << len(lead)}", [more]))
    for name in ("bias", "int32", "none"):
        bias = {"bias": args["bias"], "int32": torch.arange(n, dtype=S32), "none": None}[name]
        real = name == "bias"
        expected = reference_matmul.matmul_by_groups(
            src, weight, None if real else bias, torch.tensor(1.0), blocks,
            zeros.repeat_interleave(3), 7, args.get("dst_scale"), args.get("dst_zero_point", 0),
            dst, "binary_add:2+" * real + "eltwise_relu:0.1+binary_mul:2",
            [args["bias"], more] if real else [more], row_scales=rows,
        )  # fmt: skip
        assert_same(TF.matmul(src, weight, bias, attr, dst), expected, name)


def test_which_source_scales_are_per_row(isa: str):
    """Mask and groups that name k without need, and those of a product without k."""
    src, weight = operands((4, 8, 18), U8, S8)
    scales = torch.rand(4) + 0.5
    per_row = TF.matmul(src, weight, None, Attr().set_scales("src", 1, scales))
    pairs = Attr().set_scales("src", 3, scales[::2], (2, 8))
    rows = Attr().set_scales("src", 1, scales[::2].repeat_interleave(2))
    assert_same(TF.matmul(src, weight, None, pairs), TF.matmul(src, weight, None, rows))
    every = Attr().set_scales("src", 3, scales.repeat_interleave(8))
    torch.testing.assert_close(TF.matmul(src, weight, None, every), per_row, rtol=1e-4, atol=0.1)
    one = Attr().set_scales("src", 3, scales)
    wanted = (src[:, :1].float() @ weight[:1].float()) * scales[:, None]
    assert_same(TF.matmul(src[:, :1], weight[:1], None, one), wanted)
    for dtype in (F32, U8):
        none = Attr().set_scales("src", 3, torch.ones(0))
        empty = TF.matmul(src[:, :0], weight[:0], torch.ones(18), none, dtype)
        assert_same(empty, torch.ones(4, 18, dtype=dtype))


@pytest.mark.parametrize("batch", ((), (2,), (2, 3)), ids=str)
def test_masks_of_post_ops_index_all_dims(batch: tuple[int, ...]):
    """As oneDNN's do: with M = N a mask 2 of three dims is per row, not per column."""
    dims = (*batch, 5, 5)
    src, weight = operands((5, 5, 5), U8, S8, (batch, batch))
    acc = TF.matmul(src, weight)
    columns = 1 << len(dims) - 1
    for mask in range(1 << len(dims)):
        operand = torch.randn([size if mask >> d & 1 else 1 for d, size in enumerate(dims)])
        given = PostOps().append_binary("add", operand.reshape(-1), mask)
        assert_same(TF.matmul(src, weight, attr=Attr().set_post_ops(given)), acc + operand, mask)
        slopes = Attr().set_post_ops(PostOps().append_prelu(operand.reshape(-1), mask))
        expected = torch.where(acc >= 0, acc, acc * operand)
        assert_same(TF.matmul(src, weight, attr=slopes), expected, mask)
        if mask not in (0, columns):
            later = Attr().set_post_ops(PostOps.parse(f"binary_add:{mask}+sum:1:0:f32"))
            got = TF.matmul(src, weight, attr=later, post_op_srcs=[operand, acc])
            assert_same(got, acc + operand + acc, mask)


def test_operands_have_the_shape_of_their_mask():
    src, weight = operands((4, 5, 6), U8, S8, ((2,), (2,)))
    for mask, values in ((2, 6), (4, 4), (3, 4)):
        attr = Attr().set_post_ops(PostOps().append_binary("add", torch.ones(values), mask))
        with pytest.raises(ValueError, match=rf"torchq.matmul: values of .*mask {mask} of dims"):
            TF.matmul(src, weight, attr=attr)
    attr = Attr().set_post_ops(PostOps.parse("binary_add:2"))
    with pytest.raises(ValueError, match=r"post_op_srcs\[0\] must be \[1, 4, 1\] for binary_add:2"):
        TF.matmul(src, weight, attr=attr, post_op_srcs=[torch.ones(2, 4, 1)])
    with pytest.raises(ValueError, match="must use a mask below 8"):
        TF.matmul(src, weight, attr=Attr().set_post_ops(PostOps.parse("binary_add:8")))
