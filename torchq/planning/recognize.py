# SPDX-License-Identifier: Apache-2.0
"""From the nodes of a graph to operations, by the table of patterns."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from torch import fx, nn

from torchq.capture.graph import function_name
from torchq.capture.limits import why_long
from torchq.capture.module_kinds import AVERAGES, MATMUL, why_dtypes, why_sums
from torchq.capture.ops import Op, Recognized, Role, is_float
from torchq.capture.patterns import arguments_of, row_of
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.fake_scales import composed, fake_quantizer, is_fake, why_not_fixed
from torchq.planning.plan import Plan
from torchq.report import reasons


def recognize(plan: Plan) -> Plan:
    """Return the plan with what every call that depends on the inputs is."""
    model = plan.captured.model
    names, ops = _Names(model), dict[fx.Node, Op]()
    for node in plan.captured.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        if not node.meta["varying"]:
            node.meta["fake"] = _fake_constant(node, model)
            continue
        known, owner = _known(node, model)
        name, base = names.of(node)
        kind = function_name(node) if owner is None else type(owner).__name__
        op = Op(**vars(known), node=node, name=name, base=base, kind=kind, owner=owner)
        op = replace(op, requested=plan.config(base) is None)
        reason = _why_float(op)
        role = Role.OPAQUE if reason else Role.MEAN if _is_mean(op) else op.role
        ops[node] = _dequantization(replace(op, role=role, reason=reason), ops)
    return replace(plan, ops=ops)


class _Names:
    """Qualified names of calls: of the module, or of the caller and the function."""

    def __init__(self, model: nn.Module) -> None:
        self._used = Counter(name for name, _ in model.named_modules())
        self._calls: Counter[str] = Counter()

    def of(self, node: fx.Node) -> tuple[str, str]:
        """Return the name of a call, each only once, and the name that overrides match."""
        base = str(node.target) if node.op == "call_module" else node.meta["owner"]
        if base or node.op == "call_module":
            count = self._calls[base]
            self._calls[base] += 1
            return (f"{base}_{count}" if count else base), base
        first = f"{node.meta['scope']}.{function_name(node)}".lstrip(".")
        count = self._used[first]
        self._used[first] += 1
        name = f"{first}_{count}" if count else first
        return name, name


def _fake_constant(node: fx.Node, model: nn.Module) -> FakeQuantize | None:
    """Return the fake quantizer of a constant: of a weight."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        found = fake_quantizer(module) if is_fake(module) else ""
        return None if isinstance(found, str) else found
    row = row_of(node)
    if row is None or row.role is not Role.FAKE:
        return None
    known = row.make(arguments_of(node))
    fake = None if isinstance(known, str) else known.module
    return fake if isinstance(fake, FakeQuantize) else None


def _dequantization(op: Op, ops: dict[fx.Node, Op]) -> Op:
    """Fold a number added to or multiplied with fake-quantized values into their levels."""
    before = ops.get(op.srcs[0]) if op.role is Role.UNARY else None
    if before is None or before.role is not Role.FAKE or op.affine is None or op.requested:
        return op
    assert isinstance(before.module, FakeQuantize)
    fake = composed(before.module, *(float(value) for value in op.affine))
    if len(before.node.users) == 1 and not why_not_fixed(fake):
        return replace(op, role=Role.FAKE, module=fake, srcs=before.srcs)
    return op


def _known(node: fx.Node, model: nn.Module) -> tuple[Recognized, nn.Module | None]:
    """Return what the table says about a node, and the module that makes the call."""
    if node.op == "call_module":  # recurrent, a fake quantizer, or a layer alone
        module = model.get_submodule(str(node.target))
        if is_fake(module):
            return _of_fake(node, module), module
        if isinstance(module, MATMUL):
            sources = [node.all_input_nodes[0]]
            long = why_sums(module)
            return Recognized(Role.MATMUL, module, sources, reason=long, is_matmul=True), module
        return _opaque(reasons.NO_FORM.format(what=type(module).__name__)), module
    owner = model.get_submodule(node.meta["owner"]) if node.meta["owner"] else None
    value = node.meta["value"]
    if node.meta["static"] and value.shape is None and not value.is_sequence:
        return Recognized(Role.SHAPE, None, []), owner  # a number made of sizes
    row = row_of(node)
    if row is None:
        return _opaque(reasons.NO_FORM.format(what=function_name(node))), owner
    known = row.make(arguments_of(node))
    if not isinstance(known, str) and not all(isinstance(src, fx.Node) for src in known.srcs):
        known = reasons.CONSTANT_SOURCE
    known = _opaque(known) if isinstance(known, str) else known
    is_matmul = Role.MATMUL in (row.role, known.role) or row.is_matmul
    return replace(known, is_matmul=is_matmul), owner


def _of_fake(node: fx.Node, module: nn.Module) -> Recognized:
    fake = fake_quantizer(module)
    if isinstance(fake, str):
        return _opaque(fake)
    return Recognized(Role.FAKE, fake, [node.all_input_nodes[0]], reason=why_not_fixed(fake))


def _opaque(reason: str) -> Recognized:
    return Recognized(Role.OPAQUE, None, [], reason=reason)


def _why_float(op: Op) -> str:
    """Return why an operation that the table knows must stay float; "" if it need not."""
    if op.role in (Role.SHAPE, Role.PASS):
        return ""
    if op.requested:
        return reasons.OVERRIDE
    if op.reason:
        return op.reason
    value = op.node.meta["value"]
    if op.role is not Role.MOVE and value.shape is None:
        return reasons.NO_TENSOR
    for src in op.srcs:
        if src.meta["positional"]:
            return reasons.POSITIONS
        if why := why_dtypes({src.meta["value"].dtype}):
            return why
    if why := why_long(op):
        return why
    dims = _spatial_dims(op.module)
    if dims is not None and op.srcs and len(op.srcs[0].meta["value"].shape or ()) != dims + 2:
        return reasons.NO_BATCH.format(shape=list(op.srcs[0].meta["value"].shape))
    if not is_float(op.node):
        return reasons.RESULT_DTYPE.format(dtype=value.dtype)
    return ""


def _is_mean(op: Op) -> bool:
    """Return whether a pool averages all of several positions."""
    if op.role is not Role.POOL or not isinstance(op.module, AVERAGES):
        return False
    before, after = (math.prod(n.meta["value"].shape[2:]) for n in (op.srcs[0], op.node))
    return bool(after == 1 < before)


def _spatial_dims(module: object) -> int | None:
    """Return the spatial dims of a convolution or pool, by its name."""
    for cls in type(module).__mro__:
        name = cls.__name__
        if name[-2:] in ("1d", "2d", "3d") and ("Conv" in name or "Pool" in name):
            return int(name[-2])
    return None
