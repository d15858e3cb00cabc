# SPDX-License-Identifier: Apache-2.0
"""Packed weights: exact inverses, shapes as traced, weight sums and pair bounds by definition."""

from __future__ import annotations

import itertools
import math
import time

import cases
import pytest
import torch
from calls import S8, S32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.torchq

SPEEDY = settings(max_examples=60, deadline=None)
FORMS = [
    # name, weight, groups, dilation, packed
    ("dense", (20, 8, 3, 3), 1, (1, 1), (2, 9, 2, 16, 4)),
    ("dense_tail", (17, 7, 1, 1), 1, (1, 1), (2, 1, 2, 16, 4)),
    ("row_runs", (64, 3, 7, 7), 1, (1, 1), (4, 7, 6, 16, 4)),
    ("row_runs_1d", (5, 1, 10), 1, (1,), (1, 1, 3, 16, 4)),
    ("row_runs_column", (5, 1, 10, 1), 1, (1, 1), (1, 1, 3, 16, 4)),
    ("row_runs_columns", (16, 2, 3, 5, 1), 1, (2, 1, 3), (1, 3, 3, 16, 4)),
    ("no_row_runs_when_the_column_is_dilated", (16, 3, 3, 1), 1, (2, 1), (1, 3, 1, 16, 4)),
    ("row_runs_3d", (16, 2, 3, 2, 3), 1, (1, 1, 1), (1, 6, 2, 16, 4)),
    ("no_row_runs_when_dilated", (16, 3, 3, 3), 1, (1, 2), (1, 9, 1, 16, 4)),
    ("row_runs_dilated_rows", (16, 3, 3, 3), 1, (2, 1), (1, 3, 3, 16, 4)),
    ("grouped_wide", (96, 32, 3, 3), 3, (1, 1), (6, 9, 8, 16, 4)),
    ("grouped_merged", (128, 4, 3, 3), 16, (1, 1), (8, 9, 2, 16, 4)),
    ("grouped_merged_unevenly", (20, 2, 3, 2), 5, (1, 1), (5, 6, 1, 16, 4)),
    ("groups_of_4", (128, 4, 3, 3), 32, (1, 1), (8, 9, 1, 16, 4)),
    ("groups_of_4_tail", (20, 4, 3), 5, (2,), (2, 3, 1, 16, 4)),
    ("groups_of_4_too_few", (12, 4, 3, 3), 3, (1, 1), (1, 9, 3, 16, 4)),
    ("groups_of_8", (16, 8, 3, 3), 2, (1, 1), (1, 9, 2, 16, 4)),
    ("groups_of_8_tail", (40, 8, 1, 2), 5, (1, 1), (3, 2, 2, 16, 4)),
    ("groups_of_2", (36, 2, 3, 3), 18, (1, 1), (3, 9, 1, 16, 4)),
    ("groups_of_2_odd", (18, 2, 3, 3), 9, (1, 1), (3, 9, 2, 16, 4)),
    ("grouped_merged_tail", (15, 3, 3, 3), 3, (1, 1), (1, 9, 3, 16, 4)),
    ("depthwise_3x3", (33, 1, 3, 3), 33, (1, 1), (3, 3, 16, 4)),
    ("depthwise_5x5", (16, 1, 5, 5), 16, (2, 2), (1, 7, 16, 4)),
    ("depthwise_7x7", (16, 1, 7, 7), 16, (1, 1), (1, 14, 16, 4)),
    ("depthwise_1d", (16, 1, 15), 16, (1,), (1, 4, 16, 4)),
    ("depthwise_3d", (16, 1, 3, 3, 3), 16, (1, 1, 1), (1, 7, 16, 4)),
    ("depthwise_multiplier", (24, 1, 3, 3), 12, (1, 1), (2, 9, 2, 16, 4)),
    ("depthwise_multiplier_prime", (22, 1, 3, 3), 11, (1, 1), (11, 9, 1, 16, 4)),
    ("row_runs_of_one", (1, 1, 3, 3), 1, (1, 1), (1, 3, 1, 16, 4)),
]
DENSE = ("grouped_wide", "grouped_merged", "grouped_merged_unevenly", "groups_of_4_too_few")
DENSE += ("groups_of_2_odd", "grouped_merged_tail", "depthwise_multiplier")
DENSE += ("depthwise_multiplier_prime",)


def pair_bounds(packed: Tensor) -> Tensor:
    """By definition: the largest |s0 * w0 + s1 * w1| over u8 sources is 255 * bound."""
    if not packed.numel():
        return torch.zeros(packed.shape[0], dtype=S32)
    pairs = packed.int().reshape(packed.shape[0], -1, 2)
    ends = [(a * pairs[..., 0] + b * pairs[..., 1]).abs() for a in (0, 255) for b in (0, 255)]
    return (torch.stack(ends).amax((0, 2)) // 255).to(S32)


def check_traced(op: str, *args: object) -> None:
    """The fake kernel promises the same shapes, strides and dtypes."""
    real = getattr(ops, op)(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        traced = getattr(ops, op)(*fakes)
    pairs = zip(real, traced, strict=True) if isinstance(real, tuple) else [(real, traced)]
    for r, t in pairs:
        assert (r.shape, r.dtype, r.stride()) == (t.shape, t.dtype, t.stride())


def repeated(packed: Tensor, weight: Tensor, groups: int) -> Tensor:
    """The weights that small groups have in two panels: the last panel has the last 16 channels."""
    channels, width = weight.shape[:2]
    panels = -(-channels // 16)
    small = groups > 1 and channels == groups * width and packed.shape[0] == panels
    if not small or packed.shape[2:] not in ((1, 16, 4), (2, 16, 4)) or width not in (2, 4, 8):
        return weight[:0]
    return weight[channels - 16 : 16 * (panels - 1)]


def check_conv(weight: Tensor, groups: int, dilation: tuple[int, ...]) -> Tensor:
    packed, compensation, bound = ops.pack_conv(weight, groups, dilation)
    unpacked = ops.unpack_conv(packed, weight.shape, groups, dilation)
    assert torch.equal(unpacked, weight)
    # one row per tap, or per kernel row, or one in all
    sums = weight.int().sum(1).flatten(1)
    assert sums.shape[1] % compensation.shape[0] == 0
    rows = sums.unflatten(1, (compensation.shape[0], -1)).sum(-1).t()
    assert torch.equal(compensation, rows.to(S32))
    assert torch.equal(bound, pair_bounds(packed))
    twice = repeated(packed, weight, groups).int().sum()
    assert packed.int().sum() == weight.int().sum() + twice, "padding must be 0"
    check_traced("pack_conv", weight, groups, list(dilation))
    check_traced("unpack_conv", packed, list(weight.shape), groups, list(dilation))
    return packed


@pytest.mark.parametrize("name,shape,groups,dilation,expected", FORMS, ids=[f[0] for f in FORMS])
def test_forms(name: str, shape, groups: int, dilation, expected):
    packed = check_conv(cases.random_s8(shape), groups, dilation)
    assert packed.shape == expected


def test_linear_layout():
    """[panel][0][k / 4][channel][k % 4], zero-padded; channel 16 starts the second panel."""
    weight = torch.arange(-60, 60).to(S8).reshape(20, 6)
    packed, compensation, _ = ops.pack_linear(weight)
    assert packed.shape == (2, 1, 2, 16, 4)
    assert torch.equal(packed[0, 0, 0], weight[:16, :4])
    assert torch.equal(packed[0, 0, 1, :, :2], weight[:16, 4:])
    assert not packed[0, 0, 1, :, 2:].any()
    assert torch.equal(packed[1, 0, 0, :4], weight[16:, :4])
    assert not packed[1, :, :, 4:].any()
    assert torch.equal(compensation, weight.int().sum(1, keepdim=True).t().to(S32))


@pytest.mark.parametrize("width,groups", [(4, 5), (8, 3), (2, 10)])
def test_small_groups_layout(width: int, groups: int):
    """Lane 4 i + j of vector q: input 4 j .. 4 j + 3 of the panel, output 4 q + i of its group."""
    channels = width * groups
    weight = cases.random_s8((channels, width, 2, 3))
    packed = check_conv(weight, groups, (1, 1))
    block = max(width, 4)
    dense = torch.block_diag(*[weight[g * width : (g + 1) * width, :, 1, 2] for g in range(groups)])
    assert packed.shape == (2, 6, block // 4, 16, 4)
    for panel, first in enumerate((0, channels - 16)):
        for q, i, j in itertools.product(range(block // 4), range(4), range(4)):
            source = first + 4 * j
            output = source - (source - first) % block + 4 * q + i
            expected = dense[output, source : source + 4]
            assert torch.equal(packed[panel, 5, q, 4 * i + j], expected), (panel, q, i, j)


def check_linear(weight: Tensor) -> None:
    packed, compensation, bound = ops.pack_linear(weight)
    assert torch.equal(ops.unpack_linear(packed, *weight.shape), weight)
    assert torch.equal(compensation, weight.int().sum(1)[None].to(S32))
    assert torch.equal(bound, pair_bounds(packed))
    assert packed.int().sum() == weight.int().sum()
    check_traced("pack_linear", weight)
    check_traced("unpack_linear", packed, *weight.shape)


@pytest.mark.parametrize("shape", [(0, 8), (17, 0), (0, 0), (1, 1), (16, 4), (33, 70)], ids=str)
def test_linear_shapes(shape: tuple[int, int]):
    check_linear(cases.random_s8(shape))
    wide = cases.random_s8((shape[0], 2 * shape[1] + 1))
    check_linear(wide[:, ::2][:, : shape[1]])
    check_linear(cases.random_s8(shape[::-1]).t())


# The layouts by definition (Note [Conv packings]), weight by weight


def depthwise_slots(kernel: tuple[int, ...]) -> dict[int, int]:
    """Tap -> byte of its channel: up to four kernel rows side by side, a single one in fours."""
    *outer, width = kernel
    rows, slots, first = math.prod(outer), {}, 0
    for row in range(0, rows, 4):
        block = min(rows - row, 4)
        for r, x in itertools.product(range(block), range(width)):
            slots[(row + r) * width + x] = first + (x if block == 1 else 4 * x + r)
        first += -(-width // 4) * 4 if block == 1 else 4 * width
    return slots


def lanes_by_definition(form: str, weight: Tensor, groups: int) -> dict[tuple[int, ...], int]:
    """(panel, run, quad, lane, byte) -> weight, of those that are not padding."""
    outputs, inputs, *kernel = weight.shape
    size, found = outputs // groups, {}
    most = range(1, min(groups, 16) + 1)
    merged = max((m for m in most if groups % m == 0 and m * size <= 16), default=1)
    panels = -(-merged * size // 16)
    taps = weight.reshape(outputs, inputs, -1)
    slots = depthwise_slots(tuple(kernel))
    width = next((k for k in reversed(kernel) if k > 1), 1)
    for n, k, t in itertools.product(*map(range, taps.shape)):
        value = int(taps[n, k, t])
        if form == "depthwise":
            found[n // 16, 0, slots[t] // 4, n % 16, slots[t] % 4] = value
        elif form == "row_runs":
            at = t % width * inputs + k
            found[n // 16, t // width, at // 4, n % 16, at % 4] = value
        elif form == "groups":
            block = max(inputs, 4)
            for panel in {n // 16, -(-outputs // 16) - 1}:
                first = min(16 * panel, outputs - 16)
                at, row = n // inputs * inputs + k - first, n % block
                if n >= first:
                    lane = row % 4 * 4 + at // 4
                    found[panel, t, row // 4, lane, at % 4] = value
        else:
            group, row = divmod(n, merged * size)
            at = row // size * inputs + k
            found[group * panels + row // 16, t, at // 4, row % 16, at % 4] = value
    return found


def check_layout(form: str, packed: Tensor, weight: Tensor, groups: int) -> None:
    expected = torch.zeros_like(packed)
    lanes = expected if packed.dim() == 5 else expected.unsqueeze(1)
    for index, value in lanes_by_definition(form, weight, groups).items():
        lanes[index] = value
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("name,shape,groups,dilation,_", FORMS, ids=[f[0] for f in FORMS])
def test_every_byte_of_a_convolution(name: str, shape, groups: int, dilation, _):
    weight = cases.random_s8(shape)
    forms = ("depthwise", "row_runs", "groups", "dense")
    dense = name.startswith("no_") or name in DENSE
    form = "dense" if dense else next(f for f in forms if name.startswith(f))
    check_layout(form, ops.pack_conv(weight, groups, dilation)[0], weight, groups)


@pytest.mark.parametrize("shape", [(33, 70), (1, 65), (129, 3), (16, 64), (47, 1)], ids=str)
def test_every_byte_of_a_linear_layer(shape: tuple[int, int]):
    weight = cases.random_s8(shape)
    check_layout("dense", ops.pack_linear(weight)[0], weight[..., None], 1)


@pytest.mark.parametrize(
    "shape,groups,stride,dilation",
    [
        ((7, 19, 4, 5), 1, (2, 3), (1, 1)),
        ((6, 3, 3), 3, (2,), (3,)),
        ((32, 1, 3, 3), 32, (2, 2), (1, 1)),
        ((5, 18, 2, 1, 3), 1, (1, 2, 2), (1, 1, 2)),
        ((33, 7, 2, 2), 3, (2, 2), (1, 1)),
    ],
    ids=str,
)
def test_every_byte_of_a_transposed_convolution(shape, groups: int, stride, dilation):
    """The taps of each phase of the stride together, in descending order."""
    weight = cases.random_s8(shape)
    packed, compensation, bound = ops.pack_conv_transpose(weight, groups, stride, dilation)
    orders = [
        sorted(reversed(range(k)), key=lambda tap, s=s, d=d: tap * d % s)
        for k, s, d in zip(shape[2:], stride, dilation, strict=True)
    ]
    outputs_first = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    for dim, order in enumerate(orders):
        outputs_first = outputs_first.index_select(dim + 2, torch.tensor(order))
    check_layout("dense", packed, outputs_first, groups)
    assert torch.equal(compensation, outputs_first.int().sum(1).flatten(1).t().to(S32))
    assert torch.equal(bound, pair_bounds(packed))


@pytest.mark.parametrize("shape", [(2048, 2048), (512, 512, 3, 3)], ids=str)
def test_packing_takes_no_longer_than_50_reversals(shape: tuple[int, ...]):
    """Measured on Zen 4: 6 and 33 times as long as ``flip``; one by one it took 75 and more."""
    weight = cases.random_s8(shape)
    flat = weight.flatten(1)

    def seconds(call) -> float:
        def once() -> float:
            start = time.thread_time()
            call()
            return time.thread_time() - start

        return min(once() for _ in range(5))

    pack = ops.pack_linear if len(shape) == 2 else lambda w: ops.pack_conv(w, 1, [1, 1])
    torch.set_num_threads(1)
    packing, reversal = seconds(lambda: pack(weight)), seconds(lambda: flat.flip(1))
    assert packing < 50 * reversal, (packing, reversal)


weights = st.sampled_from(([-128, 127], [64], [-64, 63], list(range(-128, 128))))


def draw_weight(data: st.DataObject, shape: tuple[int, ...]) -> Tensor:
    values = torch.tensor(data.draw(weights), dtype=S8)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    return values[torch.randint(len(values), shape, generator=generator)]


@SPEEDY
@given(st.data())
def test_any_linear(data: st.DataObject):
    check_linear(draw_weight(data, tuple(data.draw(st.integers(0, 70)) for _ in range(2))))


@SPEEDY
@given(st.data())
def test_any_conv(data: st.DataObject):
    dims = data.draw(st.integers(1, 3))
    sizes = st.integers(1, 7 - dims)
    groups = data.draw(st.sampled_from((1, 1, 2, 3, 4, 6, 16, 17, 33)))
    inputs, outputs = (data.draw(st.integers(1, 40 if groups == 1 else 5)) for _ in range(2))
    kernel = tuple(data.draw(sizes) for _ in range(dims))
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(dims))
    check_conv(draw_weight(data, (groups * outputs, inputs, *kernel)), groups, dilation)


@SPEEDY
@given(st.data())
def test_any_depthwise(data: st.DataObject):
    dims = data.draw(st.integers(1, 3))
    channels = data.draw(st.integers(2, 70))
    kernel = tuple(data.draw(st.integers(1, 9 - 2 * dims)) for _ in range(dims))
    check_conv(draw_weight(data, (channels, 1, *kernel)), channels, (1,) * dims)


@pytest.mark.parametrize("shape", cases.CONV, ids=str)
def test_shapes(shape: cases.ConvShape):
    packed = check_conv(cases.random_s8(shape.weight), shape.groups, shape.dilation)
    assert math.prod(packed.shape) < 40 * max(1, math.prod(shape.weight)) + 64 * packed.shape[0]


def test_weight_in_any_layout():
    weight = cases.random_s8((20, 8, 3, 3))
    expected = ops.pack_conv(weight, 1, [1, 1])
    for same in (weight.to(memory_format=torch.channels_last), weight.mT.contiguous().mT):
        for got, want in zip(ops.pack_conv(same, 1, [1, 1]), expected, strict=True):
            assert torch.equal(got, want)


# Errors


def test_reduction_at_its_bound():
    limit = cases.MAX_TAPS_K
    ops.pack_linear(torch.zeros(1, limit, dtype=S8))
    ops.pack_conv(torch.zeros(1, limit // 21, 3, 7, dtype=S8), 1, [1, 1])
    ops.pack_conv(torch.zeros(2, 1, limit, dtype=S8), 2, [1])
    for call in (
        lambda: ops.pack_linear(torch.zeros(1, limit + 1, dtype=S8)),
        lambda: ops.pack_conv(torch.zeros(1, limit // 21 + 1, 3, 7, dtype=S8), 1, [1, 1]),
        lambda: ops.pack_conv(torch.zeros(2, 1, limit + 1, dtype=S8), 2, [1]),
    ):
        with pytest.raises(ValueError, match=r"torchq\.pack_\w+: weight.*65793.*Split the layer"):
            call()


W = torch.zeros(8, 4, 3, 3, dtype=S8)
ERRORS = [
    (lambda: ops.pack_linear(W.float()[..., 0, 0]), TypeError, "weight must be int8.*Quantize"),
    (lambda: ops.pack_linear(W), ValueError, r"weight must be \(out_features, in_features\), got"),
    (lambda: ops.pack_linear(W[:, 0, 0, 0]), ValueError, r"weight must be .*got \[8\]"),
    (lambda: ops.pack_conv(W.int(), 1, [1, 1]), TypeError, "weight must be int8, got int32"),
    (lambda: ops.pack_conv(W[..., 0, 0], 1, []), ValueError, r"weight must be \(OC, IC/G, k"),
    (lambda: ops.pack_conv(W, 3, [1, 1]), ValueError, "groups must divide the 8.*got groups=3"),
    (lambda: ops.pack_conv(W, 0, [1, 1]), ValueError, "groups must .*got groups=0"),
    (lambda: ops.pack_conv(W, -2, [1, 1]), ValueError, "groups must .*got groups=-2"),
    (lambda: ops.pack_conv(W, 1, [1]), ValueError, r"dilation must have 2.*got \[1\]"),
    (lambda: ops.pack_conv(W, 1, [1, 0]), ValueError, r"dilation must .*got \[1, 0\]"),
    (lambda: ops.pack_conv(W[..., :0], 1, [1, 1]), ValueError, "kernel.* at least 1"),
    (lambda: ops.unpack_linear(W, 8, 4), ValueError, r"packed must be \[1, 1, 1, 16, 4\].*got"),
    (lambda: ops.unpack_linear(W, -1, 4), ValueError, "must not be negative, got -1 and 4"),
    (lambda: ops.unpack_linear(W.int(), 8, 4), TypeError, "packed must be"),
    (lambda: ops.unpack_conv(W, [8, 4, 3, 3], 1, [1, 1]), ValueError, "packed must be.*got"),
    (lambda: ops.unpack_conv(W, [8, 4], 1, []), ValueError, "weight_shape must be.*got"),
    (lambda: ops.unpack_conv(W, [8, 4, 0, 3], 1, [1, 1]), ValueError, "kernel.* at least 1"),
    (lambda: ops.unpack_conv(W, [8, 4, 3, 3], 5, [1, 1]), ValueError, "groups must .*groups=5"),
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors(case: int):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=rf"torchq\.\w+: .*{message}"):
        call()
