# SPDX-License-Identifier: Apache-2.0
"""One request to ``peer.cpp``: a header line and a payload in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Attributes", "Depthwise", "Request", "geometry", "layout_order", "plain"]

_DTYPES = {
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int32: "s32",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
}
_LETTERS = "abcdefghijkl"  # oneDNN's names for logical dimensions


@dataclass
class Attributes:
    """Keyword arguments that every primitive of `Peer` takes besides its operands.

    A scale or zero point is a number or a tensor. One value has mask 0; several are per output
    channel for weights and per dimension 1 otherwise, unless ``masks`` says it, for example
    ``masks={"weight_scale": 2}``. ``groups={"weight_scale": (32, 1)}`` are the sizes of blocks that
    share a scale, in the last two dimensions.

    Attributes:
        output_scale: oneDNN 2's one scale for all, in place of those of oneDNN 3.
        dst: What the destination holds before, for a sum post-op; zeros if absent.
        dst_dtype: The dtype of the result, by default that of ``dst`` or the first source.
        post_ops: The chain as text, for example ``"sum:0.5+eltwise_relu+binary_add:2"``.
        post_op_tensors: The operands of its binary and prelu post-ops, in order.
        samples: If positive, the primitive is timed and a `Timing` returned, not a tensor.
        iterations: Executions per sample; 0 makes a sample last about 5 ms.
    """

    src_scale: float | Tensor | None = None
    src0_scale: float | Tensor | None = None
    src1_scale: float | Tensor | None = None
    weight_scale: float | Tensor | None = None
    dst_scale: float | Tensor | None = None
    src_zero_point: int | Tensor | None = None
    src0_zero_point: int | Tensor | None = None
    src1_zero_point: int | Tensor | None = None
    weight_zero_point: int | Tensor | None = None
    dst_zero_point: int | Tensor | None = None
    output_scale: float | Tensor | None = None
    masks: dict[str, int] = field(default_factory=dict)
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    dst: Tensor | None = None
    dst_dtype: torch.dtype | None = None
    post_ops: str = ""
    post_op_tensors: Sequence[Tensor] = ()
    samples: int = 0
    iterations: int = 0


@dataclass
class Depthwise:
    """The operands of a ``dw_conv`` post-op; the scale of its source is the ``dst_scale``."""

    weight: Tensor
    bias: Tensor | None = None
    stride: int = 1
    dtype: torch.dtype = torch.uint8  # of its source
    weight_scale: Tensor | None = None
    dst_scale: float | None = None


class Request:
    """A header and a payload in the making; ``peer.cpp`` describes them."""

    def __init__(self, primitive: str, attributes: dict[str, Any], **parameters: Any) -> None:
        self.primitive = primitive
        self.attributes = Attributes(**attributes)
        self.words: list[str] = []
        self.payload: list[bytes] = []
        self.results: list[tuple[torch.dtype, Sequence[int], str]] = []
        for key, value in parameters.items():
            self.parameter(key, value)

    def parameter(self, key: str, value: Any) -> None:
        text = "x".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        self.words.append(f"{key}={text}")

    def tensor(self, name: str, value: Tensor | None, layout: str | None = None) -> None:
        """Adds a tensor, channels-last unless a layout is given. None adds nothing."""
        if value is None:
            return
        if value.dtype not in _DTYPES:
            raise TypeError(
                f"benchmarks.onednn: {name} must be one of {list(_DTYPES)}, got {value.dtype}."
            )
        layout = layout or channels_last(value.dim())
        shape = "x".join(map(str, value.shape))
        self.words.append(f"@{name}={_DTYPES[value.dtype]}:{shape}:{layout}")
        stored = value.detach().permute(layout_order(layout)).contiguous()
        self.payload.append(stored.flatten().view(torch.uint8).numpy().tobytes())
        if name.startswith("dst"):
            self.results.append((value.dtype, value.shape, layout))

    def destination(
        self, shape: Sequence[int], src: Tensor, *, channel_mask: int = 2, layout: str | None = None
    ) -> None:
        """Adds the destination and all that depends on its shape: completes the request.

        ``channel_mask`` is the weights' mask for one value per output channel.
        """
        given = self.attributes
        dst = given.dst
        if dst is None:
            dst = torch.zeros(tuple(shape), dtype=given.dst_dtype or src.dtype)
        if dst.shape != tuple(shape) or given.dst_dtype not in (None, dst.dtype):
            raise ValueError(
                f"benchmarks.onednn: dst must be {given.dst_dtype or dst.dtype} {list(shape)}, "
                f"got {dst.dtype} {list(dst.shape)}."
            )
        self.tensor("dst", dst, layout)
        for argument in ("src", "src0", "src1", "weight", "dst"):
            for kind, dtype in (("scale", torch.float32), ("zero_point", torch.int32)):
                key = f"{argument}_{kind}"
                value = getattr(given, key, None)
                if value is None:
                    continue
                values = torch.as_tensor(value, dtype=dtype).flatten()
                several = channel_mask if argument == "weight" else 2
                mask = given.masks.get(key, 0 if values.numel() == 1 else several)
                name = "weights" if argument == "weight" else argument
                blocks = (
                    [":" + "x".join(map(str, given.groups[key]))] if key in given.groups else []
                )
                self.tensor("".join([f"{kind}:{name}:{mask}", *blocks]), values)
        if given.output_scale is not None:
            values = torch.as_tensor(given.output_scale, dtype=torch.float32).flatten()
            self.tensor(f"output_scale:dst:{0 if values.numel() == 1 else 2}", values)
        if given.post_ops:
            self.parameter("post_ops", given.post_ops)
        self._post_op_tensors(dst.shape, layout)
        if given.samples:
            self.parameter("samples", given.samples)
            self.parameter("iterations", given.iterations)

    def depthwise(self, dw: Depthwise, between: Sequence[int]) -> list[int]:
        """Adds what a depthwise post-op reads; returns the destination's shape."""
        weight = dw.weight.unsqueeze(1)
        self.tensor("dw_weights", weight, plain(weight.dim()))
        self.tensor("dw_bias", dw.bias)
        shape = "x".join(map(str, between))
        self.parameter("between", f"{_DTYPES[dw.dtype]}:{shape}:{channels_last(len(between))}")
        for name, scale in (("dw_weights", dw.weight_scale), ("dw_dst", dw.dst_scale)):
            if scale is not None:
                values = torch.as_tensor(scale, dtype=torch.float32).flatten()
                self.tensor(f"scale:{name}:{0 if values.numel() == 1 else 3}", values)
        return [*between[:2], *(-(-size // dw.stride) for size in between[2:])]

    def _post_op_tensors(self, shape: Sequence[int], layout: str | None) -> None:
        """Adds the post-ops' operands, each in the shape its mask selects of the destination."""
        chain = [post_op.split(":") for post_op in self.attributes.post_ops.split("+")]
        chain = [parts for parts in chain if parts[0].startswith(("binary_", "prelu"))]
        operands = self.attributes.post_op_tensors
        if len(chain) != len(operands):
            raise ValueError(
                f"benchmarks.onednn: post_op_tensors must be {len(chain)} tensors for "
                f"'{self.attributes.post_ops}', got {len(operands)}."
            )
        for i, ((name, mask, *_), operand) in enumerate(zip(chain, operands, strict=True)):
            selected = [size if int(mask) >> dim & 1 else 1 for dim, size in enumerate(shape)]
            # oneDNN wants the weights of a prelu channels-last, whatever the layout of dst.
            own = None if name == "prelu" else layout
            self.tensor(f"post_op:{i}", operand.reshape(selected), own)

    def header(self) -> str:
        size = sum(map(len, self.payload))
        return " ".join([self.primitive, str(size), *self.words]) + "\n"


def per_dim(nd: int, *values: int | Sequence[int]) -> list[list[int]]:
    """Each with one number per spatial dimension."""
    return [[value] * nd if isinstance(value, int) else list(value) for value in values]


def geometry(
    src: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    padding_end: int | Sequence[int] | None,
    dilation: int | Sequence[int],
) -> tuple[dict[str, list[int]], list[int]]:
    """The parameters of a convolution's or pooling's geometry, and its result's spatial size."""
    end = padding if padding_end is None else padding_end
    taps, steps, begin, after, gaps = per_dim(src.dim() - 2, kernel, stride, padding, end, dilation)
    parameters = {
        "kernel": taps,
        "strides": steps,
        "dilates": [gap - 1 for gap in gaps],  # oneDNN counts what lies between
        "padding_begin": begin,
        "padding_end": after,
    }
    size = [
        (length + begin + end - (taps - 1) * (gap + 1) - 1) // step + 1
        for length, (taps, step, gap, begin, end) in zip(
            src.shape[2:], zip(*parameters.values(), strict=True), strict=True
        )
    ]
    return parameters, size


def plain(nd: int) -> str:
    return _LETTERS[:nd]


def channels_last(nd: int) -> str:
    return _LETTERS[:1] + _LETTERS[2:nd] + _LETTERS[1:2] if nd > 1 else _LETTERS[:nd]


def layout_order(layout: str) -> list[int]:
    """The logical dimensions from outermost to innermost."""
    return [_LETTERS.index(letter) for letter in layout]
