# SPDX-License-Identifier: Apache-2.0
"""Reorders, pools and elementwise functions of the functional API: what an Attr says, bit for bit.

One tier is enough here: the kernels are tested on all of them, in test_reorder.py and its like.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import cases
import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from torch import Tensor

import torchq.functional as TF
from torchq import Attr, QParams

# Reorders


def hwigo(sizes: tuple[int, ...]) -> Tensor:
    g, o, i, h, w = sizes
    return torch.randn(h, w, i, g, o).permute(3, 4, 2, 0, 1)


def values_of(mask: int, dims: tuple[int, ...], low: float, high: float) -> Tensor:
    return torch.empty(Attr.expected_values(mask, dims)).uniform_(low, high)


@pytest.mark.parametrize("source", (F32, U8, S8, S32), ids=str)
@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_reorder_with_every_pair_of_masks(source: torch.dtype, dst: torch.dtype) -> None:
    dims = (2, 3, 4)
    src = torch.randn(dims) * 40 if source == F32 else cases.random_q(dims, source)
    if source == S32:
        src = src // 2**18
    for src_mask, dst_mask in itertools.product(range(8), range(8)):
        attr = Attr().set_scales("src", src_mask, values_of(src_mask, dims, 0.5, 2))
        attr.set_scales("dst", dst_mask, values_of(dst_mask, dims, 0.5, 2))
        for arg, mask, dtype in (("src", dst_mask, source), ("dst", src_mask, dst)):
            if dtype in (U8, S8):
                points = values_of(mask, dims, 0, 99).int()
                attr.set_zero_points(arg, mask, points)
        resolved = [
            attr.resolve(arg, dims, kind)
            for arg in ("src", "dst")
            for kind in ("scales", "zero_points")
        ]
        expected = reference.reorder(src, *resolved, dst)
        assert_same(TF.reorder(src, dst, attr), expected, attr)


@pytest.mark.parametrize("dst", (U8, S8, S32, F32), ids=str)
def test_reorder_with_output_scales(dst: torch.dtype) -> None:
    """v1 multiplies, by any finite number."""
    dims = (3, 2, 5)
    for source, mask in itertools.product((F32, S32, S8), range(8)):
        src = torch.randn(dims) * 40 if source == F32 else cases.random_q(dims, source)
        scales = values_of(mask, dims, -2, 2)
        attr = Attr().set_output_scales(mask, scales)
        resolved = attr.resolve("dst", dims, "output_scales")
        expected = reference.reorder_output_scales(src, resolved, dst)
        assert_same(TF.reorder(src, dst, attr), expected, attr)
        zeros = [torch.zeros(1, dtype=S32)] * 2
        for i, (arg, dtype) in enumerate((("src", source), ("dst", dst))):
            if dtype != F32:
                values = torch.randint(0, 100, (math.prod(resolved.shape),), dtype=S32)
                attr.set_zero_points(arg, mask, values)
                zeros[i] = attr.resolve(arg, dims, "zero_points")
        expected = reference.reorder_output_scales(src, resolved, dst, *zeros)
        assert_same(TF.reorder(src, dst, attr), expected, attr)


@pytest.mark.parametrize("dst", (U8, S32, F32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("source", (U8, F32), ids=str)
def test_reorder_with_a_sum_and_scales(source: torch.dtype, dst: torch.dtype) -> None:
    """Scales are powers of two, so the formula is exact, and its order does not matter."""
    src, old = torch.tensor([[10, 20, 4], [6, 8, 2]]), torch.tensor([[1, 2, 0], [7, 6, 3]])
    powers = torch.tensor([[0.5, 0.25, 2.0], [1.0, 4.0, 0.5]])
    for src_mask, dst_mask in itertools.product((None, *range(4)), repeat=2):
        attr, scales = Attr(), []
        for arg, mask in (("src", src_mask), ("dst", dst_mask)):
            rows, columns = (2 if (mask or 0) & 1 else 1), (3 if (mask or 0) & 2 else 1)
            scales.append(torch.ones(1) if mask is None else powers[:rows, :columns])
            if mask is not None:
                attr.set_scales(arg, mask, scales[-1])
        attr.post_ops.append_sum(2.0, 0, S8)
        real = (src * scales[0] + 2 * old) / scales[1]
        expected = real.to(dst) if dst.is_floating_point else real.round().clamp(0, 255).to(dst)
        assert_same(TF.reorder(src.to(source), dst, attr, old.to(S8)), expected, attr)


def test_reorder_keeps_strides() -> None:
    """Weights stay in hwigo order; masks count logical dims, whatever the memory order."""
    dims = (2, 3, 4, 3, 2)
    weight = hwigo(dims)
    for mask in range(32):
        scales = values_of(mask, dims, 0.01, 0.02)
        attr = Attr().set_scales("dst", mask, scales)
        result = TF.reorder(weight, S8, attr)
        expected = reference.quantize(weight, attr.resolve("dst", dims), 0, S8)
        assert_same(result, expected, mask)
        assert result.stride() == weight.stride()


def test_reorder_without_scales_converts() -> None:
    integers = torch.tensor([-(2**31), -129, -1, 0, 1, 128, 300, 2**24 + 1, 2**31 - 1]).int()
    assert_same(TF.reorder(integers, S32), integers)
    assert TF.reorder(integers, S8).tolist() == [-128, -128, -1, 0, 1, 127, 127, 127, 127]
    assert TF.reorder(integers, U8).tolist() == [0, 0, 0, 0, 1, 128, 255, 255, 255]
    assert_same(TF.reorder(integers, F32), integers.float())
    halves = torch.tensor([-0.5, 0.5, 1.5, 2.5, float("nan"), 1e30])
    assert TF.reorder(halves, U8).tolist() == [0, 0, 2, 2, 0, 255]


def test_quantize_dequantize_requantize() -> None:
    real = torch.randn(4, 3, 5) * 30
    scale, zero_point = torch.rand(3, 1) + 0.1, torch.tensor([[3], [100], [250]], dtype=S32)
    q = TF.quantize(real, scale, zero_point)
    assert_same(q, reference.quantize(real, scale, zero_point, U8))
    assert_same(TF.dequantize(q, scale, zero_point), reference.dequantize(q, scale, zero_point))
    expected = reference.requantize(q, scale, zero_point, 0.3, -5, S8)
    assert_same(TF.requantize(q, scale, zero_point, 0.3, -5, S8), expected)
    assert TF.quantize(torch.tensor([0.5, 1.5, 2.5, -0.5]), 1, 1).tolist() == [2, 2, 4, 0]


@pytest.mark.parametrize("bits,limit", [(8, 127), (7, 63)])
def test_quantize_weight_is_symmetric(bits: int, limit: int) -> None:
    weight = hwigo((2, 3, 4, 3, 2)).requires_grad_()
    largest = weight.detach().abs().amax((2, 3, 4), keepdim=True)
    q = TF.quantize_weight(weight, largest / limit, bits)
    expected = reference.quantize(weight.detach(), largest / limit, 0, S8).clamp(-limit, limit)
    assert_same(q, expected)
    assert q.stride() == weight.stride() and q.abs().amax() == limit
    assert TF.quantize_weight(torch.tensor([-9.0]), 0.001, bits).item() == -limit


# Pooling


@pytest.mark.parametrize("dims", (1, 2, 3))
@pytest.mark.parametrize("dtype", (U8, S8), ids=str)
def test_pooling(dims: int, dtype: torch.dtype) -> None:
    src = cases.random_q((2, 21, *(9, 8, 7)[:dims]), dtype)
    ones, padding = [1] * dims, ([1] * dims, [1] * dims)
    for stride, ceil_mode in itertools.product((None, 2, [1] * dims), (False, True)):
        step = [3] * dims if stride is None else [2] * dims if stride == 2 else stride
        assert_same(
            TF.max_pool(src, 3, stride, 1, ceil_mode=ceil_mode),
            reference.max_pool(src, [3] * dims, step, padding, ones, ceil_mode),
        )
        for include in (True, False):
            assert_same(
                TF.avg_pool(src, 3, stride, 1, ceil_mode, include, zero_point=19),
                reference.avg_pool(
                    src, [3] * dims, step, padding, ceil_mode, include, zero_point=19
                ),
            )
    assert_same(
        TF.avg_pool(src, 2, divisor_override=3),
        reference.avg_pool(src, [2] * dims, [2] * dims, ([0] * dims,) * 2, divisor_override=3),
    )
    assert_same(
        TF.max_pool(src, 2, 1, 0, 2),
        reference.max_pool(src, [2] * dims, ones, ([0] * dims,) * 2, [2] * dims),
    )
    for size in (1, 3):
        expected = reference.adaptive_avg_pool(src, [size] * dims)
        assert_same(TF.adaptive_avg_pool(src, size), expected)


# Elementwise


def binary_attr(relu: bool = False, dst: bool = True) -> tuple[Attr, dict[str, Any]]:
    args: dict[str, Any] = {"scale0": 0.1, "zero_point0": 3, "scale1": 0.07, "zero_point1": -4}
    attr = Attr().set_scales("src0", 0, 0.1).set_zero_points("src0", 0, 3)
    attr.set_scales("src1", 0, 0.07).set_zero_points("src1", 0, -4)
    if dst:
        attr.set_scales("dst", 0, 0.12).set_zero_points("dst", 0, 20)
        args |= {"dst_scale": 0.12, "dst_zero_point": 20}
    if relu:
        attr.post_ops.append_eltwise("relu")
    return attr, args | {"relu": relu}


@pytest.mark.parametrize("name", ("add", "mul"))
@pytest.mark.parametrize("relu", (False, True))
@pytest.mark.parametrize("dst", (U8, S8, F32), ids=str)
def test_add_and_mul(name: str, relu: bool, dst: torch.dtype) -> None:
    attr, args = binary_attr(relu, dst != F32)
    for shape in ((2, 5, 4, 3), (5, 1, 3), (1,)):
        src0, src1 = cases.random_u8((2, 5, 4, 3)), cases.random_s8(shape)
        expected = getattr(reference, name)(src0, src1, **args, dst_dtype=dst)
        assert_same(getattr(TF, name)(src0, src1, attr, dst), expected)


def test_concat_requantizes_what_differs() -> None:
    srcs = [cases.random_u8((2, c, 3)) for c in (2, 3, 4)]
    scales, points = [0.1, 0.2, 0.3], [5, 5, 7]
    attr = Attr().set_scales("dst", 0, 0.2).set_zero_points("dst", 0, 5)
    for i, (scale, point) in enumerate(zip(scales, points, strict=True)):
        attr.set_scales(f"src{i}", 0, scale).set_zero_points(f"src{i}", 0, point)
    expected = reference.concat(srcs, 1, scales, points, 0.2, 5, U8)
    assert_same(TF.concat(srcs, attr), expected)
    assert_same(TF.concat(srcs, attr, dim=-2), expected)
    assert_same(TF.concat(srcs), torch.cat(srcs, 1))


@pytest.mark.parametrize("dtype", (U8, S8), ids=str)
def test_lookup_is_any_unary_function(dtype: torch.dtype) -> None:
    src_qparams = QParams.per_tensor(0.05, 7, dtype)
    dst_qparams = QParams.per_tensor(1 / 255, 0)
    table = TF.lookup_table(torch.sigmoid, src_qparams, dst_qparams)
    src = torch.arange(256).add(torch.iinfo(dtype).min).to(dtype)
    expected = TF.quantize(torch.sigmoid(TF.dequantize(src, 0.05, 7)), 1 / 255)
    assert_same(TF.lookup(src, table), expected)
    assert_same(TF.lookup(src, table), reference.lookup(src, table))


def test_pad_is_real_zero() -> None:
    src = cases.random_u8((1, 2, 3, 3))
    padded = TF.pad(src, (1, 2, 0, 1), 128)
    assert padded.shape == (1, 2, 4, 6) and padded[..., 0].eq(128).all()
    assert_same(padded[..., :3, 1:4], src)
