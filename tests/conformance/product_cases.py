# SPDX-License-Identifier: Apache-2.0
"""Random matrix products, and convolutions under oneDNN 2's output scales."""

from __future__ import annotations

import random
from collections.abc import Callable

import reference
import reference_matmul
import torch
import torch.nn.functional as F
from chains import Chain, ChainMaker
from differential import EPSILON, Case, Exact
from matmul_cases import F32, S8, S32, U8, quantization, random_q

import torchq.functional as TF
from torchq import Attr


def matmul(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Both operands at run time; half with zero points, on the weights too."""
    batch = rng.choice(((), (), (2,), (2, 3)))
    rows, inner, columns = rng.randint(1, 9), rng.choice((1, 4, 7, 33, 64)), rng.randint(1, 35)
    shape = (*batch, rows, columns)
    axis = len(batch) + 1
    q = quantization(rng, data, shape, inner, zero_points=index % 2 == 0, axis=axis)
    src = random_q(data, q.src_dtype, *batch, rows, inner)
    weight = random_q(data, S8, *(1 if rng.random() < 0.3 else n for n in batch), inner, columns)
    weight_zero_point = rng.choice((0, 3, -20)) if q.src_zero_point else 0
    attr = q.attr(1 << axis, text=q.chain.text.replace(f":{1 << axis}", ":2"))
    if weight_zero_point:
        attr.set_zero_points("weights", 0, weight_zero_point)
    oracle = q.oracle() | {"post_ops": q.chain.text.replace(f":{1 << axis}", ":2")}

    def exact() -> Exact:
        acc = (src.double() - q.src_zero_point) @ (weight.double() - weight_zero_point)
        return q.exact(acc, axis)

    return Case(
        text=f"src {q.src_dtype} {tuple(src.shape)} weight {tuple(weight.shape)} zp "
        f"{q.src_zero_point} {weight_zero_point} {q.dst_zero_point} dst {q.dst_dtype} "
        f"'{q.chain.text}'",
        torchq=lambda: TF.matmul(src, weight, q.bias, attr, q.dst_dtype, q.chain.olds),
        reference=lambda: reference_matmul.matmul(
            src, weight, q.bias, q.src_zero_point, weight_zero_point, **oracle
        ),
        onednn=lambda peer: peer.matmul(
            src, weight, q.bias, weight_zero_point=weight_zero_point or None, **q.onednn()
        ),
        exact=exact,
        approximate=q.chain.approximate,
        zero_points=bool(q.src_zero_point or weight_zero_point or q.dst_zero_point),
    )


def output_scales(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN 2.6: one scale for all, the bias in accumulator units, eltwise post-ops with a scale.

    Post-ops act in units of dst, so either the output scale or an eltwise scale leads there.
    """
    inputs, outputs, size = rng.choice((3, 8, 17, 64)), rng.choice((4, 16, 19)), rng.randint(3, 8)
    src_dtype, dst_dtype = rng.choice((U8, S8)), rng.choice((U8, S8, F32))
    kernel = rng.choice((1, 3))
    src = random_q(data, src_dtype, 2, inputs, size, size)
    weight = random_q(data, S8, outputs, inputs, kernel, kernel)
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
    padding = kernel // 2

    def exact() -> Exact:
        acc = F.conv2d(src.double(), weight.double(), padding=padding)
        addend = (torch.zeros(1) if bias is None else bias).double().reshape(-1, 1, 1)
        biased, factor = acc + addend, scale.double().reshape(-1, 1, 1)
        size = (acc.abs() + addend.abs()) * factor
        return chain.exact(Exact(biased * factor, 4 * EPSILON * size, biased))

    return Case(
        text=f"{src_dtype} {tuple(src.shape)} {tuple(weight.shape)} -> {dst_dtype} "
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
        reference=lambda: reference.conv(
            src,
            weight,
            bias,
            0,
            stride=[1, 1],
            padding=([padding] * 2, [padding] * 2),
            dilation=[1, 1],
            output_scales=scale,
            dst_dtype=dst_dtype,
            post_ops=chain.text,
            post_op_srcs=chain.olds,
        ),
        onednn=lambda peer: peer.convolution(
            src,
            weight,
            bias,
            padding=padding,
            output_scale=scale,
            dst_dtype=dst_dtype,
            post_ops=chain.text,
            dst=chain.olds[0] if chain.olds else None,
        ),
        exact=exact,
        approximate=chain.approximate,
        padding=padding > 0,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "matmul": matmul,
    "output_scales": output_scales,
}
