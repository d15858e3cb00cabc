# SPDX-License-Identifier: Apache-2.0
"""Random matrix products, and convolutions under oneDNN 2's output scales."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import reference
import reference_matmul
import torch
import torch.nn.functional as F
from chains import Chain, ChainMaker
from differential import EPSILON, TIE, Case, Exact
from matmul_cases import (
    F32,
    S8,
    S32,
    U8,
    Quantization,
    quantization,
    random_q,
    random_weight,
    wrong_operands,
)
from torch import Tensor

import torchq.functional as TF
from benchmarks.onednn import Depthwise
from torchq import Attr, PostOps

# test_conformance.py: test_a_prelu_of_onednn_reads_the_operand_of_another
_PRELU_BEHIND_PRELU = re.compile("prelu.*eltwise.*prelu")


def matmul(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Both operands at run time; half with zero points, on the weights too."""
    batch = rng.choice(((), (), (2,), (2, 3)))
    rows, inner, columns = rng.randint(1, 9), rng.choice((1, 4, 7, 33, 64)), rng.randint(1, 35)
    shape = (*batch, rows, columns)
    axis = len(batch) + 1
    q = quantization(rng, data, shape, inner, zero_points=index % 2 == 0, axis=axis)
    src = random_q(data, q.src_dtype, *batch, rows, inner)
    weight = random_weight(data, *(1 if rng.random() < 0.3 else n for n in batch), inner, columns)
    weight_zero_point = rng.choice((0, 3, -20)) if q.src_zero_point else 0
    attr = q.attr(1 << axis)
    if weight_zero_point:
        attr.set_zero_points("weights", 0, weight_zero_point)
    bias, oracle = q.bias, q.oracle()
    if rows > 1 and rng.random() < 0.3:  # of rows: for the oracle a post-op in front
        values = torch.randint(-9, 9, (*[1] * len(batch), rows, 1), generator=data)
        q, bias = replace(q, bias=values.to(rng.choice((S8, F32)))), None
        oracle["post_ops"] = "+".join(["binary_add:1", *q.chain.words])
        oracle["post_op_srcs"] = [values.float(), *q.chain.oracle_srcs]

    def exact() -> Exact:
        acc = (src.double() - q.src_zero_point) @ (weight.double() - weight_zero_point)
        return q.exact(acc, axis)

    return Case(
        text=f"src {q.src_dtype} {tuple(src.shape)} weight {tuple(weight.shape)} zp "
        f"{q.src_zero_point} {weight_zero_point} {q.dst_zero_point} dst {q.dst_dtype} "
        f"'{q.chain.text}'",
        torchq=lambda: TF.matmul(src, weight, q.bias, attr, q.dst_dtype, q.chain.olds),
        reference=lambda side=0: reference_matmul.matmul(
            src, weight, bias, q.src_zero_point, weight_zero_point, side=side, **oracle
        ),
        onednn=lambda peer: peer.matmul(
            src, weight, q.bias, weight_zero_point=weight_zero_point or None, **q.onednn()
        ),
        exact=exact,
        approximate=q.chain.approximate,
        sided=True,
        defect="ref_int8" if _PRELU_BEHIND_PRELU.search(q.chain.text) else "",
        zero_points=bool(q.src_zero_point or weight_zero_point or q.dst_zero_point),
    )


def matmul_groups(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Scales of src by row and group of k; of weights one, by column, or in groups of their own."""
    batch = rng.choice(((), (), (2,)))
    rows, columns = rng.randint(1, 9), rng.randint(1, 35)
    size, count = rng.choice((16, 32, 48)), rng.choice((2, 3, 4))  # oneDNN takes no size of 4
    inner = size * count
    shape, axis = (*batch, rows, columns), len(batch) + 1
    q = quantization(rng, data, shape, inner, zero_points=index % 2 == 0, axis=axis)
    src = random_q(data, q.src_dtype, *batch, rows, inner)
    weight = random_weight(data, *batch, inner, columns)
    src_scale = q.src_scale * (0.5 + torch.rand((*batch, rows, count), generator=data))
    weight_size = rng.choice((size, 2 * size)) if count % 2 == 0 and rng.random() < 0.6 else inner
    weight_scale, weight_mask = q.weight_scale, 0 if q.weight_scale.numel() == 1 else 1 << axis
    groups = {"src_scale": (1, size)}
    attr = q.attr(1 << axis).set_scales("src", (2 << axis) - 1, src_scale.flatten(), (1, size))
    if weight_size < inner:
        drawn = 0.5 + torch.rand((inner // weight_size, columns), generator=data)
        weight_scale, weight_mask = drawn * weight_scale, 3 << axis - 1
        groups["weight_scale"] = (weight_size, 1)
        attr.set_scales("weights", weight_mask, weight_scale.flatten(), (weight_size, 1))
    by_group = weight_scale.expand(inner // weight_size, columns).repeat_interleave(
        weight_size // size, 0
    )

    def exact() -> Exact:
        shifted = (src.double() - q.src_zero_point).reshape(*shape[:-1], count, size)
        parts = shifted.transpose(-2, -3) @ weight.double().reshape(*batch, count, size, columns)
        parts = parts * src_scale.double().mT[..., None] * by_group[:, None].double()
        error = (4 + count) * EPSILON * parts.abs().sum(-3)
        return q.behind(Exact(parts.sum(-3), error), axis)

    biases = [] if q.bias is None else [q.bias]
    return Case(
        text=f"src {q.src_dtype} {tuple(src.shape)} weight {tuple(weight.shape)} {groups} mask "
        f"{weight_mask} zp {q.src_zero_point} {q.dst_zero_point} dst {q.dst_dtype} "
        f"'{q.chain.text}'",
        torchq=lambda: TF.matmul(src, weight, q.bias, attr, q.dst_dtype, q.chain.olds),
        reference=lambda side=0: reference_matmul.matmul_by_groups(
            src, weight, None, torch.tensor(1.0), by_group, q.src_zero_point, 0, q.dst_scale,
            q.dst_zero_point, q.dst_dtype,
            "+".join([*["binary_add:2" for _ in biases], *q.chain.words]),
            [*biases, *q.chain.oracle_values], q.chain.oracle_srcs,
            src_scale.movedim(-1, 0)[..., None], side,
        ),
        onednn=lambda peer: peer.matmul(
            src, weight, q.bias,
            **{**q.onednn(), "src_scale": src_scale, "weight_scale": weight_scale},
            masks={"src_scale": (2 << axis) - 1, "weight_scale": weight_mask}, groups=groups,
        ),
        exact=exact,
        approximate=q.chain.approximate,
        sided=True,
        defect="ref_int8" if _PRELU_BEHIND_PRELU.search(q.chain.text) else "",
        zero_points=bool(q.src_zero_point or q.dst_zero_point),
    )  # fmt: skip


def output_scales(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN 2.6: one scale for all, the bias in accumulator units, eltwise post-ops with a scale.

    Post-ops act in units of dst, so either the output scale or an eltwise scale leads there.
    """
    inputs, outputs, size = rng.choice((3, 8, 17, 64)), rng.choice((4, 16, 19)), rng.randint(3, 8)
    src_dtype, dst_dtype = rng.choice((U8, S8)), rng.choice((U8, S8, F32))
    kernel = rng.choice((1, 3))
    src = random_q(data, src_dtype, 2, inputs, size, size)
    weight = random_weight(data, outputs, inputs, kernel, kernel)
    spread = 74.0 * 74.0 * weight[0].numel() ** 0.5
    shape = (2, outputs, size, size)
    real_units = rng.random() < 0.7
    maker = ChainMaker(rng, data, shape, dst_dtype, 0.5, eltwise_scale=16.0 if real_units else 1.0)
    chain = Chain()
    if real_units:
        maker._eltwise(chain)
        if rng.random() < 0.4 and dst_dtype != F32:
            maker._sum(chain)
    count = rng.choice((1, outputs))
    scale = (0.5 + torch.rand(count, generator=data)) * (1 if real_units else 60) / spread
    bias = torch.randint(-5000, 5000, (outputs,), generator=data, dtype=S32)
    bias = rng.choice((None, bias, bias.float()))
    attr = Attr().set_output_scales(0 if count == 1 else 2, scale).set_post_ops(chain.post_ops())
    zero_point = 0 if dst_dtype == F32 else rng.choice((0, 7, 100))
    if zero_point:
        attr.set_zero_points("dst", 0, zero_point)
    padding = kernel // 2

    def exact() -> Exact:
        acc = F.conv2d(src.double(), weight.double(), padding=padding)
        addend = (torch.zeros(1) if bias is None else bias).double().reshape(-1, 1, 1)
        biased, factor = acc + addend, scale.double().reshape(-1, 1, 1)
        size = (acc.abs() + addend.abs()) * factor
        result = chain.exact(Exact(biased * factor, 4 * EPSILON * size, biased))
        return result.plus(torch.tensor(float(zero_point), dtype=torch.float64))

    return Case(
        text=f"{src_dtype} {tuple(src.shape)} {tuple(weight.shape)} -> {dst_dtype} zp {zero_point} "
        f"'{chain.text}' bias {None if bias is None else bias.dtype}",
        torchq=lambda: TF.conv2d(
            src,
            weight,
            bias,
            padding=padding,
            attr=attr,
            dst_dtype=dst_dtype,
            post_op_srcs=chain.olds,
        ),
        reference=lambda side=0: reference.conv(
            src,
            weight,
            bias,
            0,
            side=side,
            stride=[1, 1],
            padding=([padding] * 2, [padding] * 2),
            dilation=[1, 1],
            output_scales=scale,
            dst_zero_point=zero_point,
            dst_dtype=dst_dtype,
            **chain.oracle(),
        ),
        onednn=lambda peer: peer.convolution(
            src,
            weight,
            bias,
            padding=padding,
            output_scale=scale,
            dst_zero_point=zero_point or None,
            dst_dtype=dst_dtype,
            **chain.onednn(dst_dtype),
        ),
        exact=exact,
        approximate=chain.approximate,
        sided=True,
        zero_points=zero_point != 0,
        padding=padding > 0,
    )


def depthwise_fused(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """A 1x1 convolution with a depthwise one of kernel 3 in its post-ops.

    oneDNN takes no sums, and crashes on prelu.
    """
    inputs, channels = rng.choice((3, 8, 17, 64)), rng.choice((4, 16, 19, 40))
    height, width, stride = rng.randint(1, 9), rng.randint(1, 9), rng.choice((1, 2))
    between = (rng.choice((1, 2)), channels, height, width)
    shape = (*between[:2], -(-height // stride), -(-width // stride))

    def draw(shape: tuple[int, ...], reduction: int) -> Quantization:
        options: dict[str, Any] = {"sums": False, "broadcasts": ("one", "channel")}
        q = quantization(rng, data, shape, reduction, zero_points=False, **options)
        return q if "prelu" not in q.chain.text else draw(shape, reduction)

    first, second = draw(between, inputs), draw(shape, 9)
    stored = rng.choice((U8, S8))
    first_scale = float(torch.tensor(rng.uniform(0.02, 0.05)))
    first = replace(first, dst_dtype=stored, dst_scale=first_scale)
    weight_scale = second.weight_scale * (second.src_scale / first_scale)
    second = replace(second, src_scale=first_scale, src_dtype=stored, weight_scale=weight_scale)
    src = random_q(data, first.src_dtype, between[0], inputs, height, width)
    weight = random_weight(data, channels, inputs, 1, 1)
    filters = random_weight(data, channels, 1, 3, 3)
    bias = "" if second.bias is None else ":f32"
    name = "u8" if stored == U8 else "s8"
    step = f"dw_conv:3:{stride}:1:{name}{bias}"
    text = "+".join(filter(None, [first.chain.text, step, second.chain.text]))
    own = [filters] if second.bias is None else [filters, second.bias]
    attr = first.attr(1).set_post_ops(
        PostOps.parse(text, [*first.chain.values, *own, *second.chain.values])
    )
    attr.set_scales("dw_weights", 0 if weight_scale.numel() == 1 else 1, weight_scale)
    if second.dst_scale is not None:
        attr.set_scales("dw_dst", 0, second.dst_scale)
    size = [(height, stride, shape[2]), (width, stride, shape[3])]
    window: dict[str, Any] = {"stride": [stride] * 2, "dilation": [1, 1]}
    padding = ([1, 1], [(out - 1) * step + 3 - n - 1 for n, step, out in size])

    def reference_of(side: int = 0) -> Tensor:
        ones = {"stride": [1, 1], "padding": ([0, 0], [0, 0]), "dilation": [1, 1]}
        mid = reference.conv(src, weight, first.bias, 0, **ones, **first.oracle())
        more = {"padding": padding, "groups": channels, **window}
        return reference.conv(mid, filters, second.bias, 0, side=side, **more, **second.oracle())

    def exact() -> Exact:
        """Returns an interval: a stored value close to a tie may be rounded either way."""
        real = first.exact(F.conv2d(src.double(), weight.double()), 1)
        low, high = (0, 255) if stored == U8 else (-128, 127)
        one, other = (
            (real.y + sign * (real.error + TIE)).round().clamp(low, high) for sign in (-1, 1)
        )
        ends = [e for pair in zip(*(side[::-1] for side in padding), strict=True) for e in pair]
        mid = F.pad(real.y.round().clamp(low, high), ends)
        acc = F.conv2d(mid, filters.double(), stride=stride, groups=channels)
        doubt = F.pad(other - one, ends)
        doubt = F.conv2d(doubt, filters.double().abs(), stride=stride, groups=channels)
        return second.exact(acc, 1, doubt)

    wrong = wrong_operands(channels, second.chain)
    return Case(
        text=f"src {first.src_dtype} {tuple(src.shape)} -> {between} -> {shape} "
        f"{second.dst_dtype} '{text}'",
        torchq=lambda: TF.conv2d(src, weight, first.bias, attr=attr, dst_dtype=second.dst_dtype),
        reference=reference_of,
        onednn=lambda peer: peer.convolution(
            src,
            weight,
            first.bias,
            src_scale=first.src_scale,
            weight_scale=first.weight_scale,
            dst_scale=first_scale,
            dst_dtype=second.dst_dtype,
            post_ops=text,
            post_op_tensors=[*first.chain.values, *second.chain.values],
            dw=Depthwise(
                filters, second.bias, stride, stored, second.weight_scale, second.dst_scale
            ),
        ),
        exact=exact,
        approximate=first.chain.approximate or second.chain.approximate,
        sided=not first.chain.approximate,  # what is stored in between may differ
        defect=wrong and f"ref_fused_convolution:any:jit_uni_int8_1x1:avx2:{wrong}",
        padding=True,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "matmul": matmul,
    "matmul_groups": matmul_groups,
    "output_scales": output_scales,
    "depthwise_fused": depthwise_fused,
}
