# SPDX-License-Identifier: Apache-2.0
"""Softmax, normalizations, reductions and resampling against the oracle, on every tier."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import reference_primitives as reference
import torch
import torch.nn.functional as F
from calls import F32, S8, S32, U8, assert_same
from cases import random_q
from test_eltwise import DST, PARAMS, attr_of, refuse
from torch import Tensor

import torchq
import torchq.functional as TF

LAST = torch.channels_last
TYPES = list(itertools.product([U8, S8], [U8, S8, S32, F32]))


@pytest.mark.parametrize("logarithmic", [False, True], ids=["softmax", "log"])
@pytest.mark.parametrize("shape", [(5, 10), (3, 7, 1100), (4, 1), (2, 0), (70, 3, 4)], ids=str)
def test_softmax(isa: str, logarithmic: bool, shape: tuple[int, ...]):
    function = TF.log_softmax if logarithmic else TF.softmax
    for (src_dtype, dst_dtype), dim in itertools.product(TYPES, (-1, 0)):
        src, params = random_q(shape, src_dtype, len(shape)), PARAMS[src_dtype]
        to = DST[dst_dtype] if logarithmic or dst_dtype == F32 else (1 / 256, 3)
        got = function(src, dim, attr_of(src=params, dst=to), dst_dtype)
        if not src.numel():
            assert got.shape == shape
            continue
        exact = reference.softmax(src, dim, params, logarithmic)
        # 32 sums in a block, n / 512 of them, five of lanes; z, exp, the inverse, the product
        below = reference.centered(src, params).double()
        below = params[0] * (below.amax(dim, keepdim=True) - below)
        steps = 2**-24 * (42 + src.shape[dim] / 512 + below)
        error = (steps + 2**-23 * exact.abs()) if logarithmic else steps * exact + 2**-126
        if dst_dtype != F32:
            error = error + 2**-22 * (exact.abs() + to[0] * abs(to[1]))
        assert got.dtype == dst_dtype
        reference.near(got, exact, to, error)


@pytest.mark.parametrize("logarithmic", [False, True], ids=["softmax", "log"])
@pytest.mark.parametrize("shape", [(5, 10), (3, 7, 1100), (4, 1), (2, 0), (70, 3, 4)], ids=str)
def test_softmax_of_floats(isa: str, logarithmic: bool, shape: tuple[int, ...]):
    function = TF.log_softmax if logarithmic else TF.softmax
    src = 10 * torch.randn(shape)
    if src.numel():
        src[0, :-1] = -math.inf  # as masks do
        src[1] += 1e4
    for dtype, dim in itertools.product((U8, S8, S32, F32), (-1, 0)):
        to = DST[dtype] if logarithmic or dtype == F32 else (1 / 256, 3)
        got = function(src, dim, attr_of(dst=to), dtype)
        if not src.numel():
            assert got.shape == shape
            continue
        with torchq.use_isa("reference"):
            assert_same(got, function(src, dim, attr_of(dst=to), dtype), dtype)
        exact = reference.softmax(src, dim, (1.0, 0), logarithmic)
        below = src.double().amax(dim, keepdim=True) - src
        steps = 2**-24 * (42 + src.shape[dim] / 512 + below.nan_to_num(posinf=1e3).clamp(max=1e3))
        error = (steps + 2**-23 * exact.abs()) if logarithmic else steps * exact + 2**-126
        if dtype != F32:
            error = error + 2**-22 * (exact.abs() + to[0] * abs(to[1]))
        reference.near(got, exact, to, error.nan_to_num(posinf=1e30))


def test_softmax_dequantizes_its_source():
    """oneDNN's softmax of the integers, times the scale, would be one-hot here."""
    src = torch.tensor([[10, 11, 12]], dtype=U8)
    got = TF.softmax(src, 1, attr_of(src=(0.01, 5)))
    torch.testing.assert_close(got, torch.tensor([[0.05, 0.06, 0.07]]).softmax(1))


def affine(n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n) + 0.5, torch.randn(n)


@pytest.mark.parametrize("width", [1, 7, 700])
def test_layer_norm(isa: str, width: int):
    weight, bias = affine(width)
    for src_dtype, dst_dtype in TYPES:
        src = random_q((3, 5, width), src_dtype)
        src[0, 0] = 7  # no variance: eps decides
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        got = TF.layer_norm(src, [width], weight, bias, 1e-3, attr, dst_dtype)
        expected = reference.normalize(src, weight, bias, 1e-3, params, dst_dtype)
        assert_same(got, expected, (src_dtype, dst_dtype))
    ones, zeros = torch.ones(width), torch.zeros(width)
    for one, both in (((weight, None), (weight, zeros)), ((None, bias), (ones, bias))):
        got = TF.layer_norm(src, [width], *one, 1e-3, attr, dst_dtype)
        assert_same(got, reference.normalize(src, *both, 1e-3, params, dst_dtype))
    real = params[0][0] * (src.float() - params[0][1])
    got = TF.layer_norm(src, [5, width], attr=attr_of(src=params[0]))
    torch.testing.assert_close(got, F.layer_norm(real, [5, width]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 7, 700])
def test_rms_norm(isa: str, width: int):
    weight = affine(width)[0] - 1
    for src_dtype, dst_dtype in TYPES:
        src = random_q((3, 5, width), src_dtype)
        src[0, 0] = 7
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        got = TF.rms_norm(src, [width], weight, 1e-3, attr, dst_dtype)
        assert_same(got, reference.rms_norm(src, weight, 1e-3, params, dst_dtype), (src_dtype,))
    real = params[0][0] * (src.float() - params[0][1])
    got = TF.rms_norm(src, [5, width], attr=attr_of(src=params[0]))
    torch.testing.assert_close(got, F.rms_norm(real, [5, width]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 7, 16, 700, 1030])
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
def test_norms_of_floats(isa: str, width: int, centered: bool):
    weight, bias = affine(width)
    src = 3 * torch.randn(3, 5, width) + 1
    src[0, 0] = 7  # no variance: eps decides
    plain, zeros = torch.ones(width), torch.zeros(width)

    def norm(src: Tensor, *given: Tensor | None, **keywords: object) -> Tensor:
        if centered:
            return TF.layer_norm(src, [width], *given, eps=1e-3, **keywords)
        return TF.rms_norm(src, [width], *given[:1], eps=1e-3, **keywords)

    shift = bias if centered else zeros
    for dtype in (U8, S8, S32, F32):
        got = norm(src, weight, bias, attr=attr_of(dst=DST[dtype]), dst_dtype=dtype)
        arguments = (src, centered, weight, shift, 1e-3, DST[dtype], dtype)
        assert_same(got, reference.normalize_floats(*arguments), dtype)
    expected = reference.normalize_floats(src, centered, plain, zeros, 1e-3, DST[F32], F32)
    got = norm(src.mT.contiguous().mT)
    assert_same(got, expected)
    torchs = (F.layer_norm if centered else F.rms_norm)(src.double(), [width], eps=1e-3)
    torch.testing.assert_close(got.double(), torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_layer_norm_of_floats_far_from_zero(isa: str, offset: float):
    """The variance is that of deviations, not a difference of large squares."""
    src = torch.randn(4, 3000) + offset
    exact = F.layer_norm(src.double(), [3000])
    torch.testing.assert_close(TF.layer_norm(src, [3000]).double(), exact, rtol=1e-4, atol=1e-3)


def test_layer_norm_of_long_rows(isa: str):
    """Sums and sums of squares beyond int32, and a tail."""
    n = 600_011
    for dtype, value in ((U8, 255), (S8, -128)):
        src = torch.full((2, n), value, dtype=dtype)
        src[0, ::1000] = 0
        got = TF.layer_norm(src, [n], eps=1e-3)
        plain = (torch.ones(n), torch.zeros(n), 1e-3, [(1.0, 0), (1.0, 0)], F32)
        assert_same(got, reference.normalize(src, *plain))


@pytest.mark.parametrize("dtype", [U8, S8])
def test_what_is_no_integer_saturates(isa: str, dtype: torch.dtype):
    """NaN becomes the zero point, beside values beyond int32 and ordinary ones."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 2.0**31, -(2.0**31), 3e9])
    for at in (0, 63, 130, 191):
        bias = torch.linspace(-3, 3, 200)
        bias[at : at + 8] = odd
        params = [PARAMS[U8], DST[dtype]]
        src, weight = random_q((3, 200), U8, at), torch.ones(200)
        got = TF.layer_norm(
            src, [200], weight, bias, 1e-3, attr_of(src=params[0], dst=params[1]), dtype
        )
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        zero = params[1][1]
        limits = torch.tensor([zero, high, low, high, low, high, low, high], dtype=dtype)
        assert_same(got[:, at : at + 8], limits.expand(3, 8))
        safe = bias.clone()
        safe[at : at + 8] = 0
        expected = reference.normalize(src, weight, safe, 1e-3, params, dtype)
        rest = torch.ones(200, dtype=torch.bool)
        rest[at : at + 8] = False
        assert_same(got[:, rest], expected[:, rest])


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(isa: str, groups: int):
    weight, bias = affine(6)
    for (src_dtype, dst_dtype), layout in zip(
        TYPES, itertools.cycle([LAST, torch.contiguous_format])
    ):
        src = random_q((2, 6, 5, 9), src_dtype).contiguous(memory_format=layout)
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        got = TF.group_norm(src, groups, weight, bias, 1e-5, attr, dst_dtype)
        wide = [v.reshape(1, groups, -1, 1).expand(2, -1, -1, 45).reshape(2, groups, -1)
                for v in (weight, bias)]  # fmt: skip
        rows = src.reshape(2, groups, -1)
        expected = reference.normalize(rows, *wide, 1e-5, params, dst_dtype)
        assert_same(got, expected.reshape(src.shape), (src_dtype, dst_dtype))
        assert got.is_contiguous(memory_format=LAST)
    real = params[0][0] * (src.float() - params[0][1])
    got = TF.group_norm(src, groups, attr=attr_of(src=params[0]))
    torch.testing.assert_close(got, F.group_norm(real, groups), rtol=1e-4, atol=1e-4)


def channels_last(src: Tensor) -> Tensor:
    return src.movedim(1, -1).contiguous().movedim(-1, 1)


FLOATS = {"rows": (3, 6), "blocks": (2, 36, 150), "image": (2, 6, 5, 9), "volume": (1, 12, 3, 4, 7)}


@pytest.mark.parametrize("layout", ["channels last", "contiguous"])
@pytest.mark.parametrize("groups", ["one", "some", "all"])
@pytest.mark.parametrize("name", FLOATS)
def test_group_norm_of_floats(isa: str, name: str, groups: str, layout: str):
    """Channels and positions of very different sizes, and a channel without variance."""
    shape = FLOATS[name]
    channels = shape[1]
    count = {"one": 1, "some": 3, "all": channels}[groups]
    weight, bias = affine(channels)
    sizes = 10 ** (4 * torch.rand(1, channels, *[1] * (len(shape) - 2)) - 2)
    src = sizes * (torch.randn(shape) + torch.randn_like(sizes))
    src[:, 1] = 7
    src[..., -1] *= 100
    given = channels_last(src) if layout == "channels last" else src
    for dtype in (U8, S8, S32, F32):
        attr = attr_of(dst=DST[dtype])
        got = TF.group_norm(given, count, weight, bias, 1e-3, attr, dtype)
        wanted = reference.group_norm_floats(src, count, weight, bias, 1e-3, DST[dtype], dtype)
        assert_same(got, wanted, dtype)
        assert got.stride() == channels_last(wanted).stride()
    plain = (torch.ones(channels), torch.zeros(channels))
    for one, both in (((weight, None), (weight, plain[1])), ((None, bias), (plain[0], bias))):
        got = TF.group_norm(given, count, *one, 1e-3)
        assert_same(got, reference.group_norm_floats(src, count, *both, 1e-3, DST[F32], F32))
    torchs = F.group_norm(src.double(), count, eps=1e-3)
    got = TF.group_norm(given, count, eps=1e-3).double()
    torch.testing.assert_close(got, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_group_norm_of_floats_far_from_zero(isa: str, offset: float):
    """Also where the first position, from which others deviate, is far from them."""
    src = torch.randn(2, 4, 3000) + offset
    src[:, :, ::64] += 100
    exact = F.group_norm(src.double(), 2)
    torch.testing.assert_close(TF.group_norm(src, 2).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [U8, S8, F32], ids=str)
@pytest.mark.parametrize("shape", [(2, 6, 70), (2, 6, 5, 9)], ids=str)
def test_group_norm_reads_channels_last_in_place(dtype: torch.dtype, shape: tuple[int, ...]):
    src = torch.randn(shape) if dtype == F32 else random_q(shape, dtype)

    def copies(src: Tensor) -> bool:
        with torch.profiler.profile() as profile:
            TF.group_norm(src, 3, dst_dtype=U8)
        return any(event.key == "aten::copy_" for event in profile.key_averages())

    assert copies(src)
    assert not copies(channels_last(src))


@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 5, 7), (2, 600, 3)], ids=str)
def test_batch_norm(isa: str, shape: tuple[int, ...]):
    c = shape[1]
    (weight, bias), (variance, mean) = affine(c), affine(c)
    for src_dtype, dst_dtype in TYPES:
        src = random_q(shape, src_dtype)
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        attr.post_ops.append_eltwise("relu")
        got = TF.batch_norm(src, mean, variance, weight, -bias, 1e-5, attr, dst_dtype)
        expected = reference.batch_norm(
            src.movedim(1, -1), mean, variance, weight, -bias, 1e-5, [params[0], (1.0, 0)], F32
        ).relu()
        expected = reference.to_dst(expected.movedim(-1, 1), params[1], dst_dtype)
        assert_same(got + 0, expected + 0, (src_dtype, dst_dtype))


@pytest.mark.parametrize("alg", ["sum", "mean", "max", "min", "mul"])
@pytest.mark.parametrize("dims", [[-1], [0, 2], [1, 2, 3], [0, 1, 2, 3]], ids=str)
def test_reduction(isa: str, alg: str, dims: list[int]):
    for src_dtype, dst_dtype in itertools.product(DST, DST):
        src = random_q((2, 3, 4, 35), src_dtype).transpose(0, 3).contiguous().transpose(0, 3)
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        got = TF.reduction(src, alg, dims, True, attr, dst_dtype)
        expected = reference.reduction(src, alg, dims, params, dst_dtype)
        assert_same(got + 0, expected + 0, (src_dtype, dst_dtype))
        flat = TF.reduction(src, alg, dims, False, attr, dst_dtype)
        assert_same(flat, got.reshape(flat.shape))
    assert flat.dim() == 4 - len(dims)


def test_reduction_to_int32_is_exact(isa: str):
    """Above 2^24, where float32 has no odd integers."""
    src = torch.full((70_001, 3), 255, dtype=U8)
    got = TF.reduction(src, "sum", 0, dst_dtype=S32)
    assert got.tolist() == [255 * 70_001] * 3
    assert float(torch.tensor(255 * 70_001, dtype=F32)) != 255 * 70_001
    src = random_q((1000, 3), S32) | 1
    for alg in ("sum", "max", "min"):
        expected = reference.reduction(src, alg, [0], [(1.0, 0)] * 2, S32)
        assert_same(TF.reduction(src, alg, 0, True, dst_dtype=S32), expected, alg)
        assert not torch.equal(TF.reduction(src, alg, 0, True).double(), expected.double())
    src.fill_(2**30)
    assert TF.reduction(src, "sum", 0, dst_dtype=S32).tolist() == [2**31 - 1] * 3


def test_reduction_of_floats_is_in_double(isa: str):
    src = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])
    for x in (src, src.repeat(40), src[:, None].expand(4, 70)):
        assert (TF.reduction(x, "sum", 0) == 2 * x.shape[0] // 4).all()
    src[2] = torch.nan
    for alg in ("sum", "mean", "max", "min", "mul"):
        assert TF.reduction(src, alg, 0).isnan(), alg
        assert TF.reduction(src, alg, 0, dst_dtype=U8) == 0, alg


NORMS = ["norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum"]


@pytest.mark.parametrize("alg", NORMS)
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 2.5])
@pytest.mark.parametrize("dims", [[-1], [0, 2], [0, 1, 2, 3]], ids=str)
def test_norms(isa: str, alg: str, p: float, dims: list[int]):
    """Within a step of float32, or of dst, of the norm in longer arithmetic than double."""
    for src_dtype, dst_dtype, eps in itertools.product(DST, DST, (0.0, 5.0)):
        src = random_q((2, 3, 4, 35), src_dtype).transpose(0, 3).contiguous().transpose(0, 3)
        src[..., 0] = 0
        params, to = PARAMS[src_dtype], (1.0, 0) if dst_dtype == F32 else (3.5, 7)
        got = TF.reduction(
            src, alg, dims, True, attr_of(src=params, dst=to), dst_dtype, p=p, eps=eps
        )
        x = reference.centered(src, params).double() * float(torch.tensor(params[0]))
        y = (x.abs().numpy().astype(np.longdouble) ** p).sum(tuple(dims), keepdims=True)
        y = np.maximum(y, eps) if alg.endswith("max") else y + eps
        exact = torch.from_numpy((y if "power" in alg else y ** (1 / p)).astype(np.float64))
        error = 2**-24 * exact + 2**-149
        if dst_dtype != F32:
            error = error + 2**-22 * (exact + to[0] * abs(to[1]))
        assert got.dtype == dst_dtype
        reference.near(got, exact, to, error)


def test_norms_are_those_of_torch(isa: str):
    src = torch.randn(3, 500, 7)
    for p in (1.0, 2.0, 3.0):
        expected = torch.linalg.vector_norm(src.double(), p, 1).float()
        torch.testing.assert_close(TF.reduction(src, "norm_lp_sum", 1, p=p), expected)
    src[1, 1, 1] = torch.nan
    for alg in NORMS:
        assert TF.reduction(src, alg, 1, eps=1.0).isnan().nonzero().tolist() == [[1, 1]], alg
    assert TF.reduction(src[0], "norm_lp_power_p_sum", 0, p=1000.0).isinf().any()


@pytest.mark.parametrize("alg", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((2, 5, 6, 7), [12, 14]),
        ((1, 3, 9, 5), [4, 11]),
        ((2, 600, 4), [9]),
        ((1, 4, 3, 4, 5), [5, 4, 2]),
        ((1, 2, 1, 8), [5, 1]),
        ((0, 2, 3), [5]),
        ((1, 100, 4, 400), [7, 399]),  # several stretches of a line
        ((1, 17000, 3), [5]),
        ((1, 2, 3), [4099]),  # as many for the sake of the destination
    ],
    ids=str,
)
def test_resampling(isa: str, alg: str, shape: tuple[int, ...], size: list[int]):
    for src_dtype, dst_dtype in TYPES:
        src = random_q(shape, src_dtype)
        params = [PARAMS[src_dtype], DST[dst_dtype]]
        attr = attr_of(src=params[0], dst=params[1])
        got = TF.resampling(src, size, alg, attr, dst_dtype)
        expected = reference.resampling(src, size, alg, params, dst_dtype)
        assert_same(got + 0, expected + 0, (src_dtype, dst_dtype))


@pytest.mark.parametrize("scale", [2.0**-126, 0.031, 3e38])
def test_nearest_with_equal_parameters(isa: str, scale: float):
    """A copy, unless the real values overflow."""
    for dtype, zero_point in ((U8, 131), (S8, -9)):
        src, params = random_q((2, 5, 6, 7), dtype), (scale, zero_point)
        got = TF.resampling(src, (12, 5), "nearest", attr_of(src=params, dst=params))
        assert_same(got, reference.resampling(src, [12, 5], "nearest", [params, params], dtype))


def test_resampling_is_torchs(isa: str):
    src = random_q((2, 3, 5, 6), U8)
    assert_same(TF.resampling(src, (10, 12)), F.interpolate(src, (10, 12)))
    got = TF.resampling(src, (7, 13), "linear", dst_dtype=F32)
    expected = F.interpolate(src.float(), (7, 13), mode="bilinear")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-3)
    assert got.is_contiguous(memory_format=LAST)


def test_threads(isa: str):
    src = random_q((60, 30, 31), S8)
    calls = [
        lambda: TF.softmax(src, 1),
        lambda: TF.layer_norm(src, [31]),
        lambda: TF.rms_norm(src.float(), [31]),
        lambda: TF.softmax(src.float(), 1),
        lambda: TF.group_norm(src, 3),
        lambda: TF.group_norm(src.mT, 1),
        lambda: TF.group_norm(src.float(), 3),
        lambda: TF.group_norm(src.float().reshape(1, 2, -1), 1),
        lambda: TF.batch_norm(src, torch.zeros(30), torch.ones(30)),
        lambda: TF.reduction(src, "mul", 2),
        lambda: TF.reduction(src.float() / 3, "norm_lp_sum", 1, p=1.5),
        lambda: TF.reduction(src.float() / 3, "mean", 1),
        lambda: TF.reduction(src.float() / 3, "sum", 2),
        lambda: TF.resampling(src, 77, "linear", dst_dtype=F32),
    ]
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append([call() for call in calls])
    for one, three in zip(*found, strict=True):
        assert_same(one, three)


def test_errors():
    q, x = random_q((2, 6, 5), U8), torch.rand(2, 6, 5)
    for call in (
        lambda: TF.softmax(x.double()),
        lambda: TF.layer_norm(x.double(), [5]),
        lambda: TF.rms_norm(x.double(), [5]),
        lambda: TF.group_norm(x.double(), 2),
        lambda: TF.batch_norm(x, x, x),
        lambda: TF.resampling(x, 3),
    ):
        refuse(TypeError, "src must be torch.uint8 or torch.int8, got torch.float", call)
    message = "reduction: src must be uint8, int8, int32 or float32, got float64"
    refuse(TypeError, message, TF.reduction, x.double(), "sum", 1)
    refuse(ValueError, r"torchq.softmax: dim must lie in \[-3, 2\]", TF.softmax, q, 3)
    refuse(ValueError, "src must end in normalized_shape", TF.layer_norm, q, [6])
    refuse(ValueError, "weight must have 5 values", TF.layer_norm, q, [5], torch.ones(6))
    attr = attr_of(src=(0.5, 0))
    calls = ((TF.layer_norm, [5]), (TF.rms_norm, [5]), (TF.group_norm, 2), (TF.softmax, 1))
    for norm, value in calls:
        refuse(ValueError, "float32 src must have scale 1, got 0.5", norm, x, value, attr=attr)
    refuse(ValueError, "src must end in normalized_shape", TF.rms_norm, x, [6, 5, 1])
    refuse(TypeError, "normalized_shape must be an integer", TF.rms_norm, x, torch.ones(5))
    refuse(ValueError, "weight must have 30 values", TF.rms_norm, x, [6, 5], torch.ones(5))
    refuse(ValueError, "eps must be finite and at least 0", TF.rms_norm, q, [5], eps=math.nan)
    refuse(ValueError, "eps must be finite and at least 0", TF.layer_norm, q, [5], eps=-1.0)
    for src in (q, x):
        refuse(ValueError, "groups must divide the channels, 6, got 4", TF.group_norm, src, 4)
        refuse(ValueError, "weight must have 6 values", TF.group_norm, src, 2, torch.ones(5))
    ones = torch.ones(6)
    refuse(ValueError, "mean must have 6 values", TF.batch_norm, q, ones[:5], ones)
    refuse(ValueError, "variance must be finite and at least 0", TF.batch_norm, q, ones, -ones)
    refuse(ValueError, r"src must be \(N, C, ...\)", TF.batch_norm, q[0, 0], ones, ones)
    refuse(ValueError, "alg must be sum, mean", TF.reduction, q, "norm", 1)
    for p, eps in ((0.5, 0.0), (math.inf, 0.0), (2.0, -1.0), (2.0, math.nan)):
        message = "p must be finite and at least 1, and eps at least 0"
        refuse(ValueError, message, TF.reduction, q, "norm_lp_sum", 1, p=p, eps=eps)
    refuse(ValueError, r"dims must lie in \[-3, 2\]", TF.reduction, q, "sum", 3)
    refuse(ValueError, "dims must differ", TF.reduction, q, "sum", [1, -2])
    refuse(ValueError, "at least one value to reduce", TF.reduction, q[:, :0], "sum", 1)
    refuse(ValueError, "alg must be nearest or linear", TF.resampling, q, 4, "cubic")
    refuse(ValueError, r"sizes must lie in \[1, 2\^24\]", TF.resampling, q, 0)
    refuse(ValueError, "size must be one integer or 1", TF.resampling, q, [3, 4])
