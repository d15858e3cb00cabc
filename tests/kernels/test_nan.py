# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity in float results: one NaN, 0x7fc00000, and the same bits on every tier."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import reference_primitives as reference
import torch
from calls import F32, S8, S32, U8
from cases import random_q
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr

INF = float("inf")
PAYLOADS = [0x7FC00000, -0x400000, 0x7FC12345, -0x3ABCDF, 0x7F800001, -0x7EDCBB, 0x7FFFFFFF, -1]
NANS = torch.tensor(PAYLOADS, dtype=S32).view(F32)  # quiet and signalling, of both signs
OTHERS = torch.tensor([INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-40, -1e-40, 3e38, -3e38])
X = torch.cat([NANS, OTHERS]).repeat(3)
V = X.flip(0).roll(5)  # meets X's NaNs with NaNs of other payloads
ALGORITHMS = [(alg, *reference.COEFFICIENTS.get(alg, (0.0, 0.0))) for alg in reference.ELTWISE]
ALGORITHMS += [("pow", -0.6, beta) for beta in (0.0, 0.5, 1.0, 2.0, -1.0, 3.0, -2.5)]
ALGORITHMS += [("relu", 0.0, 0.0), ("soft_relu", -1.0, 0.0)]


def check(call: Callable[[], Tensor], label: object = "") -> None:
    got = call()
    assert got.dtype == F32
    with torchq.use_isa("reference"):
        expected = call()
    assert torch.equal(got.view(S32), expected.view(S32)), label
    assert set(got[got.isnan()].view(S32).tolist()) <= {0x7FC00000}, label


def test_nans_are_what_they_should_be():
    assert NANS.isnan().all() and (NANS.view(S32) < 0).sum() == 4


@pytest.mark.parametrize("eltwise", ALGORITHMS, ids=lambda e: "_".join(map(str, e)))
def test_eltwise(isa: str, eltwise: tuple[str, float, float]):
    check(lambda: TF.eltwise(X, *eltwise, dst_dtype=F32))
    for after in ALGORITHMS:
        attr = Attr()
        attr.post_ops.append_eltwise(*after)
        check(lambda a=attr: TF.eltwise(X, *eltwise, a, F32), after)


@pytest.mark.parametrize("alg", list(reference.BINARY))
def test_binary(isa: str, alg: str):
    check(lambda: TF.binary(X, V, alg, dst_dtype=F32))


def test_conversions(isa: str):
    check(lambda: TF.reorder(X, F32, Attr().set_scales("src", 0, 0.5)))


@pytest.mark.parametrize("channels", [60, 64], ids=["tail", "panels"])
def test_matrix_products(isa: str, channels: int):
    """NaN comes from sources of sums, and from the bias of dynamic layers."""
    src, weight = random_q((7, 16), U8), random_q((channels, 16), S8, 1)
    attr = Attr().set_scales("src", 0, 0.1).set_scales("weights", 0, 0.1)
    attr.post_ops.append_sum(0.5, 0, F32)
    old = X.repeat(8)[: 7 * channels].reshape(7, channels)
    for clips, eltwise in itertools.product((False, True), (None, "gelu_erf")):
        if clips:
            attr.post_ops.append_eltwise("clip", -1.0, 1.0)
        if eltwise:
            attr.post_ops.append_eltwise(eltwise)
        check(lambda: TF.linear(src, weight, None, attr, F32, post_op_srcs=[old]), str(attr))
    packed, scale = torch.ops.torchq.pack_linear(weight), torch.full((channels,), 0.1)
    for rows, per_row in itertools.product((1, 7, 40), (False, True)):
        x, bias = torch.randn(rows, 16), X.repeat(2)[:channels]
        arguments = (x, *packed, scale, bias, 16, per_row)
        check(lambda a=arguments: torch.ops.torchq.dynamic_linear(*a), (rows, per_row))
        codes = torch.randint(0, 16, (channels, 16), dtype=torch.uint8)
        four = torchq.packing.pack_linear_int4(codes, torch.ones(channels, 1))
        check(lambda a=(x, four, bias): TF.dynamic_linear_int4(*a), rows)


def test_rotary(isa: str):
    check(lambda: torch.ops.torchq.rotary(X, V, X.roll(7)))
    check(lambda: torch.ops.torchq.rotary(torch.stack([X, V]), V, X))


def test_compressed_attention(isa: str):
    """Takes NaN from queries, scales and masks."""
    rows = torch.cat([random_q((1, 1, 60, 16), S8, 1), X.view(1, 1, 60, 1).view(S8)], 3)
    finite = TF.compress_rows(torch.randn(1, 1, 60, 16))
    query = torch.randn(1, 1, 60, 16)
    for key, value in ((rows, finite), (finite, rows)):
        for mask in (None, torch.eye(60).bool(), V):
            check(lambda a=(query, key, value, mask): TF.compressed_attention(*a))
    spoilt = torch.stack([X, V] * 8, 1).view(1, 1, 60, 16)
    check(lambda: TF.compressed_attention(spoilt, finite, finite))
    check(lambda: TF.decompress_rows(TF.compress_rows(spoilt)))


def test_pools_and_reductions(isa: str):
    src = torch.stack([X, V, X.roll(7)])[None]
    check(lambda: TF.max_pool(src, 2))
    check(lambda: TF.avg_pool(src, 3))
    check(lambda: TF.adaptive_avg_pool(src, 4))
    for alg in ("sum", "max", "min", "mean", "norm_lp_max", "norm_lp_power_p_sum"):
        check(lambda alg=alg: TF.reduction(src, alg, [1], dst_dtype=F32))


def test_normalizations(isa: str):
    src, attr = random_q((4, 60, 5), U8), Attr().set_scales("src", 0, 0.1)
    mean, variance = torch.randn(60), torch.rand(60)
    check(lambda: TF.layer_norm(src.mT, [60], X, V, attr=attr, dst_dtype=F32))
    check(lambda: TF.rms_norm(src.mT, [60], X, attr=attr, dst_dtype=F32))
    check(lambda: TF.layer_norm(X, [len(X)]))
    check(lambda: TF.rms_norm(torch.stack([X, V]).mT.contiguous(), [2]))
    check(lambda: TF.group_norm(src, 2, X, V, attr=attr, dst_dtype=F32))
    check(lambda: TF.group_norm(torch.stack([X, V]).mT[..., None].contiguous(), 1))
    check(lambda: TF.group_norm(torch.stack([X, V, V[:1].expand_as(V)])[None], 3))
    check(lambda: TF.softmax(torch.stack([X, V]).mT))
    check(lambda: TF.batch_norm(src, mean, variance, X, V, attr=attr, dst_dtype=F32))


def test_integers_take_the_zero_point(isa: str):
    attr = Attr().set_scales("dst", 0, 0.1).set_zero_points("dst", 0, 7)
    for alg in ("soft_relu", "sqrt", "gelu_erf"):
        got = TF.eltwise(NANS, alg, 1.0, attr=attr, dst_dtype=S8)
        assert torch.equal(got, torch.full_like(got, 7))
