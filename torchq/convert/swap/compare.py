# SPDX-License-Identifier: Apache-2.0
"""Does a model's code do the same with observed leaves as with float layers?"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn

from torchq.convert.swap.calls import results_of
from torchq.models.inputs import are_close
from torchq.models.state import twin


class Comparison:
    """Compares the results of other models with those of a float model on the example inputs."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        expected: list[Tensor],
    ) -> None:
        """Take what the model gave."""
        self._model, self._inputs, self._expected = model, (args, kwargs), expected

    def agrees(self, prepared: nn.Module) -> bool:
        """Return False where the code raises, or gives something else.

        It may ask for the class of a layer, write to its weight, or need a result's strides. A
        model that does not agree with itself, run again, is not compared.
        """
        try:
            result = self._result(prepared)
        except Exception:  # the float model raised nothing
            return False
        return self.is_like(result)

    def is_like(self, results: list[Tensor]) -> bool:
        """Return whether these are the model's results, as far as it agrees with itself."""
        return are_close(self._expected, results) or not self._is_steady

    @functools.cached_property
    def _is_steady(self) -> bool:
        return are_close(self._expected, self._result(self._model))

    def _result(self, model: nn.Module) -> list[Tensor]:
        model = twin(model)
        return results_of(model, *self._inputs)


def fitting(
    model: nn.Module, names: Iterable[str], agrees: Callable[[list[str]], bool]
) -> list[str]:
    """Return the leaves that can be replaced together, found by bisection.

    Leaves in the same place of modules of the same class share their fate: the code is the same.

    Args:
        model: the float model.
        names: of leaves.
        agrees: tells whether the model's code does the same with these leaves replaced.
    """
    groups: dict[object, list[str]] = defaultdict(list)
    for name in names:
        groups[_place(model, name)].append(name)
    kept: list[str] = []

    def add(part: list[list[str]]) -> None:
        more = [name for group in part for name in group]
        if agrees(kept + more):
            kept.extend(more)
        elif len(part) > 1:
            add(part[: len(part) // 2])
            add(part[len(part) // 2 :])

    add(list(groups.values()))
    return kept


def _place(model: nn.Module, name: str) -> tuple[type, str]:
    """Return the class whose code calls a leaf, and the leaf's name in there."""
    parent, _, own = name.rpartition(".")
    while parent and type(model.get_submodule(parent)).__module__.startswith("torch.nn."):
        parent, _, last = parent.rpartition(".")
        own = f"{last}.{own}"
    return type(model.get_submodule(parent)), own
