# SPDX-License-Identifier: Apache-2.0
"""The emulation of 16-bit pair saturation: the documented examples, brute force, the proof."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchq.functional.packing import pack_conv, pack_linear
from torchq.onednn.saturation import (
    emulate_conv,
    emulate_conv_transpose,
    emulate_linear,
    halve,
    prove,
)

U8, S8 = torch.uint8, torch.int8


def sat16(x: int) -> int:
    return max(-32768, min(32767, x))


def dot(a: list[int], w: list[int], saturating: bool) -> tuple[int, int]:
    """u8 times s8 by consecutive pairs; the sum and how many pairs saturated."""
    total, count = 0, 0
    for k in range(0, len(a), 2):
        pair = sum(x * y for x, y in zip(a[k : k + 2], w[k : k + 2], strict=True))
        kept = sat16(pair) if saturating else pair
        total, count = total + kept, count + (kept != pair)
    return total, count


def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


# The documentation's examples


def test_source4_u8_example_32767_instead_of_64770() -> None:
    src = torch.tensor([[255, 255, 0, 0]], dtype=U8)
    weight = torch.tensor([[127, 127, 0, 0]], dtype=S8)
    sums = emulate_linear(src, weight)
    assert sums.exact.item() == 64770 == 2 * 255 * 127
    assert sums.saturated.item() == 32767
    assert sums.saturating.tolist() == [1] and sums.pairs == 2 and sums.share == 0.5


def test_source4_s8_example_255_instead_of_32258() -> None:
    values = torch.tensor([[127, 127, 0, 0]], dtype=S8)
    sums = emulate_linear(values, values)
    assert sums.exact.item() == 32258 == 2 * 127 * 127
    assert sums.saturated.item() == 255 == 32767 - 128 * (127 + 127)


def test_source4_seven_bits_of_either_are_safe() -> None:
    extremes = torch.tensor(list(itertools.product((-128, -64, 63, 127), repeat=2)))
    for sources, dtype, low, high in (
        ((0, 127), U8, -128, 127),  # u7 with s8
        ((0, 255), U8, -64, 63),  # u8 with s7
        ((-128, 127), S8, -64, 63),  # s8 with s7
        ((-128, -1), S8, -128, 127),  # the first operand of s8: only its negative half
    ):
        src = torch.tensor(list(itertools.product(sources, repeat=2)), dtype=dtype)
        weight = extremes.clamp(low, high).to(S8)
        sums = emulate_linear(src, weight)
        assert torch.equal(sums.saturated, sums.exact) and not sums.saturating.any()
    # shrinking the first operand of s8 to 7 bits does not help
    src = torch.full((1, 2), 63, dtype=S8)
    assert emulate_linear(src, torch.full((1, 2), 127, dtype=S8)).saturating.any()


def test_source4_halved_weights_never_saturate() -> None:
    weight = torch.tensor([[-128, -128], [127, 127], [127, -128]], dtype=S8)
    assert halve(weight).tolist() == [[-64, -64], [64, 64], [64, -64]]  # half to even
    src = torch.tensor(list(itertools.product((-128, 0, 127), repeat=2)), dtype=S8)
    sums = emulate_conv(src[..., None], weight[..., None])
    assert not sums.saturating.any()
    doubled = 2 * (src.long() @ halve(weight).long().t())
    assert torch.equal(sums.saturated[..., 0], doubled)


def test_source4_halving_float_weights_rounds_once() -> None:
    weight, scale = torch.tensor([2.6, 1.4, -2.6]), torch.tensor(1.0)
    assert halve(weight, scale).tolist() == [1, 1, -1]  # rne(1.3), rne(0.7), rne(-1.3)
    assert halve(torch.round(weight).to(S8)).tolist() == [2, 0, -2]  # rne(1.5), rne(0.5)
    with pytest.raises(ValueError, match="scale must be given exactly for a float weight"):
        halve(weight)
    with pytest.raises(ValueError, match="scale must be given exactly for a float weight"):
        halve(weight.to(S8), scale)


# Brute force


@pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])
@pytest.mark.parametrize("k", [0, 1, 2, 7, 32])
@pytest.mark.parametrize("zero_point", [0, 5])
def test_linear_equals_brute_force(dtype: torch.dtype, k: int, zero_point: int) -> None:
    src, weight = random((9, k), dtype), random((6, k), S8)
    sums = emulate_linear(src.reshape(3, 3, k), weight, zero_point)
    shift = 128 if dtype == S8 else 0
    counts = [0] * 6
    for m, n in itertools.product(range(9), range(6)):
        a, w = [x + shift for x in src[m].tolist()], weight[n].tolist()
        left = (shift + zero_point) * sum(w)
        expected, count = dot(a, w, True)
        counts[n] += count
        assert sums.saturated[m // 3, m % 3, n] == expected - left
        assert sums.exact[m // 3, m % 3, n] == dot(a, w, False)[0] - left
    assert sums.saturating.tolist() == counts and sums.pairs == 9 * 6 * ((k + 1) // 2)
    if k == 32:
        assert sum(counts) > 20


GEOMETRIES = [
    # C, OC, groups, kernel, stride, padding, dilation
    (5, 4, 1, (3, 2), (1, 2), (1, 0), (1, 1)),
    (6, 4, 2, (2, 2), 2, 1, 2),
    (4, 4, 4, (3, 3), 1, 1, 1),
    (3, 2, 1, (3,), 1, 2, 1),
    (2, 2, 1, (2, 1, 2), 1, 0, 1),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype,zero_point", [(U8, 0), (U8, 77), (S8, 0), (S8, -9)])
def test_conv_equals_brute_force(geometry: Any, dtype: torch.dtype, zero_point: int) -> None:
    channels, outputs, groups, kernel, stride, padding, dilation = geometry
    dims = len(kernel)
    src = random((2, channels, *(6, 5, 4)[:dims]), dtype)
    weight = random((outputs, channels // groups, *kernel), S8)
    sums = emulate_conv(src, weight, stride, padding, dilation, groups, zero_point)

    def conv(x: Tensor, w: Tensor) -> Tensor:
        op = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}[dims]
        return op(x.double(), w.double(), None, stride, padding, dilation, groups).long()

    assert torch.equal(sums.exact, conv(src.double() - zero_point, weight))
    used = halve(weight) if dtype == S8 else weight
    shift = 128 if dtype == S8 else 0
    # one pair of input channels of one tap at a time: everything else is masked out
    total = torch.zeros_like(sums.exact)
    count = 0
    pads = [p for p in reversed([padding] * dims if isinstance(padding, int) else padding)]
    padded = nn.functional.pad(
        src.long() + shift, [p for p in pads for _ in range(2)], value=zero_point + shift
    )
    padding = 0
    for tap in itertools.product(*map(range, kernel)):
        for k in range(0, channels // groups, 2):
            one = torch.zeros_like(used)
            index = (slice(None), slice(k, k + 2), *tap)
            one[index] = used[index]
            pair = conv(padded, one)
            kept = pair.clamp(-32768, 32767)
            total, count = total + kept, count + int((pair != kept).sum())
    everything = used.long().sum(tuple(range(1, used.dim()))).reshape(-1, *[1] * dims)
    expected = total - (zero_point + shift) * everything
    assert torch.equal(sums.saturated, expected * (2 if dtype == S8 else 1))
    assert int(sums.saturating.sum()) == count
    padding = geometry[5]
    inside = conv(torch.ones_like(src), torch.ones_like(weight))
    assert sums.pairs == int(inside.sum()) // (channels // groups) * ((channels // groups + 1) // 2)
    if dtype == S8 or groups == channels:
        assert count == 0
    elif channels > 3:
        assert count > 0


TRANSPOSED = [
    # C, OC, groups, kernel, stride, padding, output padding, dilation
    (5, 4, 1, (3, 2), (2, 1), (1, 0), (1, 0), (1, 1)),
    (6, 4, 2, (2, 3), 2, 1, 1, 2),
    (4, 2, 1, (4,), 3, 2, 0, 1),
]


@pytest.mark.parametrize("geometry", TRANSPOSED, ids=str)
@pytest.mark.parametrize("dtype,zero_point", [(U8, 0), (U8, 200), (S8, -9)])
def test_transposed_equals_brute_force(geometry: Any, dtype: torch.dtype, zero_point: int) -> None:
    channels, outputs, groups, kernel, *window = geometry
    dims = len(kernel)
    src = random((2, channels, *(5, 4)[:dims]), dtype)
    weight = random((channels, outputs // groups, *kernel), S8)
    stride, padding, more, dilation = window
    sums = emulate_conv_transpose(src, weight, stride, padding, more, groups, dilation, zero_point)

    def conv(x: Tensor, w: Tensor) -> Tensor:
        op = {1: nn.functional.conv_transpose1d, 2: nn.functional.conv_transpose2d}[dims]
        return op(x.double(), w.double(), None, stride, padding, more, groups, dilation).long()

    assert torch.equal(sums.exact, conv(src.double() - zero_point, weight))
    used = halve(weight) if dtype == S8 else weight
    shift = 128 if dtype == S8 else 0
    per_group = channels // groups
    total, count = torch.zeros_like(sums.exact), 0
    for tap in itertools.product(*map(range, kernel)):
        for k in range(0, per_group, 2):
            one = torch.zeros_like(used)
            for g in range(groups):
                index = (
                    slice(g * per_group + k, min(k + 2, per_group) + g * per_group),
                    slice(None),
                    *tap,
                )
                one[index] = used[index]
            pair = conv(src.long() + shift, one)
            kept = pair.clamp(-32768, 32767)
            total, count = total + kept, count + int((pair != kept).sum())
    sources = torch.full_like(src, 1)
    expected = total - (zero_point + shift) * conv(sources, used)
    assert torch.equal(sums.saturated, expected * (2 if dtype == S8 else 1))
    assert int(sums.saturating.sum()) == count and (count > 0) == (dtype == U8)
    inside = int(conv(sources, torch.ones_like(weight)).sum()) // per_group
    assert sums.pairs == inside * ((per_group + 1) // 2)


# The proof


@pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])
def test_proof_is_exactly_the_range(dtype: torch.dtype) -> None:
    """Up to it no input saturates; one above, the worst input does."""
    weight = torch.cat([random((40, 6), S8), torch.randint(-80, 81, (40, 6), dtype=S8)])
    weight[0] = 0
    proof = prove(weight, dtype)
    limits = torch.iinfo(dtype)
    for n, largest in enumerate(proof.largest.tolist()):
        for value, saturates in ((largest, False), (largest + 1, True)):
            if value > limits.max:
                continue
            top = torch.full((6,), value)
            worst = torch.stack(
                [torch.where(sign * weight[n].int() > 0, top, limits.min) for sign in (1, -1)]
            )
            sums = emulate_linear(worst.to(dtype), weight[n : n + 1])
            assert bool(sums.saturating.any()) == saturates
    assert proof.safe[0] and proof.safe.any() and not proof.safe.all()
    assert torch.equal(proof.safe, proof.largest == limits.max)


def test_proof_agrees_with_the_bound_of_packing() -> None:
    for limit in (64, 65, 127):
        weight = torch.randint(-limit, limit + 1, (48, 32), dtype=S8)
        packed = pack_linear(weight)
        safe = prove(packed, U8).safe.reshape(3, 16).all(1)
        assert torch.equal(safe, packed.pair_bound <= 128)


def test_proof_of_convolutions_pairs_within_a_tap() -> None:
    weight = torch.zeros(2, 3, 2, 2, dtype=S8)
    weight[0, 2] = 127  # the last of an odd number, alone in its pair
    weight[1, 0, 0, 0] = weight[1, 1, 0, 0] = 127
    proof = prove(weight, U8)
    assert proof.safe.tolist() == [True, False] and proof.largest.tolist() == [255, 129]
    assert str(proof) == "1 of 2 channels are safe for all inputs, the others up to a source of 129"
    assert prove(pack_conv(weight), S8).largest.tolist() == [127, 1]
    assert prove(weight, S8, halved=True).safe.all()
    assert prove(torch.zeros(3, 0, dtype=S8), U8).safe.all()
    with pytest.raises(TypeError, match=r"weight must be torch.int8 and src_dtype"):
        prove(weight.float(), U8)


def test_errors() -> None:
    src, weight = random((2, 4), U8), random((3, 4), S8)
    with pytest.raises(TypeError, match=r"src must be torch.uint8 or torch.int8, got torch.float"):
        emulate_linear(src.float(), weight)
    with pytest.raises(TypeError, match=r"weight must be torch.int8, got torch.uint8"):
        emulate_linear(src, src)
    with pytest.raises(ValueError, match=r"src must be \(\*, K\) and weight \(N, K\)"):
        emulate_linear(src, weight[:, :3])
    with pytest.raises(ValueError, match=r"as many dims, got \[2, 4\]. Check groups"):
        emulate_conv(src, weight)
    with pytest.raises(ValueError, match="at least one image"):
        emulate_conv(random((0, 4, 5), U8), random((3, 4, 2), S8))
