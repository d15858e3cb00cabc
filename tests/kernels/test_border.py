# SPDX-License-Identifier: Apache-2.0
"""The taps that meet each pixel, by brute force: weights of one give sums of windows."""

import random

import pytest
import torch
from calls import S8, S32, U8
from torch import Tensor

import torchq.functional as TF
from torchq import Attr

ops = torch.ops.torchq
CASES = range(25)
FORMS = {
    "dense": (1, 3),  # groups, inputs of each
    "dense_16": (1, 16),
    "depthwise": (20, 1),
    "small_groups": (4, 4),
    "transposed": (2, 4),
}


class Axis:
    """One dimension of a window, small enough to count."""

    def __init__(self, rng: random.Random, transposed: bool = False) -> None:
        self.transposed = transposed
        self.kernel, self.stride = rng.choice([1, 2, 3, 3, 4, 7]), rng.choice([1, 1, 2, 3, 5])
        self.dilation = rng.choice([1, 1, 2, 3])
        extent = (self.kernel - 1) * self.dilation + 1
        self.padding, self.end = rng.randint(0, extent), rng.randint(0, extent)
        self.extra = rng.randint(0, max(self.stride, self.dilation) - 1) if transposed else 0
        least = 1
        while self.sized(least).dst < 1:
            least += 1
        self.sized(least + rng.choice([0, 0, 1, 4, 9]))

    def sized(self, src: int) -> "Axis":
        """The axis over `src` positions."""
        extent = (self.kernel - 1) * self.dilation + 1
        if self.transposed:
            dst = (src - 1) * self.stride + extent + self.extra - self.padding - self.end
        else:
            dst = (src + self.padding + self.end - extent) // self.stride + 1
        self.src, self.dst = src, dst
        return self

    def meets(self) -> Tensor:
        """Taps of each destination (rows) that meet each position (columns)."""
        count = torch.zeros(self.dst, self.src, dtype=torch.float64)
        for o in range(self.dst):
            for tap in range(self.kernel):
                at, step = o * self.stride + tap * self.dilation - self.padding, 1
                if self.transposed:
                    at, step = o + self.padding - tap * self.dilation, self.stride
                if at % step == 0 and 0 <= at // step < self.src:
                    count[o, at // step] += 1
        return count


def sums(axes: list[Axis], src: Tensor) -> Tensor:
    """Sums of windows: separable, as what meets along one dimension is."""
    h, w = (axis.meets() for axis in axes)
    return (h @ src.double() @ w.T).to(S32)


def windows(axes: list[Axis]) -> dict[str, tuple[int, ...]]:
    h, w = axes
    return {
        "stride": (h.stride, w.stride),
        "padding": (h.padding, w.padding),
        "padding_end": (h.end, w.end),
        "dilation": (h.dilation, w.dilation),
    }


def sources(rng: random.Random, axes: list[Axis], channels: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    low, high = (0, 256) if dtype == U8 else (-128, 128)
    size = (rng.randint(1, 2), channels, axes[0].src, axes[1].src)
    return torch.randint(low, high, size, generator=generator).to(dtype)


def zero_points(src: int, weights: int) -> Attr:
    attr = Attr().set_zero_points("src", 0, src)
    return attr if weights == 0 else attr.set_zero_points("weights", 0, weights)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_convolutions_sum_what_taps_meet(form: str, case: int, isa: str) -> None:
    """By weights of one; and by weights of zero with a zero point of -1, whose sums over windows
    are computed apart."""
    rng = random.Random(f"{form} {case}")
    transposed = form == "transposed"
    axes = [Axis(rng, transposed), Axis(rng, transposed)]
    groups, inputs = FORMS[form]
    channels = groups * inputs
    src = sources(rng, axes, channels, rng.choice([U8, S8]))
    zero = 7
    grouped = (src.int() - zero).reshape(len(src), groups, inputs, *src.shape[2:]).sum(2)
    expected = sums(axes, grouped).repeat_interleave(inputs, 1)
    kernel = (axes[0].kernel, axes[1].kernel)
    shape = (channels, inputs, *kernel)
    options = windows(axes)
    function = TF.conv2d
    if transposed:
        function = TF.conv_transpose2d
        options["output_padding"] = (axes[0].extra, axes[1].extra)
    for weight, weight_zero in ((1, 0), (0, -1)):
        packed = torch.full(shape, weight, dtype=S8)
        attr = zero_points(zero, weight_zero)
        dst = function(src, packed, groups=groups, attr=attr, dst_dtype=S32, **options)
        assert torch.equal(dst, expected), (weight, [vars(axis) for axis in axes])


@pytest.mark.parametrize("case", CASES)
def test_pools_see_what_taps_meet(case: int, isa: str) -> None:
    """A divisor of 1 makes an average a sum, which is below 256 here."""
    rng = random.Random(case)
    axes = [Axis(rng), Axis(rng)]
    for axis in axes:  # a pool's padding is at most half of its kernel
        extent = (axis.kernel - 1) * axis.dilation + 1
        axis.padding, axis.end = min(axis.padding, extent // 2), min(axis.end, extent // 2)
        axis.sized(max(axis.src, extent))
    src = sources(rng, axes, 5, U8) % 6
    h, w = (axis.meets() for axis in axes)
    met = torch.einsum("oi,pj->opij", h, w) > 0
    best = src[:, :, None, None].double().masked_fill(~met, -1).flatten(4).amax(4).to(U8)
    stride, begin, end, dilation = windows(axes).values()
    geometry = [axes[0].kernel, axes[1].kernel, *stride, *begin, *end, *dilation]
    assert torch.equal(ops.max_pool(src, geometry, False), best)
    total = ops.avg_pool(src, torch.zeros(1, dtype=S32), geometry, False, False, 1)
    assert torch.equal(total, sums(axes, src).to(U8))
