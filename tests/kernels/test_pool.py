# SPDX-License-Identifier: Apache-2.0
"""max_pool, avg_pool and adaptive_avg_pool against the oracle and against torch in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import reference
import torch
import torch.nn.functional as F
from calls import F32, S8, S32, U8, assert_same
from cases import random_q
from geometries import spread
from memory import before_guard_page, flushing_denormals, rounding_upward
from reference_arithmetic import fma32
from torch import Tensor

import torchq.functional as TF

ops = torch.ops.torchq
MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVG = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
ZERO = {U8: 117, S8: -13, S32: -70_001, F32: 0}
WIDE = (S32, F32)


def flat(window: Sequence[Sequence[int]]) -> list[int]:
    return [value for field in window for value in field]


def max_pool(
    src: Tensor, kernel, stride, padding=0, end=None, dilation=1, ceil_mode: bool = False
) -> Tensor:
    """One call, checked against the oracle."""
    dims = src.ndim - 2
    end = padding if end is None else end
    window = spread(dims, kernel, stride, padding, end, dilation)
    got = ops.max_pool(src, flat(window), ceil_mode)
    k, s, begin, after, gap = window
    expected = reference.max_pool(src, k, s, (begin, after), gap, ceil_mode)
    assert_same(got, expected, (tuple(src.shape), window, ceil_mode))
    return got


def avg_pool(
    src: Tensor,
    kernel,
    stride,
    padding=0,
    end=None,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    zero_point: int | None = None,
) -> Tensor:
    dims = src.ndim - 2
    end = padding if end is None else end
    zero = (0 if divisor else ZERO[src.dtype]) if zero_point is None else zero_point
    k, s, begin, after = spread(dims, kernel, stride, padding, end)
    got = ops.avg_pool(
        src,
        torch.tensor(zero, dtype=S32),
        [*k, *s, *begin, *after, *[1] * dims],
        ceil_mode,
        count_include_pad,
        divisor,
    )
    expected = reference.avg_pool(
        src, k, s, (begin, after), ceil_mode, count_include_pad, divisor, zero
    )
    assert_same(got, expected, (tuple(src.shape), k, s, begin, after, ceil_mode))
    return got


def adaptive(src: Tensor, output: Sequence[int]) -> Tensor:
    got = ops.adaptive_avg_pool(src, output)
    assert_same(got, reference.adaptive_avg_pool(src, output), (tuple(src.shape), output))
    return got


GEOMETRIES = [  # name, spatial size, kernel, stride, padding
    ("resnet_stem", (16, 17), 3, 2, 1),
    ("vgg", (8, 9), 2, 2, 0),
    ("inception", (7, 7), 3, 1, 1),
    ("rectangle", (9, 11), (3, 2), (2, 3), (1, 1)),
    ("whole", (5, 6), (5, 6), 1, 0),
    ("one", (4, 4), 1, 1, 0),
    ("skips", (11, 12), 2, 5, 1),
    ("1d", (23,), 3, 2, 1),
    ("1d_long", (40,), 14, 13, 7),
    ("3d", (5, 6, 7), 3, 2, 1),
    ("3d_mixed", (4, 5, 6), (1, 2, 3), (1, 2, 2), (0, 1, 1)),
    ("single_pixel", (1, 1), 3, 2, 1),
]
IDS = [g[0] for g in GEOMETRIES]


@pytest.mark.parametrize("dtype", [U8, S8, *WIDE])
@pytest.mark.parametrize(("name", "size", "kernel", "stride", "padding"), GEOMETRIES, ids=IDS)
def test_as_torch_in_float64(isa: str, dtype: torch.dtype, name, size, kernel, stride, padding):
    src = random_q((2, 19, *size), dtype, 1)
    index, real = len(size) - 1, src.double()
    options = {"kernel_size": kernel, "stride": stride, "padding": padding}
    for ceil_mode in (False, True):
        got = max_pool(src, kernel, stride, padding, ceil_mode=ceil_mode)
        expected = MAX[index](real, **options, ceil_mode=ceil_mode)
        assert torch.equal(got.double(), expected), ceil_mode
        for count_include_pad in (False, True):
            got = avg_pool(src, kernel, stride, padding, None, ceil_mode, count_include_pad)
            shifted = AVG[index](
                real - ZERO[dtype],
                **options,
                ceil_mode=ceil_mode,
                count_include_pad=count_include_pad,
            )
            expected = shifted.float() if dtype == F32 else torch.round(shifted + ZERO[dtype])
            assert torch.equal(got.double(), expected), (ceil_mode, count_include_pad)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [((1, 1), 2, 2, 0), ((2, 1), 3, 3, 0), ((2, 2), 4, 3, 0), ((1, 2), 3, 2, 1), ((4, 1), 2, 2, 0)],
)
def test_ceil_mode_takes_images_smaller_than_the_window(isa: str, size, kernel, stride, padding):
    src = random_q((2, 19, *size), U8, 1)
    args = (src.double(), kernel, stride, padding)
    got = max_pool(src, kernel, stride, padding, ceil_mode=True)
    assert torch.equal(got.double(), F.max_pool2d(*args, ceil_mode=True))
    for counted in (False, True):
        got = avg_pool(src, kernel, stride, padding, None, True, counted, zero_point=0)
        expected = F.avg_pool2d(*args, ceil_mode=True, count_include_pad=counted)
        assert torch.equal(got.double(), torch.round(expected)), counted
    with pytest.raises(ValueError, match="smaller than the window"):
        max_pool(src[:, :, :1, :1].contiguous(), 3, 2, 0, ceil_mode=True)


@pytest.mark.parametrize("divisor", [14, 26, 28, 49, 3, 7])
def test_averages_divide(isa: str, divisor: int):
    """Multiplying by a rounded reciprocal would turn exact ties into near misses."""
    src = torch.zeros(1, 256, divisor, dtype=U8)
    total = torch.arange(256) * divisor // 2  # averages of 0, 0.5, 1, 1.5, ...
    src[0] = (total[:, None] // divisor + (torch.arange(divisor) < total[:, None] % divisor)).to(U8)
    got = avg_pool(src, divisor, 1)
    assert torch.equal(got[0, :, 0].double(), torch.round(total.double() / divisor))
    assert torch.equal(adaptive(src, [1]), got)


@cache
def averages(size: int) -> tuple[Tensor, Tensor]:
    """Sources (1, sums, size), sums innermost, of every sum or those around each half, and their
    averages by integers.
    """
    limit = 255 * size
    halves = [(2 * q + 1) * size // 2 + i for q in range(255) for i in (-1, 0, 1)]
    sums = torch.tensor(range(limit + 1) if size <= 64 else [s for s in halves if 0 <= s <= limit])
    low, more = sums // size, sums % size
    src = (low + (torch.arange(size)[:, None] < more)).to(U8)
    quotient, rest = (2 * sums + size) // (2 * size), (2 * sums + size) % (2 * size)
    return src.t().unsqueeze(0), quotient - ((rest == 0) & (quotient % 2 == 1)).long()  # to even


@pytest.mark.parametrize("size", [2, 3, 6, 9, 14, 25, 28, 49, 64, 1001, 4096, 8191, 8192, 8193])
def test_averages_round_the_exact_quotient(isa: str, size: int):
    src, expected = averages(size)
    assert torch.equal(avg_pool(src, size, 1).flatten().long(), expected)


@pytest.mark.parametrize("divisor", [1, 2, 5, 14, 28, 1000, 2**31, 2**62])
def test_divisor_override(isa: str, divisor: int):
    src = random_q((1, 18, 6, 7), U8, 2)
    got = avg_pool(src, 3, 2, 1, divisor=divisor)
    total = F.avg_pool2d(src.double(), 3, 2, 1, divisor_override=1)
    assert torch.equal(got.double(), torch.round(total / divisor).clamp(0, 255))
    avg_pool(random_q((1, 18, 6, 7), S8, 2), 3, 2, 1, divisor=divisor, ceil_mode=True)


@pytest.mark.parametrize("dtype", [U8, S8, *WIDE])
def test_padding_is_never_picked(isa: str, dtype: torch.dtype):
    """Not even where every source value is the lowest there is, or below the zero point."""
    low = reference.RANGE[dtype][0]
    for value in (low, -5 if dtype == F32 else low + 1, 0):
        src = torch.full((1, 17, 4, 5), value, dtype=dtype)
        assert (max_pool(src, 3, 1, 1) == value).all()
        assert (max_pool(src, 3, 2, 1, ceil_mode=True, dilation=2, end=2) == value).all()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_random_geometries(isa: str, dims: int):
    """Unequal padding, dilation and ceil_mode together."""
    rng = random.Random(dims)
    done = 0
    while done < 40:
        size = [rng.randint(1, 9) for _ in range(dims)]
        kernel, stride = ([rng.randint(1, 4) for _ in range(dims)] for _ in range(2))
        dilation = [rng.randint(1, 3) for _ in range(dims)]
        span = [(k - 1) * g + 1 for k, g in zip(kernel, dilation, strict=True)]
        begin, end = ([rng.randint(0, s // 2) for s in span] for _ in range(2))
        whole = [n + b + e for n, b, e in zip(size, begin, end, strict=True)]
        if any(w < s for w, s in zip(whole, span, strict=True)):
            continue
        dtype, ceil_mode = rng.choice([U8, S8, *WIDE]), rng.random() < 0.5
        src = random_q((rng.randint(1, 2), rng.randint(1, 40), *size), dtype, done)
        try:
            max_pool(src, kernel, stride, begin, end, dilation, ceil_mode)
        except ValueError as error:
            assert "meets only padding" in str(error)
        half = [k // 2 for k in kernel]
        begin, end = ([min(p, h) for p, h in zip(x, half, strict=True)] for x in (begin, end))
        whole = [n + b + e for n, b, e in zip(size, begin, end, strict=True)]
        if all(w >= k for w, k in zip(whole, kernel, strict=True)):
            try:
                avg_pool(src, kernel, stride, begin, end, ceil_mode, rng.random() < 0.5)
            except ValueError as error:
                assert "meets only padding" in str(error)
        done += 1


@pytest.mark.parametrize("size", [(1,), (13,), (7, 7), (7, 5), (12, 9), (4, 5, 6)], ids=str)
def test_adaptive(isa: str, size: tuple[int, ...]):
    for dtype in (U8, S8, *WIDE):
        src = random_q((2, 33, *size), dtype, 3)
        for out in (1, 2, 3, 5, 7, 14):
            got = adaptive(src, [out] * len(size))
            expected = ADAPTIVE[len(size) - 1](src.double(), [out] * len(size))
            assert (got.double() - expected).abs().max() <= 0.5
    src = random_q((1, 5, 6, 7), U8)
    assert adaptive(src, [6, 7]).equal(src)
    adaptive(src, [1, 7])
    adaptive(src, [4, 3])


@pytest.mark.parametrize("channels", [*range(1, 35), 63, 64, 65, 127, 128, 129, 200])
def test_channel_tails(isa: str, channels: int):
    for dtype in (U8, S8, *WIDE):
        src = random_q((1, channels, 5, 4), dtype, channels)
        last = before_guard_page(src.contiguous(memory_format=torch.channels_last))
        max_pool(last, 3, 2, 1)
        avg_pool(last, 3, 2, 1)
        adaptive(last, [1, 1])


def test_layouts(isa: str):
    q = random_q((2, 6, 8, 10), U8, 4)
    sources = [
        q,
        q.contiguous(memory_format=torch.channels_last),
        q[:, ::2],
        q.contiguous(memory_format=torch.channels_last)[:, 1:4],
        q[..., ::2],
        q.transpose(2, 3),
        q[:, :1].expand(2, 6, 8, 10),
        q[:, :, :1, :1],
        q[:1, :1],
    ]
    for i, src in enumerate(sources):
        size = src.shape[2]
        for dst in (
            max_pool(src, 1, 2),
            avg_pool(src, (min(size, 2), 1), 1),
            adaptive(src, [3, 1]),
        ):
            c, h, w = dst.shape[1:]
            assert dst.stride() == (h * w * c, 1, w * c, c), i


@pytest.mark.parametrize("pixels", [1, 2, 15, 16, 17, 33, 48, 121])
def test_contiguous_sources_become_channels_last(isa: str, pixels: int):
    for channels in (*range(1, 21), 31, 32, 33, 100):
        for batch in (1, 2):
            src = before_guard_page(random_q((batch, channels, pixels), S8, channels))
            assert torch.equal(max_pool(src, 1, 1), src)


def test_contiguous_sources_on_several_threads(isa: str):
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for shape in ((2, 3, 401, 307), (1, 40, 129, 151), (5, 130, 33, 35)):
            src = random_q(shape, U8, 3)
            assert torch.equal(max_pool(src, 1, 1), src)


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (0, 3, 5, 4), (2, 0, 4, 4)], ids=str)
def test_no_batch_or_no_channels(isa: str, shape: tuple[int, ...]):
    src, dims = torch.empty(shape, dtype=U8), len(shape) - 2
    window = [[2] * dims, [2] * dims, [0] * dims, [0] * dims, [1] * dims]
    expected = (*shape[:2], *(s // 2 for s in shape[2:]))
    assert ops.max_pool(src, flat(window), False).shape == expected
    zero = torch.tensor(0, dtype=S32)
    assert ops.avg_pool(src, zero, flat(window), False, True, None).shape == expected
    assert ops.adaptive_avg_pool(src, [1] * dims).shape == (*shape[:2], *[1] * dims)


@pytest.mark.parametrize("mode", [rounding_upward, flushing_denormals])
def test_floating_point_mode_of_the_caller_changes_nothing(isa: str, mode: Callable):
    for dtype in (U8, *WIDE):
        src = random_q((1, 64, 9, 9), dtype, 5)
        src = src * 2.0**-140 if dtype == F32 else src  # denormal
        expected = reference.avg_pool(src, [3, 3], [1, 1], ([1, 1], [1, 1]))
        zero = torch.tensor(0, dtype=S32)
        with mode():
            got = ops.avg_pool(src, zero, [3, 3, 1, 1, 1, 1, 1, 1, 1, 1], False, True, None)
        assert_same(got, expected)


def test_any_number_of_threads(isa: str):
    for dtype, threads in itertools.product((S8, *WIDE), (1, 2, 3)):
        src = random_q((3, 130, 21, 23), dtype, 6)
        torch.set_num_threads(threads)
        max_pool(src, 3, 1, 1)
        avg_pool(src, 3, 1, 1)
        adaptive(src, [7, 7])


def test_wide_values_are_exact(isa: str):
    """Sums that neither int32 nor float32 holds; a tie goes to the even number."""
    top = 2**31 - 1
    src = torch.tensor([top, top, top, top - 3, -top, -top - 1, 7, 8], dtype=S32).reshape(1, 1, -1)
    got = avg_pool(src, 2, 2, zero_point=0).flatten()
    assert got.tolist() == [top, top - 1, -top - 1, 8]
    assert max_pool(src, 2, 2).flatten().tolist() == [top, top, -top, 8]
    assert TF.max_pool(src, 2, dst_dtype=S32).equal(max_pool(src, 2, 2))
    assert avg_pool(src, 2, 2, divisor=1).flatten().tolist() == [top, top, -top - 1, 15]
    src = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).reshape(1, 1, 4)
    assert avg_pool(src, 4, 1).item() == 0.5


def test_nan_of_a_float_stays(isa: str):
    src = random_q((1, 3, 4, 5), F32)
    for place in range(4):
        src[0, 1, place // 2, place % 2] = torch.nan
        assert max_pool(src, 2, 2)[0, :, 0, 0].isnan().tolist() == [False, True, False]
        assert avg_pool(src, 2, 2)[0, :, 0, 0].isnan().tolist() == [False, True, False]
        assert TF.max_pool(src, 2, dst_dtype=U8)[0, 1, 0, 0] == 0
        src = random_q((1, 3, 4, 5), F32)


def loud_or_right(call: Callable[[], Tensor], expected: int) -> None:
    """No silent overflow: a refusal is fine, a wrong number is not."""
    try:
        got = call()
    except (ValueError, NotImplementedError):
        return
    assert (got == expected).all(), got.flatten()[0].item()


@pytest.mark.parametrize(("dtype", "value"), [(U8, 255), (S8, -128)], ids=["u8", "s8"])
def test_sums_beyond_int32(isa: str, dtype: torch.dtype, value: int):
    """The mean of 4200 x 4200 pixels sums to more than 2^31."""
    side = 4200 if dtype == S8 else 3000
    src = torch.full((1, 1, side, side), value, dtype=dtype)
    loud_or_right(lambda: ops.adaptive_avg_pool(src, [1, 1]), value)
    zero = torch.tensor(0, dtype=S32)
    window = [side, side, 1, 1, 0, 0, 0, 0, 1, 1]
    loud_or_right(lambda: ops.avg_pool(src, zero, window, False, True, None), value)


def test_padding_sums_beyond_int32(isa: str):
    """Counted padding adds zero_point per position: 2^24 times 255 here."""
    src = torch.full((1, 1, 1, 1), 255, dtype=U8)
    window = [4096, 4096, 4096, 4096, 2048, 2048, 2047, 2047, 1, 1]
    zero = torch.tensor(255, dtype=S32)
    loud_or_right(lambda: ops.avg_pool(src, zero, window, False, True, None), 255)
    src, k = src.unsqueeze(0), 2**22
    window = [k] * 6 + [k // 2] * 3 + [k // 2 - 1] * 3 + [1] * 3
    loud_or_right(lambda: ops.avg_pool(src, zero, window, False, True, None), 255)


def test_errors():
    src, zero = torch.zeros(1, 2, 5, 6, dtype=U8), torch.tensor(0, dtype=S32)
    window = [3, 3, 1, 1, 0, 0, 0, 0, 1, 1]

    def avg(divisor: int | None = None, zero_point: Tensor = zero, geometry=window):
        return ops.avg_pool(src, zero_point, geometry, False, True, divisor)

    with pytest.raises(ValueError, match="10 values for 2 spatial dimensions"):
        ops.max_pool(src, window[:9], False)
    with pytest.raises(ValueError, match="padding must be at most half of the kernel"):
        ops.max_pool(src, [3, 3, 1, 1, 2, 2, 2, 2, 1, 1], False)
    with pytest.raises(ValueError, match="smaller than the window"):
        ops.max_pool(src, [7, 7, 1, 1, 0, 0, 0, 0, 1, 1], False)
    with pytest.raises(ValueError, match="max_pool: stride must be at least 1"):
        ops.max_pool(src, [3, 3, 0, 1, 0, 0, 0, 0, 1, 1], False)
    with pytest.raises(ValueError, match=r"must be \(N, C, spatial...\)"):
        ops.max_pool(src[0, 0], window, False)
    with pytest.raises(TypeError, match="src must be uint8, int8, int32 or float32, got float64"):
        ops.max_pool(src.double(), window, False)
    for divisor in (0, -1):
        with pytest.raises(ValueError, match="divisor_override must be at least 1"):
            avg(divisor)
    with pytest.raises(NotImplementedError, match="divisor_override needs a zero point of 0"):
        avg(9, zero + 1)
    with pytest.raises(ValueError, match=r"zero_point must lie in \[0, 255\]"):
        avg(None, zero - 1)
    for output in ([0, 1], [1], [1, 1, 1], [-1, 2]):
        with pytest.raises(ValueError, match="adaptive_avg_pool: output_size must have 2 values"):
            ops.adaptive_avg_pool(src, output)
    with pytest.raises(ValueError, match="must not be empty in space"):
        ops.adaptive_avg_pool(src[:, :, :0], [1, 1])
    with pytest.raises(ValueError, match=r"smaller than the window|only padding"):
        ops.max_pool(src[:, :, :0], window, False)


def test_the_quick_division_is_the_division():
    """q + (x - q n) / n with fused multiply-adds, for every sum that avg_pool takes it for."""
    x = torch.arange(-(2**17), 2**17 + 1, dtype=torch.float32)
    for n in range(1, 257):
        divisor = torch.tensor(float(n))
        inverse = 1 / divisor
        q = x * inverse
        assert torch.equal(fma32(fma32(q, -divisor, x), inverse, q), x / divisor), n
        if n % 2 == 1 or n & (n - 1) == 0:  # the product alone, rounded
            assert torch.equal(q.round(), (x / divisor).round()), n
