# SPDX-License-Identifier: Apache-2.0
"""Finds the largest modules of a model that can be captured, and their graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from torchq.attributes.json_text import printable
from torchq.capture.aten import plain_graph
from torchq.capture.cached import cached_call, count_all, fix_kinds, smaller_calls
from torchq.capture.condition import Condition
from torchq.capture.exported import CaptureError, Exported, export, shapes_of
from torchq.capture.graph import Captured, remove_unused
from torchq.capture.module_kinds import MATMUL, RECURRENT
from torchq.capture.neutral_arguments import neutral_options
from torchq.capture.ops import Role
from torchq.capture.patterns import row_of
from torchq.capture.terms import Size
from torchq.convert.swap.calls import results_of
from torchq.convert.swap.leaves import equivalent_layer
from torchq.models.inputs import are_close
from torchq.models.state import twin
from torchq.models.trees import Args, Call, Kwargs, copied
from torchq.nn.leaf import without_hooks


@dataclass(frozen=True, eq=False)
class Part:
    """A module with its graph.

    Attributes:
        name: qualified name in the model; "" for the whole.
        exported: the captured call.
        captured: the same as a plain graph.
        has_cache: whether it takes the tensors of a cache, as ``capture/cached.py`` says.
    """

    name: str
    exported: Exported
    captured: Captured
    has_cache: bool = False


@dataclass
class Parts:
    """Captured parts of a model.

    Attributes:
        found: in the order of the modules.
        why: module that is not captured -> why.
    """

    found: list[Part] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)


def find_parts(model: nn.Module, args: Args, kwargs: Kwargs) -> Parts:
    """Capture ``model(*args, **kwargs)``; where that fails, the calls of its parts."""
    parts = Parts()
    if equivalent_layer(model) is not None:  # one layer, which needs no graph
        return parts
    calls: dict[int, Call] = {}
    if model._forward_pre_hooks:  # which give ``forward`` other arguments
        calls = _calls(model, args, kwargs)
    if not _capture(parts, model, "", calls.get(id(model), (tuple(args), dict(kwargs)))):
        _descend(parts, model, "", calls or _calls(model, args, kwargs))
    return parts


def _descend(parts: Parts, module: nn.Module, name: str, calls: dict[int, Call]) -> None:
    for key, child in module.named_children():
        full = f"{name}.{key}".lstrip(".")
        if not _is_worth(child):
            continue
        call = calls.get(id(child))
        if call is None or not _capture(parts, child, full, call):
            _descend(parts, child, full, calls)


def _is_worth(module: nn.Module) -> bool:
    """Return whether a module has parts, and a layer that can be int8 among them."""
    if next(module.children(), None) is None or _is_layer(module):
        return False
    return any(map(_is_layer, module.modules()))


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is one layer that can be int8; its weight may be parametrized."""
    layer = module if is_parametrized(module, "weight") else equivalent_layer(module)
    return isinstance(layer, (*MATMUL, *RECURRENT))


def _capture(parts: Parts, module: nn.Module, name: str, call: Call) -> bool:
    module = without_hooks(module)  # they run around a graph, as around the module's own code
    cached = cached_call(module, *call)
    return (cached and _add(parts, name, *cached, True)) or _add(parts, name, module, call, False)


def _add(parts: Parts, name: str, module: nn.Module, call: Call, has_cache: bool) -> bool:
    """Capture a call and add the part; note why where that fails."""
    try:
        exported, captured = _captured(module, call, has_cache=has_cache)
        if not exported.takes(*call):  # the code treats a batch of one, as it is here, differently
            lines = exported.lines
            exported, captured = _captured(module, call, widen=False, has_cache=has_cache)
            exported.lines = lines
    except CaptureError as error:
        parts.why[name] = printable(str(error))
        return False
    except Exception as error:  # the model's own code runs anyway
        first = str(error).partition("\n")[0]
        parts.why[name] = f"it makes no graph, got {type(error).__name__}: {printable(first)}"
        return False
    captured.prefix, captured.has_cache = f"{name}." if name else "", has_cache
    compute_once(captured)
    parts.found.append(Part(name, exported, captured, has_cache))
    return True


def _captured(
    module: nn.Module, call: Call, widen: bool = True, has_cache: bool = False
) -> tuple[Exported, Captured]:
    exported = export(module, *call, widen)
    if has_cache:
        fix_kinds(exported)
    captured = plain_graph(exported, twin(module))
    if has_cache:
        count_all(captured.graph)
    (_check_cached if has_cache else check)(module, exported, captured)
    return exported, captured


def _calls(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[int, Call]:
    """Return the first call of each module, by id, in one run of the model."""
    found: dict[int, Call] = {}
    run, twins = twin(model), {}
    for original, other in zip(model.modules(), run.modules(), strict=True):
        twins[other] = id(original)

    def recorded(module: nn.Module) -> Callable[..., object]:
        own = module.forward

        @functools.wraps(own)
        def forward(*args: object, **kwargs: object) -> object:
            if twins[module] not in found:
                found[twins[module]] = copied(args, kwargs)
            return own(*args, **kwargs)

        return forward

    for module in run.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            vars(module)["forward"] = recorded(module)  # sentence-transformers calls it by name
    args, kwargs = copied(args, kwargs)
    with torch.no_grad(), contextlib.suppress(Exception):
        run(*args, **kwargs)
    return found


def check(module: nn.Module, exported: Exported, captured: Captured) -> None:
    """Compare the graph with the module, on the example and where a dynamic size is one.

    A size of one that gives other results becomes a guard. Guards that exclude it, though the
    results are the same, as ``n % (s0[0] * n) != 0`` does, take it from here on.

    Raises:
        CaptureError: they differ on the example.
    """
    graph = fx.GraphModule(captured.model, captured.graph)
    if not _agree(module, graph, exported, exported.tensors, exported.results):
        raise CaptureError("its graph computes something else than its code")
    ones = list(_ones(exported))
    calls = sorted((x for _, x in ones), key=lambda x: sum(t.numel() for t in x))
    exported.neutral = neutral_options(module, exported, (*calls, exported.tensors))
    for guard, smaller in ones:
        unmet = [g for g in exported.guards if not g.holds(shapes_of(smaller))]
        if not all(g.only_excludes for g in unmet):
            continue
        agree = _agree(module, graph, exported, smaller)
        if agree is False and not unmet:
            exported.guards.append(guard)
        elif agree:
            for g in unmet:
                at = exported.guards.index(g)
                exported.guards[at] = g.either(guard.opposite())


def _check_cached(module: nn.Module, exported: Exported, captured: Captured) -> None:
    """Compare the graph with the module, on the example, and where a size is one or nothing cached.

    Raises:
        CaptureError: they differ.
    """
    graph = fx.GraphModule(captured.model, captured.graph)
    calls = list(smaller_calls(exported))
    exported.neutral = neutral_options(module, exported, calls)
    agree = _agree(module, graph, exported, exported.tensors, exported.results)
    for tensors in calls if agree else ():
        sizes = shapes_of(tensors)
        unmet = [g for g in exported.guards if not g.holds(sizes)]
        agree = all(g.only_excludes or g.or_equal().holds(sizes) for g in unmet)
        agree = agree and _agree(module, graph, exported, tensors)
        if not agree:
            break
        kept = [g for g in exported.guards if g not in unmet or not g.only_excludes]
        exported.guards = [g.or_equal() if g in unmet else g for g in kept]
    if not agree:
        raise CaptureError("with a cache, its graph computes something else than its code")


def _ones(exported: Exported) -> Iterator[tuple[Condition, list[Tensor]]]:
    """For each dynamic size, a guard and tensors where all sizes that are equal to it are one."""
    tensors = exported.tensors
    seen: set[int] = set()
    for i, argument in enumerate(exported.arguments):
        for d, size in enumerate(argument.shape):
            length = tensors[i].shape[d]
            if size is None and length > 1 and length not in seen:
                seen.add(length)
                yield Condition.on(Size(i, d), "!=", 1), [_cut(t, a.shape, length) for t, a in zip(
                    tensors, exported.arguments, strict=True)]  # fmt: skip


def _cut(tensor: Tensor, shape: tuple[int | None, ...], length: int) -> Tensor:
    for d, size in enumerate(shape):
        if size is None and tensor.shape[d] == length:
            tensor = tensor.narrow(d, 0, 1)
    return tensor.contiguous()


def _agree(
    module: nn.Module,
    graph: nn.Module,
    exported: Exported,
    tensors: list[Tensor],
    expected: list[Tensor] | None = None,
) -> bool | None:
    """Return whether graph and module give the same; None where the module itself fails.

    ``expected``: what the module gave, where that is known.
    """
    if expected is None:
        args, kwargs = exported.call(tensors)
        try:
            expected = results_of(twin(module), args, kwargs)
        except Exception:  # of the module's own code, which a call would raise as well
            return None
    try:
        return are_close(expected, results_of(graph, tensors, {}))
    except Exception:
        return False


def compute_once(captured: Captured) -> None:
    """Put results in the place of the calls that make them in each run.

    So do functions behind them that give no more elements. What the model returns stays, as its
    caller may write to that.
    """
    graph, model = captured.graph, captured.model
    made: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_made(node, made):
            made[node] = None
    returned = set(graph.output_node().all_input_nodes)
    owners = {node.meta["owner"] for node in made} - {""}
    for i, node in enumerate(made):
        value = node.meta["constant"]
        if not isinstance(value, Tensor) or node in returned or made.keys() >= node.users.keys():
            continue
        name = f"_torchq_made_{i}"
        model.register_buffer(name, value.detach().clone())
        with graph.inserting_before(node):
            stored = graph.create_node("get_attr", name)
        stored.meta.update(node.meta, constant=getattr(model, name), owner="")
        node.replace_all_uses_with(stored)
    remove_unused(graph)
    captured.once = owners - {node.meta.get("owner") for node in graph.nodes}


def _is_made(node: fx.Node, made: dict[fx.Node, None]) -> bool:
    """Return whether it is such a call, or what a function makes of results and constants."""
    if node.op not in ("call_function", "call_method") or node.meta["varying"]:
        return False
    row = row_of(node)
    if row is not None and row.role in (Role.MATMUL, Role.PRODUCT):
        return True
    sources = [n for n in node.all_input_nodes if n in made]
    if not sources or (row is not None and row.role is Role.FAKE):
        return False
    return _size(node) <= max(map(_size, sources))


def _size(node: fx.Node) -> int:
    """Return the elements of a tensor, or of all in a sequence."""
    found: object = node.meta["constant"]
    tensors = found if isinstance(found, tuple | list) else [found]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))
