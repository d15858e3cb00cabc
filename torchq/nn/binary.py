# SPDX-License-Identifier: Apache-2.0
"""Quantized addition, multiplication and concatenation."""

from typing import Any

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from typing_extensions import Self

from torchq.functional.placeholders import OF_A_NAME, count_modules
from torchq.nn.direct_call import DirectCall, source, sources, state
from torchq.nn.module import QModule, Spec, dtype_name, placeholder_qparams
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code


class _QCombine(QModule):
    """Scales and zero points of the sources, then of the destination.

    A float32 source is quantized with its own parameters first.
    """

    scales: Tensor
    zero_points: Tensor

    def __init__(self, srcs: list[QParams], dst: QParams | None, **spec: object) -> None:
        super().__init__()
        self._check_one_scale([*srcs, dst])
        every = [*srcs, QParams.per_tensor(1.0) if dst is None else dst]
        self.register_buffer("scales", torch.stack([q.scale.detach().reshape(()) for q in every]))
        self.register_buffer("zero_points", torch.stack([q.zero_point.reshape(()) for q in every]))
        self.dst_dtype = torch.float32 if dst is None else dst.dtype
        self.dst_code = dtype_code(self.dst_dtype)
        self._add_limits(dst)
        # not a list of dtypes: TorchScript cannot hold one
        self.src_signed = [q.dtype == torch.int8 for q in srcs]
        self.src_codes = [dtype_code(q.dtype) for q in srcs]
        self.src_lows = [q.integers[0] for q in srcs]
        self.src_highs = [q.integers[1] for q in srcs]
        self._set_spec(
            srcs=[dtype_name(q.dtype) for q in srcs],
            src_bits=[q.bits for q in srcs],
            dst=dtype_name(self.dst_dtype),
            dst_bits=8 if dst is None else dst.bits,
            **spec,
        )

    @classmethod
    def _arguments_from_spec(cls, spec: Spec) -> dict[str, Any]:
        count_modules(len(spec["srcs"]) * OF_A_NAME)
        dst = None if spec["dst"] == "f32" else placeholder_qparams(spec["dst"], spec["dst_bits"])
        srcs = map(placeholder_qparams, spec["srcs"], spec["src_bits"])
        return {"srcs": list(srcs), "dst": dst}

    def _hot(self) -> tuple[Tensor, Tensor]:
        """Return what each call passes on; nn.Module.__getattr__ would cost more."""
        if is_scripting():
            return self.scales, self.zero_points
        b = self._buffers
        return b["scales"], b["zero_points"]  # type: ignore[return-value]

    def _quantized(self, src: Tensor, i: int) -> Tensor:
        """Source ``i`` in its own quantized dtype."""
        if src.dtype == (torch.int8 if self.src_signed[i] else torch.uint8):
            return src
        code, low, high = self.src_codes[i], self.src_lows[i], self.src_highs[i]
        return self._from_float(src, self.scales[i], self.zero_points[i], code, low, high)

    def _own_repr(self) -> str:
        spec = self.read_spec()
        return f"{', '.join(spec['srcs'])} -> {spec['dst']}"


class _QBinary(_QCombine):
    """Base of operations on two sources whose shapes broadcast, optionally with relu."""

    def __init__(self, srcs: list[QParams], dst: QParams | None, relu: bool = False) -> None:
        """``srcs`` has two; ``dst`` None means float32."""
        if len(srcs) != 2:
            raise ValueError(
                f"torchq.nn.{type(self).__name__}: srcs must be the parameters of 2 sources, got "
                f"{len(srcs)}. Sums of more are torchq.functional.sum."
            )
        super().__init__(srcs, dst, relu=relu)
        self.relu = relu

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        return cls(**cls._arguments_from_spec(spec), relu=spec["relu"])


_PAIR = (
    *(source("src_signed"), source("src_signed")),
    *state("scales", "zero_points", "dst_code", "relu"),
)


class QAdd(_QBinary):
    """``quantize(real(src0) + real(src1))``, optionally with relu; shapes broadcast."""

    _direct = DirectCall("add", _PAIR, unless=("dst_high",))

    def forward(self, src0: Tensor, src1: Tensor) -> Tensor:
        """Add."""
        src0, src1 = self._quantized(src0, 0), self._quantized(src1, 1)
        scales, zero_points = self._hot()
        dst: Tensor = torch.ops.torchq.add(
            src0, src1, scales, zero_points, self.dst_code, self.relu
        )
        return self._limited(dst)


class QMul(_QBinary):
    """``quantize(real(src0) * real(src1))``, optionally with relu; shapes broadcast."""

    _direct = DirectCall("mul", _PAIR, unless=("dst_high",))

    def forward(self, src0: Tensor, src1: Tensor) -> Tensor:
        """Multiply."""
        src0, src1 = self._quantized(src0, 0), self._quantized(src1, 1)
        scales, zero_points = self._hot()
        dst: Tensor = torch.ops.torchq.mul(
            src0, src1, scales, zero_points, self.dst_code, self.relu
        )
        return self._limited(dst)


class QCat(_QCombine):
    """Concatenation; a source with other parameters than the destination's is requantized."""

    _direct = DirectCall(
        "concat",
        (sources("src_signed"), *state("scales", "zero_points", "dim", "dst_code")),
        unless=("dst_high",),
    )

    def __init__(self, srcs: list[QParams], dst: QParams | None, dim: int = 1) -> None:
        """``dim`` as in torch.cat; ``dst`` None means float32."""
        super().__init__(srcs, dst, dim=dim)
        self.dim = dim

    @classmethod
    def from_spec(cls, spec: Spec) -> "QCat":
        """See the base class."""
        return cls(**cls._arguments_from_spec(spec), dim=spec["dim"])

    def forward(self, srcs: list[Tensor]) -> Tensor:
        """Concatenate."""
        quantized: list[Tensor] = []
        for i, src in enumerate(srcs):
            quantized.append(self._quantized(src, i))
        scales, zero_points = self._hot()
        dst: Tensor = torch.ops.torchq.concat(
            quantized, scales, zero_points, self.dim, self.dst_code
        )
        return self._limited(dst)
