# SPDX-License-Identifier: Apache-2.0
"""The rows of a report, and what conversion refuses by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from torch import nn

from torchq.quantization.config import Overrides, unmatched_patterns

NOT_CALLED = "not called with example_inputs"
"""The reason of what did not run when the model was prepared."""

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


def joined(conditions: Sequence[str]) -> str:
    """Return the first conditions as one text; there may be hundreds."""
    more = f"; and {len(conditions) - 12} more" if len(conditions) > 12 else ""
    return "; ".join(conditions[:12]) + more


def check_strict(rows: list[Row]) -> None:
    """Raise RuntimeError for matmuls that stay float without an override that says so."""
    left = [r for r in rows if r.is_matmul and not r.quantized and not r.requested]
    if left:
        lines = "; ".join(f"{row.name}: {row.reason}" for row in left)
        raise RuntimeError(
            f"torchq.convert: strict=True, but {len(left)} convolution, linear or recurrent "
            f"modules stay float: {lines}. Change the model, or name them in overrides with None."
        )


def check_patterns(model: nn.Module, rows: list[Row], overrides: Overrides | None) -> None:
    """Raise ValueError for an override that matches no module, no row, and no ``.dst`` of one."""
    names = [*(name for name, _ in model.named_modules()), *(row.name for row in rows)]
    if unmatched := unmatched_patterns(overrides, [*names, *(f"{name}.dst" for name in names)]):
        quantizable = sorted({row.name for row in rows if row.quantized or row.is_matmul})
        raise ValueError(
            f"torchq.prepare: overrides must match module names, but {unmatched} match none. "
            f"The quantizable modules are {quantizable}."
        )


def html_table(
    heads: Sequence[str], lines: Iterable[Sequence[object]], notes: Iterable[str] = ()
) -> str:
    """Return a table and the notes below it; every text is escaped."""
    body = "".join(_row("td", line) for line in lines)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead>{_row('th', heads)}</thead><tbody>{body}</tbody></table>{below}"


def _row(kind: str, cells: Sequence[object]) -> str:
    texts = (f'<{kind} style="text-align: left">{escape(str(cell))}</{kind}>' for cell in cells)
    return f"<tr>{''.join(texts)}</tr>"
