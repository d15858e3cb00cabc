# SPDX-License-Identifier: Apache-2.0
"""From the nodes of a graph to operations, by the table of patterns."""

from __future__ import annotations

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from torchq.convert.patterns import arguments_of, row_of
from torchq.fake_quantize import FakeQuantize
from torchq.folding import MAX_SHIFTED_REDUCTION
from torchq.fx.ops import Arguments, Made, Op, Pattern, Role, is_float, parse_signature
from torchq.fx.patterns import PATTERNS
from torchq.fx.scripting import depends_on_strides
from torchq.fx.tracing.capture import Captured
from torchq.fx.tracing.fake import composed, fake_quantizer, is_watcher, why_not_fixed
from torchq.fx.tracing.guards import GUARDS
from torchq.kinds import AVERAGES
from torchq.nn.binary import Add, Mul

_BY_FUNCTION: dict[Any, Pattern] = {f: row for row in PATTERNS for f in row.functions}
_BY_MODULE: dict[type[nn.Module], Pattern] = {cls: row for row in PATTERNS for cls in row.modules}
_KEPT = "it writes in place to what its caller or a module keeps"
_SIGNATURES = {id(row): parse_signature(row.signature) for row in PATTERNS}


def recognize(captured: Captured, keep_float: Callable[[str], bool]) -> dict[fx.Node, Op]:
    """Every node that depends on the inputs -> what it is; constants, inputs and guards are not in.

    ``keep_float`` tells names that stay float on request.
    """
    used: Counter[str] = Counter(name for name, _ in captured.model.named_modules())
    calls: Counter[str] = Counter()
    pinned, ops = rewritten(captured.graph), dict[fx.Node, Op]()
    by_strides = read_by_strides(captured.graph)
    kept = _writes_to_kept(captured.graph)
    for node in captured.graph.nodes:
        if not node.op.startswith("call_") or node.target in GUARDS:
            continue
        if not node.meta["varying"]:
            node.meta["fake"] = _fake_constant(node, captured)
            continue
        made, owner = _made(node, captured)
        leaf = node.meta.get("owner", "")
        if node.op == "call_module" or leaf:
            base = leaf or str(node.target)
            name = base if calls[base] == 0 else f"{base}_{calls[base]}"
            calls[base] += 1
            owner = owner or captured.model.get_submodule(base)
        else:
            scope = node.meta["scope"]
            first = f"{scope}.{_function_name(node)}".lstrip(".")
            base = name = first if used[first] == 0 else f"{first}_{used[first]}"
            used[first] += 1
        kind = type(owner).__name__ if owner is not None else _function_name(node)
        op = Op(**vars(made), node=node, name=name, base=base, kind=kind, owner=owner)
        op.requested = keep_float(base)
        written = _KEPT if node in kept else ""
        if not written and not pinned.isdisjoint([node, *op.srcs]):
            written = "its memory is written in place while the old values are still read"
        if not written and not by_strides.isdisjoint([node, *op.srcs]):
            written = "code asks for the strides of a view of it"
        op.reason = _why_float(op, written)
        if op.reason:
            op.role = Role.OPAQUE
        elif _is_mean(op):
            op.role = Role.MEAN
        ops[node] = _dequantization(op, ops)
    return ops


def _fake_constant(node: fx.Node, captured: Captured) -> FakeQuantize | None:
    """The fake quantizer of a constant: of a weight."""
    if node.op == "call_module":
        return fake_quantizer(captured.model.get_submodule(str(node.target)))
    row = _BY_FUNCTION.get(node.target)
    if row is None or row.role is not Role.FAKE:
        return None
    made, _ = _made(node, captured)
    return made.module if isinstance(made.module, FakeQuantize) else None


def _dequantization(op: Op, ops: dict[fx.Node, Op]) -> Op:
    """A number added to or multiplied with what a fake quantizer gives changes its levels only."""
    before = ops.get(op.srcs[0]) if op.role is Role.UNARY else None
    if before is None or before.role is not Role.FAKE or op.affine is None or op.requested:
        return op
    assert isinstance(before.module, FakeQuantize)
    fake = composed(before.module, *(float(value) for value in op.affine))
    if len(before.node.users) == 1 and not why_not_fixed(fake):
        op.role, op.module, op.srcs = Role.FAKE, fake, before.srcs
    return op


def rewritten(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory is written while somebody still reads what was there before.

    All other writes in place are as good as new tensors.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    found: set[fx.Node] = set()
    for node in nodes:
        for source in node.meta.get("writes", ()):
            storage = source.meta["value"].storage
            aliases = [n for n in nodes[: position[node]] if _shares(n, storage)]
            later = [u for n in aliases for u in n.users if position[u] > position[node]]
            if storage == 0 or later:
                found.update(aliases, [n for n in nodes[position[node] :] if _shares(n, storage)])
                found.add(node)
    return found


def read_by_strides(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that share memory with a view whose strides are asked for, where layers made them."""
    nodes, found = list(graph.nodes), set[fx.Node]()
    for node in nodes:
        for src in node.all_input_nodes if depends_on_strides(node) else ():
            value = src.meta["value"]
            if value.shape is None or not value.storage or value.is_ordered:
                continue
            shared = [n for n in nodes if _shares(n, value.storage)]
            if shared[0].op.startswith("call_") and shared[0].meta["value"].is_ordered:
                found.update(shared)
    return found


def owners_of_memory(graph: fx.Graph) -> set[fx.Node]:
    """The first nodes of memory that is :func:`rewritten`, or :func:`read_by_strides`.

    Views of it are views of a converted model, too, if its strides are those of the float model.
    """
    pinned = rewritten(graph) | read_by_strides(graph)
    first = {n.meta["value"].storage: n for n in reversed(graph.nodes) if n in pinned}
    return {node for storage, node in first.items() if storage}


def _writes_to_kept(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that write to memory which no call made: its caller has it, or a module."""
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if "value" in node.meta:
            first.setdefault(node.meta["value"].storage, node)
    parts = (getattr, operator.getitem)  # of an argument, or of what an unknown module gave
    owners = {node: [first[n.meta["value"].storage] for n in node.meta.get("writes", ())]
              for node in graph.nodes}  # fmt: skip
    return {
        node
        for node, found in owners.items()
        if any(not owner.op.startswith("call_") or owner.target in parts for owner in found)
    }


def _shares(node: fx.Node, storage: int) -> bool:
    return "value" in node.meta and bool(node.meta["value"].storage == storage)


def _made(node: fx.Node, captured: Captured) -> tuple[Made, nn.Module | None]:
    """What the table says about a node, and its module."""
    value = node.meta["value"]
    if node.meta["static"] and value.shape is None and not value.is_sequence:
        return Made(Role.SHAPE, None, []), None  # a number made of sizes
    if node.op == "call_module":
        module = captured.model.get_submodule(str(node.target))
        return _module_made(node, module, captured), module
    if "aten" in node.meta:
        return _call_made(node), None
    row = _BY_FUNCTION.get(node.target)
    if row is None or row.make is None:
        return _opaque(f"{_function_name(node)} has no int8 form"), None
    arguments = _bind(node, _SIGNATURES[id(row)])
    if arguments is None:
        return _opaque("its arguments are not known"), None
    source = arguments.get("mat1", arguments.get("input", node))
    constant = not isinstance(source, fx.Node)
    made = (
        "its source is a constant"
        if constant and row.role not in (Role.COMBINE, Role.PRODUCT, Role.FAKE)
        else row.make(arguments)
    )
    if not isinstance(made, str) and not all(isinstance(src, fx.Node) for src in made.srcs):
        made = "its source is a constant"
    made = _opaque(made) if isinstance(made, str) else made
    made.is_matmul = Role.MATMUL in (row.role, made.role) or row.is_matmul
    return made, None


def _call_made(node: fx.Node) -> Made:
    """What the table of ATen calls says about a node."""
    row = row_of(node)
    if row is None:
        return _opaque(f"{_function_name(node)} has no int8 form")
    made = row.make(arguments_of(node))
    if not isinstance(made, str) and not all(isinstance(src, fx.Node) for src in made.srcs):
        made = "its source is a constant"
    made = _opaque(made) if isinstance(made, str) else made
    made.is_matmul = Role.MATMUL in (row.role, made.role) or row.is_matmul
    return made


def _module_made(node: fx.Node, module: nn.Module, captured: Captured) -> Made:
    name = str(node.target)
    if name in captured.untraceable:
        return _opaque(f"it cannot be traced: {captured.untraceable[name]}")
    if (fake := fake_quantizer(module)) is not None:
        module = fake
    elif is_watcher(module):
        return Made(Role.PASS, None, [n for n in node.args[:1] if isinstance(n, fx.Node)])
    if isinstance(module, torch.jit.ScriptModule):
        return _opaque("TorchScript compiled it; torchq converts the Python module")
    row = next((_BY_MODULE[c] for c in type(module).__mro__ if c in _BY_MODULE), None)
    if row is None:
        return _opaque(f"{type(module).__name__} has no int8 form")
    if module._forward_hooks or module._forward_pre_hooks:
        return _opaque("it has forward hooks, which would be lost")
    bound = inspect.signature(type(module).forward).bind(module, *node.args, **node.kwargs)
    nodes: list[fx.Node] = []
    fx.node.map_arg(tuple(bound.arguments.values())[1:], nodes.append)
    if row.role is Role.PASS and not isinstance(list(bound.arguments.values())[1], fx.Node):
        return _opaque("it passes on no single value")
    made = Made(row.role, module, nodes, reason=row.check(module))
    if row.role is Role.MATMUL and len(bound.arguments) > 2:
        more = list(bound.arguments)[2]
        given = bound.arguments[more] is not None
        made.reason = made.reason or (f"its {more} is given at run time" if given else "")
    if row.role is Role.UNARY and len(nodes) != 1:
        made.reason = "it has no tensor as source"
    if isinstance(module, Add | Mul) and len(nodes) != 2:
        made.reason = "an operand is not a tensor"
    row.adapt(made)
    return made


def _opaque(reason: str) -> Made:
    return Made(Role.OPAQUE, None, [], reason=reason)


def _bind(node: fx.Node, signature: dict[str, Any]) -> Arguments | None:
    """Arguments by name; what does not depend on the inputs is its value."""
    names, more = [n for n in signature if n != "*"], "*" in signature
    if len(node.args) > len(names) and not more:
        return None
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if not more and set(given) - set(names):
        return None
    arguments = Arguments()
    for name in names:
        value = given.get(name, signature[name])
        if value is ...:
            return None
        arguments.nodes[name] = value
        arguments[name] = fx.node.map_arg(value, _constant)
    return arguments


def _constant(node: fx.Node) -> Any:
    return node.meta.get("constant", node)


def _function_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return str(node.name).rstrip("0123456789").rstrip("_") if name == "fn" else name


def _why_float(op: Op, written: str) -> str:
    """Why an operation that the table knows must stay float; "" if it need not."""
    if op.role in (Role.SHAPE, Role.PASS):
        return ""
    if op.requested:
        return "kept float by an override"
    if op.reason:
        return op.reason
    value = op.node.meta["value"]
    if written:
        return written
    if op.role is not Role.MOVE and value.shape is None:
        return "it returns no tensor"
    if any(src.meta.get("positional") for src in op.srcs):
        return "it reads what depends on sizes and positions alone"
    for src in op.srcs:
        if not is_float(src):
            return f"its source is {src.meta['value'].dtype}, not torch.float32"
    dims = _spatial_dims(op.module)
    if op.role is Role.PRODUCT and _reduction(op) > MAX_SHIFTED_REDUCTION:
        return f"it sums more than {MAX_SHIFTED_REDUCTION} products, which could overflow int32"
    if dims is not None and op.srcs and len(op.srcs[0].meta["value"].shape or ()) != dims + 2:
        return f"its source {list(op.srcs[0].meta['value'].shape)} has no batch dimension"
    if value.dtype != torch.float32:
        return f"its result is {value.dtype}, not torch.float32"
    return ""


def _is_mean(op: Op) -> bool:
    """Whether a pool averages all of several positions."""
    if op.role is not Role.POOL or not isinstance(op.module, AVERAGES):
        return False
    before, after = (math.prod(n.meta["value"].shape[2:]) for n in (op.srcs[0], op.node))
    return bool(after == 1 < before)


def _reduction(op: Op) -> int:
    shape = op.srcs[0].meta["value"].shape
    return int(shape[-1]) if shape else 0


def _spatial_dims(module: nn.Module | None) -> int | None:
    """Of a convolution or pool, by its name."""
    for cls in type(module).__mro__:
        name = cls.__name__
        if name[-2:] in ("1d", "2d", "3d") and ("Conv" in name or "Pool" in name):
            return int(name[-2])
    return None
