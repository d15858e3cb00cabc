# SPDX-License-Identifier: Apache-2.0
"""The base class of observers, modules that watch activations during calibration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchq.quantization.qparams import QParams, choose_qparams
from torchq.quantization.ranges import activation_range


class Observer(nn.Module):
    """Base of all observers: ``forward(x)`` records ``x`` and returns it unchanged.

    Subclasses implement ``_record``. Those that keep more than ``min_value`` and ``max_value``
    implement ``_range`` too. A class that has a ``_record`` needs a ``_merge`` of its own where
    several processes calibrate. Buffers, which they exchange and calibration files hold, come from
    ``_add_buffer`` and change in place.

    Attributes:
        name: qualified name of what is observed, set by the calibration flow for error messages.
        min_value: float32 ``[]`` (``[C]`` per channel); inf before the first value.
        max_value: float32, same shape; -inf before the first value.
        row_count: items of the first dimension that were recorded; None where what was recorded
            came from a file or another process.
    """

    name: str
    min_value: Tensor
    max_value: Tensor
    row_count: int | None = None  # of what an older version pickled
    _elsewhere: bool

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Start without data; here, as the ``__init__`` of a dataclass calls no other."""
        self = super().__new__(cls)
        nn.Module.__init__(self)
        self.name, self.row_count = "", 0
        self._elsewhere = False  # whether a subclass recorded data and left min_value, max_value
        self._add_buffer("min_value", torch.inf)
        self._add_buffer("max_value", -torch.inf)
        return self

    def __init__(self) -> None:
        """Nothing is left to do."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Modules are hashed by identity, also where a dataclass or the subclass compares them."""
        super().__init_subclass__(**kwargs)
        if vars(cls).get("__hash__") is None:
            cls.__hash__ = nn.Module.__hash__  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        """Record ``x`` (floating point, any shape; empty tensors are ignored) and return it.

        Raises:
            TypeError: ``x`` is not a floating-point tensor.
            ValueError: ``x`` contains NaN or inf; nothing of it is recorded.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            remedy = f"Give the model what it computes with, such as batch.float(). {self._keep}"
            raise TypeError(self._text(f"src must be a floating-point tensor, got {got}", remedy))
        if x.numel():
            with torch.no_grad():
                self._record(x.detach().to(torch.float32))
            self._elsewhere = self._elsewhere or not self.calibrated
            if self.row_count is not None:
                self.row_count += x.shape[0] if x.dim() > 1 else 1
        return x

    def qparams(
        self, dtype: torch.dtype = torch.uint8, bits: int = 8, symmetric: bool = False
    ) -> QParams:
        """Choose the parameters for what was recorded; see ``choose_qparams`` for the arguments.

        Raises:
            RuntimeError: no data was recorded.
            ValueError: ``dtype`` or ``bits`` is not supported.
        """
        integers = activation_range(dtype, bits)
        if not self.calibrated:
            remedy = f"Run torchq.calibrate with data that reaches this module. {self._keep}"
            raise RuntimeError(
                self._text("data must be recorded before qparams(), got none", remedy)
            )
        low, high = self._range(integers, symmetric)
        return choose_qparams(low, high, dtype, bits, symmetric, self._channel_axis)

    @property
    def calibrated(self) -> bool:
        """Return whether any value was recorded."""
        ranged = self.min_value.numel() > 0 and bool((self.min_value <= self.max_value).all())
        return ranged or self._elsewhere

    def check_merge(self) -> None:
        """Raise unless what several observers of this kind recorded can be merged.

        Raises:
            NotImplementedError: the class records in its own way, and says no way to merge that.
            RuntimeError: this kind depends on the order of the data.
        """
        own = {"forward", "_record", "_merge"}
        owner = next(cls for cls in type(self).__mro__ if own & vars(cls).keys())
        if owner is Observer or "_merge" not in vars(owner):
            problem = f"class {owner.__name__} must implement _merge(self, other), got none"
            remedy = "Add there what the other one recorded, or calibrate in one process."
            raise NotImplementedError(self._text(problem, remedy))

    def merge(self, other: Observer) -> Self:
        """Add what ``other`` recorded, as if its data had come here too; return self.

        Raises:
            TypeError: ``other`` is an observer of another kind.
            ValueError: ``other`` has other settings or another number of channels.
            NotImplementedError, RuntimeError: this kind cannot merge; see :meth:`check_merge`.
        """
        self.check_merge()
        if type(other) is not type(self):
            got = type(other).__name__
            remedy = "Calibrate all processes with the same QConfig."
            raise TypeError(self._text(f"other must be a {type(self).__name__}, got {got}", remedy))
        if other.extra_repr() != self.extra_repr():
            expected = f"other must have the settings ({self.extra_repr()})"
            remedy = "Calibrate all processes with the same QConfig."
            raise ValueError(self._text(f"{expected}, got ({other.extra_repr()})", remedy))
        with torch.no_grad():
            if other.calibrated:
                self._merge(other)
                counts = self.row_count, other.row_count
                self.row_count = None if None in counts else sum(filter(None, counts))
                self._elsewhere = self._elsewhere or not self.calibrated
        return self

    def check_state(self) -> None:
        """Raise ValueError unless the buffers hold what such an observer records."""
        low, high = self.min_value, self.max_value
        ranges = low.isfinite() & high.isfinite() & (low <= high)
        self._check_loaded(ranges | ((low == torch.inf) & (high == -torch.inf)), "its range")

    def _check_loaded(self, valid: Tensor | bool, what: str) -> None:
        if not bool(torch.as_tensor(valid, device="cpu").all()):
            problem = f"{what} must be one that it has recorded, got other values"
            raise ValueError(self._text(problem, "Was the file changed? Calibrate anew."))

    def extra_repr(self) -> str:
        """Return settings as ``name=value``; observers merge only if these agree."""
        return ""

    @property
    def _channel_axis(self) -> int | None:
        return None

    def _record(self, values: Tensor) -> None:
        """Record a float32 tensor with at least one element; the model may change it later."""
        raise NotImplementedError(
            self._text(
                f"class {type(self).__name__} must implement _record(self, values), got a subclass "
                "of Observer without it",
                "Implement it, such as: self._widen(*self._min_max(values)).",
            )
        )

    def _range(
        self, integers: tuple[int, int], symmetric: bool
    ) -> tuple[float | Tensor, float | Tensor]:
        """Return the real range to cover with the given integers."""
        if not bool((self.min_value <= self.max_value).all()):
            raise NotImplementedError(
                self._text(
                    f"class {type(self).__name__} must implement _range(self, integers, "
                    "symmetric), or change min_value and max_value in _record, got neither",
                    "Return the smallest and the largest real value to cover.",
                )
            )
        return self.min_value, self.max_value

    def _merge(self, other: Self) -> None:
        """Add what another observer of this class and these settings recorded."""
        raise NotImplementedError  # check_merge comes first

    def _min_max(self, values: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.aminmax(values)
        self._check_finite(values, low, high)
        # Adding 0.0 turns -0.0 into 0.0, whose order min and max leave open.
        return low + 0.0, high + 0.0

    def _widen(self, low: Tensor, high: Tensor) -> None:
        torch.minimum(self.min_value, low, out=self.min_value)
        torch.maximum(self.max_value, high, out=self.max_value)

    def _check_finite(self, values: Tensor, low: Tensor, high: Tensor) -> None:
        if bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            return
        nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
        problem = f"got {nans} NaN and {infs} inf among {values.numel()} values"
        remedy = f"Remove them from the calibration data. {self._keep}"
        raise ValueError(self._text(f"src must be finite in float32, {problem}", remedy))

    @property
    def _keep(self) -> str:
        return f"To keep it float, pass overrides={{{self.name!r}: None}}." if self.name else ""

    def _text(self, problem: str, remedy: str) -> str:
        place = f" of {self.name!r}" if self.name else ""
        return f"torchq.{type(self).__name__}{place}: {problem}. {remedy}".rstrip()

    def _add_buffer(self, name: str, value: object, dtype: torch.dtype = torch.float32) -> None:
        """Register ``torch.tensor(value)`` as a buffer."""
        self._set_buffer(name, lambda: torch.tensor(value, dtype=dtype, device="cpu"))

    def _set_buffer(self, name: str, make: Callable[[], Tensor]) -> None:
        # A tensor made in inference mode could not be updated in place outside of it.
        with torch.inference_mode(False):
            self.register_buffer(name, make())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep statistics in float32 when the model is converted with half() or bfloat16()."""
        exact = {name: value for name, value in self._buffers.items() if value is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in exact.items():
            converted = self._buffers[name]
            if converted is not None and converted.dtype != value.dtype:
                self._buffers[name] = value.to(converted.device)
        return self
