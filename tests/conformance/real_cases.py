# SPDX-License-Identifier: Apache-2.0
"""Random eltwise, binary, sum, softmax, reduction and resampling cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import reference_primitives as oracle
import torch
from chains import COMPARISON, FUNCTIONS, PARTIAL, float32
from differential import EPSILON, Case, Exact
from matmul_cases import F32, S8, S32, U8, random_q
from real_chains import (
    BINARY,
    ELTWISE,
    SUM,
    draw_chain,
    finished,
    keywords,
    safe_layout,
)
from simple_cases import tensor
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr

ONE = (1.0, 0)
NORMS = ("norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum")
_HAS_AVX512 = "avx512" in torchq.supported_isas()


def small(rng: random.Random, nd: int = 4) -> tuple[int, ...]:
    return (2, rng.choice((3, 8, 17)), *(rng.randint(1, 6) for _ in range(nd - 2)))


def attr_of(**scales: float | None) -> Attr:
    attr = Attr()
    for name, scale in scales.items():
        if scale is not None:
            attr.set_scales(name, 0, scale)
    return attr


def eltwise(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN's has one dtype and no scale, for integers few functions, and ignores a sum."""
    dtype = rng.choice((F32, F32, U8, S8, S32))
    name = rng.choice([*FUNCTIONS, *PARTIAL] if dtype == F32 else ["relu", "linear"])
    f = FUNCTIONS.get(name) or PARTIAL[name]
    alpha, beta = float32(rng.choice(f.alpha)), float32(rng.choice(f.beta))
    shape = small(rng)
    src = 3 * torch.randn(shape, generator=data) if dtype == F32 else tensor(data, dtype, *shape)
    if name in PARTIAL:
        src = src.abs() + 0.01
    chain = draw_chain(rng, data, shape, dtype, ELTWISE + BINARY)

    def exact() -> Exact:
        start = Exact(src.double(), torch.zeros_like(src, dtype=torch.float64))
        return chain.exact(
            start.step(lambda v: f.double(v, alpha, beta), relative=f.relative, absolute=f.absolute)
        )

    return Case(
        f"{name}:{alpha}:{beta} {dtype} {shape} '{chain.text}'",
        lambda: TF.eltwise(src, name, alpha, beta, dst_dtype=dtype, **keywords(chain)),
        lambda: finished(oracle.ELTWISE[name](src.double(), alpha, beta).float(), chain, dtype),
        lambda peer: peer.eltwise(src, name, alpha, beta, **chain.onednn(dtype)),
        exact,
        approximate=True,
    )


def binary(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Scales of the sources; oneDNN has none of dst."""
    dtypes = (U8, S8, F32)
    dtype0, dtype1, dst_dtype = rng.choice(dtypes), rng.choice(dtypes), rng.choice(dtypes)
    alg = rng.choice(("add", "sub", "mul", "div", "max", "min", "ge", "gt", "le", "lt", "eq", "ne"))
    shape = small(rng)
    other = tuple(n if rng.random() < 0.7 else 1 for n in shape)
    src0, src1 = tensor(data, dtype0, *shape), tensor(data, dtype1, *other)
    if alg == "div":
        src1 = torch.where(src1 == 0, torch.ones_like(src1), src1)
    scales = [None if d == F32 else float32(rng.uniform(0.2, 1.5)) for d in (dtype0, dtype1)]
    params = [(1.0 if scale is None else scale, 0) for scale in scales]
    chain = draw_chain(rng, data, shape, dst_dtype, ELTWISE + BINARY + SUM)
    attr = attr_of(src0=scales[0], src1=scales[1])
    # test_conformance.py: test_a_comparison_behind_a_binary_of_onednn_is_wrong
    wrong = dst_dtype == U8 and COMPARISON.search(chain.text) and not _HAS_AVX512

    def exact() -> Exact:
        a, b = (src.double() * p[0] for src, p in zip((src0, src1), params, strict=True))
        y = oracle.BINARY[alg](a, b.expand_as(a)).double()
        size = a.abs() + b.abs() if alg in ("add", "sub") else y.abs()
        near = (a - b).abs() <= 4 * EPSILON * (a.abs() + b.abs())
        jump = near.double() if alg in ("ge", "gt", "le", "lt", "eq", "ne") else 0.0
        return chain.exact(Exact(y, 4 * EPSILON * size + jump))

    return Case(
        f"{alg} {dtype0} {shape} {dtype1} {other} -> {dst_dtype} scales {scales} '{chain.text}'",
        lambda: TF.binary(src0, src1, alg, dst_dtype=dst_dtype, **keywords(chain, attr)),
        lambda: finished(oracle.binary(src0, src1, alg, [*params, ONE], F32), chain, dst_dtype),
        lambda peer: peer.binary(
            src0,
            src1,
            alg,
            src0_scale=scales[0],
            src1_scale=scales[1],
            dst_dtype=dst_dtype,
            **chain.onednn(dst_dtype),
        ),
        exact,
        approximate=chain.approximate,
        defect="jit:uni" if wrong else "",
    )


def sum_(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype, dst_dtype = rng.choice((U8, S8, F32)), rng.choice((U8, S8, F32))
    shape = small(rng)
    srcs = [tensor(data, dtype, *shape) for _ in range(rng.randint(1, 5))]
    scales = [float32(rng.uniform(-1, 1.5)) for _ in srcs]

    def exact() -> Exact:
        parts = [src.double() * scale for src, scale in zip(srcs, scales, strict=True)]
        size = torch.stack(parts).abs().sum(0)
        return Exact(torch.stack(parts).sum(0), (2 + len(srcs)) * EPSILON * size)

    return Case(
        f"{dtype} {shape} -> {dst_dtype} scales {scales}",
        lambda: TF.sum(srcs, scales, dst_dtype=dst_dtype),
        lambda: oracle.weighted_sum(srcs, [*((s, 0) for s in scales), ONE], dst_dtype),
        lambda peer: peer.sum(srcs, scales, dst_dtype=dst_dtype),
        exact,
    )


def reduction(rng: random.Random, data: torch.Generator, index: int) -> Case:
    alg = rng.choice(("sum", "mean", "max", "min", "mul", *NORMS))
    # oneDNN has few norms of integers
    dtype = rng.choice((U8, S8, S32, F32) if alg not in NORMS or rng.random() < 0.3 else (F32,))
    dst_dtype = rng.choice((dtype, S32, F32))
    p, eps = rng.choice((1.0, 2.0, 3.0, 1.5)), rng.choice((0.0, 0.5))
    shape = small(rng)
    dims = sorted(rng.sample(range(4), rng.randint(1, 3)))
    src = tensor(data, dtype, *shape)
    if alg == "mul":
        src = src.remainder(3) if dtype == U8 else src.remainder(3) - 1
    sizes = [1 if d in dims else size for d, size in enumerate(shape)]
    chain = draw_chain(rng, data, sizes, dst_dtype, ELTWISE + BINARY + SUM)

    def exact() -> Exact:
        x = src.double()
        if alg == "mul":
            y = x
            for dim in dims:
                y = y.prod(dim, keepdim=True)
            return chain.exact(Exact(y, 64 * EPSILON * y.abs()))
        terms = math.prod(shape[dim] for dim in dims)
        if alg in NORMS:  # a power, a sum of that many, and a root, of float32 each
            y = oracle.norm(alg, x.abs().pow(p).sum(dims, keepdim=True), p, eps)
            return chain.exact(Exact(y, (terms + 64) * EPSILON * y.abs()))
        reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[alg]
        y = reduce(x, dims, keepdim=True)
        error = 4 * EPSILON * y.abs() + (terms * EPSILON if alg == "mean" else 0)
        if dtype in (S32, F32) and alg in ("sum", "mean"):  # float32 additions in another order
            error = error + EPSILON * (terms if alg == "sum" else 1) * reduce(x.abs(), dims, True)
        return chain.exact(Exact(y, error))

    return Case(
        f"{alg}:{p}:{eps} {dtype} {shape} over {dims} -> {dst_dtype} '{chain.text}'",
        lambda: TF.reduction(
            src, alg, dims, True, dst_dtype=dst_dtype, p=p, eps=eps, **keywords(chain)
        ),
        lambda: finished(
            oracle.reduction(src, alg, dims, [ONE, ONE], F32, p, eps), chain, dst_dtype
        ),
        lambda peer: peer.reduction(
            src, alg, dims, p, eps, dst_dtype=dst_dtype, **chain.onednn(dst_dtype)
        ),
        exact,
        approximate=chain.approximate,
    )


def resampling(rng: random.Random, data: torch.Generator, index: int) -> Case:
    dtype = rng.choice((U8, S8))
    nd, alg = rng.choice((1, 2, 2, 3)), rng.choice(("nearest", "linear"))
    shape = small(rng, nd + 2)
    size = [rng.randint(1, 12) for _ in range(nd)]
    src = random_q(data, dtype, *shape)
    chain = draw_chain(rng, data, [*shape[:2], *size], dtype, ELTWISE + BINARY + SUM)

    def x() -> Tensor:
        return oracle.resampling(src, size, alg, [ONE, ONE], F32)

    def exact() -> Exact:
        y = x().double()
        error = 256 * 8 * EPSILON * torch.ones_like(y) if alg == "linear" else 0 * y
        return chain.exact(Exact(y, error))

    return Case(
        f"{alg} {dtype} {shape} -> {size} '{chain.text}'",
        lambda: TF.resampling(src, size, alg, **keywords(chain)),
        lambda: finished(x(), chain, dtype),
        lambda peer: peer.resampling(
            src, alg, size, layout=safe_layout(chain, nd + 2), **chain.onednn(dtype)
        ),
        exact,
        approximate=chain.approximate,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "eltwise": eltwise,
    "binary": binary,
    "sum": sum_,
    "reduction": reduction,
    "resampling": resampling,
}
