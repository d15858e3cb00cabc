# SPDX-License-Identifier: Apache-2.0
"""Pooling on quantized tensors: scale and zero point pass through; an average may have its own."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from typing_extensions import Self

from torchq.functional.arguments import Ints, conv_geometry, spread
from torchq.nn.direct_call import NONE, DirectCall, source, state
from torchq.nn.module import QModule, Spec, dtype_name, placeholder_qparams
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code

Dst = QParams | Literal["f32"] | None
"""Of a pool: parameters of its own, float32, or those of the source."""


class _QPool(QModule):
    """The parameters of what flows through; float32 sources are quantized with them first.

    Shapes:
        src: ``(N, C, spatial...)``, channels-last memory is read in place.
        dst: the same dtype, or that of ``dst``; channels-last unless ``contiguous``.
    """

    dims: ClassVar[int] = 0
    dst_scale: Tensor
    dst_zero_point: Tensor
    scales: Tensor | None
    zero_points: Tensor | None

    def __init__(self, src: QParams, contiguous: bool, dst: Dst = None, **spec: object) -> None:
        super().__init__()
        self._add_src(src)
        self.contiguous = contiguous
        layout = {"contiguous": True} if contiguous else {}
        own: dict[str, object] = {}
        self._add_limits(None if dst == "f32" else dst)
        self.dst_code: int | None = None
        if dst is not None:
            real = QParams.per_tensor(1.0) if dst == "f32" else dst
            self._add_qparams("dst", real)
            self.dst_dtype = torch.float32 if dst == "f32" else real.dtype
            self.dst_code = dtype_code(self.dst_dtype)
            own = {"dst": dtype_name(self.dst_dtype), "dst_bits": real.bits}
        # of the source and of the destination; None where that has the source's
        self.register_buffer("scales", None, persistent=False)
        self.register_buffer("zero_points", None, persistent=False)
        arguments = {**spec, **layout}
        self._set_spec(src=dtype_name(src.dtype), src_bits=src.bits, **own, arguments=arguments)
        self.refold()

    def _window(self, kernel_size: Ints, stride: Ints | None, **more: Ints) -> dict[str, list[int]]:
        """Each with one number per spatial dimension."""
        given = {"kernel_size": kernel_size, "stride": kernel_size if stride is None else stride}
        op = f"nn.{type(self).__name__}"
        return {k: spread(op, k, value, self.dims) for k, value in {**given, **more}.items()}

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        own: dict[str, Any] = {}
        if "dst" in spec:
            is_float = spec["dst"] == "f32"
            own["dst"] = "f32" if is_float else placeholder_qparams(spec["dst"], spec["dst_bits"])
        return cls(placeholder_qparams(spec["src"], spec["src_bits"]), **own, **spec["arguments"])

    def refold(self) -> None:
        """See the base class."""
        if self.dst_code is not None:
            self.scales = torch.cat([self.src_scale, self.dst_scale])
            self.zero_points = torch.cat([self.src_zero_point, self.dst_zero_point])

    def _finished(self, dst: Tensor) -> Tensor:
        """Clamped to 7 bits where the destination has only 7, and contiguous where wanted."""
        dst = self._limited(dst)
        return dst.contiguous() if self.contiguous else dst

    def _own_repr(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.read_spec()["arguments"].items())


class QMaxPool(_QPool):
    """Maximum over windows; padding is never picked. Arguments as in ``torch.nn.MaxPool2d``."""

    _direct = DirectCall(
        "max_pool",
        (source("src_dtype"), *state("geometry", "ceil_mode")),
        unless=("contiguous",),
    )

    def __init__(
        self,
        src: QParams,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        contiguous: bool = False,
    ) -> None:
        """``src``: parameters of source and destination."""
        window = self._window(kernel_size, stride, padding=padding, dilation=dilation)
        super().__init__(src, contiguous, None, **window, ceil_mode=ceil_mode)
        self.ceil_mode = ceil_mode
        kernel, step, begin, gaps = window.values()
        self.geometry = conv_geometry("max_pool", kernel, step, begin, None, gaps)

    @classmethod
    def from_float(
        cls,
        module: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d,
        src: QParams,
        contiguous: bool = False,
    ) -> Self:
        """Take the window over.

        Raises:
            NotImplementedError: ``return_indices`` is set.
        """
        if module.return_indices:
            raise NotImplementedError(
                f"torchq.nn.{cls.__name__}: return_indices is not supported. Keep this pool float."
            )
        m = module
        return cls(src, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, contiguous)

    def forward(self, src: Tensor) -> Tensor:
        """Pool."""
        dst: Tensor = torch.ops.torchq.max_pool(
            self._quantized_src(src), self.geometry, self.ceil_mode
        )
        return dst.contiguous() if self.contiguous else dst


class QAvgPool(_QPool):
    """``rne(float(sum) / float(count))`` over windows. Arguments as in ``torch.nn.AvgPool2d``.

    With ``dst``, in real units: see :mod:`torchq.functional.pooling`.
    """

    _direct = DirectCall(
        "avg_pool",
        (
            source("src_dtype"),
            *state("src_zero_point", "geometry", "ceil_mode", "count_include_pad"),
            NONE,
            *state("scales", "zero_points", "dst_code"),
        ),
        unless=("dst_high", "contiguous"),
    )

    def __init__(
        self,
        src: QParams,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        contiguous: bool = False,
        dst: Dst = None,
    ) -> None:
        """``src``: parameters of the source, and of the destination where ``dst`` is None."""
        window = self._window(kernel_size, stride, padding=padding)
        modes = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        super().__init__(src, contiguous, dst, **window, **modes)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        kernel, step, begin = window.values()
        self.geometry = conv_geometry("avg_pool", kernel, step, begin, None, 1)

    @classmethod
    def from_float(
        cls,
        module: nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d,
        src: QParams,
        contiguous: bool = False,
        dst: Dst = None,
    ) -> Self:
        """Take the window over.

        Raises:
            NotImplementedError: ``divisor_override`` is set.
        """
        if getattr(module, "divisor_override", None) is not None:
            raise NotImplementedError(
                f"torchq.nn.{cls.__name__}: divisor_override is not supported: such a sum does "
                "not keep the scale. Keep this pool float."
            )
        m = module
        modes = m.ceil_mode, m.count_include_pad
        return cls(src, m.kernel_size, m.stride, m.padding, *modes, contiguous, dst)

    def forward(self, src: Tensor) -> Tensor:
        """Pool."""
        # avg_pool takes the zero point from the parameters in real units, if there are any
        if is_scripting():
            zero_point, scales, zero_points = self.src_zero_point, self.scales, self.zero_points
        else:
            b = self._buffers
            zero_point = b["src_zero_point"]  # type: ignore[assignment]
            scales, zero_points = b["scales"], b["zero_points"]
        dst: Tensor = torch.ops.torchq.avg_pool(
            self._quantized_src(src),
            zero_point,
            self.geometry,
            self.ceil_mode,
            self.count_include_pad,
            None,
            scales,
            zero_points,
            self.dst_code,
        )
        return self._finished(dst)


class QAdaptiveAvgPool(_QPool):
    """Average over ``output_size`` windows a dimension; an entry None keeps the source's size.

    With ``dst``, in real units: see :mod:`torchq.functional.pooling`.
    """

    def __init__(
        self,
        src: QParams,
        output_size: int | Sequence[int | None] | None,
        contiguous: bool = False,
        dst: Dst = None,
    ) -> None:
        """``src``: parameters of the source, and of the destination where ``dst`` is None."""
        if output_size is None or isinstance(output_size, int):
            output_size = [output_size] * self.dims
        sizes = list(output_size)
        if len(sizes) != self.dims or any(n is not None and n < 1 for n in sizes):
            raise ValueError(
                f"torchq.nn.{type(self).__name__}: output_size must be {self.dims} sizes of at "
                f"least 1, or None for the source's own, got {sizes}. Keep an empty pool float."
            )
        super().__init__(src, contiguous, dst, output_size=sizes)
        # 0 stands for None: TorchScript has no list of optional ints
        self.output_size = [0 if size is None else int(size) for size in sizes]

    @classmethod
    def from_float(
        cls,
        module: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d,
        src: QParams,
        contiguous: bool = False,
        dst: Dst = None,
    ) -> Self:
        """Take the output size over."""
        return cls(src, module.output_size, contiguous, dst)

    def forward(self, src: Tensor) -> Tensor:
        """Pool."""
        size = [src.size(i + 2) if n == 0 else n for i, n in enumerate(self.output_size)]
        dst: Tensor = torch.ops.torchq.adaptive_avg_pool(
            self._quantized_src(src), size, self.scales, self.zero_points, self.dst_code
        )
        return self._finished(dst)


class QMaxPool1d(QMaxPool):
    """1-D :class:`QMaxPool`."""

    dims = 1


class QMaxPool2d(QMaxPool):
    """2-D :class:`QMaxPool`."""

    dims = 2


class QMaxPool3d(QMaxPool):
    """3-D :class:`QMaxPool`."""

    dims = 3


class QAvgPool1d(QAvgPool):
    """1-D :class:`QAvgPool`."""

    dims = 1


class QAvgPool2d(QAvgPool):
    """2-D :class:`QAvgPool`."""

    dims = 2


class QAvgPool3d(QAvgPool):
    """3-D :class:`QAvgPool`."""

    dims = 3


class QAdaptiveAvgPool1d(QAdaptiveAvgPool):
    """1-D :class:`QAdaptiveAvgPool`."""

    dims = 1


class QAdaptiveAvgPool2d(QAdaptiveAvgPool):
    """2-D :class:`QAdaptiveAvgPool`."""

    dims = 2


class QAdaptiveAvgPool3d(QAdaptiveAvgPool):
    """3-D :class:`QAdaptiveAvgPool`."""

    dims = 3
