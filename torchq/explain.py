# SPDX-License-Identifier: Apache-2.0
"""What is int8, what stayed float, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from torchq.nn.fused import ResidualFirst
from torchq.nn.module import QModule
from torchq.recording import is_leaf

if TYPE_CHECKING:
    from torchq.planning import Plan


@dataclass(frozen=True)
class Row:
    """One module of the float model.

    Attributes:
        name: qualified name.
        kind: class of the float module.
        quantized: whether it runs in int8, by itself or fused.
        reason: why it stays float, or what it was fused into; "" otherwise.
        site: name of the module that now computes it.
        is_matmul: whether it is a convolution or linear.
        requested: whether an override kept it float.
    """

    name: str
    kind: str
    quantized: bool
    reason: str
    site: str
    is_matmul: bool
    requested: bool


@dataclass(frozen=True)
class Explanation:
    """The rows, and a table of them as ``str``."""

    rows: tuple[Row, ...]
    details: dict[str, str]

    def __str__(self) -> str:
        """One line per module: name, class, int8 or float, and the scales or the reason."""
        cells = [("module", "class", "runs in", "attributes, or why it is float")]
        for row in self.rows:
            detail = row.reason or self.details.get(row.site, "")
            cells.append((row.name, row.kind, "int8" if row.quantized else "float", detail))
        widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(cell, [*widths, 0], strict=True))
            for cell in cells
        ]
        layers = [row for row in self.rows if row.is_matmul]
        quantized = sum(row.quantized for row in layers)
        lines.append(f"{quantized} of {len(layers)} convolutions and linears run in int8")
        return "\n".join(line.rstrip() for line in lines)


def explain(model: nn.Module) -> Explanation:
    """What :func:`torchq.prepare` decided for each module of a prepared or converted model.

    Raises:
        ValueError: the model comes from neither.
    """
    rows = getattr(model, "torchq_report", None)
    if rows is None:
        raise ValueError(
            f"torchq.explain: model must come from torchq.prepare or torchq.convert, got "
            f"{type(model).__name__}. torchq.load does not restore the report."
        )
    details = {
        name: (module.layer if isinstance(module, ResidualFirst) else module).extra_repr()
        for name, module in model.named_modules()
        if isinstance(module, QModule)
    }
    return Explanation(tuple(rows), details)


def report_rows(model: nn.Module, plan: Plan) -> list[Row]:
    """One row per leaf module of the float model that computes something."""
    from torchq.fuse import MATMUL

    owner = {}
    for layer in plan.layers:
        for name in (*layer.absorbed, *layer.activations, layer.site, layer.name):
            owner[name] = layer
    rows = []
    for name, module in model.named_modules():
        if not is_leaf(module):
            continue
        layer = owner.get(name)
        reason = "no quantized form, or not reached by example_inputs"
        site = name
        if layer is not None:
            reason, site = plan.reasons[layer.name], layer.site
            if not reason and name != layer.name:
                reason = f"fused into {layer.name}"
        quantized = layer is not None and not plan.reasons[layer.name]
        requested = layer is not None and plan.config(layer) is None
        kind = type(module).__name__
        rows.append(Row(name, kind, quantized, reason, site, isinstance(module, MATMUL), requested))
    return rows
