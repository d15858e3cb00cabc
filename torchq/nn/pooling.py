# SPDX-License-Identifier: Apache-2.0
"""Pooling on quantized tensors: scale and zero point pass through."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.functional import conv_geometry
from torchq.nn.module import QModule, dtype_name, placeholder_qparams
from torchq.qparams import QParams

Ints = int | Sequence[int]


def _spread(value: Ints, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


class _QPool(QModule):
    """The parameters of what flows through; float32 sources are quantized with them first.

    Shapes:
        src: ``(N, C, spatial...)``, channels-last memory is read in place.
        dst: the same dtype, channels-last unless ``contiguous``.
    """

    dims: ClassVar[int] = 0

    def __init__(self, src: QParams, contiguous: bool, **spec: object) -> None:
        super().__init__()
        self._add_src(src)
        self.contiguous = contiguous
        layout = {"contiguous": True} if contiguous else {}
        self._set_spec(src=dtype_name(src.dtype), src_bits=src.bits, arguments={**spec, **layout})

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        """See the base class."""
        return cls(placeholder_qparams(spec["src"], spec["src_bits"]), **spec["arguments"])

    def extra_repr(self) -> str:
        """The window."""
        return ", ".join(f"{k}={v}" for k, v in self.read_spec()["arguments"].items())


class QMaxPool(_QPool):
    """Maximum over windows; padding is never picked. Arguments as in ``torch.nn.MaxPool2d``."""

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
        kernel = _spread(kernel_size, self.dims)
        window = {
            "kernel_size": kernel,
            "stride": kernel if stride is None else _spread(stride, self.dims),
            "padding": _spread(padding, self.dims),
            "dilation": _spread(dilation, self.dims),
        }
        super().__init__(src, contiguous, **window, ceil_mode=ceil_mode)
        self.ceil_mode = ceil_mode
        self.geometry = conv_geometry(
            "max_pool", kernel, window["stride"], window["padding"], None, window["dilation"]
        )

    @classmethod
    def from_float(
        cls,
        module: nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d,
        src: QParams,
        contiguous: bool = False,
    ) -> Self:
        """Takes the window over.

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
        """Pools."""
        dst: Tensor = torch.ops.torchq.max_pool(
            self._quantized_src(src), self.geometry, self.ceil_mode
        )
        return dst.contiguous() if self.contiguous else dst


class QAvgPool(_QPool):
    """``rne(float(sum) / float(count))`` over windows. Arguments as in ``torch.nn.AvgPool2d``."""

    def __init__(
        self,
        src: QParams,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        contiguous: bool = False,
    ) -> None:
        """``src``: parameters of source and destination."""
        kernel = _spread(kernel_size, self.dims)
        window = {
            "kernel_size": kernel,
            "stride": kernel if stride is None else _spread(stride, self.dims),
            "padding": _spread(padding, self.dims),
        }
        modes = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        super().__init__(src, contiguous, **window, **modes)
        self.ceil_mode, self.count_include_pad = ceil_mode, count_include_pad
        self.geometry = conv_geometry(
            "avg_pool", kernel, window["stride"], window["padding"], None, 1
        )

    @classmethod
    def from_float(
        cls,
        module: nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d,
        src: QParams,
        contiguous: bool = False,
    ) -> Self:
        """Takes the window over.

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
        return cls(src, m.kernel_size, m.stride, m.padding, *modes, contiguous)

    def forward(self, src: Tensor) -> Tensor:
        """Pools."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            zero_point = self.src_zero_point
        else:
            zero_point = self._buffers["src_zero_point"]  # type: ignore[assignment]
        dst: Tensor = torch.ops.torchq.avg_pool(
            self._quantized_src(src),
            zero_point,
            self.geometry,
            self.ceil_mode,
            self.count_include_pad,
            None,
        )
        return dst.contiguous() if self.contiguous else dst


class QAdaptiveAvgPool(_QPool):
    """Average over ``output_size`` windows a dimension; an entry None keeps the source's size."""

    def __init__(
        self,
        src: QParams,
        output_size: int | Sequence[int | None] | None,
        contiguous: bool = False,
    ) -> None:
        """``src``: parameters of source and destination."""
        if output_size is None or isinstance(output_size, int):
            output_size = [output_size] * self.dims
        sizes = list(output_size)
        super().__init__(src, contiguous, output_size=sizes)
        # 0 stands for None: TorchScript has no list of optional ints
        self.output_size = [0 if size is None else int(size) for size in sizes]

    @classmethod
    def from_float(
        cls,
        module: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d,
        src: QParams,
        contiguous: bool = False,
    ) -> Self:
        """Takes the output size over."""
        return cls(src, module.output_size, contiguous)

    def forward(self, src: Tensor) -> Tensor:
        """Pools."""
        size = [src.size(i + 2) if n == 0 else n for i, n in enumerate(self.output_size)]
        dst: Tensor = torch.ops.torchq.adaptive_avg_pool(self._quantized_src(src), size)
        return dst.contiguous() if self.contiguous else dst


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
