# SPDX-License-Identifier: Apache-2.0
"""What is int8, what stayed float, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from torchq.fuse import MATMUL, QUANTIZABLE, Layer
from torchq.nn.fused import ResidualFirst
from torchq.nn.module import QModule
from torchq.recording import is_leaf
from torchq.saturation import seven_bits
from torchq.standalone import FOREIGN, RECURRENT, is_foreign

if TYPE_CHECKING:
    from torchq.planning import Plan


_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")


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
    """The rows, and a table of them as ``str``.

    Attributes:
        rows: one per module of the float model.
        details: attributes of the quantized modules, by name.
        seven_bits: where 7 bits would matter on other libraries' terms, and why, by name; see
            :func:`torchq.saturation.seven_bits`.
    """

    rows: tuple[Row, ...]
    details: dict[str, str]
    seven_bits: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        """One line per module: name, class, int8 or float, and the scales or the reason."""
        cells = [("module", "class", "runs in", "attributes, or why it is float")]
        for row in self.rows:
            detail = row.reason or self.details.get(row.site, "")
            name = row.name or "(the model)"
            cells.append((name, row.kind, "int8" if row.quantized else "float", detail))
        widths = [max(len(cell[i]) for cell in cells) for i in range(3)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(cell, [*widths, 0], strict=True))
            for cell in cells
        ]
        if self.seven_bits:
            names = list(self.seven_bits)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(
                "exact here; under oneDNN's rules without VNNI 7 bits would matter in "
                f"{', '.join(names[:4])}{more} (torchq.saturation.seven_bits says why)"
            )
        layers = [row for row in self.rows if row.is_matmul]
        quantized = sum(row.quantized for row in layers)
        if self.note:
            lines.append(self.note)
        recurrent = any(row.kind in _RECURRENT for row in layers)
        kinds = (
            "convolutions, linears and recurrent modules"
            if recurrent
            else "convolutions and linears"
        )
        lines.append(f"{quantized} of {len(layers)} {kinds} run in int8")
        return "\n".join(line.rstrip() for line in lines)


def explain(model: nn.Module) -> Explanation:
    """What :func:`torchq.prepare` decided for each module of a prepared or converted model.

    Raises:
        ValueError: the model comes from neither.
    """
    rows = getattr(model, "torchq_report", None)
    if rows is None:
        raise ValueError(
            "torchq.explain: model must come from torchq.prepare or torchq.convert, got "
            f"{type(model).__name__}. Convert the float model, or load what "
            "torchq.save wrote."
        )
    details = {
        name: (module.layer if isinstance(module, ResidualFirst) else module).extra_repr()
        for name, module in model.named_modules()
        if isinstance(module, QModule)
    }
    return Explanation(tuple(rows), details, seven_bits(model), getattr(model, "torchq_note", ""))


def report_rows(model: nn.Module, plan: Plan) -> list[Row]:
    """One row per module of the float model that computes something by itself."""
    reporter = _Reporter(plan)
    return [
        reporter.row(name, module)
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(False), None) is not None
    ]


def check_strict(rows: list[Row]) -> None:
    """Raises RuntimeError for matmuls that stay float without an override that says so."""
    left = [r for r in rows if r.is_matmul and not r.quantized and not r.requested]
    if left:
        lines = "; ".join(f"{row.name}: {row.reason}" for row in left)
        raise RuntimeError(
            f"torchq.convert: strict=True, but {len(left)} convolution, linear or recurrent "
            f"modules stay float: {lines}. Change the model, or name them in overrides with None."
        )


class _Reporter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls = plan.recording.calls_of()
        self.layer_of = {layer.name: layer for layer in plan.layers}
        self.fused_into: dict[str, list[Layer]] = {}
        for layer in plan.layers:
            for name in (*layer.absorbed, *layer.activations, layer.site):
                if name != layer.name and not plan.reasons[layer.name]:
                    self.fused_into.setdefault(name, []).append(layer)

    def row(self, name: str, module: nn.Module) -> Row:
        layer, hosts = self.layer_of.get(name), self.fused_into.get(name, [])
        quantized, reason, site = False, "", name
        if name in self.plan.standalone:
            reason = self.plan.standalone[name]
            quantized = not reason
        elif layer is not None:
            reason, site = self.plan.reasons[name], layer.site
            quantized = not reason
        if hosts:
            into = "fused into " + ", ".join(host.name for host in hosts)
            reason = f"{into}; elsewhere float: {reason}" if reason else into
            quantized, site = True, hosts[0].site
        elif layer is None and name not in self.plan.standalone:
            quantized, reason = self._without_layer(name, module)
        requested = self.plan.config(name) is None
        is_matmul = isinstance(module, (*MATMUL, *RECURRENT))
        name, site = (f"{self.plan.prefix}{other}".rstrip(".") for other in (name, site))
        return Row(name, type(module).__name__, quantized, reason, site, is_matmul, requested)

    def _without_layer(self, name: str, module: nn.Module) -> tuple[bool, str]:
        calls = self.calls.get(name, [])
        if is_foreign(module):
            return False, FOREIGN
        if not is_leaf(module):
            return False, "only leaf modules of torch.nn and torchq.nn have an int8 form"
        if not calls and name in self.plan.recording.exposed:
            return False, "its parameters are used outside of it, and it is not called"
        if not calls:
            return False, "not called with example_inputs"
        if all(call.moves for call in calls):
            passes = [self.plan.producer(call.inputs[0]) is not None for call in calls]
            return all(passes), "passes values on as they are"
        if isinstance(module, QUANTIZABLE):
            return False, "it returns no tensor"
        return False, f"{type(module).__name__} has no int8 form"
