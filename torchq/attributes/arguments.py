# SPDX-License-Identifier: Apache-2.0
"""Checked conversion of arguments (scalars, values, masks), and how their text is read and written.

``where`` is how an error begins: ``"torchq.<op>: <argument>"``. Tensors returned here are private
1-D CPU copies, so changing the caller's tensor afterwards changes nothing. Text is locale-free.
"""

from __future__ import annotations

import difflib
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Values: TypeAlias = float | Sequence[object] | npt.NDArray[np.generic] | Tensor

DTYPE_NAMES = {torch.uint8: "u8", torch.int8: "s8", torch.int32: "s32", torch.float32: "f32"}
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)
"""Dtypes of real values. Everything is computed in float32; the others are read and given."""
ARGS = ("src", "weights", "dst", "dw_weights", "dw_dst")  # and src<i>
MAX_DIMS = 12  # oneDNN's DNNL_MAX_NDIMS
INT32 = torch.iinfo(torch.int32)


def as_float32(values: Tensor) -> Tensor:
    """Return bfloat16 and float16 as float32, which is exact; other tensors as they are."""
    return values.float() if values.dtype in HALVES else values


def computed_dtype(dst_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an op computes its result: the half ones are rounded float32."""
    return torch.float32 if dst_dtype in HALVES else dst_dtype


def kind_text(value: object) -> str:
    """Return a value for an error: short, and of arrays and tensors only what they are."""
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return f"a numpy array of {value.dtype} {shape}, which torch.from_numpy converts"
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    text = f"{value}"
    return text if len(text) < 200 else text[:200] + "..."


def check_type(where: str, value: object, kind: type, remedy: str) -> None:
    """Raise TypeError unless ``value`` is a ``kind``; a Tensor must be dense, too."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{where} must be of type {kind.__name__}, got {type(value).__name__}. {remedy}"
        )
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise TypeError(
            f"{where} must be a dense Tensor, got {value.layout}. Call .to_dense() first."
        )


def check_tensors(where: str, values: object) -> None:
    """Raise TypeError unless ``values`` is a sequence of tensors; one tensor is none."""
    if not isinstance(values, Sequence):
        raise TypeError(
            f"{where} must be a list of tensors, got {type(values).__name__}. Pass [] for none, "
            "[x] for one."
        )
    for index, value in enumerate(values):
        check_type(f"{where}[{index}]", value, Tensor, "Pass a list of tensors.")


def to_float32(where: str, value: float | Tensor) -> float:
    """Return the value rounded to float32, which must be finite."""
    single = isinstance(value, Tensor) and value.numel() == 1
    if isinstance(value, bool) or not (single or isinstance(value, Real)):
        raise TypeError(f"{where} must be a number, got {value!r}. Pass a float.")
    number = float(value)
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded):
        raise ValueError(
            f"{where} must be finite in float32, got {number!r}. "
            "The largest magnitude is 3.4028235e38."
        )
    return rounded


def to_int(where: str, value: object, low: int, high: int) -> int:
    """Return the value as an int in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{where} must be an integer, got {value!r}. Pass an int.")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(
            f"{where} must be in [{low}, {high}], got {number}. Pass a value in that range."
        )
    return number


def to_mask(where: str, mask: int) -> int:
    """Return a mask of up to MAX_DIMS bits."""
    return to_int(f"{where}: mask", mask, 0, 2**MAX_DIMS - 1)


def to_dtype(where: str, dtype: torch.dtype | str) -> torch.dtype:
    """Return a dtype of DTYPE_NAMES, given as such or by its short name."""
    for known, name in DTYPE_NAMES.items():
        if dtype in (known, name):
            return known
    names = ", ".join(f"{known} ({name})" for known, name in DTYPE_NAMES.items())
    raise ValueError(f"{where} must be one of {names}, got {dtype!r}. Convert to one of them.")


def check_choice(
    where: str, value: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> str:
    """Raise ValueError with the known choices and the nearest one.

    ``aliases`` are names that others use, and what they mean here.
    """
    known = list(known)
    if value in known:
        return value
    found = (aliases or {}).get(str(value)) or nearest(str(value), known)
    raise ValueError(
        f"{where} must be one of {', '.join(known)}, got {value!r}. Did you mean {found!r}?"
    )


def nearest(value: str, known: Sequence[str], cutoff: float = 0.0) -> str:
    """Return the known name that is most like another, by its words first; "" where none is."""
    found = [name for name in known if f"_{value}_" in f"_{name}_"]
    within = [name for name in known if f"_{name}_" in f"_{value}_"]
    found += sorted(within, key=len, reverse=True)
    found += difflib.get_close_matches(value, known, n=1, cutoff=cutoff)
    return found[0] if found else ""


def place_of(name: str) -> str:
    """Return a module's qualified name as errors give it."""
    return repr(name) if name else "the model"


def float_values(where: str, values: Values, *, positive: bool = False) -> Tensor:
    """Finite (and if asked, positive) float32 values."""
    array = _array(where, values, "iuf", "numbers")
    with np.errstate(over="ignore"):
        singles = array.astype(np.float32).reshape(-1)
    bad = ~np.isfinite(singles) | (singles <= 0 if positive else False)
    if bad.any():
        index = int(bad.argmax())
        kind = "finite float32 values > 0" if positive else "finite float32 values"
        raise ValueError(
            f"{where} must be {kind}, got {array.reshape(-1)[index]} at index {index}. "
            "Correct that value."
        )
    return torch.from_numpy(singles.copy())


def int_values(where: str, values: Values) -> Tensor:
    """Int32 values; floats are refused rather than rounded."""
    array = _array(where, values, "iu", "integers").reshape(-1)
    for index, value in enumerate(array.tolist()):
        to_int(f"{where}[{index}]", value, INT32.min, INT32.max)
    return torch.from_numpy(array.astype(np.int32))


def _array(where: str, values: Values, kinds: str, expected: str) -> npt.NDArray[np.generic]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.dtype.kind not in kinds:
        raise TypeError(
            f"{where} must be {expected}, got {values!r}. "
            f"Pass one number, a list or a tensor of {expected}."
        )
    return array


def selected_dims(where: str, mask: int, dims: Sequence[int]) -> list[int]:
    """Return the dims whose bit is set in ``mask``, 1 for the others."""
    if mask >> len(dims):
        raise ValueError(
            f"{where} must use a mask below {1 << len(dims)} for dims {list(dims)}, got mask "
            f"{mask} ({mask:#b}). Bit d selects dim d."
        )
    return [dim if mask >> d & 1 else 1 for d, dim in enumerate(dims)]


def expected_values(mask: int, dims: Sequence[int]) -> int:
    """Return the number of values a mask asks for: the product of selected dims (1 for mask 0)."""
    return math.prod(selected_dims("torchq.expected_values: mask", mask, dims))


def check_count(
    where: str, mask: int, values: Tensor | None, shape: Sequence[int], dims: Sequence[int]
) -> None:
    """Raise ValueError unless there are as many values as ``shape`` (of the mask) has elements."""
    expected = math.prod(shape)
    if values is not None and values.numel() != expected:
        raise ValueError(
            f"{where} must be {expected} values (mask {mask} of dims {list(dims)} selects "
            f"{list(shape)}), got {values.numel()}. Supply {expected} values or change the mask."
        )


def check_single(where: str, mask: int, values: Tensor) -> None:
    """Raise ValueError if mask 0 comes with other than one value; other masks need the dims."""
    if mask == 0 and values.numel() != 1:
        raise ValueError(
            f"{where} must be 1 value for mask 0, got {values.numel()}. "
            "Set the bit of each dim that has its own values."
        )


def content(values: Tensor | None) -> tuple[torch.dtype, bytes] | None:
    """Return the dtype and the bits of 1-D values, which decide equality."""
    return None if values is None else (values.dtype, values.numpy().tobytes())


@dataclass(frozen=True, eq=False)
class MaskedValues:
    """Values by mask; None if they are supplied at execution. ``groups``: of the last two dims."""

    mask: int
    values: Tensor | None
    groups: tuple[int, ...] | None = None

    def text(self) -> str:
        """Return the mask, and the groups."""
        return str(self.mask) + (f":{self.groups[0]}x{self.groups[1]}" if self.groups else "")

    def shape(self, where: str, dims: Sequence[int]) -> list[int]:
        """Return the values' own shape over ``dims``: dim / group if selected, else 1."""
        shape = selected_dims(where, self.mask, dims)
        for d, group in enumerate(self.groups or (), start=len(dims) - 2):
            if d < 0 or dims[d] % group or (group > 1 and not self.mask >> d & 1):
                raise ValueError(
                    f"{where} must have groups that divide the last two dims and are 1 outside the "
                    f"mask, got groups {list(self.groups or ())}, mask {self.mask}, dims "
                    f"{list(dims)}. Change the groups or the mask."
                )
            shape[d] //= group
        return shape

    def resolve(self, where: str, dims: Sequence[int]) -> Tensor:
        """Return the values in a shape that broadcasts over ``dims``."""
        shape = self.shape(where, dims)
        if self.values is None:
            raise missing(where)
        check_count(where, self.mask, self.values, shape, dims)
        values = self.values.reshape(shape)
        for d, group in enumerate(self.groups or (), start=len(dims) - 2):
            if group > 1:
                values = values.repeat_interleave(group, dim=d)
        return values


def check_arg(where: str, arg: str) -> str:
    """Raise ValueError unless ``arg`` is one that may have scales."""
    if isinstance(arg, str) and re.fullmatch(r"src(0|[1-9][0-9]{0,2})", arg):
        return arg
    if arg == "bias":
        raise ValueError(
            f"{where}: arg must be one of {', '.join(ARGS)}, src0, src1, ..., got 'bias'. A float "
            "bias is in real units, an int32 bias in accumulator units: neither has a scale."
        )
    return check_choice(f"{where}: arg", arg, [*ARGS, "src0", "src1"])


def sort_args(args: Iterable[str]) -> list[str]:
    """In the order of ARGS, then src0, src1, ..."""
    return sorted(args, key=lambda arg: (0, ARGS.index(arg)) if arg in ARGS else (1, int(arg[3:])))


def check_groups(label: str, mask: int, groups: Sequence[int] | None) -> tuple[int, ...] | None:
    """Two sizes, each >= 1."""
    if groups is None:
        return None
    if not isinstance(groups, Sequence) or len(groups) != 2 or mask == 0:
        raise ValueError(
            f"{label} must have two group sizes and mask > 0, got groups {groups!r}, mask "
            f"{mask}. Groups divide the last two dims."
        )
    return tuple(to_int(f"{label}: groups", size, 1, INT32.max) for size in groups)


def missing(where: str) -> ValueError:
    """Return the error for values declared but not supplied."""
    return ValueError(
        f"{where} must be supplied, got only a mask. Use attr.with_values(...) before the call."
    )


def float_text(value: float) -> str:
    """Return the shortest text that reads back as this float32, read as float32 or as float64.

    It never holds a ``+`` (the separator of post-ops): 3.4e38, 1e-45, 6, -0.
    """
    single = np.float32(value)
    if value == 0 or 1e-4 <= abs(value) < 1e16:
        text = np.format_float_positional(single, trim="-")
    else:
        text = np.format_float_scientific(single, trim="-", exp_digits=1)
    if np.float32(float(text)) != single:  # rounding twice misses it, as with 7.038531e-26
        text = repr(float(single))
    return text.replace("e+", "e")


def parse_float(where: str, text: str) -> float:
    """Read what `float_text` wrote, or any decimal text without a ``+``."""
    if not re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e-?[0-9]{1,3})?", text):
        raise ValueError(f"{where} must be a number like 6, 0.5, 1e-5 or 1e20 (without '+')")
    return to_float32(where, float(text))


def parse_int(where: str, text: str) -> int:
    """Read a decimal integer of at most 10 digits."""
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", text):
        raise ValueError(f"{where} must be an integer like 0 or 128")
    return int(text)


def parse_groups(where: str, text: str) -> list[int]:
    """Group sizes of the last two dims, ``32x1``."""
    return [parse_int(where, size) for size in text.split("x")]


def split_at(text: str, separator: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Return (position, text) of the parts between separators; ``text`` itself is at ``start``."""
    for part in text.split(separator):
        yield start, part
        start += len(part) + len(separator)


@contextmanager
def at_position(op: str, position: int, got: str) -> Iterator[None]:
    """Add the op, the position (from 0) and the text there to a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"torchq.{op}: at position {position}, got {got!r}: {error}") from None


def join_fields(name: str, *fields: tuple[str, str]) -> str:
    """Join a name and its (text, default) fields with ``:``, without the trailing defaults."""
    kept = list(fields)
    while kept and kept[-1][0] == kept[-1][1]:
        kept.pop()
    return ":".join([name, *(text for text, _ in kept)])


_READERS: dict[str, Callable[[str, str], object]] = {
    "scale": parse_float,
    "shift": parse_float,
    "alpha": parse_float,
    "beta": parse_float,
    "zero_point": parse_int,
    "mask": parse_int,
    "dtype": to_dtype,
    "bias_dtype": to_dtype,
    "kernel": parse_int,
    "stride": parse_int,
    "padding": parse_int,
    "groups": parse_groups,
    "mode": lambda _, text: text,
}


def read_fields(
    op: str, position: int, token: str, names: Sequence[str], required: int = 0
) -> dict[str, object]:
    """Read ``<head>:<field>:...`` by the fields' names; the first ``required`` must be there."""
    (_, head), *parts = split_at(token, ":", position)
    if not required <= len(parts) <= len(names):
        form = "".join([f":<{name}>" for name in names[:required]])
        form += "".join(f"[:<{name}>]" for name in names[required:])
        with at_position(op, position, token):
            raise ValueError(f"must have the form {head}{form}")
    fields = {}
    for name, (start, text) in zip(names, parts, strict=False):
        with at_position(op, start, text):
            fields[name] = _READERS[name](name, text)
    return fields
