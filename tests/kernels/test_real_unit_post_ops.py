# SPDX-License-Identifier: Apache-2.0
"""Post-ops of every op in real units against the oracle: any chain, operands of any mask."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import reference
import reference_primitives as oracle
import torch
from calls import F32, S8, S32, U8, assert_same
from cases import random_q
from test_eltwise import DST, PARAMS, attr_of, refuse
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq import Attr, PostOps

SHAPE = (2, 19, 5, 7)
ALL = [U8, S8, S32, F32]
MEAN, VARIANCE = torch.randn(19), torch.rand(19) + 0.5
WEIGHT = torch.rand(SHAPE[-1]) + 0.5
OTHER = random_q((19, 1, 7), S8, 5)


def by_channel(q: Tensor, params: tuple[float, int]) -> Tensor:
    one, none = torch.ones(19), torch.zeros(19)
    x = oracle.batch_norm(
        q.movedim(1, -1), MEAN, VARIANCE, one, none, 1e-5, [params, (1.0, 0)], F32
    )
    return x.movedim(-1, 1)


def grouped(q: Tensor, params: tuple[float, int]) -> Tensor:
    """One group of all channels."""
    rows = q.reshape(2, -1)
    ones, none = torch.ones(rows.shape[1]), torch.zeros(rows.shape[1])
    x = oracle.normalize(rows, ones, none, 1e-3, [params, (1.0, 0)], F32)
    return x.reshape(q.shape)


def softmax(q: Tensor, params: tuple[float, int]) -> Tensor:
    return oracle.softmax(q, 1, params, False).float()


def centered(q: Tensor, params: tuple[float, int]) -> Tensor:
    """In float64, of which an average is rounded to float32."""
    return oracle.centered(q, params).double()


def pooled(q: Tensor, params: tuple[float, int], average: bool) -> Tensor:
    window = ([2, 3], [1, 2], ([1, 0], [1, 0]))
    if not average:
        return oracle.real(reference.max_pool(q, *window, [1, 1]), params)
    return params[0] * reference.avg_pool(centered(q, params), *window)


@dataclass(frozen=True)
class Op:
    """`call` with q and keywords; `x` is its float32 result in front of the chain."""

    call: Callable[..., Tensor]
    x: Callable[[Tensor, tuple[float, int]], Tensor]
    source: str = "src"
    relative: float = 0.0  # error of x, else 0


POOL = {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0)}
OPS = {
    "eltwise": Op(lambda q, **k: TF.eltwise(q, "abs", **k), lambda q, p: oracle.real(q, p).abs()),
    "binary": Op(
        lambda q, **k: TF.binary(q, OTHER, "sub", **k),
        lambda q, p: oracle.real(q, p) - OTHER.float(),
        "src0",
    ),
    "prelu": Op(
        lambda q, **k: TF.prelu(q, MEAN, **k),
        lambda q, p: oracle.BINARY["prelu"](oracle.real(q, p), MEAN.reshape(19, 1, 1)),
    ),
    "softmax": Op(lambda q, **k: TF.softmax(q, 1, **k), softmax, relative=2.0**-18),
    "layer_norm": Op(
        lambda q, **k: TF.layer_norm(q, (7,), WEIGHT, None, 1e-3, **k),
        lambda q, p: oracle.normalize(q, WEIGHT, torch.zeros(7), 1e-3, [p, (1.0, 0)], F32),
    ),
    "group_norm": Op(lambda q, **k: TF.group_norm(q, 1, None, None, 1e-3, **k), grouped),
    "batch_norm": Op(lambda q, **k: TF.batch_norm(q, MEAN, VARIANCE, **k), by_channel),
    "reduction": Op(
        lambda q, **k: TF.reduction(q, "mean", [2], True, **k),
        lambda q, p: oracle.reduction(q, "mean", [2], [p, (1.0, 0)], F32),
    ),
    "reduction without the dim": Op(
        lambda q, **k: TF.reduction(q, "max", 1, **k),
        lambda q, p: oracle.reduction(q, "max", [1], [p, (1.0, 0)], F32).squeeze(1),
    ),
    "resampling": Op(
        lambda q, **k: TF.resampling(q, (9, 3), "linear", **k),
        lambda q, p: oracle.resampling(q, [9, 3], "linear", [p, (1.0, 0)], F32),
    ),
    "max_pool": Op(lambda q, **k: TF.max_pool(q, **POOL, **k), lambda q, p: pooled(q, p, False)),
    "avg_pool": Op(lambda q, **k: TF.avg_pool(q, **POOL, **k), lambda q, p: pooled(q, p, True)),
    "adaptive_avg_pool": Op(
        lambda q, **k: TF.adaptive_avg_pool(q, (2, 1), **k),
        lambda q, p: p[0] * reference.adaptive_avg_pool(centered(q, p), [2, 1]),
    ),
}
BINARIES = ["add", "sub", "mul", "div", "max", "min", "ge", "gt", "le", "lt", "eq", "ne", "select"]
ELTWISE = [("abs",), ("relu", 0.1), ("clip", -0.75, 2.0), ("linear", 0.6, -0.25), ("square",),
           ("round",), ("tanh",), ("swish", 1.0), ("gelu_erf",), ("logistic",)]  # fmt: skip


@dataclass
class Drawn:
    """A chain; what the caller supplies, and every operand, in order."""

    post_ops: PostOps
    srcs: list[Tensor]
    operands: list[Tensor]


def draw_values(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    if dtype == F32:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return torch.where(x.abs() < 0.25, 0.5, x)
    if dtype == S32:
        return random_q(tuple(shape), S8, seed).int() * 3 + 1
    return random_q(tuple(shape), dtype, seed)


def draw(rng: random.Random, shape: torch.Size, dst_dtype: torch.dtype) -> Drawn:
    """One to five post-ops; operands of any mask and dtype, supplied in advance or at the call."""
    made = Drawn(PostOps(), [], [])
    for _ in range(rng.randint(1, 5)):
        kind, seed = (
            rng.choice(["sum", "eltwise", "binary", "binary", "prelu"]),
            rng.getrandbits(30),
        )
        mask = rng.choice([0, 2, rng.randrange(1 << len(shape)), (1 << len(shape)) - 1])
        selected = [n if mask >> d & 1 else 1 for d, n in enumerate(shape)]
        if kind == "sum":
            zero_point = 0 if dst_dtype == F32 else rng.choice([0, 3])
            made.post_ops.append_sum(rng.choice([1.0, -0.3]), zero_point)
            old = draw_values(list(shape), dst_dtype, seed)
            made.srcs.append(old)
            made.operands.append(old)
        elif kind == "eltwise":
            made.post_ops.append_eltwise(*rng.choice(ELTWISE))
        else:
            dtype = rng.choice([F32, U8, S8, S32]) if kind == "binary" else F32
            values = draw_values(selected, dtype, seed)
            now = mask in (0, 2) or rng.random() < 0.5
            alg = rng.choice(BINARIES)
            if kind == "binary":
                made.post_ops.append_binary(alg, values.flatten() if now else None, mask, dtype)
            else:
                made.post_ops.append_prelu(values.flatten() if now else None, mask)
            made.operands.append(values)
            made.srcs += [] if now else [values]
            if kind == "binary" and alg == "select":
                condition = draw_values(list(shape), U8, seed + 1) % 2
                made.srcs.append(condition)
                made.operands.append(condition)
    return made


@pytest.mark.parametrize("name", OPS)
def test_chains(isa: str, name: str) -> None:
    op, layouts = OPS[name], [torch.contiguous_format, torch.channels_last]
    for case in range(24):
        rng = random.Random(f"{name}/{case}")
        any_source = "pool" in name or "reduction" in name
        src_dtype, dst_dtype = rng.choice(ALL if any_source else [U8, S8]), rng.choice(ALL)
        q = random_q(SHAPE, src_dtype, case).contiguous(memory_format=rng.choice(layouts))
        x = op.x(q, PARAMS[src_dtype])
        made = draw(rng, x.shape, dst_dtype)
        attr = attr_of(**{op.source: PARAMS[src_dtype], "dst": DST[dst_dtype]})
        attr.set_post_ops(made.post_ops)
        keywords = {"attr": attr, "dst_dtype": dst_dtype, "post_op_srcs": made.srcs}
        got = op.call(q, **keywords)
        label = (case, src_dtype, dst_dtype, str(made.post_ops))
        with torchq.use_isa("reference"):
            assert_same(got, op.call(q, **keywords), label)
        low, expected, high = oracle.finish(
            x, str(made.post_ops), made.operands, DST[dst_dtype], dst_dtype, op.relative
        )
        assert got.shape == expected.shape and got.dtype == dst_dtype, label
        if not (op.relative or oracle.approximate(str(made.post_ops))):
            assert_same(got + 0, expected + 0, label)
        outside = (got < torch.minimum(low, high)) | (got > torch.maximum(low, high))
        assert not outside.any(), (label, got[outside][:3], low[outside][:3], high[outside][:3])


def test_threads_and_long_rows(isa: str) -> None:
    """Blocks of 512 values begin anywhere in an operand's period."""
    q = random_q((3, 700, 9), U8)
    attr = Attr()
    attr.post_ops.append_binary("mul", torch.rand(700) + 0.5, 2).append_prelu(torch.rand(9), 4)
    attr.post_ops.append_binary("add", torch.randn(3 * 9), 5)
    operands = [
        values.reshape(shape)
        for values, shape in zip(
            attr.post_ops.values, [(1, 700, 1), (1, 1, 9), (3, 1, 9)], strict=True
        )
    ]
    x = oracle.finish(q.float(), str(attr.post_ops), operands, (1.0, 0), F32)[1]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for src in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
            assert_same(TF.eltwise(src, "linear", 1.0, attr=attr, dst_dtype=F32), x)
            got = TF.reduction(src.unsqueeze(-1), "sum", -1, attr=attr, dst_dtype=F32)
            assert_same(got, x)


def test_pools_without_post_ops_are_real_ones(isa: str) -> None:
    """A scale or a dtype alone is enough; divisors need no zero point of 0."""
    q, params = random_q(SHAPE, U8), (0.031, 131)
    got = TF.avg_pool(q, 2, divisor_override=3, attr=attr_of(src=params), dst_dtype=F32)
    total = (q.long() - 131).float().unfold(2, 2, 2).unfold(3, 2, 2).sum((-1, -2))
    assert_same(got, torch.tensor(0.031) * (total / 3))
    assert_same(TF.max_pool(q, 2, dst_dtype=F32), TF.max_pool(q, 2).float())
    got = TF.avg_pool(q, 3, 1, 1, count_include_pad=False, attr=attr_of(src=params, dst=params))
    assert (got.int() - TF.avg_pool(q, 3, 1, 1, count_include_pad=False).int()).abs().max() <= 1
    empty = TF.max_pool(q[:0], 2, dst_dtype=S32)
    assert empty.shape == (0, 19, 2, 3) and empty.dtype == S32


@pytest.mark.parametrize("name", OPS)
def test_errors(name: str) -> None:
    op, q = OPS[name], random_q(SHAPE, U8)
    shape = op.call(q, dst_dtype=U8).shape

    def chain(text: str, *srcs: Tensor) -> dict[str, object]:
        attr = Attr().set_post_ops(PostOps.parse(text))
        return {"attr": attr, "dst_dtype": U8, "post_op_srcs": srcs}

    old, one = torch.zeros(shape, dtype=U8), torch.zeros([1] * len(shape))
    refuse(ValueError, "post_op_srcs must be 1 tensors", op.call, q, **chain("sum"))
    refuse(ValueError, "post_op_srcs must be 0 tensors", op.call, q, **chain("", old))
    refuse(TypeError, r"post_op_srcs\[0\] must be uint8", op.call, q, **chain("sum", old.int()))
    refuse(ValueError, "must have shape", op.call, q, **chain("sum", old[:1]))
    refuse(ValueError, "values must be present", op.call, q, **chain("binary_add:2"))
    refuse(ValueError, "must have masks from 0", op.call, q, **chain("binary_add:999", one))
    refuse(NotImplementedError, "nearest", op.call, q, **chain("dw_conv:3:1:1"))


def test_pool_errors() -> None:
    q = random_q(SHAPE, U8)
    refuse(ValueError, "zero_point must be 0 with attr", TF.avg_pool, q, 2, zero_point=3,
           dst_dtype=F32)  # fmt: skip
    refuse(ValueError, "scales, zero_points and dst_dtype must come together",
           torch.ops.torchq.max_pool, q, [2, 2, 2, 2, 0, 0, 0, 0, 1, 1], False,
           post_ops="eltwise_relu")  # fmt: skip


def test_refusals() -> None:
    """Ops without post-ops raise instead of ignoring them."""
    q, attr = random_q((2, 3), U8), Attr()
    attr.post_ops.append_eltwise("relu")
    refuse(
        NotImplementedError, "torchq.sum: post_ops must be empty.*nearest", TF.sum, [q], attr=attr
    )
    refuse(NotImplementedError, "torchq.concat: post_ops must be empty", TF.concat, [q], attr)
