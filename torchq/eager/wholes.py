# SPDX-License-Identifier: Apache-2.0
"""Which modules that a model's own code calls become graphs: those that it does nothing else with.

Such a module may be a sequence or have a forward of its own, as residual blocks do. The graph must
do what the module does on every way that later calls may go: so nothing may decide about its way
but its class and constants (:func:`check`), and nobody else may hold what it holds. What code could
ask of a part of it raises (:class:`torchq.nn.swapped.Whole`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.affine import TRANSPOSED
from torchq.eager.asked import asked_classes
from torchq.eager.recording import Call, Recording, is_hooked
from torchq.fx.module import QuantizedGraph
from torchq.fx.prepared import Prepared
from torchq.fx.tracing.capture import Captured, CaptureError
from torchq.fx.tracing.guards import GUARDS, expect, expect_float
from torchq.fx.tracing.memory import agree
from torchq.kinds import MATMUL
from torchq.nn.swapped import INSIDE, Stood
from torchq.state import changed, shares, state_of, twin

__all__ = ["candidates", "check", "computes"]


def candidates(model: nn.Module, recording: Recording) -> Iterator[tuple[str, list[Call]]]:
    """Modules that are called as a whole only, and their calls; outer ones first."""
    asked = asked_classes(model.modules())
    for name, module in model.named_modules():
        known = name in recording.wholes and asked.isdisjoint(_classes(module))
        if known and _is_left_alone(name, module, model, recording):
            yield name, recording.wholes[name]


def _classes(module: nn.Module) -> set[Any]:
    """What code may ask whether it is one, by name too; that it is a module, it stays."""
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    return {*classes, *(cls.__name__ for cls in classes)}


def _is_left_alone(name: str, module: nn.Module, model: nn.Module, recording: Recording) -> bool:
    if not name and type(module) is not nn.Sequential:
        return False  # who calls the model may do it in any way
    parts = dict(module.named_modules(prefix=name))
    layers = [recording.leaves.get(n) for n in parts]
    if sum(m is not None for m in layers) < 2 or not _has_matmul(layers):
        return False
    if any(is_hooked(m) or not _is_plain_part(m) for m in parts.values()):
        return False
    if any(n in parts and name not in within for n, within in recording.exposures):
        return False
    calls = [*recording.calls, *(c for found in recording.wholes.values() for c in found)]
    if any(c.name in parts and c.module is not None and not _is_in(name, c) for c in calls):
        return False
    if not all(map(_is_plain, recording.wholes[name])):
        return False
    return not _has_other_names(module, model) and not shares(model, module)


def _has_matmul(layers: list[nn.Module | None]) -> bool:
    return any(isinstance(m, (*MATMUL, *TRANSPOSED)) for m in layers)


def _is_plain_part(module: nn.Module) -> bool:
    own_call = type(module).__call__ is not nn.Module.__call__
    return not own_call and not isinstance(module, torch.jit.ScriptModule)


def _is_in(name: str, call: Call) -> bool:
    return call.name == name or name in call.within


def _is_plain(call: Call) -> bool:
    sources = call.sources or ()
    floats = all(x.dtype == torch.float32 for x in sources)
    return bool(sources) and floats and call.plain and not call.writes and not call.keywords


def _has_other_names(module: nn.Module, model: nn.Module) -> bool:
    """Whether a part is registered outside of it, too."""
    parts, everywhere = set(module.modules()), model.named_modules
    own = [n for n, m in everywhere(remove_duplicate=False) if m is module]
    return any(
        m in parts and n not in own and not n.startswith(tuple(f"{o}." if o else "" for o in own))
        for n, m in everywhere(remove_duplicate=False)
    )


def check(captured: Captured) -> None:
    """Makes the graph refuse other dtypes.

    Raises:
        CaptureError: another input than the example might go another way through the module.
    """
    if captured.untraceable:
        raise CaptureError("a part of it cannot be traced")
    graph = captured.graph
    guards = [node for node in graph.nodes if node.target in GUARDS]
    if any(node.target is not expect or not _asks_rank(node.args[0]) for node in guards):
        raise CaptureError("its Python code acts on sizes or values")
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        for node in inputs if len(inputs) > 1 else ():
            guard = graph.call_function(expect_float, (node,))
            guard.meta.update(scope="", writes=[], static=True, varying=False)


def _asks_rank(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target == "dim"


def computes(module: nn.Module, prepared: Prepared, calls: list[Call]) -> bool:
    """Whether the graph does what the module did in all calls, and keeps and refuses the same."""
    given: list[Any] = [(call.sources, {}) for call in calls]
    before, copied = state_of(module), twin(module)
    with torch.no_grad():
        if not agree(copied, copy.deepcopy(prepared), given):
            return False
        guards = prepared.plan.captured.graph.find_nodes(op="call_function", target=expect)
        takes = guards and any(map(_takes, [copied] * 2, _other_ranks(calls[0].sources or ())))
    names = Stood.of(module, "").hidden
    taken = names & ({*dir(QuantizedGraph), *dir(prepared), INSIDE})
    return not takes and not taken and not changed(before, state_of(copied))


def _other_ranks(sources: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    fewer = tuple(x[0] if x.dim() and len(x) else x for x in sources)
    return [fewer, tuple(x[None] for x in sources)]


def _takes(module: nn.Module, sources: tuple[Tensor, ...]) -> bool:
    try:
        copy.deepcopy(module)(*sources)
    except Exception:  # of the model's own code
        return False
    return True
