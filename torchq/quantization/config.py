# SPDX-License-Identifier: Apache-2.0
"""QConfig: how a module is quantized, and how overrides choose one per module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from torchq.attributes.arguments import nearest
from torchq.attributes.options import (
    RECIPES,
    WEIGHT_GRANULARITIES,
    Bits,
    CacheBits,
    EmbeddingBits,
    Granularity,
    GroupSize,
    ObserverName,
    RecipeName,
    WeightBits,
)
from torchq.quantization.int4 import check_group_size
from torchq.quantization.observers.base import Observer
from torchq.quantization.observers.binned import (
    EntropyObserver,
    HistogramObserver,
    PercentileObserver,
)
from torchq.quantization.observers.minmax import MinMaxObserver, MovingAverageObserver
from torchq.quantization.ranges import check_bits, check_choice, check_dtype

Class = TypeVar("Class")

OBSERVERS: dict[str, Callable[[], Observer]] = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageObserver,
    "percentile": PercentileObserver,
    "histogram": HistogramObserver,
    "entropy": EntropyObserver,
}


def _names_fields(cls: type[Class]) -> type[Class]:
    """Let a dataclass say in torchq's words which fields it has."""
    names, own = [field.name for field in fields(cls)], cls.__init__  # type: ignore[arg-type]

    @functools.wraps(own)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        wrong = next((name for name in kwargs if name not in names), None)
        if wrong is not None:
            near = nearest(wrong, names, 0.4)
            raise TypeError(
                f"torchq.{cls.__name__}: fields must be of {', '.join(names)}, got {wrong!r}. "
                + (f"Did you mean {near!r}?" if near else "Leave it out.")
            )
        if len(args) > len(names):
            raise TypeError(
                f"torchq.{cls.__name__}: there must be at most {len(names)} values, got "
                f"{len(args)}. Give them by name, as in {cls.__name__}({names[0]}={args[0]!r})."
            )
        own(self, *args, **kwargs)

    setattr(cls, "__init__", __init__)  # noqa: B010
    return cls


@_names_fields
@dataclass(frozen=True)
class QConfig:
    """How to quantize a module. Immutable; vary one with ``dataclasses.replace``.

    Attributes:
        activation_observer: "minmax", "moving_average", "percentile", "histogram" or "entropy", or
            a callable that makes an Observer, such as ``partial(PercentileObserver, 99.9)``.
        activation_dtype: ``torch.uint8`` or ``torch.int8``.
        activation_bits: 8 or 7.
        activation_symmetric: fix the zero point in the middle of the integers. None means symmetric
            for int8 and affine for uint8; ``symmetric`` is the outcome.
        weight_granularity: "per_channel" or "per_tensor".
        weight_bits: 8, 7 or 4. Weights are symmetric, and int8 for 8 and 7. 4 needs ``dynamic`` or
            a recipe other than "fast". It holds for linear layers; others then take 8.
        group_size: values of a row of a 4-bit weight that share a scale: 32, 64 or 128; None is 32.
            The last group of a row may be smaller.
        cache_bits: 8 keeps keys and values of a cache of transformers as int8, with a scale for
            each token and head; None keeps them float. An override replaces it for its module.
        min_sqnr: decibels that the result of a linear layer must keep with 4-bit weights, on the
            calibration data; the layer has 8 bits where it would keep less. None asks nothing.
        dynamic: choose activation parameters at run time; the observer is then not used.
        embedding_bits: 8 or 4 quantizes the rows of embeddings, each with a scale and an offset;
            None keeps embeddings float. Rows need no data: the prepared model has them already.
        recipe: a choice between time and accuracy. "fast" quantizes by the ranges of the
            calibration data. With the default observer it also equalizes channels between layers,
            and scales the few large channels that linear layers read, or gives them layers of their
            own. "accurate" has dynamic linear layers and attention, SmoothQuant and bias
            correction; "best" also rounds weights by GPTQ. Both run 1.1 to 1.5 times as long as
            "fast" on a transformer; convolutions and recurrent layers are as in "fast".
        strict: raise if a call cannot take its int8 graph, instead of warning and running the
            model's own code. Only the config of the whole model counts, not those of overrides.
        check_inputs: raise ValueError where a float value that becomes int8 is NaN or inf. Without
            it NaN counts as the zero point and inf as the end of the range. Eager mode and
            torch.jit.script check, and read these values once more. torch.jit.trace, torch.export
            and torch.compile leave the check out. Only the config of the whole model counts.

    Raises:
        TypeError: a field has another type.
        ValueError: a field has another value.

    Example:
        >>> config = torchq.QConfig(activation_observer="minmax", weight_bits=7)
        >>> print(config)
        activations u8 affine minmax, weights s8/7 per_channel
        >>> print(torchq.QConfig(dynamic=True))
        activations u8 affine dynamic, weights s8 per_channel
    """

    activation_observer: ObserverName | Callable[[], Observer] = "histogram"
    activation_dtype: torch.dtype = torch.uint8
    activation_bits: Bits = 8
    activation_symmetric: bool | None = None
    weight_granularity: Granularity = "per_channel"
    weight_bits: WeightBits = 8
    dynamic: bool = False
    recipe: RecipeName = "fast"
    strict: bool = False
    embedding_bits: EmbeddingBits | None = None
    group_size: GroupSize | None = None
    check_inputs: bool = False
    min_sqnr: float | None = None
    cache_bits: CacheBits | None = None

    def __post_init__(self) -> None:
        """Validate every field."""
        self._check_observer()
        check_dtype("QConfig", self.activation_dtype, "activation_dtype")
        check_bits("QConfig", "activation_bits", self.activation_bits)
        check_choice("QConfig", "weight_granularity", self.weight_granularity, WEIGHT_GRANULARITIES)
        if self.activation_symmetric is not None:
            _check_bool("activation_symmetric", self.activation_symmetric)
        check_choice("QConfig", "recipe", self.recipe, RECIPES)
        _check_bool("dynamic", self.dynamic)
        _check_bool("strict", self.strict)
        _check_bool("check_inputs", self.check_inputs)
        self._check_weight_bits()
        bits = self.embedding_bits
        if bits is not None and (isinstance(bits, bool) or bits not in (8, 4)):
            raise ValueError(
                f"torchq.QConfig: embedding_bits must be None, 8 or 4, got {bits!r}. Leave it out "
                "to keep embeddings float."
            )
        if self.cache_bits not in (None, 8):
            raise ValueError(
                f"torchq.QConfig: cache_bits must be None or 8, got {self.cache_bits!r}. Leave it "
                "out to keep keys and values of a cache float."
            )

    def _check_weight_bits(self) -> None:
        bits, group_size = self.weight_bits, self.group_size
        if isinstance(bits, bool) or bits not in (8, 7, 4):
            raise ValueError(
                f"torchq.QConfig: weight_bits must be 8, 7 or 4, got {bits!r}. Use 8; 7 rules out "
                "saturation in 16-bit pair sums, 4 halves the weights of dynamic linear layers."
            )
        if bits == 4 and not self.by_rows:
            raise ValueError(
                "torchq.QConfig: weight_bits must be 8 or 7 for static layers, got 4. Add "
                "dynamic=True, or recipe='accurate' or 'best'."
            )
        if group_size is not None:
            check_group_size("QConfig", group_size)
            if bits != 4:
                raise ValueError(
                    f"torchq.QConfig: group_size must be None with weight_bits={bits}, got "
                    f"{group_size}. Only 4-bit weights have groups."
                )
        self._check_min_sqnr()

    def _check_min_sqnr(self) -> None:
        limit = self.min_sqnr
        if limit is None:
            return
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise TypeError(
                f"torchq.QConfig: min_sqnr must be a number of decibels or None, got "
                f"{type(limit).__name__}. Write min_sqnr=20.0, say."
            )
        if not math.isfinite(limit):
            raise ValueError(
                f"torchq.QConfig: min_sqnr must be finite, got {limit}. Use weight_bits=8 for 8 "
                "bits everywhere, and None for 4."
            )
        if self.weight_bits != 4:
            raise ValueError(
                f"torchq.QConfig: min_sqnr must be None with weight_bits={self.weight_bits}, got "
                f"{limit}. It keeps layers at 8 bits that would lose too much at 4."
            )

    def _check_observer(self) -> None:
        observer = self.activation_observer
        if isinstance(observer, str):
            check_choice("QConfig", "activation_observer", observer, tuple(OBSERVERS))
        elif isinstance(observer, Observer):
            raise TypeError(
                "torchq.QConfig: activation_observer must be a name or a callable that makes an "
                f"Observer, got a {type(observer).__name__}, which all modules would share. "
                f"Pass the class, or functools.partial({type(observer).__name__}, ...)."
            )
        elif not callable(observer):
            raise TypeError(
                "torchq.QConfig: activation_observer must be a name or a callable that makes an "
                f"Observer, got {type(observer).__name__}. Pass one of {', '.join(OBSERVERS)}."
            )

    @property
    def symmetric(self) -> bool:
        """Return whether activations are quantized symmetrically; None means the default."""
        if self.activation_symmetric is None:
            return self.activation_dtype == torch.int8
        return self.activation_symmetric

    @property
    def by_rows(self) -> bool:
        """Return whether linear layers and attention quantize each row by its own range."""
        return self.dynamic or self.recipe != "fast"

    @property
    def samples_rows(self) -> bool:
        """Return whether linear layers take a recipe, chosen on a sample of what they read."""
        return self.recipe != "fast" and not self.dynamic

    @property
    def int8_bits(self) -> Bits:
        """Return the bits of int8 weights: 8 beside linear layers of 4."""
        return 8 if self.weight_bits == 4 else self.weight_bits

    def make_observer(self, name: str = "") -> Observer:
        """Make a fresh activation observer for the module ``name``.

        Raises:
            TypeError: the callable returned something else than an Observer.
        """
        make = self.activation_observer
        observer = OBSERVERS[make]() if isinstance(make, str) else make()
        if not isinstance(observer, Observer):
            raise TypeError(
                "torchq.QConfig: activation_observer must make an Observer, got "
                f"{type(observer).__name__}. Return a torchq.observers.Observer from it."
            )
        observer.name = name
        return observer

    def __str__(self) -> str:
        """One line, such as ``activations u8 affine histogram, weights s8 per_channel``."""
        dtype = "u8" if self.activation_dtype == torch.uint8 else "s8"
        kind = "symmetric" if self.symmetric else "affine"
        observer = "dynamic" if self.dynamic else self._observer_name()
        recipe = f", recipe {self.recipe}" if self.recipe != "fast" else ""
        bits = self.embedding_bits
        return (
            f"activations {dtype}{_bits_suffix(self.activation_bits)} {kind} {observer}, "
            f"weights {self._weights()}"
            + ("" if bits is None else f", embeddings u8{_bits_suffix(bits)} per row")
            + ("" if self.cache_bits is None else ", caches s8 per row")
            + recipe
        )

    def _weights(self) -> str:
        if self.weight_bits == 4:
            less = "" if self.min_sqnr is None else f", or s8 below {self.min_sqnr:g} dB"
            return f"s4 in groups of {self.group_size or 32}{less}"
        return f"s8{_bits_suffix(self.weight_bits)} {self.weight_granularity}"

    def _observer_name(self) -> str:
        observer = self.activation_observer
        if isinstance(observer, str):
            return observer
        # functools.partial has no name of its own, but its function has.
        named = getattr(observer, "func", observer)
        return str(getattr(named, "__name__", type(named).__name__))


Overrides = Mapping[str, QConfig | None]


def resolve(overrides: Overrides | None, name: str, default: QConfig | None) -> QConfig | None:
    """Choose the configuration of the module or activation with the qualified name ``name``.

    Patterns are matched with ``fnmatch``, case-sensitively, against the whole name; ``*`` also
    matches dots. One that matches a module holds for all that is in it. If several match, the one
    written last wins, so general patterns come first::

        overrides = {"encoder": QConfig(weight_bits=7), "encoder.head": None}

    With ``.dst`` behind it, a pattern means the destinations only. What matches a layer itself, not
    a module that it is in, does not choose for the layer's destination.

    Args:
        overrides: pattern to QConfig, or to None to keep the match float.
        name: qualified name, as in ``named_modules()``.
        default: what applies if no pattern matches.

    Raises:
        TypeError: ``overrides`` is no mapping from str to QConfig or None.
    """
    known = check_overrides(overrides)
    chosen, names = default, _with_containers(name) if known else []
    for pattern, config in known.items():
        if any(fnmatchcase(each, pattern) for each in names):
            chosen = config
    return chosen


def _with_containers(name: str) -> list[str]:
    """Return the names that a pattern may match: this one, and those of what it is in.

    ``a.b.dst`` is in ``a``, and is one of the destinations ``a.dst``.
    """
    base = name.removesuffix(".dst")
    parts = base.split(".") if base else []
    containers = [".".join(parts[:i]) for i in range(len(parts))]
    return [name, *containers, *(f"{c}{name[len(base) :]}" for c in containers if base != name)]


def unmatched_patterns(overrides: Overrides | None, names: Iterable[str]) -> list[str]:
    """Patterns that match none of ``names``, in order: misspelled names, most likely.

    Raises:
        TypeError: ``overrides`` is no mapping from str to QConfig or None.
    """
    known = {full for name in names for full in _with_containers(name)}
    return [
        pattern
        for pattern in check_overrides(overrides)
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def check_overrides(overrides: Overrides | None) -> Overrides:
    """Return ``overrides``, or an empty mapping for None.

    Raises:
        TypeError: ``overrides`` is no mapping from str to QConfig or None.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise TypeError(
            "torchq.prepare: overrides must be a mapping from name pattern to QConfig or None, got "
            f"{type(overrides).__name__}. Example: {{'classifier.*': None}}."
        )
    for pattern, config in overrides.items():
        if not isinstance(pattern, str):
            raise TypeError(
                "torchq.prepare: patterns in overrides must be str, got "
                f"{type(pattern).__name__}. Use qualified names, such as 'encoder.*'."
            )
        if config is not None and not isinstance(config, QConfig):
            raise TypeError(
                f"torchq.prepare: overrides[{pattern!r}] must be a QConfig or None, got "
                f"{type(config).__name__}. None keeps the match float."
            )
    return overrides


def _bits_suffix(bits: int) -> str:
    return "" if bits == 8 else f"/{bits}"


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"torchq.QConfig: {name} must be a bool, got {type(value).__name__}. "
            "Pass True or False."
        )
