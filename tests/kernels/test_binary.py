# SPDX-License-Identifier: Apache-2.0
"""add, mul and concat against the oracle, bit for bit on every tier."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import BROADCASTS, random_q
from memory import before_guard_page, flushing_denormals, misaligned, rounding_upward
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchq.runtime.library import dtype_code

ops = torch.ops.torchq
OPS = ["add", "mul"]
ZERO = {U8: 131, S8: -9, F32: 0}
TYPES = [
    *itertools.product([U8, S8], [U8, S8], [U8, S8]),
    (U8, U8, F32),
    (U8, S8, F32),
    (S8, S8, F32),
]


def check(
    op: str,
    src0: Tensor,
    src1: Tensor,
    dst: torch.dtype = U8,
    scales: tuple[float, float, float] | None = None,
    zero_points: tuple[int, int, int] | None = None,
    relu: bool = False,
    label: object = "",
) -> Tensor:
    """One call against the oracle."""
    last = 1.0 if dst == F32 else 0.041 if op == "add" else 1.7
    s = torch.tensor(scales or (0.031, 0.017, last))
    z = zero_points or (ZERO[src0.dtype], ZERO[src1.dtype], ZERO[dst])
    got = getattr(ops, op)(src0, src1, s, torch.tensor(z, dtype=S32), dtype_code(dst), relu)
    oracle = getattr(reference, op)
    expected = oracle(src0, src1, s[0], z[0], s[1], z[1], s[2], z[2], dst, relu)
    assert_same(got, expected, label)
    return got


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("relu", [False, True])
def test_dtypes(isa: str, op: str, relu: bool):
    shape = (3, 5, 29)
    for a, b, dst in TYPES:
        check(op, random_q(shape, a, 1), random_q(shape, b, 2), dst, relu=relu, label=(a, b, dst))


@pytest.mark.parametrize("op", OPS)
def test_every_pair_of_values(isa: str, op: str):
    for a, b, dst in TYPES:
        every = [torch.arange(256).add(reference.RANGE[t][0]).to(t) for t in (a, b)]
        check(op, every[0][:, None], every[1], dst, label=(a, b, dst))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("zero", [0, 3, 4])
def test_ties_go_to_even(isa: str, op: str, zero: int):
    q = torch.arange(256).to(U8)
    for src1 in (0, 1):
        other = torch.full_like(q, src1)
        got = check(op, q, other, U8, (0.5, 1.0, 1.0), (0, 0, zero), label=src1)
        halfway = got[1::2]  # of odd q, but for mul by 0
        if op == "add" or src1 == 1:
            assert (halfway[halfway < 255] % 2 == 0).all(), src1


@pytest.mark.parametrize("op", OPS)
def test_saturates_at_both_ends(isa: str, op: str):
    low, high = torch.tensor([0], dtype=U8), torch.tensor([255], dtype=U8)
    for dst, ends in ((U8, (0, 255)), (S8, (-128, 127))):
        zero = (128, 128, ZERO[dst])
        big = (1e20, 1e3, 1.0)
        assert check(op, high, high, dst, big, zero).item() == ends[1]
        assert check(op, low, high if op == "mul" else low, dst, big, zero).item() == ends[0]


@pytest.mark.parametrize("size", [*range(35), 63, 64, 65, 127, 129, 1000])
def test_tails(isa: str, size: int):
    for op in OPS:
        src0, src1 = random_q((size,), U8, 3), random_q((size,), S8, 4)
        check(op, src0, src1)
        check(op, before_guard_page(src0), before_guard_page(src1), S8)
        if size:
            check(op, misaligned(src0, 1), misaligned(src1, 3), F32)


@pytest.mark.parametrize(("shape0", "shape1"), BROADCASTS, ids=str)
def test_broadcasts(isa: str, shape0: tuple[int, ...], shape1: tuple[int, ...]):
    for op in OPS:
        dst = check(op, random_q(shape0, U8, 1), random_q(shape1, S8, 2), label=op)
        assert dst.shape == torch.broadcast_shapes(shape0, shape1)


@pytest.mark.parametrize("channels", [1, 5, 32, 100, 1500, 3000])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_value_per_channel(isa: str, channels: int, batch: int):
    """Rows of channels, joined as long as they are narrow."""
    last = torch.channels_last
    src = random_q((2, channels, 9, 7), U8, 1).contiguous(memory_format=last)
    other = random_q((batch, channels, 1, 1), S8, 2)
    for op, dst in itertools.product(OPS, (U8, F32)):
        check(op, src, other, dst)
        check(op, other, src, dst)


def test_layouts(isa: str):
    """Values do not depend on strides; dst is laid out like the operand with its shape."""
    x, y = random_q((2, 5, 3, 7), U8, 1), random_q((2, 5, 3, 7), S8, 2)
    last = torch.channels_last
    pairs = [
        (x.contiguous(memory_format=last), y.contiguous(memory_format=last)),
        (x.contiguous(memory_format=last), y),
        (x, y.contiguous(memory_format=last)),
        (x[..., ::2], y[..., 1::2].contiguous(memory_format=last)[..., [0, 1, 2, 0]]),
        (x.transpose(1, 3), y.transpose(1, 3)),
        (x[:, :, :1].expand(x.shape), y),
        (x[:1, :, :1, :1].contiguous(memory_format=last), y.contiguous(memory_format=last)),
    ]
    for i, (a, b) in enumerate(pairs):
        for op in OPS:
            dst = check(op, a, b, label=(op, i))
            like = a if a.shape == dst.shape else b
            assert dst.stride() == torch.empty_like(like).stride(), (op, i)


@pytest.mark.parametrize("mode", [rounding_upward, flushing_denormals])
def test_floating_point_mode_of_the_caller_changes_nothing(isa: str, mode):
    q = torch.arange(256).to(U8)
    zero = torch.tensor([0, 0, 0], dtype=S32)
    cases = [(op, dst) for op in OPS for dst in (U8, F32)]
    scales = [
        torch.tensor([2e-39, 3e-39, 1.0 if dst == F32 else 8e-39 if op == "add" else 1.0])
        for op, dst in cases
    ]
    with mode():
        got = [
            getattr(ops, op)(q, q.flip(0), s, zero, dtype_code(dst), False)
            for (op, dst), s in zip(cases, scales, strict=True)
        ]
    for (op, dst), s, dst_q in zip(cases, scales, got, strict=True):
        oracle = getattr(reference, op)
        assert_same(dst_q, oracle(q, q.flip(0), s[0], 0, s[1], 0, s[2], 0, dst), (op, dst))


def test_two_threads_return_the_same_bits(isa: str):
    src0, src1 = random_q((4, 33, 1031), U8, 1), random_q((33, 1), S8, 2)
    torch.set_num_threads(2)
    for op in OPS:
        check(op, src0, src1)


def check_concat(
    srcs: list[Tensor],
    dim: int,
    dst: torch.dtype,
    scales: list[float] | None = None,
    zero_points: list[int] | None = None,
    label: object = "",
) -> Tensor:
    n = len(srcs)
    s = torch.tensor(scales or [0.02 + 0.013 * i for i in range(n)] + [1.0 if dst == F32 else 0.04])
    z = zero_points or [ZERO[src.dtype] - i for i, src in enumerate(srcs)] + [ZERO[dst]]
    got = ops.concat(srcs, s, torch.tensor(z, dtype=S32), dim, dtype_code(dst))
    expected = reference.concat(srcs, dim, list(s[:n]), z[:n], s[n], z[n], dst)
    assert_same(got, expected, label)
    return got


@pytest.mark.parametrize("dst", [U8, S8, F32])
@pytest.mark.parametrize("dim", range(-4, 4))
def test_concat_along_any_dimension(isa: str, dim: int, dst: torch.dtype):
    shapes = []
    for extent in (3, 1, 0, 17):
        shape = [2, 5, 4, 3]
        shape[dim] = extent
        shapes.append(tuple(shape))
    srcs = [random_q(shape, (U8, S8)[i % 2], i) for i, shape in enumerate(shapes)]
    check_concat(srcs, dim, dst)
    last = [src.contiguous(memory_format=torch.channels_last) for src in srcs]
    check_concat(last, dim, dst, label="channels_last")
    check_concat([*last[:2], *srcs[2:]], dim, dst, label="mixed")


@pytest.mark.parametrize("pixels", [1, 5, 130])
def test_concat_of_narrow_and_wide_rows(isa: str, pixels: int):
    """Rows of channels, as they are and converted; 5000 are more than are converted at a time."""
    widths = [1, 15, 16, 17, 32, 33, 64, 257, 300, 5000]
    srcs = [random_q((2, width, pixels, 1), (U8, S8)[i % 2], i) for i, width in enumerate(widths)]
    srcs = [src.contiguous(memory_format=torch.channels_last) for src in srcs]
    check_concat(srcs, 1, U8)
    n = len(srcs)
    check_concat(srcs, 1, S8, [0.3] * (n + 1), [ZERO[src.dtype] for src in srcs] + [ZERO[S8]])
    torch.set_num_threads(2)
    check_concat(srcs, 1, U8)


def test_concat_copies_where_nothing_changes(isa: str):
    srcs = [random_q((2, 3), U8, i) for i in range(3)]
    got = check_concat(srcs, 1, U8, [0.3] * 4, [7] * 4)
    assert torch.equal(got, torch.cat(srcs, 1))


def test_concat_takes_its_layout_from_the_first_source(isa: str):
    q = random_q((2, 6, 3, 5), U8, 1)
    last = q.contiguous(memory_format=torch.channels_last)
    assert check_concat([last, q], 1, U8).is_contiguous(memory_format=torch.channels_last)
    assert check_concat([q, last], 1, U8).is_contiguous()
    odd = q.permute(3, 1, 0, 2)
    dst = check_concat([odd, odd], 1, S8)
    assert dst.stride() == (1, 30, 360, 5) or dst.permute(2, 1, 3, 0).is_contiguous()
    wide = q[:, ::2, :, ::2]
    assert check_concat([wide, wide], 2, S8).is_contiguous()
    assert check_concat([q[:, :1].expand(2, 6, 3, 5), q], 0, U8).shape == (4, 6, 3, 5)


@pytest.mark.parametrize("dim", range(3))
@pytest.mark.parametrize("shape", [(4, 1, 3), (1, 5, 3), (4, 5, 1), (1, 1, 1)], ids=str)
def test_concat_of_expanded_sources(isa: str, shape: tuple[int, ...], dim: int):
    """They say nothing about the order of dst: it is that of others, or contiguous."""
    expanded = random_q(shape, U8, 1).expand(4, 5, 3)
    plain, turned = random_q((4, 5, 3), S8, 2), random_q((3, 4, 5), S8, 3).permute(1, 2, 0)
    for srcs in ([expanded, plain], [plain, expanded], [expanded, expanded]):
        for dst in (U8, F32):
            got = check_concat(srcs, dim, dst)
            assert got.is_contiguous()
            check_fake(srcs, dim, dst, got)
    got = check_concat([expanded, turned], dim, S8)
    assert got.permute(2, 0, 1).is_contiguous()
    check_fake([expanded, turned], dim, S8, got)


def check_fake(srcs: list[Tensor], dim: int, dst: torch.dtype, real: Tensor) -> None:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(src) for src in srcs]
        params = torch.empty(len(srcs) + 1), torch.empty(len(srcs) + 1, dtype=S32)
        fake = ops.concat(fakes, *params, dim, dtype_code(dst))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def seconds(call: Callable[[], object]) -> float:
    def once() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    return min(once() for _ in range(5))


def test_strides_cost_no_more_than_a_copy():
    """Value by value it took 30 to 60 times as long as dense sources, on Zen 4; now 2 to 7."""
    torch.set_num_threads(1)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=S32)
    dense = random_q((128, 100, 32), S8, 1)
    expanded = random_q((128, 1, 32), S8, 2).expand(128, 100, 32)
    turned = random_q((128, 32, 100), S8, 3).mT
    for first, second in ((expanded, dense), (dense, turned)):
        other = second.contiguous()
        plain = seconds(lambda o=other: ops.concat([dense, o], scales, zeros, 2, 1))
        given = seconds(lambda a=first, b=second: ops.concat([a, b], scales, zeros, 2, 1))
        assert given < 15 * plain, (given, plain)
    for op in (ops.add, ops.mul):
        plain = seconds(lambda f=op: f(dense, dense, scales, zeros, 1, False))
        given = seconds(lambda f=op: f(dense, turned, scales, zeros, 1, False))
        assert given < 25 * plain, (given, plain)


def test_concat_of_one_or_nothing(isa: str):
    check_concat([random_q((5,), S8)], 0, U8)
    empty = torch.empty(0, 3, dtype=U8)
    assert check_concat([empty, empty], 0, U8).shape == (0, 3)
    assert check_concat([empty, empty], 1, U8).shape == (0, 6)
    assert check_concat([empty, random_q((4, 3), U8)], 0, S8).shape == (4, 3)
    check_concat([random_q((3,), U8, i) for i in range(40)], 0, U8)


def test_errors():
    q, zero = torch.zeros(2, 3, dtype=U8), torch.zeros(3, dtype=S32)
    one = torch.ones(3)
    for op in OPS:
        run = getattr(ops, op)
        for bad in (0.0, -2.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=f"torchq.{op}: scales must be finite.*index 1"):
                run(q, q, torch.tensor([1.0, bad, 1.0]), zero, 0, False)
        with pytest.raises(ValueError, match=r"zero_points must lie in \[0, 255\].*index 2"):
            run(q, q, one, zero + torch.tensor([0, 0, 256], dtype=S32), 0, False)
        with pytest.raises(ValueError, match="scales must have 3 values, got 2"):
            run(q, q, one[:2], zero, 0, False)
        with pytest.raises(TypeError, match=r"src1? must be uint8 or int8, got float32"):
            run(q, q.float(), one, zero, 0, False)
        with pytest.raises(ValueError, match="float32 destination must have scale 1"):
            run(q, q, one * 2, zero, 6, False)
        with pytest.raises(NotImplementedError, match="int32 destination is not supported"):
            run(q, q, one, zero, 3, False)
        with pytest.raises(ValueError, match="src0 and src1 must broadcast"):
            run(q, torch.zeros(2, 4, dtype=U8), one, zero, 0, False)
        with pytest.raises(ValueError, match="ratio of the scales is not a finite float32"):
            run(q, q, torch.tensor([3e38, 3e38, 1e-38]), zero, 0, False)
    with pytest.raises(ValueError, match=r"concat: dim must lie in \[-2, 1\]"):
        ops.concat([q, q], one, zero, 2, 0)
    with pytest.raises(ValueError, match="concat: srcs must agree in every dimension but 0"):
        ops.concat([q, q[:, :2]], one, zero, 0, 0)
    with pytest.raises(ValueError, match="concat: srcs must be at least one tensor"):
        ops.concat([], one[:1], zero[:1], 0, 0)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (3, 1, 1, 1)])
def test_parameters_are_taken_by_their_number(shape: tuple[int, ...]):
    """Parameters of any shape give the same result, or an error of concat."""
    q = random_q((2, 3), U8)
    s, z = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([1, 2, 3], dtype=S32)
    expected = ops.concat([q, q], s, z, 0, 0)
    try:
        got = ops.concat([q, q], s.reshape(shape), z.reshape(shape), 0, 0)
    except ValueError as error:
        assert "torchq.concat" in str(error)
    else:
        assert_same(got, expected)
