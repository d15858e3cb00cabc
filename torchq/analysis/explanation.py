# SPDX-License-Identifier: Apache-2.0
"""Reports which modules are int8, which stayed float, and why."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from torch import nn

from torchq.attributes.arguments import place_of
from torchq.models.attached import attachment_of, computing_modules, graphs_of
from torchq.nn.embedding import QEmbedding, QEmbeddingBag
from torchq.nn.module import QModule
from torchq.report import reasons
from torchq.report.rows import Row, Weight, joined
from torchq.report.tables import folding_table, text_table

_RECURRENT = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")

_LINE = 128  # characters of guards
_HEADS = ("module", "class", "runs in", "attributes, or why it is float")


@dataclass(frozen=True)
class GraphRow:
    """A graph, and how often it ran.

    Attributes:
        module: qualified name of the module whose calls the graph takes; "" for the whole model.
        guards: conditions that a call must meet, as text.
        graph_calls: how many calls met them.
        own_calls: how many calls ran the module's own code.
    """

    module: str
    guards: tuple[str, ...]
    graph_calls: int
    own_calls: int

    def __str__(self) -> str:
        """One line."""
        return (
            f"graph of {place_of(self.module)}: {self.graph_calls} calls, {self.own_calls} of own "
            f"code; guards: {_shortened(self.guards)}"
        )


@dataclass(frozen=True)
class InputRow:
    """Float values that became int8, in samples that a few calls took.

    Attributes:
        name: of the input, or of the module that reads the values.
        sampled: how many values were looked at.
        clipped: how many of them lay beyond the range.
        nans: how many of them were NaN.
        range: from calibration.
        seen: the smallest and the largest of them.
    """

    name: str
    sampled: int
    clipped: int
    nans: int
    range: tuple[float, float]
    seen: tuple[float, float]

    def __str__(self) -> str:
        """One line."""
        (low, high), (seen_low, seen_high) = self.range, self.seen
        nans = f", {self.nans} NaN" if self.nans else ""
        return (
            f"{self.name}: of {self.sampled} sampled values {self.clipped} clipped{nans}; range "
            f"{low:.4g} to {high:.4g}, seen {seen_low:.4g} to {seen_high:.4g}"
        )


def _shortened(guards: tuple[str, ...]) -> str:
    """Return guards in one line: as many as fit, and how many there are more."""
    ends = list(itertools.accumulate(len(guard) + 2 for guard in guards))
    count = max(1, sum(end <= _LINE for end in ends))
    more = f"; and {len(guards) - count} more (explain(model).graphs)"
    return f"{joined(guards[:count])}{more if count < len(guards) else ''}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows, and a table of them as ``str``.

    Attributes:
        rows: one per module of the float model.
        details: attributes of the quantized modules, by name.
        note: why the whole model has no graph; "" where it has one.
        graphs: of the model or its parts.
        weights: parameters that data is multiplied by, in any code.
        embeddings: bytes of the embeddings with quantized rows, and what float32 would take.
        inputs: values that calls brought as float and that became int8, where any were sampled.
    """

    rows: tuple[Row, ...]
    details: dict[str, str]
    note: str = ""
    graphs: tuple[GraphRow, ...] = field(default=(), compare=False)  # they count calls
    weights: tuple[Weight, ...] = ()
    embeddings: tuple[int, int] = (0, 0)
    inputs: tuple[InputRow, ...] = field(default=(), compare=False)

    @property
    def float_weights(self) -> tuple[Weight, ...]:
        """Return the weights that stay float though no override says so."""
        return tuple(weight for weight in self.weights if weight.stays_float(self.rows))

    def __str__(self) -> str:
        """One line per module: name, class, int8 or float, and the scales or the reason.

        Calls in a loop are one line, with the scales of the first.
        """
        return text_table([_HEADS, *self._cells()], self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table, for notebooks: it folds, and long ones are folded at first."""
        return folding_table(_HEADS, self._cells(), self._notes())

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """Return the lines of the table."""
        cells = []
        for rows in self._alike():
            row, calls = rows[0], sum(row.calls for row in rows)
            detail = row.reason or self.details.get(row.site, "")
            name = f"{row.name} .. {rows[-1].name}" if len(rows) > 1 else row.name
            kind = f"{row.kind} x{calls}" if calls > 1 else row.kind
            place = "int8" if row.quantized else "float"
            cells.append((name or "(the model)", kind, place, detail))
        return cells

    def _notes(self) -> list[str]:
        """Return what stands below the table."""
        lines = []
        layers = [row for row in self.rows if row.is_matmul]
        quantized = sum(row.quantized for row in layers)
        if self.note:
            lines.append(self.note)
        lines.extend(self._on_weights())
        own, in_float = self.embeddings
        if own:
            lines.append(f"embeddings: {own:,} bytes, instead of {in_float:,} in float32")
        lost = [row for row in self.inputs if row.clipped or row.nans]
        lines.extend(str(row) for row in lost[:4])
        if len(lost) > 4:
            lines.append(f"and {len(lost) - 4} more inputs with clipped values")
        lines.extend(str(graph) for graph in self.graphs[:4])
        if len(self.graphs) > 4:
            lines.append(f"and {len(self.graphs) - 4} more graphs")
        recurrent = any(row.kind in _RECURRENT for row in layers)
        kinds = (
            "convolutions, linears and recurrent modules"
            if recurrent
            else "convolutions and linears"
        )
        idle = sum(row.reason == reasons.NOT_CALLED for row in layers)
        more = f"; {idle} more are {reasons.NOT_CALLED}" if idle else ""
        lines.append(f"{quantized} of {len(layers) - idle} {kinds} run in int8{more}")
        return lines

    def _on_weights(self) -> list[str]:
        """Return how much is int8 by weights and multiplications, and which others are float."""
        int8 = [weight for weight in self.weights if weight.is_int8(self.rows)]
        if not self.weights:
            return []
        size = 100 * sum(w.size for w in int8) / max(sum(w.size for w in self.weights), 1)
        macs = 100 * sum(w.macs for w in int8) / max(sum(w.macs for w in self.weights), 1)
        lines = [f"int8: {size:.3g} % of the weights, {macs:.3g} % of the multiplications by them"]
        layers = {name for row in self.rows if row.is_matmul for name in row.weights}
        others = [weight for weight in self.float_weights if weight.name not in layers]
        if others:
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            told = ", ".join(f"{weight.name} ({weight.size:,} weights)" for weight in others[:4])
            lines.append(f"float, in no layer: {told}{more}")
        return lines

    def _alike(self) -> list[list[Row]]:
        """Rows of one line of code that share their fate."""
        found: dict[object, list[Row]] = {}
        for row in self.rows:
            reason = re.sub(r"_\d+\b", "", row.reason)  # of what it was fused into
            alike = row.first or row.name, row.quantized, reason
            found.setdefault(alike, []).append(row)
        return list(found.values())


def explain(model: nn.Module) -> Explanation:
    """Report which modules of a model run in int8, and why others stay float.

    Args:
        model: from :func:`torchq.prepare`, :func:`torchq.convert`, :func:`torchq.quantize`,
            :func:`torchq.quantize_dynamic` or :func:`torchq.load`.

    Returns:
        A report that prints as a table. Its ``rows``, ``graphs``, ``inputs`` and ``float_weights``
        are for programs.

    Raises:
        ValueError: the model comes from none of these.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).eval()
        >>> qmodel = torchq.quantize(model, [torch.randn(8, 16)], overrides={"2": None})
        >>> for row in torchq.explain(qmodel).rows:
        ...     print(row.name, row.kind, "int8" if row.quantized else row.reason)
        0 Linear int8
        1 Tanh its destination is float
        2 Linear kept float by an override
    """
    rows = getattr(model, "torchq_report", None)
    if rows is None:
        raise ValueError(
            "torchq.explain: model must come from torchq.prepare or torchq.convert, got "
            f"{type(model).__name__}. Convert the float model, or load what "
            "torchq.save wrote."
        )
    details = {
        name: str(module.extra_repr())
        for name, module in computing_modules(model).items()
        if isinstance(module, QModule)
    }
    owners = [owner for module in model.modules() if (owner := attachment_of(module))]
    graphs = tuple(
        GraphRow(o.name, tuple(o.conditions()), o.graph_calls, o.own_calls) for o in owners
    )
    note = getattr(model, "torchq_note", "")
    weights = tuple(getattr(model, "torchq_weights", ()))
    kinds = (QEmbedding, QEmbeddingBag)
    tables = {id(m.rows): m for m in model.modules() if isinstance(m, kinds)}.values()
    floats = sum(4 * table.num_embeddings * table.embedding_dim for table in tables)
    embeddings = sum(table.rows.nbytes for table in tables), floats
    return Explanation(tuple(rows), details, note, graphs, weights, embeddings, _inputs(model))


def _inputs(model: nn.Module) -> tuple[InputRow, ...]:
    """Return what the quantized modules of graphs and leaves counted."""
    parts = [module for _, graph in graphs_of(model) for module in graph.modules()]
    modules = {id(module): module for module in (*parts, *model.modules())}.values()
    counters = [module._clips for module in modules if isinstance(module, QModule)]
    return tuple(
        InputRow(c.name, c.sampled, c.clipped, c.nans, (c.low, c.high), (c.seen_low, c.seen_high))
        for c in counters
        if c.sampled
    )
