# SPDX-License-Identifier: Apache-2.0
"""Random pools, reorders, concatenations, sums and binaries."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import reference
import torch
from chains import COMPARISON
from differential import EPSILON, Case, Exact
from matmul_cases import F32, S8, S32, U8, random_q
from real_chains import BINARY, ELTWISE, draw_chain, finished, keywords
from torch import Tensor

import torchq.functional as TF
from torchq import Attr


def tensor(data: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Full range; int32 and float32 within what a scale brings to 8 bits."""
    if dtype == F32:
        return 100 * torch.randn(shape, generator=data)
    if dtype == S32:
        return torch.randint(-(2**20), 2**20, shape, generator=data, dtype=S32)
    return random_q(data, dtype, *shape)


def rounded(y: Tensor, steps: int = 3) -> Exact:
    return Exact(y, steps * EPSILON * y.abs())


def pooling(rng: random.Random, data: torch.Generator, index: int) -> Case:
    nd = rng.choice((1, 2, 2, 3))
    dtype = rng.choice((U8, S8, S32, F32))
    kernel = [rng.randint(2, 4) for _ in range(nd)]
    stride = [rng.randint(1, 3) for _ in range(nd)]
    padding = [rng.randint(0, k // 2) if index % 2 else 0 for k in kernel]
    if index % 2 and not any(padding):
        padding[0] = 1
    shape = (rng.choice((1, 2)), rng.choice((3, 16, 33)), *(rng.randint(5, 10) for _ in range(nd)))
    src = tensor(data, dtype, *shape)
    algorithm = rng.choice(("max", "avg_include_padding", "avg_exclude_padding"))
    text = f"{algorithm} {dtype} {shape} kernel {kernel} stride {stride} padding {padding}"
    include = algorithm == "avg_include_padding"
    ones, both = [1] * nd, (padding, padding)

    def pooled(x: Tensor) -> Tensor:
        """In the dtype of x: integers are rounded."""
        if algorithm == "max":
            return reference.max_pool(x, kernel, stride, both, ones)
        return reference.avg_pool(x, kernel, stride, both, count_include_pad=include)

    shape = tuple(pooled(src).shape)
    chain = draw_chain(rng, data, shape, dtype, ELTWISE + BINARY)
    text += f" '{chain.text}'"

    def ours() -> Tensor:
        real = keywords(chain) if chain.words else {}
        if algorithm == "max":
            return TF.max_pool(src, kernel, stride, padding, **real)
        return TF.avg_pool(src, kernel, stride, padding, count_include_pad=include, **real)

    def oracle() -> Tensor:
        return finished(pooled(src.float()), chain, dtype) if chain.words else pooled(src)

    def exact() -> Exact:
        if algorithm == "max":
            return chain.exact(rounded(pooled(src).double()))
        taps, largest = math.prod(kernel), src.abs().max().double()
        x = reference.pad(src.double(), padding, padding, 0)
        valid = reference.pad(torch.ones_like(src, dtype=torch.float64), padding, padding, 0)
        total = reference.windows(x, kernel, stride, ones).sum(-1)
        count = reference.windows(valid, kernel, stride, ones).sum(-1)
        y = total / (taps if include else count)
        order = taps * EPSILON * largest if dtype in (S32, F32) else 0  # of float32 additions
        return chain.exact(Exact(y, 3 * EPSILON * y.abs() + order))

    # test_conformance.py: test_a_comparison_behind_an_average_of_onednn_is_wrong,
    # test_an_average_of_onednn_beyond_16_bits_wraps
    defect = ""
    if algorithm != "max" and COMPARISON.search(chain.text):
        defect = "jit_int"
    elif algorithm != "max" and dtype == U8 and exact().y.max() >= 2**15 - 1:
        defect = "jit_int:avx2"
    elif algorithm != "max" and dtype == S32 and exact().y.max() >= 2**31 - 1:
        defect = "jit_int"
    return Case(
        text,
        ours,
        oracle,
        lambda peer: peer.pooling(
            src, algorithm, kernel, stride=stride, padding=padding, **chain.onednn(dtype)
        ),
        exact,
        approximate=chain.approximate,
        defect=defect,
        padding=any(padding),
    )


def reorder(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN wants equal masks where both sides have one."""
    dtypes = (U8, S8, S32, F32)
    src_dtype, dst_dtype = rng.choice(dtypes), rng.choice(dtypes)
    if index % 2 == 0 and {src_dtype, dst_dtype} <= {S32, F32}:  # without zero points
        dst_dtype = rng.choice((U8, S8))
    shape = (2, rng.choice((3, 16, 19)), rng.randint(1, 6), rng.randint(1, 6))
    mask = rng.choice((0, 2))
    count = shape[1] if mask else 1
    src = tensor(data, src_dtype, *shape)
    width = {U8: 1.0, S8: 1.0, S32: 2.0**-14, F32: 1.0}
    src_scale = (0.5 + torch.rand(count, generator=data)) * width[src_dtype]
    dst_scale = (0.5 + torch.rand(count, generator=data)) * width[dst_dtype]
    zero_points = index % 2 == 0
    zs = rng.randint(1, 100) if zero_points and src_dtype in (U8, S8) else 0
    zd = rng.randint(1, 100) if zero_points and dst_dtype in (U8, S8) else 0
    text = f"{src_dtype} -> {dst_dtype} {shape} mask {mask} zero points {zs} {zd}"
    attr = Attr().set_scales("src", mask, src_scale).set_scales("dst", mask, dst_scale)
    attr.set_zero_points("src", 0, zs) if zs else None
    attr.set_zero_points("dst", 0, zd) if zd else None

    def along(scale: Tensor) -> Tensor:
        return scale.reshape(1, -1, 1, 1)

    def exact() -> Exact:
        x = (src.double() - zs) * along(src_scale).double() / along(dst_scale).double() + zd
        return Exact(x, 6 * EPSILON * (x.abs() + zd + abs(zs)))

    return Case(
        text,
        lambda: TF.reorder(src, dst_dtype, attr),
        lambda: reference.reorder(src, along(src_scale), zs, along(dst_scale), zd, dst_dtype),
        lambda peer: peer.reorder(
            src,
            src_scale=src_scale,
            dst_scale=dst_scale,
            dst_dtype=dst_dtype,
            src_zero_point=zs or None,
            dst_zero_point=zd or None,
        ),
        exact,
        zero_points=bool(zs or zd),
    )


def concat(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN has a scale for each source and none for dst."""
    dtype, dst_dtype = rng.choice((U8, S8)), rng.choice((U8, S8, F32))
    axis, nd = rng.choice((1, 1, 2, 3)), 4
    base = [2, rng.choice((3, 16)), rng.randint(2, 5), rng.randint(2, 5)]
    srcs = []
    for _ in range(rng.randint(2, 4)):
        base[axis] = rng.randint(1, 17)
        srcs.append(random_q(data, dtype, *base))
    scales = [float(torch.tensor(rng.uniform(0.3, 1.5))) for _ in srcs]
    attr = Attr()
    for i, scale in enumerate(scales):
        attr.set_scales(f"src{i}", 0, scale)

    def exact() -> Exact:
        parts = [src.double() * scale for src, scale in zip(srcs, scales, strict=True)]
        return rounded(torch.cat(parts, axis))

    return Case(
        f"{dtype} -> {dst_dtype} {[tuple(src.shape) for src in srcs]} axis {axis} of {nd}",
        lambda: TF.concat(srcs, attr, axis, dst_dtype),
        lambda: reference.concat(srcs, axis, scales, [0] * len(srcs), 1, 0, dst_dtype),
        lambda peer: peer.concat(srcs, axis, scales, dst_dtype=dst_dtype),
        exact,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "pooling": pooling,
    "reorder": reorder,
    "concat": concat,
}
