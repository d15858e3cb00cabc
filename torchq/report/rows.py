# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and what conversion refuses by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
