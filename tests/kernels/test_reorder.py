# SPDX-License-Identifier: Apache-2.0
"""quantize, dequantize, requantize and reorder against the oracle, bit for bit on every tier."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import random_q, tie_values
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import before_guard_page, flushing_denormals, misaligned, rounding_upward
from torch import Tensor

import torchq
from torchq.runtime.library import dtype_code

ops = torch.ops.torchq
SHAPE = (2, 3, 5, 7)
MASKS = range(16)
PAIRS = list(itertools.product([U8, S8, S32, F32], repeat=2))
ZERO_POINTS = {U8: (0, 1, 127, 128, 255), S8: (-128, -7, 0, 4, 127), S32: (0,), F32: (0,)}


def i32(*values: int) -> Tensor:
    return torch.tensor(values if len(values) != 1 else values[0], dtype=S32)


def quantize(x: Tensor, scale: float | Tensor, zero_point: int | Tensor, dtype: torch.dtype):
    zero_point = torch.as_tensor(zero_point, dtype=S32)
    return ops.quantize(x, torch.as_tensor(scale), zero_point, dtype_code(dtype))


def broadcast(mask: int, shape: tuple[int, ...] = SHAPE) -> list[int]:
    """The parameter shape of a oneDNN mask: bit d selects dimension d."""
    return [size if mask >> d & 1 else 1 for d, size in enumerate(shape)]


def scales(mask: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(broadcast(mask, shape), generator=generator) * 0.1 + 0.01


def zero_points(mask: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    if dtype not in (U8, S8):
        return torch.zeros(broadcast(mask), dtype=S32)
    return random_q(tuple(broadcast(mask)), dtype, seed).int()


def reals(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 8


def values(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return reals(shape) if dtype == F32 else random_q(shape, dtype, 3)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values of a 4-D tensor, laid out in every way a user may have them."""
    wide = torch.stack([x, x], -1).flatten(-2)
    return {
        "contiguous": x.contiguous(),
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3).contiguous().transpose(1, 3),
        "strided": wide[..., ::2],
        "offset": torch.cat([x[:1], x])[1:],
        "narrowed": torch.cat([x, x], 1)[:, : x.shape[1]],
    }


@pytest.mark.parametrize("dst", [U8, S8])
def test_quantize_by_any_mask(isa: str, dst: torch.dtype):
    x = reals()
    for mask in MASKS:
        for zero_mask in (0, mask, 2):
            scale, zero = scales(mask), zero_points(zero_mask, dst)
            expected = reference.quantize(x, scale, zero, dst)
            assert_same(quantize(x, scale, zero, dst), expected, (mask, zero_mask))


def test_quantize_to_int32_by_any_mask(isa: str):
    x = reals() * 1e6
    for mask in MASKS:
        scale = scales(mask)
        assert_same(quantize(x, scale, 0, S32), reference.quantize(x, scale, 0, S32), mask)


@pytest.mark.parametrize("src", [U8, S8, S32])
def test_dequantize_by_any_mask(isa: str, src: torch.dtype):
    q = values(src)
    for mask in MASKS:
        for zero_mask in (0, mask, 8):
            scale, zero = scales(mask), zero_points(zero_mask, src)
            expected = reference.dequantize(q, scale, zero)
            assert_same(ops.dequantize(q, scale, zero), expected, (mask, zero_mask))


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda d: str(d)[6:])
def test_requantize_by_any_mask(isa: str, src: torch.dtype, dst: torch.dtype):
    q = values(src)
    for mask in MASKS:
        other = mask ^ 5
        args = (
            *(scales(mask, 1), zero_points(mask, src, 1)),
            *(scales(other, 2), zero_points(mask & 6, dst, 2)),
        )
        if dst == U8 and src == S32:
            args = (args[0] * 1e-6, *args[1:])
        expected = reference.requantize(q, *args, dst)
        assert_same(ops.requantize(q, *args, dtype_code(dst)), expected, mask)


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda d: str(d)[6:])
def test_reorder_multiplies_by_output_scales(isa: str, src: torch.dtype, dst: torch.dtype):
    q = values(src)
    for mask in MASKS:
        factor = scales(mask, 4) * (1e-5 if src == S32 else 12) - (0.5 if mask == 3 else 0)
        expected = reference.reorder_output_scales(q, factor, dst)
        assert_same(ops.reorder(q, factor, dtype_code(dst)), expected, mask)


@pytest.mark.parametrize("src", [U8, S8, S32, F32])
def test_reorder_without_scales_converts(isa: str, src: torch.dtype):
    q = values(src)
    for dst in (U8, S8, S32, F32):
        expected = q if src == dst else reference.reorder_output_scales(q, 1.0, dst)
        for name, x in layouts(q).items():
            got = ops.reorder(x, torch.empty(0), dtype_code(dst))
            assert_same(got, expected, (name, dst))
            assert got.data_ptr() != x.data_ptr(), "a functional op never returns its argument"


def test_reorder_keeps_the_sign_of_zero(isa: str):
    """It multiplies (there is no zero point to add), and -0.0 * 1 is -0.0."""
    x = torch.tensor([-0.0, 0.0, -1e-30] * 11)
    expected = reference.reorder_output_scales(x, 1e-20, F32)
    assert_same(ops.reorder(x, torch.tensor(1e-20), 6), expected)


def test_int32_without_scales_is_exact(isa: str):
    q = i32(-(2**31), -(2**24) - 1, -1, 0, 2**24 + 1, 2**31 - 1)
    assert_same(ops.reorder(q, torch.empty(0), 3), q)


@pytest.mark.parametrize("dst", [U8, S8])
@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-10])
def test_ties_go_to_even_behind_the_zero_point(isa: str, dst: torch.dtype, scale: float):
    """x = (k + 1/2) * scale lies halfway; with an odd zero point the other neighbor is even."""
    x = tie_values(scale)
    for zero in ZERO_POINTS[dst]:
        got = quantize(x, scale, zero, dst)
        assert_same(got, reference.quantize(x, scale, zero, dst), zero)
        low, high = reference.RANGE[dst]
        inside = (got > low) & (got < high)
        assert (got[inside] % 2 == 0).all(), zero


@pytest.mark.parametrize("dst", [U8, S8, S32])
def test_no_number_saturates_or_becomes_the_zero_point(isa: str, dst: torch.dtype):
    low, high = reference.RANGE[dst]
    inf, big = math.inf, 3.4e38
    x = torch.tensor([math.nan, inf, -inf, big, -big, 2.0**31, -(2.0**31), 2147483520.0] * 21)
    for scale, zero in itertools.product((1.0, 1e-3, 1e-38), ZERO_POINTS[dst]):
        got = quantize(x, scale, zero, dst)
        assert_same(got, reference.quantize(x, scale, zero, dst), (scale, zero))
        assert got[:5].tolist() == [zero, high, low, high, low]


@pytest.mark.parametrize("dst", [U8, S8, F32])
def test_int32_sources_beyond_the_float_mantissa(isa: str, dst: torch.dtype):
    """float(q) rounds half to even above 2^24, once."""
    q = i32(*(s * (2**k + d) for k in (24, 25, 27, 30) for d in (-3, -1, 0, 1, 3) for s in (1, -1)))
    q = torch.cat([q, i32(-(2**31), 2**31 - 1)])
    args = (torch.tensor(2.0**-23), i32(0), torch.tensor(1.0), i32(0))
    got = ops.requantize(q, *args, dtype_code(dst))
    assert_same(got, reference.requantize(q, *args, dst))
    real = ops.dequantize(q, args[0], args[1])
    assert_same(real, reference.dequantize(q, args[0], args[1]))
    assert real[-1].item() == 256.0


def test_every_value_of_a_byte(isa: str):
    for dtype in (U8, S8):
        low, high = reference.RANGE[dtype]
        q = torch.arange(low, high + 1).to(dtype)
        for zero in ZERO_POINTS[dtype]:
            scale = torch.tensor(0.0371)
            real = ops.dequantize(q, scale, i32(zero))
            assert_same(real, reference.dequantize(q, scale, zero))
            assert_same(quantize(real, scale, zero, dtype), q, "a round trip is exact")


@pytest.mark.parametrize("size", [*range(35), 63, 64, 65, 127, 1000])
def test_tails(isa: str, size: int):
    x = reals((size,))
    for dst in (U8, S8, S32):
        assert_same(quantize(x, 0.05, 0, dst), reference.quantize(x, 0.05, 0, dst))
    q = values(S8, (size,))
    assert_same(ops.dequantize(q, torch.tensor(0.3), i32(5)), reference.dequantize(q, 0.3, 5))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1, 1, 1, 1), (2, 1, 3, 1, 2)])
def test_any_number_of_dimensions(isa: str, shape: tuple[int, ...]):
    q = values(U8, shape)
    assert_same(ops.dequantize(q, torch.tensor(0.5), i32(3)), reference.dequantize(q, 0.5, 3))
    x = reals(shape)
    assert_same(quantize(x, 0.1, 7, U8), reference.quantize(x, 0.1, 7, U8))
    scale = torch.full([1] * len(shape), 0.1)
    assert_same(quantize(x, scale, 7, U8), reference.quantize(x, 0.1, 7, U8))


@pytest.mark.parametrize("mask", [0, 2, 9, 15])
def test_layouts(isa: str, mask: int):
    """Values do not depend on strides, and dst keeps the order of src's dimensions."""
    scale, zero = scales(mask), zero_points(mask, U8)
    for dst in (U8, S32):
        zero = zero if dst == U8 else zero * 0
        expected = reference.quantize(reals(), scale, zero, dst)
        for name, x in layouts(reals()).items():
            got = quantize(x, scale, zero, dst)
            assert_same(got, expected, name)
            assert got.stride() == torch.empty_like(x, dtype=dst).stride(), name
    for name, q in layouts(values(U8)).items():
        zero = zero_points(mask, U8)
        real = ops.dequantize(q, scale, zero)
        assert_same(real, reference.dequantize(values(U8), scale, zero), name)
        assert real.stride() == torch.empty_like(q, dtype=F32).stride(), name


def test_expanded_and_flipped_operands(isa: str):
    x = reals((1, 3, 1, 7)).expand(SHAPE)
    scale, zero = scales(2).expand(SHAPE), zero_points(8, U8).expand(SHAPE)
    expected = reference.quantize(x.contiguous(), scale.contiguous(), zero.contiguous(), U8)
    assert_same(quantize(x, scale, zero, U8), expected)
    by_width = scales(8).flatten()  # fewer dimensions than src: PyTorch's broadcasting
    assert_same(quantize(x, by_width, 3, U8), reference.quantize(x, by_width, 3, U8))
    strided = scales(15)[:, :, :, ::2].repeat_interleave(2, 3)[..., :7]
    assert_same(quantize(x, strided, 3, U8), reference.quantize(x, strided, 3, U8))


def test_weights_with_hwigo_strides_by_group_and_channel(isa: str):
    """Source 1, example 1: (G, OC, IC, H, W) whose memory is hwigo, mask 3 (bits G and OC)."""
    groups, outputs, inputs, height, width = shape = (3, 5, 4, 2, 3)
    memory = reals((height, width, inputs, groups, outputs))
    weight = memory.permute(3, 4, 2, 0, 1)
    assert weight.shape == shape
    scale = scales(3, shape=shape)
    assert scale.shape == (groups, outputs, 1, 1, 1)
    for dst in (S8, S32):
        expected = reference.quantize(weight, scale, 0, dst)
        got = quantize(weight, scale, 0, dst)
        assert_same(got, expected, "scales divide")
        assert got.stride() == weight.stride(), "still hwigo"
        inverse = reference.f32(1 / scale.double())
        got = ops.reorder(weight, inverse, dtype_code(dst))
        assert_same(got, reference.reorder_output_scales(weight, inverse, dst), "multiply")
        assert_same(got, expected, "1 / scale, the same numbers")


def test_the_worked_example_of_the_int8_inference_guide(isa: str):
    """Q_a = 255/15, Q_w = 127/9.8; the document prints -5.2 as -1145 and 2.4 as 528: it uses
    Q_a * Q_w = 220.3."""
    scale_a, scale_w = 15 / 255, 9.8 / 127
    a = torch.tensor([15.0, 14.0, 15.0, 8.0, 11.0])
    assert quantize(a, scale_a, 0, U8).tolist() == [255, 238, 255, 136, 187]
    w = torch.tensor([-5.1, 6.8, -1.2, 9.8])
    # The document prints -15 for -1.2, the floor of -15.55; nearest is -16.
    assert quantize(w, scale_w, 0, S8).tolist() == [-66, 88, -16, 127]
    b = torch.tensor([2.4, -5.2, -8.0])
    exact = quantize(b, scale_a * scale_w, 0, S32)
    assert (exact - i32(528, -1145, -1762)).abs().max() <= 1
    assert quantize(b, 1 / (17 * 12.96), 0, S32).tolist() == [529, -1146, -1763]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip_stays_within_half_a_step(data: st.DataObject):
    scale = torch.tensor(data.draw(st.floats(2.0**-40, 2.0**40, width=32)))
    dtype = data.draw(st.sampled_from([U8, S8]))
    low, high = reference.RANGE[dtype]
    zero = data.draw(st.integers(low, high))
    isa = data.draw(st.sampled_from(torchq.supported_isas()))
    steps = st.floats(low - zero, high - zero, width=32)
    x = torch.tensor(data.draw(st.lists(steps, min_size=1, max_size=40))) * scale
    with torchq.use_isa(isa):
        q = quantize(x, scale, zero, dtype)
        again = ops.dequantize(q, scale, i32(zero))
    step = scale.double().item()
    # Two roundings in units of |x| and of |x| + zero_point steps, besides half a step.
    ulp = 2.0**-23 * (x.double().abs() + (abs(zero) + 1) * step)
    assert ((again.double() - x.double()).abs() <= step / 2 + ulp).all()


@pytest.mark.parametrize("mode", [rounding_upward, flushing_denormals])
def test_floating_point_mode_of_the_caller_changes_nothing(isa: str, mode):
    x = torch.cat([tie_values(), torch.tensor([1e-42, -1e-42, 2e-39])])
    tiny = torch.tensor(1e-39)
    q = torch.arange(256).to(U8)
    expected = reference.quantize(x, 0.3, 7, U8), reference.dequantize(q, tiny, 9)
    factor = torch.tensor(1e-40)
    scaled = reference.reorder_output_scales(q, factor, F32)
    with mode():
        got = quantize(x, 0.3, 7, U8), ops.dequantize(q, tiny, i32(9))
        reordered = ops.reorder(q, factor, 6)
    for a, b in zip((*got, reordered), (*expected, scaled), strict=True):
        assert_same(a, b)


def test_any_number_of_threads_and_any_address(isa: str):
    x = reals((3, 5, 77, 131))
    scale, zero = scales(2, shape=x.shape), zero_points(0, U8)
    expected = reference.quantize(x, scale, zero, U8)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_same(quantize(x, scale, zero, U8), expected)
    small = values(U8, (3, 43))
    for by in (1, 2, 3):
        got = ops.dequantize(misaligned(small, by), misaligned(torch.tensor(0.1), by), i32(3))
        assert_same(got, reference.dequantize(small, 0.1, 3))
    assert_same(ops.dequantize(before_guard_page(small), torch.tensor(0.1), i32(3)), got)


def test_errors():
    x, q, one, zero = torch.zeros(2, 3), torch.zeros(2, 3, dtype=U8), torch.ones(()), i32(0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"torchq.quantize: scale must be finite"):
            quantize(x, bad, 0, U8)
    with pytest.raises(ValueError, match=r"zero_point must lie in \[0, 255\].*got 256 at index 0"):
        quantize(x, 1.0, 256, U8)
    assert quantize(x, 1.0, 1000, S32).eq(1000).all()  # any int32 is one of its zero points
    with pytest.raises(ValueError, match=r"must broadcast against src \[2, 3\], got \[2\]"):
        quantize(x, torch.ones(2), 0, U8)
    with pytest.raises(ValueError, match="must broadcast against src"):
        quantize(x, torch.ones(1, 2, 1), 0, U8)
    with pytest.raises(TypeError, match="quantize: src must be float32, got uint8"):
        quantize(q, 1.0, 0, U8)
    with pytest.raises(TypeError, match="quantize: scale must be float32, got float64"):
        ops.quantize(x, one.double(), zero, 0)
    with pytest.raises(TypeError, match="zero_point must be int32, got int64"):
        ops.quantize(x, one, zero.long(), 0)
    with pytest.raises(TypeError, match="dequantize: src must be uint8, int8 or int32"):
        ops.dequantize(x, one, zero)
    with pytest.raises(NotImplementedError, match="dst_dtype must be 0"):
        ops.quantize(x, one, zero, 7)
    with pytest.raises(ValueError, match="not a finite float32"):
        ops.requantize(q, torch.tensor(3e38), zero, torch.tensor(1e-10), zero, 0)


def test_gradients_are_refused():
    x = torch.zeros(2, 3, requires_grad=True)
    calls = [
        lambda: ops.quantize(x, torch.ones(()), i32(0), 0),
        lambda: ops.reorder(x, torch.ones(()), 0),
        lambda: ops.reorder(x, torch.empty(0), 6),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="no_grad"):
            call()
        with torch.no_grad():
            assert not call().requires_grad
