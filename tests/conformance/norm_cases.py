# SPDX-License-Identifier: Apache-2.0
"""Random softmax, layer norm, RMS norm and group norm cases, of integer and float32 sources.

oneDNN multiplies the results by the scale of the source; torchq dequantizes the source with it. The
cases therefore have a scale of the destination only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import reference_primitives as oracle
import torch
from chains import COMPARISON, Chain, float32
from differential import EPSILON, Case, Exact
from matmul_cases import F32, S8, U8, random_q
from real_cases import ONE, attr_of, small
from real_chains import BINARY, ELTWISE, SUM, draw_chain, finished, keywords, scaled
from torch import Tensor

import torchq.functional as TF

EPS = 1e-5
POST_OPS = ELTWISE + BINARY + SUM


def source(data: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=data) if dtype == F32 else random_q(data, dtype, *shape)


def dtypes(rng: random.Random) -> tuple[torch.dtype, torch.dtype, float | None]:
    """Returns the dtypes of src and dst, and the scale of an integer dst."""
    dtype, dst_dtype = rng.choice((U8, S8, F32)), rng.choice((U8, S8, F32))
    return dtype, dst_dtype, None if dst_dtype == F32 else float32(rng.uniform(0.02, 0.04))


def normalized(rows: Tensor, centered: bool, gamma: Tensor, beta: Tensor) -> Exact:
    """Rows (..., n), less their mean if ``centered``."""
    x = rows.double()
    mean = x.mean(-1, keepdim=True) if centered else torch.zeros(())
    deviation = ((x - mean).square().mean(-1, keepdim=True) + EPS).sqrt()
    y = (x - mean) / deviation * gamma + beta
    size = (x.abs() + mean.abs()) / deviation * gamma
    return Exact(y, 32 * EPSILON * (size + beta.abs()))


def softmax(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype, dst_dtype = rng.choice((U8, S8, F32)), rng.choice((U8, S8, F32))
    shape, logarithmic = small(rng), rng.random() < 0.4
    axis = rng.choice((1, 1, 2, 3))
    src = source(data, dtype, *shape)
    src = src * rng.choice((1, 4, 16)) if dtype == F32 else src // rng.choice((1, 16, 32))
    dst_scale = (
        None if dst_dtype == F32 else float32(rng.uniform(1, 2) / 256 * (32 if logarithmic else 1))
    )
    function = TF.log_softmax if logarithmic else TF.softmax
    chain = draw_chain(rng, data, shape, dst_dtype, ELTWISE + BINARY)

    def exact() -> Exact:
        x = src.double()
        y = x.log_softmax(axis) if logarithmic else x.softmax(axis)
        steps = 3e-6 * (1 + y.abs()) if logarithmic else 2e-6 * y + 1e-12
        difference = 2 * EPSILON * (x - x.amax(axis, keepdim=True)).abs()  # floats are rounded
        error = steps + difference * (1 if logarithmic else y)
        return scaled(Exact(y, error), chain, dst_scale)

    return Case(
        f"{'log_' * logarithmic}softmax {dtype} {shape} axis {axis} -> {dst_dtype} {dst_scale} "
        f"'{chain.text}'",
        lambda: function(src, axis, dst_dtype=dst_dtype, **keywords(chain, attr_of(dst=dst_scale))),
        lambda: finished(
            oracle.softmax(src, axis, ONE, logarithmic).float(), chain, dst_dtype, dst_scale
        ),
        lambda peer: peer.softmax(
            src,
            axis,
            logarithmic=logarithmic,
            dst_scale=dst_scale,
            dst_dtype=dst_dtype,
            **chain.onednn(dst_dtype),
        ),
        exact,
        approximate=True,
        defect="jit:avx2" if COMPARISON.search(chain.text) else "",
    )


def row_shape(rng: random.Random) -> tuple[int, ...]:
    return rng.randint(1, 4), rng.randint(1, 5), rng.choice((4, 16, 33, 64))


def rare_chain(
    rng: random.Random,
    data: torch.Generator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale: float | None,
) -> Chain:
    """Few have post-ops, which oneDNN 3.2 refuses."""
    return draw_chain(rng, data, shape, dtype, POST_OPS, scale) if rng.random() < 0.15 else Chain()


def layer_normalization(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype, dst_dtype, dst_scale = dtypes(rng)
    shape = row_shape(rng)
    src = source(data, dtype, *shape)
    gamma = 0.5 + torch.rand(shape[-1], generator=data)
    beta = torch.randn(shape[-1], generator=data)
    chain = rare_chain(rng, data, shape, dst_dtype, dst_scale)
    attr = attr_of(dst=dst_scale)

    def x() -> Tensor:
        if dtype == F32:
            return oracle.normalize_floats(src, True, gamma, beta, EPS, ONE, F32)
        return oracle.normalize(src, gamma, beta, EPS, [ONE, ONE], F32)

    return Case(
        f"{dtype} {shape} -> {dst_dtype} {dst_scale} '{chain.text}'",
        lambda: TF.layer_norm(
            src, shape[-1:], gamma, beta, EPS, dst_dtype=dst_dtype, **keywords(chain, attr)
        ),
        lambda: finished(x(), chain, dst_dtype, dst_scale),
        lambda peer: peer.layer_normalization(
            src, gamma, beta, dst_scale=dst_scale, dst_dtype=dst_dtype, **chain.onednn(dst_dtype)
        ),
        lambda: scaled(normalized(src, True, gamma, beta), chain, dst_scale),
        approximate=chain.approximate,
    )


def rms_normalization(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype, dst_dtype, dst_scale = dtypes(rng)
    shape = row_shape(rng)
    src = source(data, dtype, *shape)
    gamma = 0.5 + torch.rand(shape[-1], generator=data)
    zeros = torch.zeros(shape[-1])
    chain = rare_chain(rng, data, shape, dst_dtype, dst_scale)
    attr = attr_of(dst=dst_scale)

    def x() -> Tensor:
        if dtype == F32:
            return oracle.normalize_floats(src, False, gamma, zeros, EPS, ONE, F32)
        return oracle.rms_norm(src, gamma, EPS, [ONE, ONE], F32)

    return Case(
        f"{dtype} {shape} -> {dst_dtype} {dst_scale} '{chain.text}'",
        lambda: TF.rms_norm(
            src, shape[-1:], gamma, EPS, dst_dtype=dst_dtype, **keywords(chain, attr)
        ),
        lambda: finished(x(), chain, dst_dtype, dst_scale),
        lambda peer: peer.rms_normalization(
            src, gamma, dst_scale=dst_scale, dst_dtype=dst_dtype, **chain.onednn(dst_dtype)
        ),
        lambda: scaled(normalized(src, False, gamma, zeros), chain, dst_scale),
        approximate=chain.approximate,
    )


def group_normalization(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype, dst_dtype, dst_scale = dtypes(rng)
    groups, per_group = rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 8))
    channels = groups * per_group
    shape = (rng.choice((1, 2)), channels, *(rng.randint(2, 9) for _ in range(rng.randint(1, 3))))
    src = source(data, dtype, *shape)
    gamma = 0.5 + torch.rand(channels, generator=data)
    beta = torch.randn(channels, generator=data)
    chain = rare_chain(rng, data, shape, dst_dtype, dst_scale)
    attr = attr_of(dst=dst_scale)
    rows = src.reshape(shape[0], groups, -1)
    each = [v.reshape(groups, -1).repeat_interleave(rows.shape[2] // per_group, 1)
            for v in (gamma, beta)]  # fmt: skip

    def x() -> Tensor:
        if dtype == F32:
            return oracle.group_norm_floats(src, groups, gamma, beta, EPS, ONE, F32)
        wide = [v.expand_as(rows) for v in each]
        return oracle.normalize(rows, *wide, EPS, [ONE, ONE], F32).reshape(shape)

    def exact() -> Exact:
        y = normalized(rows, True, *each)
        return scaled(Exact(y.y.reshape(shape), y.error.reshape(shape)), chain, dst_scale)

    return Case(
        f"{dtype} {shape} in {groups} groups -> {dst_dtype} {dst_scale} '{chain.text}'",
        lambda: TF.group_norm(
            src, groups, gamma, beta, EPS, dst_dtype=dst_dtype, **keywords(chain, attr)
        ),
        lambda: finished(x(), chain, dst_dtype, dst_scale),
        lambda peer: peer.group_normalization(
            src,
            groups,
            gamma,
            beta,
            dst_scale=dst_scale,
            dst_dtype=dst_dtype,
            **chain.onednn(dst_dtype),
        ),
        exact,
        approximate=chain.approximate,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "softmax": softmax,
    "layer_normalization": layer_normalization,
    "rms_normalization": rms_normalization,
    "group_normalization": group_normalization,
}
