# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model and each function that it calls."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torchq.explain import NOT_CALLED, Row
from torchq.fx.layers import Layer
from torchq.fx.ops import Op, Role
from torchq.fx.planning import Plan
from torchq.fx.tracing.capture import Captured
from torchq.fx.tracing.fake import is_watcher
from torchq.kinds import MATMUL
from torchq.nn.rnn_observed import CELLS, NETWORKS
from torchq.standalone import FOREIGN, RECURRENT, is_foreign

_MATMULS = (*MATMUL, *RECURRENT, nn.Bilinear)
_MATMUL_NAMES = [cls.__name__ for cls in (*_MATMULS, *NETWORKS, *CELLS)]


def report_rows(plan: Plan, inside: dict[str, list[Row]]) -> list[Row]:
    """Rows in the order of calls, then those of modules that are not called.

    Args:
        plan: what was decided.
        inside: rows of submodules that cannot be traced and were prepared by themselves.
    """
    layer_of = {part: layer for layer in plan.layers for part in layer.parts}
    first: dict[Any, str] = {}  # where a function is called -> the name of the first call
    rows: dict[str, list[Row]] = defaultdict(list)
    for op in plan.ops.values():
        if isinstance(op.node.target, type):  # the class of what the model returns
            continue
        if op.role is Role.SHAPE or (op.owner is None and op.role is Role.PASS):
            continue
        unpacks = op.owner is None and op.srcs and op.srcs[0].meta["value"].is_sequence
        if unpacks and not plan.is_joined(op.node):  # the results of a module
            continue
        if op.node.meta.get("positional"):  # of sizes and positions alone
            continue
        name = op.base if op.owner is not None else op.name
        if name in inside:
            why = f"{op.reason}; its modules were swapped, its functions and operators stay float"
            whole = replace(_row(plan, op, None, name), reason=why, is_matmul=False)
            rows[name] = [whole, *(row for row in inside[name] if row.name != name)]
        else:
            row, place = _row(plan, op, layer_of.get(op), name), op.node.meta.get("place")
            if op.owner is None and place is not None:
                row = replace(row, first=first.setdefault((place, op.kind), name))
            rows[name].append(row)
    result = [_together(several) for name, several in rows.items() if name not in inside]
    for name, several in rows.items():
        if name in inside:
            result.extend(several)
    return result + _not_called(plan, {row.name: row for row in result})


def _together(rows: list[Row]) -> Row:
    """One row for all calls of a module."""
    rows = [replace(row, calls=len(rows)) for row in rows]
    quantized = [row for row in rows if row.quantized]
    if not quantized or len(quantized) == len(rows):
        reasons = dict.fromkeys(row.reason for row in rows)
        if all(r.startswith("fused into ") for r in reasons):
            into = dict.fromkeys(r.removeprefix("fused into ") for r in reasons)
            return replace(rows[0], reason="fused into " + ", ".join(into))
        return replace(rows[0], reason="; ".join(r for r in reasons if r))
    left = next(row.reason for row in rows if not row.quantized)
    first = quantized[0]
    return replace(first, reason=f"{first.reason or 'int8'}; elsewhere float: {left}")


def _row(plan: Plan, op: Op, layer: Layer | None, name: str) -> Row:
    quantized, reason, site = False, op.reason, op.name
    if op.owner is not None and op.base in plan.standalone:
        quantized, site = True, op.base
    elif (whole := plan.dynamic_wholes.get(op)) is not None:
        quantized, reason, site = True, f"fused into {whole.name}", whole.name
    elif layer is not None:
        reason = plan.reasons[layer]
        quantized = not reason
        if quantized:
            reason = layer.note
        host = plan.table_hosts.get(layer, layer)
        if quantized and op is not host.op:
            reason, site = f"fused into {host.name}", host.name
    elif op.role in (Role.MOVE, Role.PASS, Role.POOL, Role.PAD):
        quantized = plan.is_int8(op.node)
        reason = "passes values on as they are" if op.role is Role.PASS else ""
        if not quantized:
            reason = "its sources are float"
    elif op.role is Role.DYNAMIC:
        quantized = True
    elif op.role is Role.FAKE:
        quantized, reason = True, "says what the scale and zero point are"
    elif op.role is Role.SLOPES:
        reason = "it has a slope per channel, and no convolution or linear in front takes it over"
    elif op.role is Role.NORM:
        reason = "it stands alone on rows of features"
    is_matmul = isinstance(op.owner, _MATMULS) or op.is_matmul
    if op.owner is not None and name in plan.captured.untraceable:
        is_matmul = is_matmul or _multiplies(plan.captured, name)
    return Row(name, op.kind, quantized, reason, site, is_matmul, op.requested)


def _multiplies(captured: Captured, name: str) -> bool:
    """Whether a module that was not traced computes a convolution or a matrix product."""
    module, (args, kwargs) = copy.deepcopy(
        (captured.model.get_submodule(name), captured.examples[name])
    )
    try:
        with FlopCounterMode(display=False) as counter:
            module(*args, **kwargs)
    except Exception:  # of the model's own code: who knows what it would compute
        return True
    return bool(counter.get_total_flops())


def _not_called(plan: Plan, known: dict[str, Row]) -> list[Row]:
    """Modules of the float model that the graph does not call by themselves."""
    used = {
        str(node.target).rpartition(".")[0]
        for node in plan.captured.graph.nodes
        if node.op == "get_attr"
    }
    constant = {str(node.target) for node in plan.captured.graph.find_nodes(op="call_module")}
    modules = dict(plan.captured.model.named_modules())
    watchers = tuple(name for name, module in modules.items() if is_watcher(module))
    rows = []
    for name, module in plan.captured.model.named_modules():
        if name in known or not name or next(module.children(), None) is not None:
            continue
        foreign = is_foreign(module)  # its operations have rows of their own, in float
        if (name in plan.captured.entered and not foreign) or name.startswith(watchers):
            continue
        host = next((other for other in known if name.startswith(f"{other}.")), None)
        compiled = getattr(module, "original_name", "")  # by TorchScript: the class it was
        is_matmul = foreign or (isinstance(module, _MATMULS) and name not in used)
        is_matmul |= compiled in _MATMUL_NAMES
        requested = plan.config(name) is None
        if name in plan.captured.once or name in constant:
            is_matmul = False
            reason = "nothing that it reads depends on the inputs"
            reason += ": it is computed once" if name in plan.captured.once else ""
        elif name in plan.captured.called and name not in used and host is None:
            is_matmul, reason = False, "nothing uses its result"
        elif foreign and name in used:
            reason = FOREIGN
        elif name in used:
            reason = "its parameters are used outside of it"
        elif host is None:
            reason = NOT_CALLED
        elif not is_matmul:
            continue
        else:
            reason = f"it is a part of {host}: {known[host].reason}"
            requested |= known[host].requested
        kind = compiled or type(module).__name__
        rows.append(Row(name, kind, False, reason, name, is_matmul, requested))
    return rows
