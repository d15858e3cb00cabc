# SPDX-License-Identifier: Apache-2.0
"""A quantized layer in the place of a float one: float in, float out, for any code around."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _get_tracing_state
from torch._jit_internal import is_scripting
from torch.compiler import is_compiling
from torch.nn.modules.conv import _ConvNd

from torchq.attributes.arguments import kind_text
from torchq.nn.float_weight import FloatWeight
from torchq.nn.module import QModule, Spec, as_source, half_entry, half_from_entry, is_real
from torchq.nn.quantize import Quantize
from torchq.quantization.qparams import QParams

Module = TypeVar("Module", bound=nn.Module)
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)

_PAD_MODES = "reflect", "replicate", "circular"
_MOST_PADDING = 1 << 31
"""Padding at one side that a spec may have: torch does not check larger or negative values."""
_LEAF = "torchq_leaf"
"""Name of the attribute of an error that holds the leaf whose layer raised it."""


def constants_of(module: nn.Module) -> dict[str, object]:
    """Return a float layer's public plain attributes by name: ``in_features`` and the like.

    A class that is not of torch.nn may have some of its own. Of a layer that stands for a module
    (``convert/swap/leaves.py``) they are that module's.
    """
    found: dict[str, object] = {}
    if "_own_constants" in vars(module):
        return dict(vars(module)["_own_constants"])
    for cls in reversed(type(module).__mro__):
        names = getattr(cls, "__constants__", ())
        if cls.__module__.startswith(("torch.", "torchq.")) or cls is object:
            found.update((name, getattr(module, name, None)) for name in names)
        else:
            found.update(vars(cls))
    found.update(vars(module))
    ours = {"training", "weight", "bias"}
    return {k: v for k, v in found.items() if k[0] != "_" and k not in ours and _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in (int, float, bool, str, type(None))


def take_hooks(new: nn.Module, module: nn.Module) -> nn.Module:
    """Return ``new`` with the forward hooks of the module whose place it takes."""
    for name in _HOOKS:
        vars(new)[name] = vars(module)[name].copy()
    return new


def is_traced() -> bool:
    """Return True while calls of operators are recorded: a tracer does not know FloatWeight."""
    return is_compiling() or _get_tracing_state() is not None


def without_hooks(module: Module) -> Module:
    """Return the module, or one on the same parameters that has no forward hooks."""
    if not any(vars(module)[name] for name in _HOOKS):
        return module
    plain = copy.copy(module)
    for name in _HOOKS:
        vars(plain)[name] = OrderedDict()
    return plain


def _kind(value: Tensor) -> str:
    """Return what a source is, for an error; TorchScript compiles this."""
    if not is_scripting():  # noqa: SIM102 - TorchScript leaves out such a block alone
        if not isinstance(value, Tensor):
            return kind_text(value)
    return f"{value.dtype}"


class _Read:
    """The tensors that were made for readers; copies and tracers see none."""

    __slots__ = ("bias", "weight")

    def __init__(self) -> None:
        self.weight: FloatWeight | None = None
        self.bias: FloatWeight | None = None

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return _Read, ()


class Leaf(nn.Module):
    """Base of what takes a float layer's place: it has the attributes of that layer.

    Setting them raises, since it would have no effect.
    """

    def __init__(self) -> None:
        """Start without attributes."""
        super().__init__()
        self._read = _Read()

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise AttributeError for what the float layer had."""
        fixed = vars(self).get("_fixed", {})
        if name in ("weight", "bias") or (name in fixed and fixed[name] != value):
            raise AttributeError(
                f"torchq.nn: {name} of a layer must be what it was in torchq.prepare, got another. "
                "Change the float model before torchq.prepare, or keep the layer float: name it in "
                "overrides with None."
            )
        super().__setattr__(name, value)

    def _fix(self, constants: dict[str, object]) -> None:
        """To be called last: what the leaf has itself is not replaced."""
        own = vars(self).keys() | self._modules.keys()
        fixed = {name: value for name, value in constants.items() if name not in own}
        vars(self).update(fixed)
        vars(self)["_fixed"] = fixed

    @property
    def weight(self) -> Tensor:
        """The weight that the layer computes with, in the float layer's dtype."""
        if is_scripting():
            return self._weight_values()
        else:
            found = self._read.weight
            return self._read_weight() if found is None or is_traced() else found

    @property
    def bias(self) -> Tensor | None:
        """The bias in the float layer's dtype, or None."""
        if is_scripting():
            return self._bias_values()
        else:
            found = self._read.bias
            return self._read_bias() if found is None or is_traced() else found

    def _read_weight(self) -> Tensor:
        if is_traced():
            return self._weight_values()
        shape = self._weight_shape()
        self._read.weight = FloatWeight(self._weight_values, shape, "weight", self._weight_dtype())
        return self._read.weight

    def _read_bias(self) -> Tensor | None:
        value = self._bias_values()
        if value is not None and not is_traced():
            dtype = value.dtype
            value = self._read.bias = FloatWeight(self._bias_values, value.shape, "bias", dtype)
        return value

    def _weight_shape(self) -> torch.Size:
        raise NotImplementedError

    def _weight_dtype(self) -> torch.dtype:
        raise NotImplementedError

    def _weight_values(self) -> Tensor:
        raise NotImplementedError

    def _bias_values(self) -> Tensor | None:
        raise NotImplementedError


if TYPE_CHECKING:

    class _Layer(nn.Module):
        """Attributes of layers that a leaf reads; not all layers have all of them."""

        bias: Tensor | None
        src_factor: Tensor | None
        src_scale: Tensor
        weight_scale: Tensor
        weight_zero_point: Tensor | None

        def weight_values(self) -> Tensor: ...


class QuantizedLeaf(Leaf, QModule):
    """A quantized layer, and the attributes of the float one.

    ``weight`` and ``bias`` are tensors of the values that the layer computes with, in the float
    layer's dtype, made when something reads them (:class:`~torchq.nn.float_weight.FloatWeight`).
    The packed weight is ``layer.weight``. The result has the dtype of the source.

    ``quantize`` is None, or quantizes the source with one scale per channel: the weight then has
    the ratios of these scales to the layer's one.
    """

    _pad: list[int]
    _pad_mode: str
    _shape: list[int]
    _dilation: list[int]
    _stride: list[int]
    _groups: int
    _zero: int
    _turned: bool
    _dtype: torch.dtype
    if TYPE_CHECKING:
        layer: _Layer

    def __init__(
        self,
        layer: nn.Module,
        constants: dict[str, object],
        weight: Spec,
        pad: Sequence[int] = (),
        mode: str = "",
    ) -> None:
        """Wrap ``layer``, which has a float32 destination; :meth:`of` is the usual way.

        Args:
            layer: quantized.
            constants: attributes of the float layer.
            weight: how to unpack the weight: ``shape``, ``groups``, ``dilation``, ``stride``,
                ``zero`` (128 of uint8) and ``turned`` (the float module holds the transpose);
                ``dtype`` of the float one, "bf16" or "f16", where it is not float32.
            pad: for :func:`torch.nn.functional.pad` in front of the layer.
            mode: of that padding.
        """
        super().__init__()
        self.layer = cast("_Layer", layer)
        self._pad, self._pad_mode = list(pad), mode
        self._shape, self._dilation = list(weight["shape"]), list(weight["dilation"])
        self._stride, self._groups = list(weight["stride"]), weight["groups"]
        self._zero, self._turned = weight["zero"], weight["turned"]
        self._dtype = half_from_entry(weight)
        self.quantize: Quantize | None = None  # a plain None costs no look-up through nn.Module
        self._set_spec(constants=constants, weight=weight, pad=list(pad), mode=mode)
        self._fix({k: _hashable(value) for k, value in constants.items()})

    @classmethod
    def of(cls, module: Any, layer: Any, factors: Tensor | None = None) -> "QuantizedLeaf":
        """Return the leaf for a float module.

        Args:
            module: the float module, or the layer of torch.nn that stands for one.
            layer: quantized from what :func:`without_padding` gives of the module.
            factors: of its source's channels, which are in the layer's weight; None for none.
        """
        packed = layer.packed()
        shape, steps = list(packed.shape), list(packed.stride)
        if steps:
            cls = QuantizedTransposedLeaf
            shape[:2] = [shape[1] * packed.groups, shape[0] // packed.groups]
        weight = {
            "shape": shape, "groups": packed.groups, "dilation": list(packed.dilation),
            "stride": steps, "zero": 128 * (packed.dtype == torch.uint8),
            "turned": vars(module).get("_turned", False),
        }  # fmt: skip
        weight.update(half_entry(module.weight.dtype))
        mode = getattr(module, "padding_mode", "zeros")
        pad = [] if mode == "zeros" else module._reversed_padding_repeated_twice
        made = cls(layer, constants_of(module), weight, pad, mode if pad else "")
        if factors is not None:
            channels = packed.in_channels
            factors = factors.repeat_interleave(channels // len(factors))
            zero_points = layer.src_zero_point.expand(channels).contiguous()
            axis = 1 if len(shape) > 2 else -1
            src = QParams(layer.src_scale * factors, zero_points, layer.src_dtype, axis)
            made.quantize = Quantize(src)
        return made

    @classmethod
    def from_spec(cls, spec: Spec) -> "QuantizedLeaf":
        """Return a leaf without its layer, which has a spec of its own."""
        pad, mode = spec["pad"], spec["mode"]
        known = mode in (_PAD_MODES if pad else ("",))
        if not known or not all(type(n) is int and 0 <= n <= _MOST_PADDING for n in pad):
            raise ValueError(
                "torchq.load: padding of a layer in the file's specs must be reflect, replicate or "
                f"circular, by 0 to 2**31, got {str(mode)[:60]!r} by {str(pad)[:60]}. Was it "
                "written by torchq.save?"
            )
        return cls(nn.Identity(), spec["constants"], spec["weight"], pad, mode)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: object, **kwargs: object
    ) -> None:
        if f"{prefix}weight" in state_dict:
            raise RuntimeError(
                f"torchq.nn.{type(self).__name__}: '{prefix}weight' of the state is of the float "
                "model, and this layer is quantized. Give it what state_dict() of the converted "
                "model returned."
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @torch.jit.unused
    def _weight_shape(self) -> torch.Size:
        return torch.Size(self._shape[::-1] if self._turned else self._shape)

    @torch.jit.unused
    def _weight_dtype(self) -> torch.dtype:
        return self._dtype

    def _weight_values(self) -> Tensor:
        if hasattr(self.layer, "weight_values"):
            own = self.layer.weight_values().to(self._dtype)
            return own.t() if self._turned else own
        else:
            return self._int8_values()

    def _int8_values(self) -> Tensor:
        split, rank = 1, len(self._shape)
        if len(self._stride) > 0:
            split = self._groups
            q = torch.ops.torchq.unpack_conv_transpose(
                self.layer.weight, self._shape, self._groups, self._stride, self._dilation
            )
        elif len(self._dilation) > 0:
            q = torch.ops.torchq.unpack_conv(
                self.layer.weight, self._shape, self._groups, self._dilation
            )
        else:
            q = torch.ops.torchq.unpack_linear(self.layer.weight, self._shape[0], self._shape[1])
        channels = [split, 1, -1] if len(self._stride) > 0 else [1, -1, 1]
        channels = channels + [1] * (rank - 2)
        grouped = [split, self._shape[0] // split] + self._shape[1:]  # noqa: RUF005 - scripted
        values: Tensor = (q.float() + self._zero).reshape(grouped)
        if hasattr(self.layer, "weight_zero_point"):
            zero_point = self.layer.weight_zero_point
            if zero_point is not None:
                values = values - zero_point.reshape(channels if zero_point.numel() > 1 else [1])
        scale = self.layer.weight_scale
        values = values * scale.reshape(channels if scale.numel() > 1 else [1])
        values = values.reshape(self._shape)
        if hasattr(self.layer, "src_factor"):
            factor = self.layer.src_factor
            if factor is not None:
                values = values * factor
        if self.quantize is not None:
            step = self.layer.src_scale
            ratios = step / self.quantize.src_scale
            groups = self._groups
            by_group = [groups, self._shape[0] // groups] + self._shape[1:]  # noqa: RUF005
            columns = [groups, 1, -1] + [1] * (rank - 2)
            values = values.reshape(by_group) * ratios.reshape(columns)
            values = values.reshape(self._shape)
        values = values.to(self._dtype)
        return values.t() if self._turned else values

    def _bias_values(self) -> Tensor | None:
        bias = self.layer.bias
        return None if bias is None else bias.to(self._dtype, copy=True)

    def forward(self, input: Tensor) -> Tensor:
        """Run the layer; the argument has the name that ``torch.nn`` gives it."""
        if is_scripting():
            return as_source(self.layer(self._checked(input)), input)
        else:
            return self._recorded(input)

    @torch.jit.unused
    def _recorded(self, input: Tensor, *more: object) -> Tensor:
        """Run the layer; an error of it remembers the leaf, see :func:`failing_leaf`."""
        try:
            return as_source(self.layer(self._checked(input), *more), input)
        except (TypeError, ValueError, RuntimeError) as error:
            vars(error).setdefault(_LEAF, self)
            raise

    def _checked(self, input: Tensor) -> Tensor:
        """Return the layer's source, padded."""
        if input.dtype != torch.float32 and not is_real(input):
            raise TypeError(
                "torchq.nn: input of a layer must be torch.float32, torch.bfloat16 or "
                f"torch.float16, got {_kind(input)}. Give it input.float()."
            )
        padded = F.pad(input, self._pad, self._pad_mode) if len(self._pad) > 0 else input
        return padded if self.quantize is None else self.quantize(padded)


class QuantizedTransposedLeaf(QuantizedLeaf):
    """A quantized transposed convolution, which takes an ``output_size`` as the float one does."""

    _output_padding = nn.ConvTranspose2d._output_padding  # for any number of dims

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Run the layer; the arguments have the names that ``torch.nn`` gives them."""
        padding: list[int] | None = None
        if output_size is not None:
            padding = self._output_padding(  # type: ignore[misc]
                input, output_size, self._stride, self.padding, self._shape[2:],  # type: ignore[arg-type]
                len(self._stride), self._dilation,
            )  # fmt: skip
        if is_scripting():
            return as_source(self.layer(self._checked(input), None, None, padding), input)
        else:
            return self._recorded(input, None, None, padding)


def failing_leaf(error: Exception) -> QuantizedLeaf | None:
    """Return the leaf whose layer raised an error, if a leaf's did."""
    leaf = vars(error).get(_LEAF)
    return leaf if isinstance(leaf, QuantizedLeaf) else None


def without_padding(module: nn.Module) -> nn.Module:
    """Return the float layer without a padding of other values than zeros, which a leaf does."""
    if not isinstance(module, _ConvNd) or module.padding_mode == "zeros":
        return module
    plain = copy.copy(module)
    plain.padding, plain.padding_mode = (0,) * len(plain.kernel_size), "zeros"
    return plain


def _hashable(value: object) -> object:
    """Return tuples, which JSON writes as lists."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
