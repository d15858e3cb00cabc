# SPDX-License-Identifier: Apache-2.0
"""Quantizes and packs each float weight of a conversion once, for leaves and graphs alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.attributes.options import Granularity
from torchq.nn.batch_norm import TRANSPOSED
from torchq.nn.from_float import Pack, dynamic_from_float
from torchq.nn.module import QModule
from torchq.nn.weight import QuantizedWeight, packed_weight
from torchq.quantization.config import QConfig
from torchq.quantization.recipes.equalization import with_source_factors
from torchq.quantization.recipes.sample import SourceSample
from torchq.report import reasons

Made = TypeVar("Made", QuantizedWeight, QModule)


@dataclass
class _Form:
    """Integers that were made of a float weight.

    Attributes:
        key: values that the integers depend on: tensors, numbers and None.
        why: what sets this form apart, for the report; "" for plain rounding.
        made: a QuantizedWeight, or the dynamic module that has the integers.
    """

    key: tuple[object, ...]
    why: str
    made: Any


@dataclass(eq=False)
class _Float:
    """A float weight, and the forms that it has."""

    weight: Tensor
    forms: list[_Form] = field(default_factory=list)

    def is_same(self, other: Tensor) -> bool:
        """Return whether another tensor has these values; that in the same memory has."""
        one = self.weight
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


class PackedWeights:
    """The int8 weights of one conversion.

    A float weight is known by the name of its layer, or by its memory where layers are tied.
    """

    def __init__(self) -> None:
        """Start without weights."""
        self._known: dict[str | int, list[_Float]] = {}

    def packing(
        self, name: str, factors: Tensor | None = None, plain: nn.Module | None = None
    ) -> Pack:
        """Return what packs the weight of this layer.

        Args:
            name: qualified, of the float layer.
            factors: of its source's channels, which the weight is multiplied by; None for none.
            plain: the float layer, where what is packed has a batch norm in its weight, too.
        """
        return partial(self._pack, name, factors, plain)

    def _pack(
        self,
        name: str,
        factors: Tensor | None,
        plain: nn.Module | None,
        module: nn.Module,
        granularity: Granularity,
        bits: int,
        scale: Tensor | None = None,
    ) -> QuantizedWeight:
        why = "" if factors is None else reasons.FACTORS
        why = why if plain is None else reasons.BATCH_NORM
        more = None if plain is None else module.weight
        forms = [tuple(getattr(module, key, ())) for key in ("stride", "dilation")]
        layout = isinstance(module, TRANSPOSED), getattr(module, "groups", 0), *forms
        key = (granularity, bits, *layout, scale, factors, more)

        def make() -> QuantizedWeight:
            of = module if factors is None else with_source_factors(module, factors)
            return packed_weight(of, granularity, bits, scale)

        weight = (plain or module).get_parameter("weight")
        return self._form(name, weight, key, why, make)

    def dynamic(
        self,
        name: str,
        linear: nn.Linear,
        config: QConfig,
        scale: Tensor | None = None,
        sample: SourceSample | None = None,
    ) -> QModule:
        """Return the dynamic form of a layer; those of one recipe share their tensors.

        For the arguments see :func:`~torchq.nn.from_float.dynamic_from_float`.
        """
        pack = self.packing(name)
        make = partial(dynamic_from_float, linear, config, scale, sample, pack)
        if config.weight_bits != 4 and sample is None:
            return make()
        recipe = None if sample is None else sample.kept
        grid = config.weight_granularity, config.weight_bits, config.group_size, config.recipe
        key = (*grid, scale, recipe, linear.bias)
        made = self._form(name, linear.weight, key, reasons.SAMPLED, make)
        return copy.deepcopy(made, {id(t): t for t in made.buffers()})

    def _form(
        self, name: str, weight: Tensor, key: tuple[object, ...], why: str, make: Callable[[], Made]
    ) -> Made:
        """Return the form of a weight with this key, made where it is new."""
        known = self._of(name, weight.detach())
        same = (f for f in known.forms if len(f.key) == len(key) and all(map(_equal, f.key, key)))
        if (form := next(same, None)) is None:
            known.forms.append(form := _Form(key, why, make()))
        made: Made = form.made
        return made

    def _of(self, name: str, weight: Tensor) -> _Float:
        """Return what is known of a float weight, from now on by this name, too."""
        keys = name, weight.data_ptr()
        known = [one for key in keys for one in self._known.get(key, ())]
        found = next((one for one in known if one.is_same(weight)), None) or _Float(weight)
        for key in keys:
            if found not in (others := self._known.setdefault(key, [])):
                others.append(found)
        return found

    def copies(self, name: str) -> str:
        """Return what the report says of a layer whose weight has several int8 forms, or ""."""
        for one in self._known.get(name, ()):
            if len(one.forms) > 1:
                why = dict.fromkeys(form.why for form in one.forms if form.why)
                told = "; ".join(why) or reasons.OTHER_SCALES
                return reasons.COPIES.format(count=len(one.forms), why=told)
        return ""


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
