# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and what conversion refuses by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from torchq.quantization.config import Overrides, unmatched_patterns

NOT_CALLED = "not called with example_inputs"
"""The reason of what did not run when the model was prepared."""

DYNAMIC = "dynamic: "
READ = "its parameters are used outside of it, and it is not called"
"""The reason of a layer whose parameters the model's own code reads."""


@dataclass(frozen=True)
class Row:
    """One module of the float model.

    Attributes:
        name: qualified name.
        kind: class of the float module.
        quantized: whether it runs in int8, by itself or fused.
        reason: why it stays float, or what it was fused into; "" otherwise.
        site: name of the module that now computes it.
        is_matmul: whether it is a convolution, linear or recurrent module.
        requested: whether an override kept it float.
        calls: how often the model calls the module.
        first: of a function that one line of code calls again and again, the name of the first row
            of it; "" otherwise.
        weights: names of the parameters that it computes with.
    """

    name: str
    kind: str
    quantized: bool
    reason: str
    site: str
    is_matmul: bool
    requested: bool
    calls: int = 1
    first: str = ""
    weights: tuple[str, ...] = ()


@dataclass(frozen=True)
class Weight:
    """A parameter that data is multiplied by.

    Attributes:
        name: qualified name in the float model.
        size: elements.
        macs: multiplications by them on the example inputs.
        requested: whether an override keeps it float.
    """

    name: str
    size: int
    macs: int
    requested: bool

    def is_int8(self, rows: Sequence[Row]) -> bool:
        """Return whether one of the rows computes with it in int8."""
        return any(row.quantized and self.name in row.weights for row in rows)

    def stays_float(self, rows: Sequence[Row]) -> bool:
        """Return whether it is float though no override says so."""
        requested = any(row.requested and self.name in row.weights for row in rows)
        return not (self.requested or requested or self.is_int8(rows))


def joined(conditions: Sequence[str]) -> str:
    """Return the first conditions as one text; there may be hundreds."""
    more = f"; and {len(conditions) - 12} more" if len(conditions) > 12 else ""
    return "; ".join(conditions[:12]) + more


def check_strict(rows: list[Row], weights: Sequence[Weight]) -> None:
    """Raise RuntimeError for what multiplies in float without an override that says so."""
    left = [r for r in rows if r.is_matmul and not r.quantized and not r.requested]
    lines = [f"{row.name or 'the model'}: {row.reason}" for row in left]
    told = {name for row in left for name in row.weights}
    for weight in weights:
        if weight.name not in told and weight.stays_float(rows):
            row = next((r for r in rows if weight.name in r.weights and r.reason), None)
            why = f"of {row.name}: {row.reason}" if row else "no layer of a known kind has it"
            lines.append(f"{weight.name}, a parameter that data is multiplied by, {why}")
    if lines:
        raise RuntimeError(
            f"torchq.convert: strict=True, but {len(lines)} convolution, linear or recurrent "
            f"modules or parameters stay float: {'; '.join(lines)}. Change the model, or name them "
            "in overrides: None keeps them float, and torchq.QConfig() makes layers int8 that read "
            "rows too small for one scale."
        )


def check_patterns(
    model: nn.Module, rows: list[Row], weights: Sequence[Weight], overrides: Overrides | None
) -> None:
    """Raise ValueError for an override that matches no module, row, weight or ``.dst`` of one."""
    names = [name for name, _ in model.named_modules()]
    names += [*(row.name for row in rows), *(weight.name for weight in weights)]
    if unmatched := unmatched_patterns(overrides, [*names, *(f"{name}.dst" for name in names)]):
        told = ", ".join(map(repr, unmatched[:3])) + (", ..." if len(unmatched) > 3 else "")
        raise ValueError(
            f"torchq.prepare: overrides must match names of modules or functions, but {told} "
            f"match{'es' * (len(unmatched) == 1)} none. {_nearest_names(model, rows, unmatched)} "
            "torchq.explain(torchq.prepare(model, example_inputs)) lists all."
        )


def _nearest_names(model: nn.Module, rows: list[Row], patterns: list[str]) -> str:
    """Return a sentence with the names that are most like patterns, or with the outermost ones."""
    modules = [name for name, _ in model.named_modules() if name]
    known = [*modules, *(row.name for row in rows if row.quantized and row.name not in modules)]
    near = []
    for pattern in patterns[:3]:
        text, end = (pattern[:-4], ".dst") if pattern.endswith(".dst") else (pattern, "")
        near += [name + end for name in get_close_matches(text, known, 2, 0.55)]
    if near:
        return f"Did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?"
    outer = list(dict.fromkeys(name.partition(".")[0] for name in known if name))
    if not outer:
        return "The model is one module, which only '' and '*' match."
    more = f" and {len(outer) - 5} more" if len(outer) > 5 else ""
    return f"Names begin with {', '.join(map(repr, outer[:5]))}{more}."
