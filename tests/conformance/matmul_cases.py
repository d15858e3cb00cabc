# SPDX-License-Identifier: Apache-2.0
"""Random convolutions and inner products."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reference
import torch
import torch.nn.functional as F
from chains import Chain, ChainMaker
from differential import EPSILON, Case, Exact
from geometries import ConvShape, ConvTransposeShape
from peers import exact_weight
from torch import Tensor

import torchq.functional as TF
from torchq import Attr

U8, S8, S32, F32 = torch.uint8, torch.int8, torch.int32, torch.float32
CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TORCHQ_CONV = {1: TF.conv1d, 2: TF.conv2d, 3: TF.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
TORCHQ_TRANSPOSED = {1: TF.conv_transpose1d, 2: TF.conv_transpose2d, 3: TF.conv_transpose3d}


@dataclass(frozen=True)
class Quantization:
    """Everything about a case but its geometry; zero points of 0 are left out by both sides."""

    src_dtype: torch.dtype
    dst_dtype: torch.dtype
    src_scale: float
    weight_scale: Tensor
    dst_scale: float | None
    src_zero_point: int
    dst_zero_point: int
    bias: Tensor | None
    chain: Chain

    def attr(self, weight_mask: int) -> Attr:
        attr = Attr().set_scales("src", 0, self.src_scale)
        mask = 0 if self.weight_scale.numel() == 1 else weight_mask
        attr.set_scales("weights", mask, self.weight_scale)
        if self.dst_scale is not None:
            attr.set_scales("dst", 0, self.dst_scale)
        if self.src_zero_point:
            attr.set_zero_points("src", 0, self.src_zero_point)
        if self.dst_zero_point:
            attr.set_zero_points("dst", 0, self.dst_zero_point)
        return attr.set_post_ops(self.chain.post_ops())

    def oracle(self) -> dict[str, Any]:
        return {
            "src_scale": torch.tensor(self.src_scale),
            "weight_scale": self.weight_scale,
            "dst_scale": None if self.dst_scale is None else torch.tensor(self.dst_scale),
            "dst_zero_point": self.dst_zero_point,
            "dst_dtype": self.dst_dtype,
            **self.chain.oracle(),
        }

    def onednn(self) -> dict[str, Any]:
        return {
            "src_scale": self.src_scale,
            "weight_scale": self.weight_scale,
            "dst_scale": self.dst_scale,
            "src_zero_point": self.src_zero_point or None,
            "dst_zero_point": self.dst_zero_point or None,
            "dst_dtype": self.dst_dtype,
            **self.chain.onednn(self.dst_dtype),
        }

    def exact(self, acc: Tensor, axis: int, doubt: Tensor | float = 0) -> Exact:
        """``acc`` has the source's zero point taken off; another may be off by ``doubt``."""
        weight_scale = along(self.weight_scale, axis, acc.ndim)
        scale = float(torch.tensor(self.src_scale)) * weight_scale
        x = acc * scale
        return self.behind(Exact(x, 4 * EPSILON * x.abs() + doubt * scale, acc), axis)

    def behind(self, result: Exact, axis: int) -> Exact:
        """Adds the bias, the chain and the scale and zero point of dst to ``result``."""
        if self.bias is not None:
            whole = self.bias.dim() > 1
            bias = self.bias.double() if whole else along(self.bias, axis, result.y.ndim)
            result = result.plus(bias)
        result = self.chain.exact(result)
        if self.dst_scale is not None:
            result = result.times(1 / float(torch.tensor(self.dst_scale)))
        return result.plus(torch.tensor(float(self.dst_zero_point), dtype=torch.float64))


def along(values: Tensor, axis: int, dims: int) -> Tensor:
    """One value, or one per index of an axis, in float64."""
    shape = [-1 if d == axis and values.numel() > 1 else 1 for d in range(dims)]
    return values.double().reshape(shape)


def random_q(data: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    low, high = (0, 256) if dtype == U8 else (-128, 128)
    return torch.randint(low, high, shape, generator=data).to(dtype)


def random_weight(data: torch.Generator, *shape: int) -> Tensor:
    return exact_weight(random_q(data, S8, *shape))


def quantization(
    rng: random.Random,
    data: torch.Generator,
    shape: tuple[int, ...],
    reduction: int,
    *,
    zero_points: bool,
    axis: int = 1,
    sums: bool = True,
    **maker_options: Any,
) -> Quantization:
    """Results of a few units, and destinations that use their range and saturate now and then."""
    src_dtype, dst_dtype = rng.choice((U8, S8)), rng.choice((U8, S8, S8, U8, S32, F32))
    channels = shape[axis]
    spread = 74.0 * 74.0 * max(reduction, 1) ** 0.5
    weight_scale = 0.5 + torch.rand(rng.choice((1, channels)), generator=data)
    dst_scale = None
    if dst_dtype != F32:
        dst_scale = {U8: 0.03, S8: 0.04, S32: 1e-4}[dst_dtype] * rng.uniform(0.5, 1.5)
    src_zero_point = dst_zero_point = 0
    if zero_points:
        src_zero_point = rng.choice((1, 100, 128, 255) if src_dtype == U8 else (-128, -7, 1, 90))
        if dst_dtype != F32:
            dst_zero_point = rng.choice((1, 2, 100, 128) if dst_dtype == U8 else (-90, -7, 1, 30))
    old_scale = dst_scale or 0.5
    old_dtype = dst_dtype if sums else None
    maker = ChainMaker(rng, data, shape, old_dtype, old_scale, axis, **maker_options)
    return Quantization(
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
        src_scale=float(torch.tensor(rng.uniform(1, 2) * 1.5 / spread**0.5)),
        weight_scale=weight_scale / spread**0.5,
        dst_scale=None if dst_scale is None else float(torch.tensor(dst_scale)),
        src_zero_point=src_zero_point,
        dst_zero_point=dst_zero_point,
        bias=torch.randn(channels, generator=data) if rng.random() < 0.6 else None,
        chain=maker.chain(),
    )


def random_conv(rng: random.Random, padded: bool) -> ConvShape:
    """Dense, grouped or depthwise."""
    nd = rng.choice((1, 2, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4, 0))  # 0: depthwise
    inputs = rng.choice((1, 3, 8, 16, 17, 24))
    if groups == 0:
        inputs = outputs = groups = rng.choice((5, 8, 16, 19, 33))
    else:
        outputs = groups * rng.choice((1, 4, 8, 9, 16))
        inputs *= groups
    kernel = [rng.choice((1, 2, 3, 3)) for _ in range(nd)]
    if padded:
        kernel[0] = max(kernel[0], 2)
    stride = [rng.choice((1, 1, 2)) for _ in range(nd)]
    dilation = [rng.choice((1, 1, 1, 2)) for _ in range(nd)]
    padding = [rng.randint(0, k - 1) if padded else 0 for k in kernel]
    if padded and not any(padding):
        padding[0] = 1
    end = [
        rng.randint(0, k - 1) if padded and rng.random() < 0.3 else p
        for k, p in zip(kernel, padding, strict=True)
    ]
    size = [rng.randint(5, 11 if nd < 3 else 6) for _ in range(nd)]
    window = map(tuple, (size, kernel, stride, padding, end, dilation))
    return ConvShape(rng.choice((1, 2)), inputs, outputs, *window, groups, "conv")


def wrong_operands(channels: int, chain: Chain) -> str:
    """The defect of oneDNN's depthwise convolutions by AVX2, of so many channels.

    test_conformance.py: test_an_operand_behind_a_depthwise_convolution_of_onednn_is_ignored
    """
    operands = "binary" in chain.text or "prelu" in chain.text
    return "jit_uni_int8:avx2" if channels % 8 > 1 and operands else ""


def convolution(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Half with zero points, half with padding."""
    shape = random_conv(rng, padded=index % 2 == 1)
    weight = random_weight(data, *shape.weight)
    q = quantization(rng, data, shape.dst, shape.reduction, zero_points=index % 4 < 2)
    src = random_q(data, q.src_dtype, *shape.src)
    nd, (begin, end) = len(shape.size), map(list, shape.padding)
    depthwise = shape.groups == shape.in_channels
    window: dict[str, Any] = {
        "stride": list(shape.stride),
        "dilation": list(shape.dilation),
        "groups": shape.groups,
    }
    ends = {"padding": begin, "padding_end": end}

    def exact() -> Exact:
        sides = [side for pair in zip(begin[::-1], end[::-1], strict=True) for side in pair]
        shifted = F.pad(src.double() - q.src_zero_point, sides)
        return q.exact(CONVOLVE[nd](shifted, weight.double(), **window), 1)

    return Case(
        text=f"{shape} src {q.src_dtype} dst {q.dst_dtype} zp {q.src_zero_point} "
        f"{q.dst_zero_point} '{q.chain.text}'",
        torchq=lambda: TORCHQ_CONV[nd](
            src,
            weight,
            q.bias,
            attr=q.attr(1 if shape.groups == 1 else 3),
            dst_dtype=q.dst_dtype,
            post_op_srcs=q.chain.olds,
            **window,
            **ends,
        ),
        reference=lambda side=0: reference.conv(
            src, weight, q.bias, q.src_zero_point, padding=(begin, end), side=side, **window,
            **q.oracle(),
        ),
        onednn=lambda peer: peer.convolution(
            src, weight, q.bias, **window, **ends, **q.onednn()
        ),
        exact=exact,
        approximate=q.chain.approximate,
        sided=True,
        defect=wrong_operands(shape.in_channels, q.chain) if depthwise else "",
        zero_points=bool(q.src_zero_point or q.dst_zero_point),
        padding=any(begin + end),
    )  # fmt: skip


def random_conv_transpose(rng: random.Random, padded: bool) -> ConvTransposeShape:
    nd = rng.choice((1, 2, 2, 3))
    groups = rng.choice((1, 1, 1, 2, 4))
    channels = groups * rng.choice((1, 3, 8, 16)), groups * rng.choice((1, 5, 16))
    kernel = [rng.choice((1, 2, 3, 4)) for _ in range(nd)]
    if padded:
        kernel[0] = max(kernel[0], 2)
    stride = [rng.choice((1, 2, 2, 3)) for _ in range(nd)]
    dilation = [rng.choice((1, 1, 1, 2)) for _ in range(nd)]
    extra = [rng.randrange(s) if rng.random() < 0.3 else 0 for s in stride]
    padding = [rng.randint(0, k // 2) if padded else 0 for k in kernel]
    if padded and not any(padding):
        padding[0] = 1
    size = [rng.randint(3, 7 if nd < 3 else 4) for _ in range(nd)]
    window = map(tuple, (size, kernel, stride, padding, padding, dilation))
    batch = rng.choice((1, 2))
    return ConvTransposeShape(batch, *channels, *window, groups, "conv_transpose", tuple(extra))


def deconvolution(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """Half with zero points, half with padding."""
    shape = random_conv_transpose(rng, padded=index % 2 == 1)
    weight = random_weight(data, *shape.weight)
    reduction = shape.in_channels // shape.groups * max(1, math.prod(shape.kernel) // 4)
    q = quantization(rng, data, shape.dst, reduction, zero_points=index % 4 < 2)
    src = random_q(data, q.src_dtype, *shape.src)
    nd, padding = len(shape.size), list(shape.padding_begin)
    window: dict[str, Any] = {
        "stride": list(shape.stride),
        "dilation": list(shape.dilation),
        "output_padding": list(shape.output_padding),
        "groups": shape.groups,
    }

    def exact() -> Exact:
        shifted = src.double() - q.src_zero_point
        return q.exact(TRANSPOSED[nd](shifted, weight.double(), padding=padding, **window), 1)

    return Case(
        text=f"src {q.src_dtype} {shape.src} weight {shape.weight} {window} padding {padding} "
        f"dst {q.dst_dtype} zp {q.src_zero_point} {q.dst_zero_point} '{q.chain.text}'",
        torchq=lambda: TORCHQ_TRANSPOSED[nd](
            src,
            weight,
            q.bias,
            padding=padding,
            attr=q.attr(1 if shape.groups == 1 else 3),
            dst_dtype=q.dst_dtype,
            post_op_srcs=q.chain.olds,
            **window,
        ),
        reference=lambda side=0: reference.conv_transpose(
            src, weight, q.bias, q.src_zero_point, padding=(padding, padding), side=side, **window,
            **q.oracle(),
        ),
        onednn=lambda peer: peer.deconvolution(
            src, weight, q.bias, padding=padding, **window, **q.onednn()
        ),
        exact=exact,
        approximate=q.chain.approximate,
        sided=True,
        # test_conformance.py: test_a_deconvolution_of_onednn_is_wrong, and of_onednn_today
        defect=("jit_", "brg_deconv") if max(shape.stride) > 1 else "",
        zero_points=bool(q.src_zero_point or q.dst_zero_point),
        padding=any(padding),
    )  # fmt: skip


def inner_product(rng: random.Random, data: torch.Generator, index: int) -> Case:
    """oneDNN's has no zero points: those are matmul's. Some sums go beyond 2^24."""
    rows, outputs = rng.randint(1, 9), rng.choice((1, 5, 16, 33, 70))
    inputs = rng.choice((1, 4, 7, 64, 65, 130))
    large = index % 16 == 0
    if large:
        inputs = 1500
    q = quantization(rng, data, (rows, outputs), inputs, zero_points=False)
    src, weight = random_q(data, q.src_dtype, rows, inputs), random_weight(data, outputs, inputs)
    if large:
        src, weight = src | 64, exact_weight((weight | 96).clamp(min=96))
        src = src.clamp(min=64)
    sizes = (inputs // 4, 2, 2) if inputs % 4 == 0 else (inputs,)  # channels and spatial dims
    images, kernels = src.reshape(rows, *sizes), weight.reshape(outputs, *sizes)
    text = (
        f"sizes {sizes} src {q.src_dtype} {tuple(src.shape)} weight {tuple(weight.shape)} "
        f"dst {q.dst_dtype} '{q.chain.text}'"
    )

    def ours() -> Tensor:
        given = {"attr": q.attr(1), "dst_dtype": q.dst_dtype, "post_op_srcs": q.chain.olds}
        return TF.inner_product(images, kernels, q.bias, **given)

    return Case(
        text=text,
        torchq=ours,
        reference=lambda side=0: reference.linear(src, weight, q.bias, 0, side=side, **q.oracle()),
        onednn=lambda peer: peer.inner_product(images, kernels, q.bias, **q.onednn()),
        exact=lambda: q.exact(src.double() @ weight.double().T, 1),
        approximate=q.chain.approximate,
        sided=True,
    )


GENERATORS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "convolution": convolution,
    "deconvolution": deconvolution,
    "inner_product": inner_product,
}
