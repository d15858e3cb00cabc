# SPDX-License-Identifier: Apache-2.0
"""Softmax and normalizations of quantized tensors, and of float32 where ``src`` is None."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.attributes.post_ops import PostOps
from torchq.functional.placeholders import placeholder
from torchq.nn.module import QModule, Spec, dtype_name, placeholder_qparams
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code


class _QNorm(QModule):
    """Base of the modules here.

    Buffers:
        scales, zero_points: ``[2]``, of the source and the destination.
        src_scale, src_zero_point: ``[1]``, the source's again, which quantize float32; 1 and 0
            where ``src`` is None.
    """

    scales: Tensor
    zero_points: Tensor

    def __init__(
        self, src: QParams | None, dst: QParams | None, post_ops: PostOps | None, **spec: object
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.reads_float = src is None
        src = QParams.per_tensor(1.0) if src is None else src
        self.post_ops = str(post_ops or "")
        if not all(part.startswith("eltwise_") for part in self.post_ops.split("+") if part):
            raise NotImplementedError(
                f"torchq.nn.{name}: post_ops must be eltwise ones, which have no operands, got "
                f"'{self.post_ops}'. The nearest supported form is the function in "
                "torchq.functional, which takes all."
            )
        self._check_one_scale([src, dst])
        self._add_src(src)
        self.dst_dtype = torch.float32 if dst is None else dst.dtype
        self.dst_code = dtype_code(self.dst_dtype)
        self._add_limits(dst)
        one = QParams.per_tensor(1.0) if dst is None else dst
        self.register_buffer("scales", torch.stack([src.scale.detach(), one.scale.detach()]))
        self.register_buffer("zero_points", torch.stack([src.zero_point, one.zero_point]))
        self._set_spec(
            src="f32" if self.reads_float else dtype_name(src.dtype),
            src_bits=src.bits,
            dst=dtype_name(self.dst_dtype),
            dst_bits=8 if dst is None else dst.bits,
            post_ops=self.post_ops,
            arguments=spec,
        )

    @classmethod
    def from_spec(cls, spec: Spec) -> Self:
        """See the base class."""
        dst = None if spec["dst"] == "f32" else placeholder_qparams(spec["dst"], spec["dst_bits"])
        src = None if spec["src"] == "f32" else placeholder_qparams(spec["src"], spec["src_bits"])
        return cls(src, dst, post_ops=PostOps.parse(spec["post_ops"]), **spec["arguments"])

    def _source(self, src: Tensor) -> Tensor:
        """Return what the op reads: float32 as it is where ``src`` is None."""
        if self.reads_float:
            if src.dtype != torch.float32:
                raise TypeError(
                    f"torchq.nn: src of this normalization must be float32, got {src.dtype}. Make "
                    "the module with the QParams of its source, or pass float32."
                )
            return src
        return self._quantized_src(src)

    def _own_repr(self) -> str:
        spec = self.read_spec()
        arguments = [f"{k}={v}" for k, v in spec["arguments"].items()]
        chain = [f"post_ops='{self.post_ops}'"] if self.post_ops else []
        return ", ".join([*arguments, f"{spec['src']} -> {spec['dst']}", *chain])


class QSoftmax(_QNorm):
    """``quantize(post_ops(softmax(real(src))))`` along ``dim``: :func:`torchq.functional.softmax`.

    Shapes:
        src: any, of the source dtype; float32 is quantized with the source's parameters, or read as
            it is where these are None.
        dst: the same, uint8, int8 or float32.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: ``dim`` does not exist.
    """

    def __init__(
        self,
        src: QParams | None,
        dst: QParams | None = None,
        dim: int = -1,
        logarithmic: bool = False,
        post_ops: PostOps | None = None,
    ) -> None:
        """``logarithmic``: the logarithm of it; ``dst`` None means float32.

        Raises:
            NotImplementedError: a scale per channel, or a post-op that is not eltwise.
        """
        super().__init__(src, dst, post_ops, dim=dim, logarithmic=logarithmic)
        self.dim, self.logarithmic = dim, logarithmic

    @classmethod
    def from_float(
        cls, module: nn.Softmax | nn.LogSoftmax, src: QParams | None, dst: QParams | None = None
    ) -> "QSoftmax":
        """Make the quantized form of a module whose ``dim`` is given."""
        if module.dim is None:
            raise ValueError(
                "torchq.nn.QSoftmax: dim must be given, got None. Make the module with dim=-1, or "
                "the dimension you mean."
            )
        return cls(src, dst, module.dim, isinstance(module, nn.LogSoftmax))

    def forward(self, src: Tensor) -> Tensor:
        """Apply it."""
        dst: Tensor = torch.ops.torchq.softmax(
            self._source(src),
            self.dim,
            self.logarithmic,
            self.scales,
            self.zero_points,
            self.dst_code,
            self.post_ops,
        )
        return self._limited(dst)


class _QAffineNorm(_QNorm):
    """With ``weight`` and perhaps ``bias``: float32 in real units, or absent."""

    weight: Tensor | None

    def __init__(
        self,
        src: QParams | None,
        dst: QParams | None,
        post_ops: PostOps | None,
        shape: Sequence[int],
        affine: dict[str, Tensor | None],
        places: dict[str, bool],
        eps: float,
        **sizes: object,
    ) -> None:
        """``affine`` has parameters of ``shape``; ``places``: which are to be loaded."""
        given = dict[str, bool]()
        for name, values in affine.items():
            if values is None and places[name]:
                affine[name] = placeholder(*shape)
            elif values is not None and list(values.shape) != list(shape):
                raise ValueError(
                    f"torchq.nn: {name} of a normalization must have shape {list(shape)}, got "
                    f"{list(values.shape)}. Pass one value per normalized element or channel."
                )
            given[f"has_{name}"] = affine[name] is not None
        super().__init__(src, dst, post_ops, **sizes, eps=eps, **given)
        for name, values in affine.items():
            self._add_floats(name, values)
        self.eps = eps


class QLayerNorm(_QAffineNorm):
    """``quantize(post_ops(layer_norm(real(src))))``: :func:`torchq.functional.layer_norm`.

    Shapes:
        src: ``(*, normalized_shape)`` of the source dtype; float32 is quantized with the source's
            parameters, or read as it is where these are None.
        dst: the same, uint8, int8 or float32.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: ``src`` does not end in ``normalized_shape``.
    """

    bias: Tensor | None

    def __init__(
        self,
        src: QParams | None,
        dst: QParams | None,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        post_ops: PostOps | None = None,
        *,
        has_weight: bool = False,
        has_bias: bool = False,
    ) -> None:
        """``dst`` None means float32; ``has_weight`` and ``has_bias`` make place for loaded ones.

        Raises:
            NotImplementedError: a scale per channel, or a post-op that is not eltwise.
        """
        shape = [int(size) for size in normalized_shape]
        affine, places = {"weight": weight, "bias": bias}, {"weight": has_weight, "bias": has_bias}
        super().__init__(src, dst, post_ops, shape, affine, places, eps, normalized_shape=shape)
        self.normalized_shape, self.dims = shape, len(shape)

    @classmethod
    def from_float(
        cls, module: nn.LayerNorm, src: QParams | None, dst: QParams | None = None
    ) -> "QLayerNorm":
        """Make the quantized form, with the same shape, weight, bias and eps."""
        return cls(src, dst, module.normalized_shape, module.weight, module.bias, module.eps)

    def forward(self, src: Tensor) -> Tensor:
        """Normalize."""
        if list(src.shape[-self.dims :]) != self.normalized_shape:
            raise ValueError(
                f"torchq.nn.QLayerNorm: src must end in {self.normalized_shape}, got "
                f"{list(src.shape)}. Check the layer's normalized_shape."
            )
        dst: Tensor = torch.ops.torchq.layer_norm(
            self._source(src),
            self.dims,
            self.weight,
            self.bias,
            self.eps,
            self.scales,
            self.zero_points,
            self.dst_code,
            self.post_ops,
        )
        return self._limited(dst)


class QRMSNorm(_QAffineNorm):
    """``quantize(post_ops(rms_norm(real(src))))``: :func:`torchq.functional.rms_norm`.

    Shapes and errors as for :class:`QLayerNorm`.
    """

    def __init__(
        self,
        src: QParams | None,
        dst: QParams | None,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
        post_ops: PostOps | None = None,
        *,
        has_weight: bool = False,
    ) -> None:
        """See :class:`QLayerNorm`; ``eps`` None is 2**-23."""
        shape = [int(size) for size in normalized_shape]
        affine, places = {"weight": weight}, {"weight": has_weight}
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        super().__init__(src, dst, post_ops, shape, affine, places, eps, normalized_shape=shape)
        self.normalized_shape, self.dims = shape, len(shape)

    @classmethod
    def from_float(
        cls, module: nn.RMSNorm, src: QParams | None, dst: QParams | None = None
    ) -> "QRMSNorm":
        """Make the quantized form, with the same shape, weight and eps."""
        return cls(src, dst, module.normalized_shape, module.weight, module.eps)

    def forward(self, src: Tensor) -> Tensor:
        """Normalize."""
        if list(src.shape[-self.dims :]) != self.normalized_shape:
            raise ValueError(
                f"torchq.nn.QRMSNorm: src must end in {self.normalized_shape}, got "
                f"{list(src.shape)}. Check the layer's normalized_shape."
            )
        dst: Tensor = torch.ops.torchq.rms_norm(
            self._source(src),
            self.dims,
            self.weight,
            self.eps,
            self.scales,
            self.zero_points,
            self.dst_code,
            self.post_ops,
        )
        return self._limited(dst)


class QGroupNorm(_QAffineNorm):
    """``quantize(post_ops(group_norm(real(src))))``: :func:`torchq.functional.group_norm`.

    Shapes:
        src: ``(N, num_channels, ...)`` of the source dtype; float32 is quantized with the source's
            parameters, or read as it is where these are None. A channels-last one is not copied.
        dst: the same, channels-last, uint8, int8 or float32.

    Raises:
        TypeError: ``src`` has another dtype.
        ValueError: the number of channels is another, or no multiple of the groups.
    """

    bias: Tensor | None

    def __init__(
        self,
        src: QParams | None,
        dst: QParams | None,
        num_groups: int,
        num_channels: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        post_ops: PostOps | None = None,
        *,
        has_weight: bool = False,
        has_bias: bool = False,
    ) -> None:
        """See :class:`QLayerNorm`."""
        affine, places = {"weight": weight, "bias": bias}, {"weight": has_weight, "bias": has_bias}
        sizes = {"num_groups": num_groups, "num_channels": num_channels}
        super().__init__(src, dst, post_ops, [num_channels], affine, places, eps, **sizes)
        self.num_groups, self.num_channels = num_groups, num_channels

    @classmethod
    def from_float(
        cls, module: nn.GroupNorm, src: QParams | None, dst: QParams | None = None
    ) -> "QGroupNorm":
        """Make the quantized form, with the same groups, weight, bias and eps."""
        sizes = (module.num_groups, module.num_channels)
        return cls(src, dst, *sizes, module.weight, module.bias, module.eps)

    def forward(self, src: Tensor) -> Tensor:
        """Normalize."""
        if src.dim() < 2 or src.shape[1] != self.num_channels:
            raise ValueError(
                f"torchq.nn.QGroupNorm: src must be (N, {self.num_channels}, ...), got "
                f"{list(src.shape)}. Check the layer's num_channels."
            )
        dst: Tensor = torch.ops.torchq.group_norm(
            self._source(src),
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            self.scales,
            self.zero_points,
            self.dst_code,
            self.post_ops,
        )
        return self._limited(dst)
