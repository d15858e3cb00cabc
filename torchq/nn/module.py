# SPDX-License-Identifier: Apache-2.0
"""Base of the quantized modules: a spec, readable state, refolding after loading."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.compiler import is_compiling
from typing_extensions import Self

from torchq.attributes.arguments import DTYPE_NAMES, as_float32, check_type, kind_text
from torchq.attributes.json_text import read_json
from torchq.functional.packing import PackedWeight, unproven
from torchq.nn.clip_counter import ClipCounter, Told, check_finite
from torchq.nn.direct_call import DirectCall
from torchq.quantization.qparams import QParams
from torchq.runtime.library import dtype_code

LAYOUT_VERSION = 1
"""Of the packed weights and the spec; a state of another version does not load."""

Spec = dict[str, Any]
"""What describes a module in JSON: its class, and what :meth:`QModule.from_spec` builds it of."""

_UNCHANGED = (
    "Nothing of the quantized model was changed, but what a float module around it has in front of "
    "it may be."
)
_CHOOSE = "Choose them from what an observer saw, or with torchq.QParams.per_tensor."
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``u8``, ``s8``, ``s32`` or ``f32``."""
    return DTYPE_NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype that :func:`dtype_name` names so."""
    return _DTYPES[name]


_HALF_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def half_entry(dtype: torch.dtype) -> Spec:
    """Return what a spec says of a float module's dtype: nothing of float32."""
    return {"dtype": _HALF_NAMES[dtype]} if dtype in _HALF_NAMES else {}


def half_from_entry(spec: Spec) -> torch.dtype:
    """Return the dtype of which :func:`half_entry` made an entry of ``spec``."""
    name = spec.get("dtype")
    return next((dtype for dtype, own in _HALF_NAMES.items() if own == name), torch.float32)


def is_real(src: Tensor) -> bool:
    """Return whether it is float32, bfloat16 or float16. TorchScript compiles it."""
    dtype = src.dtype
    return dtype == torch.float32 or dtype == torch.bfloat16 or dtype == torch.float16


def quantize_boundary(
    src: Tensor, scale: Tensor, zero_point: Tensor, code: int, low: int, high: int
) -> Tensor:
    """Quantize the float source of a quantized module, to 7 bits where the module has only 7.

    A function because TorchScript compiles it.

    Raises:
        TypeError: ``src`` is neither float32, bfloat16 nor float16, nor of the module's source
            dtype.
    """
    if not is_real(src):
        raise TypeError(
            "torchq.nn: src must be float32, bfloat16 or float16, or the module's own quantized "
            f"dtype, got {src.dtype}. Convert it with .float(), or dequantize what is quantized "
            "otherwise."
        )
    q: Tensor = torch.ops.torchq.quantize(src, scale, zero_point, code)
    return torch.clamp(q, low, high) if high - low < 255 else q


def as_source(dst: Tensor, src: Tensor) -> Tensor:
    """Return a float32 result in the dtype of a bfloat16 or float16 source; others as they are.

    A function because TorchScript compiles it.
    """
    if src.dtype != dst.dtype and dst.dtype == torch.float32 and src.is_floating_point():
        return dst.to(src.dtype)
    return dst


class QModule(nn.Module):
    """Base of the quantized modules.

    State is plain tensors. What is not a number (class, layout version, dtypes, geometry, post-ops)
    is JSON text in the uint8 buffer ``spec``; ``load_state_dict`` raises when it differs, and takes
    over what calibration chose in it: scale and zero point of a sum, bounds of a clip. Tensors that
    follow from others (multiplier, offset, ...) are non-persistent buffers, recomputed by
    :meth:`refold`. The tensors' dtypes are part of their meaning, so ``half()`` and the like raise.
    """

    registry: ClassVar[dict[str, type["QModule"]]] = {}
    """Every subclass by name, for :func:`torchq.load`."""

    _direct: ClassVar[DirectCall | None] = None
    """How a converted model calls the op without the module, where ``forward`` comes to one op."""

    spec: Tensor
    checked_name: str
    src_scale: Tensor
    src_zero_point: Tensor

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Register the subclass; ``_direct`` holds for the forward of its own class only."""
        super().__init_subclass__(**kwargs)
        own = vars(next(base for base in cls.__mro__ if "forward" in vars(base)))
        direct = own.get("_direct")
        cls._direct = None if direct is None else direct._replace(forward=own["forward"])
        # The first of a name: torch.export makes subclasses of its own with the same names.
        QModule.registry.setdefault(cls.__name__, cls)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As of nn.Module, but buffers that are None come last.

        torch.export counts them, too, when it looks for those of a root module among its inputs.
        """
        super().register_buffer(name, tensor, persistent)
        for key in [key for key, own in self._buffers.items() if own is None]:
            self._buffers[key] = self._buffers.pop(key)

    def _set_spec(self, **fields: object) -> None:
        fields = {"class": type(self).__name__, "version": LAYOUT_VERSION, **fields}
        # beside the buffer, which loses its values on meta
        self._spec_text = json.dumps(fields, separators=(",", ":"))
        self.name_source(f"a source of {type(self).__name__}", False, None)
        text = list(self._spec_text.encode())
        self.register_buffer("spec", torch.tensor(text, dtype=torch.uint8, device="cpu"))

    def read_spec(self) -> Spec:
        """Return the spec as a dict."""
        return dict(json.loads(self._spec_text))

    def extra_repr(self) -> str:
        """Return what the class tells of itself, then scales and zero points."""
        values = {} if self._buffers.get("scales") is None else {"scales": 0, "zero_points": 0}
        names = values or [n for n in self._buffers if n.endswith(("_scale", "_zero_point"))]
        known = [(name, self._buffers[name]) for name in names]
        told = [f"{name}={_values_text(own)}" for name, own in known if own is not None]
        return ", ".join(filter(None, [self._own_repr(), *told]))

    def _own_repr(self) -> str:
        return ""

    @classmethod
    def from_spec(cls, spec: Spec) -> "QModule":
        """Return a module of this spec whose tensors are still to be loaded."""
        raise NotImplementedError(f"torchq.nn.{cls.__name__}: from_spec is not supported.")

    def refold(self) -> None:
        """Recompute what follows from other tensors; call it after changing them."""

    def name_source(self, name: str, checks: bool, told: Told | None) -> None:
        """Tell how to call the float source, and whether it must be finite.

        Args:
            name: for warnings and errors, such as "input 'x'".
            checks: raise ValueError for NaN and inf.
            told: shared by the modules of a model, of which one warns; None never warns.
        """
        self._clips = ClipCounter(name, checks, told)
        if checks:
            self.checked_name = name  # TorchScript sees no counter

    def _packed_weights(self) -> dict[str, PackedWeight]:
        """Return the packed weights by what follows ``weight`` in the names of their buffers."""
        return {}

    def _check_packed(self, name: str) -> None:
        """Raise ValueError unless packed weights, their sums and their pair bounds fit together.

        Kernels take them as proof that their own sums are exact, so a loaded state must prove them.
        """
        for suffix, packed in self._packed_weights().items():
            parts = (packed.weight, packed.compensation, packed.pair_bound)
            plain = all(type(part) in (Tensor, nn.Parameter) for part in parts)
            if not plain or all(part.is_meta for part in parts):
                continue  # fake or meta: no values
            if wrong := unproven(packed):
                raise ValueError(
                    f"torchq.nn.{type(self).__name__}: '{wrong}{suffix}' of the state of '{name}' "
                    "must follow from its weight, got other values. The state was damaged or "
                    "changed by hand: load the original, or quantize the model again."
                )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """As usual; what was in memory needs no check, unlike what is unpickled."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        # most are empty dicts of hooks, of which copy takes 5 us each
        empty = {k: v.copy() for k, v in vars(self).items() if isinstance(v, dict) and not v}
        rest = {key: value for key, value in vars(self).items() if key not in empty}
        vars(copied).update(empty, **copy.deepcopy(rest, memo))
        return copied

    def __setstate__(self, state: dict[str, object]) -> None:
        """Unpickle.

        Raises:
            ValueError: packed weights, their sums and their bounds do not fit together.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_spec_text" not in self.__dict__:  # of an older version
            self._spec_text = text_bytes(self.spec).decode()
        if "_clips" not in self.__dict__:
            self.name_source(f"a source of {type(self).__name__}", False, None)
        self._own_empty_buffers()
        self._check_packed("")

    def _own_empty_buffers(self) -> None:
        """``torch.export.save`` fails at empty tensors in a file that is mapped to memory."""
        for name, own in self._buffers.items():
            if own is not None and own.numel() == 0:
                self._buffers[name] = own.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        text = self._spec_text
        if not self._holds(state_dict, prefix):
            self._check_dtypes(state_dict, prefix)
            # with assign=True, torch would register parameters in place of buffers
            state_dict = {key: _no_parameter(value) for key, value in state_dict.items()}
            spec = state_dict.get(prefix + "spec")
            text = self._checked_spec(spec, prefix)
            if isinstance(spec, Tensor) and text != self._spec_text:  # maybe of another length
                self.spec = torch.empty_like(spec)
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        error_msgs: list[str] = args[-1] if args else kwargs["error_msgs"]
        if not error_msgs:
            if text != self._spec_text:
                self._spec_text, self.post_ops = text, json.loads(text)["post_ops"]
            self._own_empty_buffers()
            self._check_packed(prefix.rstrip("."))
            self.refold()

    def _holds(self, state_dict: dict[str, object], prefix: str) -> bool:
        """Return whether a state is the module's own tensors and nothing else.

        Then loading them again changes nothing, which takes torch 1 ms.
        """
        own = {
            prefix + name: value
            for name, value in self._buffers.items()
            if value is not None and name not in self._non_persistent_buffers_set
        }
        return (
            own.keys() == state_dict.keys()
            and all(state_dict[name] is value for name, value in own.items())
            and not self._load_state_dict_pre_hooks
        )

    def _check_dtypes(self, state_dict: dict[str, object], prefix: str) -> None:
        """Raise RuntimeError for anything but dense tensors of the module's dtypes."""
        for name, own in self._buffers.items():
            given = state_dict.get(prefix + name)
            if own is None or given is None:
                continue
            got = given.dtype if isinstance(given, Tensor) else kind_text(given)
            dense = isinstance(given, Tensor) and given.layout is torch.strided
            if not dense or got != own.dtype:
                raise RuntimeError(
                    f"torchq.nn.{type(self).__name__}: '{prefix}{name}' of the state must be a "
                    f"dense tensor of {own.dtype}, got {got}. Is it of the float model, or was it "
                    "converted with half() or the like? Give it what state_dict() of the converted "
                    "model returned."
                )

    def _checked_spec(self, given: object, prefix: str) -> str:
        """Return the text of a state's spec, or the module's own without one.

        Raises:
            RuntimeError: they differ in more than what calibration chose.
        """
        if not isinstance(given, Tensor) or given.is_meta:
            return self._spec_text
        text = text_bytes(given).decode("ascii", errors="replace")
        if text == self._spec_text or _uncalibrated(text) == _uncalibrated(self._spec_text):
            return text
        raise RuntimeError(
            f"torchq.nn.{type(self).__name__}: the state of '{prefix.rstrip('.')}' has spec "
            f"{text[:500]}, but this module is {self._spec_text[:500]}. Build the module for that "
            "spec, or load with torchq.load."
        )

    def check_conversion(self, fn: Callable[[Tensor], Tensor], where: str = "") -> None:
        """Raise TypeError if ``fn`` changes dtypes, or moves tensors to a device without kernels.

        Args:
            fn: what ``half()``, ``to()`` and the like do to each tensor.
            where: name of the module in the one that is converted.
        """
        for name, own in self._buffers.items():
            if own is None:
                continue
            made, full = fn(own.reshape(-1)[:0]), f"{where}.{name}".lstrip(".")
            if made.dtype != own.dtype:
                raise TypeError(
                    f"torchq.nn.{type(self).__name__}: '{full}' must stay {own.dtype}, got a "
                    f"conversion to {made.dtype}. Convert the float model, to torch.bfloat16 say, "
                    f"and quantize it then. {_UNCHANGED}"
                )
            if made.device.type not in ("cpu", "meta", own.device.type):
                raise TypeError(
                    f"torchq.nn.{type(self).__name__}: '{full}' must stay on the CPU, got a move "
                    f"to {made.device}. Quantized layers run on CPUs: give them what x.cpu() "
                    f"returns. {_UNCHANGED}"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, part in self.named_modules() if recurse else [("", self)]:
            if isinstance(part, QModule):
                part.check_conversion(fn, name)

        def flat(own: Tensor) -> Tensor:
            """Packed weights are of 4 and 5 dims, but no images: a memory format is not theirs."""
            return fn(own.reshape(-1)).view(own.shape) if own.dim() > 3 else fn(own)

        return super()._apply(flat, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _add_qparams(self, name: str, qparams: QParams) -> None:
        """Buffers ``<name>_scale`` [1 or C] and ``<name>_zero_point`` [1]."""
        self.register_buffer(f"{name}_scale", qparams.scale.detach().reshape(-1).clone())
        self.register_buffer(f"{name}_zero_point", qparams.zero_point.reshape(-1).clone())

    def _add_packed(self, weight: PackedWeight) -> None:
        """Add ``weight``, ``compensation`` and ``pair_bound``."""
        for name, part in weight.tensors().items():
            self.register_buffer(name, part)

    def _add_floats(self, name: str, values: Tensor | None) -> None:
        """Add a float32 buffer of its own memory, or None."""
        own = None if values is None else as_float32(values.detach()).clone()
        self.register_buffer(name, own)

    def _add_folded(self, *names: str) -> None:
        """Add float32 buffers that no file holds, and that :meth:`refold` fills."""
        for name in names:
            empty = torch.empty(0, dtype=torch.float32, device="cpu")
            self.register_buffer(name, empty, persistent=False)

    def _add_src(self, src: QParams) -> None:
        """Add what :meth:`_quantized_src` needs."""
        check_type(f"torchq.nn.{type(self).__name__}: src", src, QParams, _CHOOSE)
        self._add_qparams("src", src)
        self.src_dtype = src.dtype
        self.src_code = dtype_code(src.dtype)
        self.src_low, self.src_high = src.integers

    def _check_one_scale(self, qparams: Sequence[QParams | None]) -> None:
        """Raise NotImplementedError for parameters per channel, TypeError for anything else."""
        for q in qparams:
            if q is not None:
                check_type(f"torchq.nn.{type(self).__name__}: src and dst", q, QParams, _CHOOSE)
        if any(q is not None and q.is_per_channel for q in qparams):
            raise NotImplementedError(
                f"torchq.nn.{type(self).__name__}: src and dst must have one scale, got one "
                "per channel. The nearest supported form is a Dequantize in front, or a float "
                "destination."
            )

    def _add_limits(self, dst: QParams | None) -> None:
        """Add what :meth:`_limited` needs; None for a float destination."""
        # 0 where nothing is to be clamped: that is what `_direct` can ask for
        self.dst_low, self.dst_high = (0, 0) if dst is None or dst.bits == 8 else dst.integers

    def _limited(self, dst: Tensor) -> Tensor:
        """Clamped to 7 bits where the destination has only 7."""
        return torch.clamp(dst, self.dst_low, self.dst_high) if self.dst_high > 0 else dst

    def _quantized_src(self, src: Tensor) -> Tensor:
        """Return the source in its quantized dtype; floats are quantized, all else a TypeError."""
        if src.dtype == self.src_dtype:
            return src
        return self._from_float(
            src, self.src_scale, self.src_zero_point, self.src_code, self.src_low, self.src_high
        )

    def _from_float(
        self, src: Tensor, scale: Tensor, zero_point: Tensor, code: int, low: int, high: int
    ) -> Tensor:
        """Return a float source in a quantized dtype, and count what that clips."""
        if is_scripting():
            if hasattr(self, "checked_name"):
                check_finite(src, self.checked_name)
        elif not is_compiling():
            self._clips.look(src, scale, zero_point, low, high)
        return quantize_boundary(src, scale, zero_point, code, low, high)


def _no_parameter(value: object) -> object:
    return value.detach() if type(value) is nn.Parameter else value


def text_bytes(text: Tensor) -> bytes:
    """Return the text that a uint8 tensor holds; a list of its values would be eight times it."""
    flat = text.detach().contiguous().view(-1).view(torch.uint8)
    return bytes(flat.numpy().data)


def read_spec(spec: Tensor) -> Spec:
    """Parse a ``spec`` buffer.

    Raises:
        ValueError: it is not the spec of a torchq module.
    """
    try:
        fields = read_json(text_bytes(spec))
        if isinstance(fields, dict) and isinstance(fields.get("class"), str):
            return fields
    except ValueError:
        pass
    raise ValueError(
        "torchq.nn: spec must be the JSON text of a torchq module, got "
        f"{text_bytes(spec)[:60]!r}. Is this a state saved by torchq?"
    )


def _values_text(values: Tensor) -> str:
    """Return up to four values, or how many there are and the smallest and the largest."""
    if values.is_meta:
        return "?"
    numbers = [f"{value:.4g}" for value in values.tolist()]
    if len(numbers) > 4:
        return f"{len(numbers)} of {float(values.min()):.4g} to {float(values.max()):.4g}"
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"


def _uncalibrated(text: str) -> object:
    """Return the fields of a spec, without the numbers in its post-ops that calibration chose."""
    try:
        fields = read_json(text.encode())
        return fields | {"post_ops": list(map(_without_numbers, fields["post_ops"].split("+")))}
    except (AttributeError, KeyError, TypeError, ValueError):  # no post-ops, or no spec
        return text


def _without_numbers(post_op: str) -> list[str]:
    """Return the fields of a post-op, without scale and zero point of a sum, bounds of a clip."""
    name, *fields = post_op.split(":")
    return [name, *(fields[2:] if name in ("sum", "eltwise_clip") else fields)]


def placeholder_qparams(dtype: str, bits: int = 8) -> QParams:
    """Parameters of a module that is about to be loaded."""
    one = QParams.per_tensor(1.0, 0, dtype_from_name(dtype))
    return QParams(one.scale, one.zero_point, one.dtype, None, bits)
