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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torchq
from benchmarks.onednn.program import WheelsUnavailableError, build, downloaded, environment
from benchmarks.onednn.request import Depthwise, Request, geometry, layout_order, per_dim, plain

__all__ = [
    "Depthwise",
    "Peer",
    "RefusedError",
    "Timing",
    "WheelsUnavailableError",
    "build",
    "downloaded",
    "sums_are_exact",
]


def sums_are_exact() -> bool:
    """Returns True where oneDNN, torch's too, adds int8 products in 32 bits on this CPU.

    Without VNNI it adds pairs in 16 bits, which saturate, and halves the weights of int8 sources.
    """
    return any(isa.endswith("_vnni") or isa == "amx" for isa in torchq.supported_isas())


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


class Peer:
    """A running oneDNN. Tensors are logical (N, C, ...); what crosses the pipe is channels-last.

    Args:
        threads: Threads of the process.
        version: Version of oneDNN.
        max_isa: The most it may use of the CPU, ``"AVX512_CORE_VNNI"`` for example; "" is all.

    Every method takes the fields of `Attributes` as further keyword arguments, returns the result
    (with ``samples`` a `Timing`) and raises `RefusedError` with oneDNN's reason if it declines.
    Weights are reordered once, outside the timed region, to the layout the primitive prefers.
    """

    def __init__(self, threads: int = 1, version: str = "3.2", max_isa: str = "") -> None:
        self.version = version
        self.implementation = ""  # of the last request
        self._process = subprocess.Popen(
            [str(build(version))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **environment(version, threads),
                **({"ONEDNN_MAX_CPU_ISA": max_isa} if max_isa else {}),
            },
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
        dw: Depthwise | None = None,
        **attributes: Any,
    ) -> Any:
        """Convolves as torch does, 1 to 3 dimensions; ``padding_end`` defaults to ``padding``.

        ``dw`` holds the operands of a ``dw_conv`` in ``post_ops``.
        """
        kernel = weight.shape[2:]
        window, size = geometry(src, kernel, stride, padding, padding_end, dilation)
        request = Request("convolution", attributes, **window)
        request.tensor("src", src)
        shape = [src.shape[0], weight.shape[0], *size]
        if dw is not None:
            shape = request.depthwise(dw, shape)
        if groups > 1:
            weight = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        request.tensor("weights", weight, plain(weight.dim()))
        request.tensor("bias", bias)
        request.destination(shape, src, channel_mask=3 if groups > 1 else 1)
        return self._run(request)

    def deconvolution(
        self,
        src: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        **attributes: Any,
    ) -> Any:
        """torch's conv_transpose with its weight (in, out / groups, ...), 1 to 3 dimensions."""
        nd = src.dim() - 2
        steps, begin, extra, gaps = per_dim(nd, stride, padding, output_padding, dilation)
        window = {
            "strides": steps,
            "dilates": [gap - 1 for gap in gaps],
            "padding_begin": begin,
            "padding_end": [a - b for a, b in zip(begin, extra, strict=True)],
        }
        request = Request("deconvolution", attributes, **window)
        request.tensor("src", src)
        outputs = weight.shape[1]
        grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        stored = grouped.transpose(1, 2) if groups > 1 else weight.transpose(0, 1)
        request.tensor("weights", stored, plain(stored.dim()))
        request.tensor("bias", bias)
        size = [
            (length - 1) * step - 2 * pad + gap * (taps - 1) + more + 1
            for length, step, pad, gap, taps, more in zip(
                src.shape[2:], steps, begin, gaps, weight.shape[2:], extra, strict=True
            )
        ]
        shape = (src.shape[0], groups * outputs, *size)
        request.destination(shape, src, channel_mask=3 if groups > 1 else 1)
        return self._run(request)

    def inner_product(
        self, src: Tensor, weight: Tensor, bias: Tensor | None = None, **attributes: Any
    ) -> Any:
        """``src @ weight.T``; spatial dimensions, which both then have, are summed over too."""
        request = Request("inner_product", attributes)
        request.tensor("src", src)
        request.tensor("weights", weight, plain(weight.dim()))
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
        request = Request("matmul", attributes, prepack=int(prepack))
        request.tensor("src", src, plain(nd))
        for name, operand in (("weights", weight), ("bias", bias)):
            if operand is not None:  # oneDNN wants the same number of dimensions everywhere
                operand = operand.reshape([1] * (nd - operand.dim()) + list(operand.shape))
                request.tensor(name, operand, plain(nd))
        shape = (*batch, src.shape[-2], weight.shape[-1])
        request.destination(shape, src, channel_mask=1 << (nd - 1), layout=plain(nd))
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
        window, size = geometry(src, kernel, step, padding, padding_end, dilation)
        request = Request("pooling", attributes, algorithm=f"pooling_{algorithm}", **window)
        return self._run_on(request, (*src.shape[:2], *size), src=src)

    def eltwise(
        self, src: Tensor, algorithm: str, alpha: float = 0, beta: float = 0, **attributes: Any
    ) -> Any:
        """Applies the function oneDNN calls ``eltwise_<algorithm>``."""
        request = Request(
            "eltwise", attributes, algorithm=f"eltwise_{algorithm}", alpha=alpha, beta=beta
        )
        return self._run_on(request, src.shape, src=src)

    def binary(self, src0: Tensor, src1: Tensor, algorithm: str, **attributes: Any) -> Any:
        """Applies ``binary_<algorithm>``; dimensions of ``src1`` that are 1 are broadcast."""
        request = Request("binary", attributes, algorithm=f"binary_{algorithm}")
        return self._run_on(request, src0.shape, src0=src0, src1=src1)

    def reorder(self, src: Tensor, **attributes: Any) -> Any:
        """Converts to ``dst_dtype``: ``src_scale * (src - src_zero_point)``, then quantized."""
        return self._run_on(Request("reorder", attributes), src.shape, src=src)

    def sum(self, srcs: Sequence[Tensor], scales: Sequence[float], **attributes: Any) -> Any:
        """``sum_i scales[i] * srcs[i]``."""
        request = Request("sum", attributes, scales=list(scales))
        parts = {f"part{i}": src for i, src in enumerate(srcs)}
        return self._run_on(request, srcs[0].shape, **parts)

    def concat(
        self,
        srcs: Sequence[Tensor],
        axis: int,
        scales: Sequence[float] | None = None,
        **attributes: Any,
    ) -> Any:
        """The sources, each times its scale, one after the other."""
        request = Request("concat", attributes, axis=axis)
        for i, src in enumerate(srcs):
            request.tensor(f"part{i}", src)
        for i, scale in enumerate(scales or ()):
            request.tensor(f"scale:part{i}:0", torch.tensor([scale]))
        shape = list(srcs[0].shape)
        shape[axis] = sum(src.shape[axis] for src in srcs)
        request.destination(shape, srcs[0])
        return self._run(request)

    def softmax(
        self, src: Tensor, axis: int, *, logarithmic: bool = False, **attributes: Any
    ) -> Any:
        """Softmax or log-softmax along ``axis``."""
        algorithm = "softmax_log" if logarithmic else "softmax_accurate"
        request = Request("softmax", attributes, algorithm=algorithm, axis=axis)
        return self._run_on(request, src.shape, src=src)

    def layer_normalization(
        self, src: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, **attributes: Any
    ) -> Any:
        """Normalizes over the last dimension, times gamma, plus beta."""
        return self._normalize("layer_normalization", src, gamma, beta, epsilon, attributes)

    def rms_normalization(
        self, src: Tensor, gamma: Tensor, epsilon: float = 1e-5, **attributes: Any
    ) -> Any:
        """Layer normalization with the flag ``rms_norm``; oneDNN 3.2 has none."""
        return self._normalize("rms_normalization", src, gamma, None, epsilon, attributes)

    def _normalize(
        self,
        primitive: str,
        src: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        epsilon: float,
        attributes: dict[str, Any],
    ) -> Any:
        request = Request(primitive, attributes, epsilon=epsilon)
        layout = plain(src.dim())
        request.tensor("src", src, layout)
        request.tensor("gamma", gamma)
        request.tensor("beta", beta)
        request.destination(src.shape, src, layout=layout)
        return self._run(request)

    def group_normalization(
        self,
        src: Tensor,
        groups: int,
        gamma: Tensor,
        beta: Tensor,
        epsilon: float = 1e-5,
        **attributes: Any,
    ) -> Any:
        """Normalizes over groups of channels and all positions; oneDNN 3.2 has none."""
        request = Request("group_normalization", attributes, groups=groups, epsilon=epsilon)
        request.tensor("gamma", gamma)
        request.tensor("beta", beta)
        return self._run_on(request, src.shape, src=src)

    def reduction(
        self,
        src: Tensor,
        algorithm: str,
        dims: Sequence[int],
        p: float = 0,
        epsilon: float = 0,
        **attributes: Any,
    ) -> Any:
        """``reduction_<algorithm>`` over ``dims``, which keep size 1; ``p`` is of norms."""
        name = f"reduction_{algorithm}"
        request = Request("reduction", attributes, algorithm=name, p=p, epsilon=epsilon)
        shape = [1 if dim in dims else size for dim, size in enumerate(src.shape)]
        return self._run_on(request, shape, src=src)

    def resampling(
        self,
        src: Tensor,
        algorithm: str,
        size: Sequence[int],
        *,
        layout: str | None = None,
        **attributes: Any,
    ) -> Any:
        """``resampling_nearest`` or ``_linear`` to a spatial size; channels-last by default."""
        request = Request("resampling", attributes, algorithm=f"resampling_{algorithm}")
        request.tensor("src", src, layout)
        request.destination((*src.shape[:2], *size), src, layout=layout)
        return self._run(request)

    def recurrent(
        self,
        cell: str,
        tensors: dict[str, Tensor],
        factors: dict[str, Tensor],
        *,
        direction: str = "left2right",
        data_scale: float = 127,
        data_shift: float = 128,
        **attributes: Any,
    ) -> Any:
        """An int8 ``"lstm"`` or ``"gru"``; returns dst_layer, dst_iter and dst_iter_c.

        Args:
            cell: "lstm" (gates i f c o) or "gru" (gates u r o).
            tensors: oneDNN's arguments by name, dense in the order of their logical dimensions:
                src_layer (T, N, C), src_iter and src_iter_c (layers, directions, N, C),
                weights_* float32 (layers, directions, inputs, gates, outputs) or, for the
                projection, (layers, directions, inputs, outputs), bias, dst_*.
            factors: for "weights" and "projection", what they are multiplied with: one value, or
                one per gate and output.
            direction: "left2right", "right2left" or "concat".
            data_scale: factor of source and states.
            data_shift: added to source and states.
            attributes: samples and iterations only.
        """
        request = Request(cell, attributes, direction=direction)
        request.parameter("data_scale", data_scale)
        request.parameter("data_shift", data_shift)
        for name, values in factors.items():
            mask = 0 if values.numel() == 1 else 24 if name == "weights" else 8
            request.tensor(f"factors:{name}:{mask}", values.flatten())
        for name, tensor in tensors.items():
            request.tensor(name, tensor, plain(tensor.dim()))
        for name in ("samples", "iterations"):
            if request.attributes.samples:
                request.parameter(name, getattr(request.attributes, name))
        return self._run(request)

    def _run_on(self, request: Request, shape: Sequence[int], **srcs: Tensor) -> Any:
        """Runs a request on these sources; its result has a shape, and the first one's dtype."""
        for name, src in srcs.items():
            request.tensor(name, src)
        request.destination(shape, next(iter(srcs.values())))
        return self._run(request)

    def _run(self, request: Request) -> Tensor | list[Tensor] | Timing:
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
        results = []
        for dtype, shape, layout in request.results:
            dims = layout_order(layout)
            stored = torch.empty([shape[dim] for dim in dims], dtype=dtype)
            data = stored.view(-1).view(torch.uint8).numpy()
            data[:] = memoryview(payload)[: data.size]
            payload = payload[data.size :]
            results.append(stored.permute([dims.index(dim) for dim in range(len(dims))]))
        return results[0] if len(results) == 1 else results

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
