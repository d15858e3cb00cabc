# SPDX-License-Identifier: Apache-2.0
"""Native oneDNN primitives, run in a process of their own: what torchq is compared with.

torch carries its own oneDNN, whose symbols would meet those of a second one in the same process, so
``peer.cpp`` is compiled on demand against the wheels on PyPI and spoken to through pipes.
Everything downloaded or built lies in ``build/onednn-<version>/``; the environment stays as it is.

    with Peer(threads=1) as peer:
        dst = peer.convolution(src, weight, src_scale=0.1, weight_scale=scales, dst_scale=0.2)
        timing = peer.convolution(src, weight, dst_dtype=torch.int32, samples=20)
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.onednn.program import WheelsUnavailableError, build

__all__ = ["Peer", "RefusedError", "Timing", "WheelsUnavailableError", "build"]

_DTYPES = {
    torch.uint8: "u8",
    torch.int8: "s8",
    torch.int32: "s32",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
}
_LETTERS = "abcdefghijkl"  # oneDNN's names for logical dimensions


class RefusedError(RuntimeError):
    """oneDNN does not implement what was asked for, or finds it invalid."""


@dataclass(frozen=True)
class Timing:
    """Seconds per execution, one figure per sample, and oneDNN's name of what was executed."""

    seconds: list[float]
    implementation: str

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Attributes:
    """What every primitive of `Peer` takes besides its operands, as keyword arguments.

    A scale or zero point is a number or a tensor. One value has mask 0; several are per output
    channel for weights and per dimension 1 otherwise, unless ``masks`` says it, for example
    ``masks={"weight_scale": 2}``.

    Attributes:
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
    masks: dict[str, int] = field(default_factory=dict)
    dst: Tensor | None = None
    dst_dtype: torch.dtype | None = None
    post_ops: str = ""
    post_op_tensors: Sequence[Tensor] = ()
    samples: int = 0
    iterations: int = 0


class _Request:
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
        layout = layout or _channels_last(value.dim())
        shape = "x".join(map(str, value.shape))
        self.words.append(f"@{name}={_DTYPES[value.dtype]}:{shape}:{layout}")
        stored = value.detach().permute(_order(layout)).contiguous()
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
                self.tensor(f"{kind}:{name}:{mask}", values)
        if given.post_ops:
            self.parameter("post_ops", given.post_ops)
        self._post_op_tensors(dst.shape, layout)
        if given.samples:
            self.parameter("samples", given.samples)
            self.parameter("iterations", given.iterations)

    def _post_op_tensors(self, shape: Sequence[int], layout: str | None) -> None:
        """Adds the post-ops' operands, each in the shape its mask selects of the destination."""
        chain = [post_op.split(":") for post_op in self.attributes.post_ops.split("+")]
        masks = [int(parts[1]) for parts in chain if parts[0].startswith(("binary_", "prelu"))]
        operands = self.attributes.post_op_tensors
        if len(masks) != len(operands):
            raise ValueError(
                f"benchmarks.onednn: post_op_tensors must be {len(masks)} tensors for "
                f"'{self.attributes.post_ops}', got {len(operands)}."
            )
        for i, (mask, operand) in enumerate(zip(masks, operands, strict=True)):
            selected = [size if mask >> dim & 1 else 1 for dim, size in enumerate(shape)]
            self.tensor(f"post_op:{i}", operand.reshape(selected), layout)

    def header(self) -> str:
        size = sum(map(len, self.payload))
        return " ".join([self.primitive, str(size), *self.words]) + "\n"


class Peer:
    """A running oneDNN. Tensors are logical (N, C, ...); what crosses the pipe is channels-last.

    Args:
        threads: OpenMP threads of the process.
        version: Version of oneDNN.

    Every method takes the fields of `Attributes` as further keyword arguments, returns the result
    (with ``samples`` a `Timing`) and raises `RefusedError` with oneDNN's reason if it declines.
    Weights are reordered once, outside the timed region, to the layout the primitive prefers.
    """

    def __init__(self, threads: int = 1, version: str = "3.2") -> None:
        self.version = version
        self.implementation = ""  # of the last request
        self._process = subprocess.Popen(
            [str(build(version))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._receive("start")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process. Closing twice is fine."""
        if not self._requests.closed:
            self._process.communicate()

    def convolution(
        self,
        src: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        padding_end: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        **attributes: Any,
    ) -> Any:
        """Convolves as torch does, 1 to 3 dimensions; ``padding_end`` defaults to ``padding``."""
        kernel = weight.shape[2:]
        window, size = _window(src, kernel, stride, padding, padding_end, dilation)
        request = _Request("convolution", attributes, **window)
        request.tensor("src", src)
        shape = (src.shape[0], weight.shape[0], *size)
        if groups > 1:
            weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        request.tensor("weights", weight, _plain(weight.dim()))
        request.tensor("bias", bias)
        request.destination(shape, src, channel_mask=3 if groups > 1 else 1)
        return self._run(request)

    def inner_product(
        self, src: Tensor, weight: Tensor, bias: Tensor | None = None, **attributes: Any
    ) -> Any:
        """``src @ weight.T``; spatial dimensions, which both then have, are summed over too."""
        request = _Request("inner_product", attributes)
        request.tensor("src", src)
        request.tensor("weights", weight, _plain(weight.dim()))
        request.tensor("bias", bias)
        request.destination((src.shape[0], weight.shape[0]), src, channel_mask=1)
        return self._run(request)

    def matmul(
        self,
        src: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        prepack: bool = False,
        **attributes: Any,
    ) -> Any:
        """``src @ weight`` on (batch..., M, K) and (batch..., K, N), everything row-major.

        ``prepack`` lets the primitive choose the weights' layout, for weights that are constant.
        """
        nd = src.dim()
        batch = torch.broadcast_shapes(src.shape[:-2], weight.shape[:-2])
        request = _Request("matmul", attributes, prepack=int(prepack))
        request.tensor("src", src, _plain(nd))
        for name, operand in (("weights", weight), ("bias", bias)):
            if operand is not None:  # oneDNN wants the same number of dimensions everywhere
                operand = operand.reshape([1] * (nd - operand.dim()) + list(operand.shape))
                request.tensor(name, operand, _plain(nd))
        shape = (*batch, src.shape[-2], weight.shape[-1])
        request.destination(shape, src, channel_mask=1 << (nd - 1), layout=_plain(nd))
        return self._run(request)

    def pooling(
        self,
        src: Tensor,
        algorithm: str,
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        padding_end: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        **attributes: Any,
    ) -> Any:
        """Pools with ``"max"``, ``"avg_include_padding"`` or ``"avg_exclude_padding"``.

        ``stride`` defaults to ``kernel``; torch's ``ceil_mode`` is a larger ``padding_end``.
        """
        step = kernel if stride is None else stride
        window, size = _window(src, kernel, step, padding, padding_end, dilation)
        request = _Request("pooling", attributes, algorithm=f"pooling_{algorithm}", **window)
        request.tensor("src", src)
        request.destination((*src.shape[:2], *size), src)
        return self._run(request)

    def eltwise(
        self, src: Tensor, algorithm: str, alpha: float = 0, beta: float = 0, **attributes: Any
    ) -> Any:
        """Applies the function oneDNN calls ``eltwise_<algorithm>``."""
        request = _Request(
            "eltwise", attributes, algorithm=f"eltwise_{algorithm}", alpha=alpha, beta=beta
        )
        request.tensor("src", src)
        request.destination(src.shape, src)
        return self._run(request)

    def binary(self, src0: Tensor, src1: Tensor, algorithm: str, **attributes: Any) -> Any:
        """Applies ``binary_<algorithm>``; dimensions of ``src1`` that are 1 are broadcast."""
        request = _Request("binary", attributes, algorithm=f"binary_{algorithm}")
        request.tensor("src0", src0)
        request.tensor("src1", src1)
        request.destination(src0.shape, src0)
        return self._run(request)

    def reorder(self, src: Tensor, **attributes: Any) -> Any:
        """Converts to ``dst_dtype``: ``src_scale * (src - src_zero_point)``, then quantized."""
        request = _Request("reorder", attributes)
        request.tensor("src", src)
        request.destination(src.shape, src)
        return self._run(request)

    def _run(self, request: _Request) -> Tensor | Timing:
        header = request.header()
        # A broken pipe is reported by _receive, with what became of the process.
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(header.encode())
            self._requests.writelines(request.payload)
            self._requests.flush()
        answer, payload = self._receive(header.strip())
        self.implementation = answer["implementation"]
        if "seconds" in answer:
            seconds = [float(figure) for figure in answer["seconds"].split(",")]
            return Timing(seconds, self.implementation)
        dtype, shape, layout = request.results[0]
        order = _order(layout)
        stored = torch.empty([shape[dim] for dim in order], dtype=dtype)
        stored.view(-1).view(torch.uint8).numpy()[:] = memoryview(payload)
        return stored.permute([order.index(dim) for dim in range(len(order))])

    def _receive(self, header: str) -> tuple[dict[str, str], bytes]:
        """Reads one answer: the words of its header line, and its payload."""
        status, _, rest = self._answers.readline().decode().partition(" ")
        size, _, text = rest.strip().partition(" ")
        if status == "error":
            primitive, _, asked = header.split(" ", 2)
            raise RefusedError(f"oneDNN {self.version} refuses {primitive}: {text}. Asked: {asked}")
        if status != "ok":
            self.close()
            raise RuntimeError(
                f"benchmarks.onednn: the oneDNN process ended with status "
                f"{self._process.returncode} on: {header}"
            )
        answer = dict(word.split("=", 1) for word in text.split())
        return answer, self._answers.read(int(size))


def _window(
    src: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    padding_end: int | Sequence[int] | None,
    dilation: int | Sequence[int],
) -> tuple[dict[str, list[int]], list[int]]:
    """The parameters of a convolution's or pooling's geometry, and its result's spatial size."""

    def per_dim(value: int | Sequence[int]) -> list[int]:
        return [value] * (src.dim() - 2) if isinstance(value, int) else list(value)

    parameters = {
        "kernel": per_dim(kernel),
        "strides": per_dim(stride),
        "dilates": [step - 1 for step in per_dim(dilation)],  # oneDNN counts the gaps
        "padding_begin": per_dim(padding),
        "padding_end": per_dim(padding if padding_end is None else padding_end),
    }
    size = [
        (length + begin + end - (taps - 1) * (gap + 1) - 1) // step + 1
        for length, (taps, step, gap, begin, end) in zip(
            src.shape[2:], zip(*parameters.values(), strict=True), strict=True
        )
    ]
    return parameters, size


def _plain(nd: int) -> str:
    return _LETTERS[:nd]


def _channels_last(nd: int) -> str:
    return _LETTERS[:1] + _LETTERS[2:nd] + _LETTERS[1:2] if nd > 1 else _LETTERS[:nd]


def _order(layout: str) -> list[int]:
    """The logical dimensions from outermost to innermost."""
    return [_LETTERS.index(letter) for letter in layout]
