# SPDX-License-Identifier: Apache-2.0
"""eltwise, binary, prelu, sum and shuffle against the oracle, on every tier."""

from __future__ import annotations

import contextlib
import itertools
import math

import pytest
import reference_primitives as reference
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import random_q
from memory import rounding_upward
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr

PARAMS = {U8: (0.031, 131), S8: (0.017, -9), S32: (0.003, 1000), F32: (1.0, 0)}
DST = {U8: (0.023, 117), S8: (0.029, 3), S32: (0.001, -77), F32: (1.0, 0)}
ALL = [U8, S8, S32, F32]


def attr_of(**params: tuple[float, int]) -> Attr:
    attr = Attr()
    for arg, (scale, zero_point) in params.items():
        attr.set_scales(arg, 0, scale).set_zero_points(arg, 0, zero_point)
    return attr


def source(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    if dtype == F32:
        draw = torch.Generator().manual_seed(seed)
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, -1.5])
        x = torch.randn(shape, generator=draw) * 3
        x.view(-1)[: min(8, x.numel())] = special[: x.numel()]
        return x
    if dtype == S32:
        draw = torch.Generator().manual_seed(seed)
        q = torch.randint(-3000, 5000, shape, dtype=S32, generator=draw)
        q.view(-1)[:2] = torch.tensor([2**31 - 1, -(2**31)])[: q.numel()]
        return q
    return random_q(shape, dtype, seed)


@pytest.mark.parametrize("alg", list(reference.ELTWISE))
def test_eltwise(isa: str, alg: str):
    alpha, beta = (float(torch.tensor(v)) for v in reference.COEFFICIENTS.get(alg, (0.0, 0.0)))
    for src_dtype, dst_dtype in itertools.product(ALL, ALL):
        src = source((7, 131), src_dtype)
        params, to = PARAMS[src_dtype], DST[dst_dtype]
        got = TF.eltwise(src, alg, alpha, beta, attr_of(src=params, dst=to), dst_dtype)
        x = reference.real(src, params).double()
        exact = reference.ELTWISE[alg](x, alpha, beta)
        label = (alg, src_dtype, dst_dtype)
        if alg in reference.EXACT and alg != "relu":
            assert_same(got, reference.to_dst(exact.float(), to, dst_dtype), label)
            continue
        size = torch.maximum(exact.abs(), x.abs().clamp(max=1e4)).clamp(min=1)
        error = 2**-24 * size * (8 + 2 * abs(beta) + 4 * abs(alpha))
        if dst_dtype != F32:
            error = error + 2**-23 * (exact.abs() + to[0] * abs(to[1]))
        reference.near(got, exact, to, torch.nan_to_num(error, nan=0.0))


def test_eltwise_has_the_same_bits_on_every_tier(isa: str):
    for alg in reference.ELTWISE:
        alpha, beta = reference.COEFFICIENTS.get(alg, (0.0, 0.0))
        for dtype in (S8, F32):
            src, attr = source((3, 331), dtype), attr_of(src=PARAMS[dtype])
            got = TF.eltwise(src, alg, alpha, beta, attr, F32)
            with torchq.use_isa("reference"):
                assert_same(got, TF.eltwise(src, alg, alpha, beta, attr, F32), alg)


def test_eltwise_chain_is_applied_in_order(isa: str):
    src = random_q((3, 77), U8)
    attr = attr_of(src=(0.05, 100), dst=(0.1, 7))
    attr.post_ops.append_eltwise("abs").append_eltwise("linear", 2.0, -1.0)
    got = TF.eltwise(src, "relu", 0.5, attr=attr, dst_dtype=S8)
    x = reference.real(src, (0.05, 100))
    x = torch.where(x > 0, x, x * 0.5).abs()
    x = reference.fma32(x, torch.tensor(2.0), torch.tensor(-1.0))
    assert_same(got, reference.to_dst(x, (0.1, 7), S8))


@pytest.mark.parametrize("alg", list(reference.BINARY))
def test_binary(isa: str, alg: str):
    for a, b, dst in [*itertools.product([U8, S8], [U8, S8], ALL), (F32, S32, F32), (S32, F32, S8)]:
        src0, src1 = source((3, 1, 130), a, 1), source((3, 5, 1), b, 2)
        params = [PARAMS[a], PARAMS[b], DST[dst]]
        attr = attr_of(src0=params[0], src1=params[1], dst=params[2])
        got = TF.binary(src0, src1, alg, attr, dst)
        expected = reference.binary(src0, src1, alg, params, dst)
        assert got.shape == (3, 5, 130)
        assert_same(got + 0 if dst == F32 else got, expected + 0, (alg, a, b, dst))


def test_binary_selects(isa: str):
    src0, src1 = random_q((4, 1, 9), U8, 1), random_q((3, 9), S8, 2)
    condition = torch.rand(4, 3, 9) > 0.5
    params = [PARAMS[U8], PARAMS[S8], DST[S8]]
    attr = attr_of(src0=params[0], src1=params[1], dst=params[2])
    expected = reference.select(condition, src0, src1, params, S8)
    for c in (condition, condition.to(S8) * -3):
        assert_same(TF.binary(src0, src1, "select", attr, S8, condition=c), expected)


def test_prelu(isa: str):
    weight = torch.randn(6)
    for dtype, dst in itertools.product([U8, S8, F32], [U8, S8, F32]):
        src = source((2, 6, 5, 7), dtype).contiguous(memory_format=torch.channels_last)
        got = TF.prelu(src, weight, attr_of(src=PARAMS[dtype], dst=DST[dst]), dst)
        wide = weight.reshape(6, 1, 1)
        params = [PARAMS[dtype], (1.0, 0), DST[dst]]
        assert_same(got, reference.binary(src, wide, "prelu", params, dst), (dtype, dst))
        assert got.stride() == src.stride()
    x = random_q((4, 6), S8)
    assert_same(
        TF.prelu(x, weight, attr_of(src=(0.5, 3)), F32),
        reference.binary(x, weight, "prelu", [(0.5, 3), (1.0, 0), (1.0, 0)], F32),
    )


def test_sum(isa: str):
    scales = [0.5, -0.75, 0.3, 2.0]
    for dst in ALL:
        srcs = [source((2, 3, 171), dtype, i) for i, dtype in enumerate((U8, S8, S32, F32))]
        srcs[1] = srcs[1].transpose(0, 2).contiguous().transpose(0, 2)
        attr = attr_of(dst=DST[dst])
        zero_points = [131, -9, 5, 0]
        for i, z in enumerate(zero_points):
            attr.set_zero_points(f"src{i}", 0, z)
        got = TF.sum(srcs, scales, attr, dst)
        params = [*zip(scales, zero_points, strict=True), DST[dst]]
        assert_same(got, reference.weighted_sum(srcs, params, dst), dst)
    one = random_q((5,), U8)
    assert_same(TF.sum([one]), one)
    assert_same(TF.sum([one, one], dst_dtype=S32), 2 * one.int())


def test_layouts_and_empty(isa: str):
    base = random_q((2, 6, 5, 700), U8)
    for q in (base, base[:, ::2, :, ::3], base.transpose(1, 3), base[:, :1].expand(2, 6, 5, 700)):
        attr = attr_of(src=(0.05, 100))
        got = TF.eltwise(q, "abs", attr=attr, dst_dtype=F32)
        assert_same(got, reference.real(q, (0.05, 100)).abs())
        assert_same(TF.binary(q, q, "max"), q)
        assert_same(TF.binary(q[..., :1], q, "max"), torch.maximum(q[..., :1], q))
    for shape in ((), (0,), (2, 0, 3)):
        q = random_q(shape, U8)
        assert_same(TF.eltwise(q, "relu"), q)
        assert_same(TF.binary(q, q, "min", dst_dtype=F32), q.float())
        assert_same(TF.sum([q]), q)


def test_threads(isa: str):
    src, attr = random_q((97, 1031), S8), attr_of(src=(0.1, 3))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(TF.eltwise(src, "mish", attr=attr, dst_dtype=F32))
        found.append(TF.binary(src, src[:1], "div", dst_dtype=F32))
    assert_same(found[2], found[0])
    assert_same(found[3], found[1])


@pytest.mark.parametrize(("size", "group", "dim"), [(12, 3, 1), (12, 4, 0), (6, 6, -1), (7, 1, 2)])
def test_shuffle(size: int, group: int, dim: int):
    shape = [2, 3, 4]
    shape[dim] = size
    src = random_q(tuple(shape), S8)
    got = TF.shuffle(src, group, dim)
    assert_same(got, reference.shuffle(src, group, dim))
    if dim == 1:
        expected = torch.nn.functional.channel_shuffle(src.float(), size // group)
        assert_same(got.float(), expected)
        assert got.stride(1) == 1


def refuse(error: type[Exception], message: str, call, *args, **kwargs) -> None:
    with pytest.raises(error, match=message):
        call(*args, **kwargs)


def test_errors():
    q = random_q((2, 6, 5), U8)
    refuse(TypeError, "torchq.eltwise: src must be uint8, int8, int32 or", TF.eltwise, q.long(),
           "abs", dst_dtype=U8)  # fmt: skip
    refuse(ValueError, "alg must be", TF.eltwise, q, "sin")
    refuse(ValueError, "alpha must be nonzero for soft_relu", TF.eltwise, q, "soft_relu", 0)
    x = torch.rand(3, requires_grad=True)
    refuse(RuntimeError, "src requires grad", TF.eltwise, x, "abs")
    attr = attr_of(src=(0.5, 0))
    attr.post_ops.append_sum()
    refuse(ValueError, "post_op_srcs must be 1 tensors", TF.eltwise, q, "abs", attr=attr)
    refuse(ValueError, "zero_points must lie", TF.eltwise, q, "abs", attr=attr_of(src=(1, 256)))
    refuse(ValueError, "float32 destination must have scale 1", TF.eltwise, q, "abs",
           attr=attr_of(dst=(2.0, 0)), dst_dtype=F32)  # fmt: skip
    refuse(NotImplementedError, "must have mask 0", TF.eltwise, q, "abs",
           attr=Attr().set_scales("src", 2, [1.0] * 6))  # fmt: skip
    refuse(ValueError, "torchq.binary: alg must be add, sub", TF.binary, q, q, "xor")
    refuse(ValueError, "must broadcast, got", TF.binary, q, q[:, :, :4], "add")
    refuse(ValueError, "condition must be given for select", TF.binary, q, q, "select")
    refuse(ValueError, "condition must have the shape of dst", TF.binary, q, q, "select",
           condition=q[0])  # fmt: skip
    refuse(TypeError, "condition must be uint8 or int8", TF.binary, q, q, "select",
           condition=q.float())  # fmt: skip
    refuse(ValueError, "weight must broadcast to src", TF.prelu, q, torch.rand(4, 2, 6, 5))
    refuse(ValueError, "srcs must be 1 to 32 tensors, got 0", TF.sum, [])
    refuse(ValueError, "srcs must be 1 to 32 tensors, got 33", TF.sum, [q] * 33)
    refuse(ValueError, "srcs must have one shape", TF.sum, [q, q[:1]])
    refuse(ValueError, "scales must be 2 numbers", TF.sum, [q, q], [1.0])
    refuse(ValueError, "group_size must divide dim 1", TF.shuffle, q, 4)
    refuse(ValueError, "dim must lie in", TF.shuffle, q, 2, 3)


@pytest.mark.parametrize(("src", "dst"), [(U8, S8), (F32, U8), (S8, F32), (S32, S32)])
def test_reorder_with_sum(isa: str, src: torch.dtype, dst: torch.dtype):
    x, old = source((3, 50), src, 1), source((3, 50), dst, 2)
    attr = attr_of(src=PARAMS[src], dst=DST[dst])
    attr.post_ops.append_sum(-0.7, 0 if dst == F32 else 3)
    params = [PARAMS[src], (-0.7, 0 if dst == F32 else 3), DST[dst]]
    got = TF.reorder(x, dst, attr, old)
    assert_same(got, reference.weighted_sum([x, old], params, dst))


def splitmix(seed: int, index: int) -> float:
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 40) / 2**24


@pytest.mark.parametrize("dst", [U8, S8, S32])
def test_reorder_rounds_stochastically(isa: str, dst: torch.dtype):
    x, seed = source((3, 700), F32, 1).t(), -5
    attr = attr_of(dst=DST[dst]).set_rounding("dst", "stochastic")
    got = TF.reorder(x, dst, attr, seed=seed)
    y = reference.fma32(
        x, reference.f32(1 / reference.f64(DST[dst][0])), torch.tensor(float(DST[dst][1]))
    )
    u = torch.tensor([splitmix(seed, i) for i in range(x.numel())]).reshape(x.shape)
    whole = torch.where(y - y.floor() > u, y.floor() + 1, y.floor())
    assert_same(got, reference.store(whole, DST[dst][1], dst))
    half = torch.full((20_000,), 0.25)
    rate = TF.reorder(half, U8, Attr().set_rounding("dst", "stochastic")).float().mean()
    assert abs(rate - 0.25) < 0.02


def test_reorder_rounds_as_the_environment(isa: str):
    x = source((500,), F32, 1)
    attr = attr_of(dst=DST[S8]).set_rounding("dst", "environment")
    assert_same(TF.reorder(x, S8, attr), TF.quantize(x, *DST[S8], S8))
    with rounding_upward():
        got = TF.reorder(x, S8, attr)
    y = reference.fma32(
        x, reference.f32(1 / reference.f64(DST[S8][0])), torch.tensor(float(DST[S8][1]))
    )
    assert_same(got, reference.store(y.ceil(), DST[S8][1], S8))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "environment"])
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(("src", "dst"), [(U8, S8), (F32, U8), (S8, S32), (S32, U8)])
def test_reorder_with_masks_on_both_sides(
    src: torch.dtype, dst: torch.dtype, with_sum: bool, rounding: str, isa: str
):
    """Scales along dim 1 of src and 0 of dst, zero points along the other ones."""
    x, old = source((3, 500), src, 1), source((3, 500), dst, 2)
    if src == F32:
        x[1, 7], x[2, 9], x[0, 3] = math.nan, math.inf, -math.inf
    limits = torch.tensor([0, 200]) if dst == U8 else torch.tensor([-100, 100])
    scales = {"src": 0.01 + torch.rand(500), "dst": 0.1 + torch.rand(3)}
    zeros = {"dst": torch.randint(int(limits[0]), int(limits[1]), (500,), dtype=S32)}
    zeros["src"] = torch.zeros(3, dtype=S32) if src == F32 else torch.tensor([3, 0, 9], dtype=S32)
    attr = Attr().set_rounding("dst", rounding)
    for arg, mask in (("src", 2), ("dst", 1)):
        attr.set_scales(arg, mask, scales[arg]).set_zero_points(arg, 3 - mask, zeros[arg])
    real = reference.real(x, (scales["src"], zeros["src"].reshape(3, 1)))
    if with_sum:
        attr.post_ops.append_sum(-0.7, 5)
        real = reference.f32(real.double() + reference.real(old, (-0.7, 5)).double())
    inverse = reference.f32(1 / scales["dst"].double()).reshape(3, 1)
    y = reference.fma32(real, inverse, zeros["dst"].double())
    u = torch.tensor([splitmix(7, i) for i in range(x.numel())]).reshape(x.shape)
    whole = {"nearest": y, "environment": y.ceil()}
    whole["stochastic"] = torch.where(y - y.floor() > u, y.floor() + 1, y.floor())
    with rounding_upward() if rounding == "environment" else contextlib.nullcontext():
        got = TF.reorder(x, dst, attr, old if with_sum else None, seed=7)
    if rounding == "nearest" and not with_sum:  # the ratio of the scales is rounded once
        ratio = reference.f32(scales["src"].double() / scales["dst"].double().reshape(3, 1))
        shifted = x if src == F32 else reference.f32(x.double() - zeros["src"].reshape(3, 1))
        whole["nearest"] = reference.fma32(shifted, ratio, zeros["dst"].double())
    zero = zeros["dst"].expand(3, 500)
    assert_same(got, reference.store(whole[rounding], zero, dst))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "environment"])
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize(("src", "dst"), [(U8, S8), (F32, U8), (S8, S32)])
def test_reorder_with_output_scales_sum_and_rounding(
    src: torch.dtype, dst: torch.dtype, with_sum: bool, rounding: str
):
    """Output scales, of any sign, stand for the source's scale; dst has scale 1."""
    x, old = source((3, 500), src, 1), source((3, 500), dst, 2)
    for scale in (torch.randn(500), torch.tensor([-0.75])):
        mask = 2 if scale.numel() > 1 else 0
        zero = torch.tensor(7 if dst == U8 else -9, dtype=S32)
        src_zero = torch.tensor(0 if src == F32 else 3, dtype=S32)
        attr = Attr().set_output_scales(mask, scale).set_rounding("dst", rounding)
        attr.set_zero_points("src", 0, src_zero).set_zero_points("dst", 0, zero)
        shifted = reference.f32(x.double() - src_zero)
        real = reference.f32(shifted.double() * scale.double())
        if with_sum:
            attr.post_ops.append_sum(-0.7, 5)
            real = reference.f32(real.double() + reference.real(old, (-0.7, 5)).double())
        y = reference.fma32(real, torch.ones(1), zero.double())
        if rounding == "stochastic":
            u = torch.tensor([splitmix(7, i) for i in range(x.numel())]).reshape(x.shape)
            y = torch.where(y - y.floor() > u, y.floor() + 1, y.floor())
        elif rounding == "environment":
            y = y.ceil()
        elif not with_sum:
            y = reference.fma32(shifted, scale, zero.double())
        with rounding_upward() if rounding == "environment" else contextlib.nullcontext():
            got = TF.reorder(x, dst, attr, old if with_sum else None, seed=7)
        assert_same(got, reference.store(y, zero, dst))


def test_reorder_to_another_layout():
    x = source((2, 3, 4, 5), F32, 1)
    for attr in (attr_of(dst=DST[S8]), attr_of(dst=DST[S8]).set_rounding("dst", "environment")):
        got = TF.reorder(x, S8, attr, memory_format=torch.channels_last)
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got, TF.reorder(x, S8, attr))
        back = TF.reorder(got, F32, memory_format=torch.contiguous_format)
        assert back.is_contiguous() and torch.equal(back, got.float())
    refuse(TypeError, "memory_format must be of type memory_format", TF.reorder, x, S8,
           memory_format="nhwc")  # fmt: skip


def test_reorder_with_sum_errors():
    q = random_q((2, 6), U8)
    attr = Attr()
    attr.post_ops.append_sum(0.5)
    refuse(ValueError, "old must be torch.uint8", TF.reorder, q, U8, attr)
    refuse(ValueError, "old must be torch.int8", TF.reorder, q, S8, attr, q)
    refuse(ValueError, "old must be torch.uint8", TF.reorder, q, U8, attr, q[:1])
    refuse(NotImplementedError, "must be empty or one sum", TF.reorder, q, U8, Attr(), q)
    attr.set_scales("src", 2, [1.0] * 5)
    refuse(ValueError, "must be 6 values", TF.reorder, q, U8, attr, q)
    for scales, zeros, message in (
        (torch.ones(2, 5), torch.zeros(2, dtype=S32), "scales must broadcast against src"),
        (torch.ones(3), torch.zeros(2, dtype=S32), r"must be \[2, ...\]"),
        (torch.ones(2), torch.tensor([0, 300], dtype=S32), "zero_points must lie in"),
        (torch.tensor([1.0, -1]), torch.zeros(2, dtype=S32), "scales must be finite and greater"),
    ):
        refuse(ValueError, message, torch.ops.torchq.reorder_rounded, q, scales, zeros, 0,
               "stochastic", 1)  # fmt: skip
    attr = Attr().set_rounding("dst", "environment")
    refuse(ValueError, "dst_dtype must be an integer type", TF.reorder, q, F32, attr)
