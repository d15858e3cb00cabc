# SPDX-License-Identifier: Apache-2.0
"""Tells what calibration data cannot have said, and that nothing of a model is int8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx, nn

from torchq.convert.dispatch import dispatches
from torchq.convert.prepared import Prepared
from torchq.convert.sources import CHECKS, CLIPS, input_names, source_name
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.watching import watched_ranges
from torchq.nn.clip_counter import SHARE, warn
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.quantization.observers import Observer, PercentileObserver
from torchq.report.rows import Row

_ROWS = 4
"""Fewer are no sample: a range of 4 rows still misses every fifth new row's extremes."""
_NAMED = 3


def warn_of_data(op: str, prepared: nn.Module) -> None:
    """Warn, once for all inputs, where calibration has seen few rows or one value only.

    A row is an item of the first dimension: an image, a text, a row of features. Only inputs that
    no quantized layer is in front of count: what comes later follows from them.
    """
    found = [text for name, observer in _inputs(prepared) if (text := _unseen(name, observer))]
    if found:
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        warn(
            f"torchq.{op}: calibration has seen too little to choose ranges by: "
            f"{'; '.join(found[:_NAMED])}{more}. Later values beyond these ranges are clipped. "
            "Calibrate with real data, preprocessed as in later calls; some hundred rows suffice."
        )


def _unseen(name: str, observer: Observer) -> str:
    rows, low, high = observer.row_count, observer.min_value, observer.max_value
    count = f"{rows} row" + "s" * (rows != 1)
    if low.numel() == 1 and float(low) == float(high):
        return f"{name} was {float(low):.4g} everywhere" + (f", in {count}" if rows else "")
    return f"{name} had {count}" if rows and rows < _ROWS else ""


def _inputs(prepared: nn.Module) -> Iterator[tuple[str, Observer]]:
    """Yield the observers of the first quantized values, with how to call these."""
    inside: set[str] = set()
    for dispatch in dispatches(prepared):
        graph = dispatch.graph
        assert isinstance(graph, Prepared)
        bases = [layer.op.base for layer in graph.plan.active]
        inside.update(f"{graph.plan.prefix}{name}" for name in (*bases, *graph.opaque_names))
        names = input_names(graph.plan.captured.graph, dispatch)
        for node, observer in _first_observers(graph):
            yield names.get(node.name) or source_name(observer.name), observer
    for name, module in prepared.named_modules():
        if name in inside:
            continue
        if isinstance(module, ObservedLeaf) and module.observer is not None:
            yield source_name(name), module.observer
        elif isinstance(module, ObservedRNN | ObservedRNNCell) and module.src_observer is not None:
            yield source_name(name), module.src_observer


def _first_observers(graph: Prepared) -> Iterator[tuple[fx.Node, Observer]]:
    """Yield observers of values with no quantized layer before them, and nodes of these values."""
    plan, later = graph.plan, set[fx.Node]()
    roots = {node: root for root, nodes in plan.groups.items() for node in nodes}
    ranges = watched_ranges(plan)
    for node in plan.captured.graph.nodes:
        follows = not later.isdisjoint(node.all_input_nodes)
        alone = node.op == "call_module" and node.target in graph.opaque_names
        made = alone or node in plan.layer_at
        if node.meta["varying"] and not follows and (alone or (node in roots and not made)):
            observer = (
                getattr(graph.graph_module.get_submodule(str(node.target)), "src_observer", None)
                if alone
                else graph.recorder(ranges[roots[node]][0])
            )
            if isinstance(observer, Observer):
                yield node.all_input_nodes[0] if alone else node, observer
        if follows or made:
            later.add(node)


def keep_options(prepared: nn.Module, result: nn.Module) -> None:
    """Give a converted model the options on inputs that its own attributes tell.

    Where observers clip a percentage of the values, calls may have twice that without a warning.
    """
    shares = [SHARE]
    for part in (prepared, *(dispatch.graph for dispatch in dispatches(prepared))):
        found = (m for m in part.modules() if isinstance(m, PercentileObserver))
        shares += [(100 - observer.percentile) / 50 for observer in found]
    if max(shares) > SHARE:
        vars(result)[CLIPS] = max(shares)
    if vars(prepared).get(CHECKS):
        vars(result)[CHECKS] = True


def warn_of_floats(rows: Sequence[Row]) -> None:
    """Warn where nothing runs in int8 though no override says so."""
    left = [row for row in rows if row.is_matmul and not row.requested]
    if left and not any(row.quantized for row in rows):
        warn(
            f"torchq.convert: nothing runs in int8; '{left[0].name}' is float: {left[0].reason}. "
            "torchq.explain tells the others."
        )
