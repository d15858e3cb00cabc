# SPDX-License-Identifier: Apache-2.0
"""Makes operations dynamic; linear layers take over the functions and additions after them."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx, nn

from torchq.attributes.options import EltwiseAlg
from torchq.attributes.post_ops import PostOps
from torchq.capture.ops import Op, Role, append_clip, clip_bounds, have_one_size, only_reader
from torchq.nn.fake_scales import is_per_token
from torchq.nn.float_modules import Add, Attention
from torchq.planning.plan import Plan

_FUNCTIONS: dict[type, tuple[EltwiseAlg, float]] = {
    nn.Tanh: ("tanh", 0.0),
    nn.Sigmoid: ("logistic", 0.0),
    nn.SiLU: ("swish", 1.0),
    nn.Mish: ("mish", 0.0),
}
"""Class of a module -> algorithm and alpha of its post-op."""


def read_tokens(plan: Plan) -> Plan:
    """Return the plan, where linear layers of sources fake-quantized by tokens are dynamic."""
    ops = dict(plan.ops)
    for op in plan.ops.values():
        fake = ops.get(op.srcs[0]) if op.role is Role.MATMUL else None
        if fake is not None and is_per_token(fake.owner) and isinstance(op.module, nn.Linear):
            srcs = [fake.node.all_input_nodes[0]]
            ops[op.node] = replace(op, role=Role.DYNAMIC, absorbed=(fake,), srcs=srcs)
    return replace(plan, ops=ops)


def quantize_rows(plan: Plan) -> Plan:
    """Return the plan, where what a configuration quantizes row by row is dynamic."""
    ops = dict(plan.ops)
    for node in plan.ops:
        config = plan.config(ops[node].base)
        if config is not None and config.by_rows:
            make_dynamic(ops[node], ops)
    return replace(plan, ops=ops)


def make_dynamic(op: Op, ops: dict[fx.Node, Op]) -> Op:
    """Return attention or a linear layer as a dynamic one, and put it into ``ops``.

    Linear layers take over the functions and additions that alone read them.
    """
    linear = op.role is Role.MATMUL and isinstance(op.module, nn.Linear)
    if not linear and not (op.role is Role.PRODUCT and isinstance(op.module, Attention)):
        return op
    for part in op.absorbed:  # no layers, whatever their own configuration
        ops[part.node] = replace(ops[part.node], role=Role.OPAQUE)
    op = ops[op.node] = replace(op, role=Role.DYNAMIC)
    if linear:
        op = ops[op.node] = _with_post_ops(op, ops)
    return op


def _with_post_ops(op: Op, ops: dict[fx.Node, Op]) -> Op:
    """Return a linear layer with what alone reads it: a function, an addition, or both."""
    chain, position = PostOps(), {node: i for i, node in enumerate(ops)}
    while (post_op := only_reader(op.dst, ops)) is not None:
        others = tuple(src for src in post_op.srcs if src is not op.dst)
        if post_op.role is Role.PASS:
            others = ()
        elif isinstance(post_op.module, Add) and have_one_size(others[0], op.dst):
            # the sum is computed where the layer is: its other operand has to be there
            late = position.get(others[0], -1) > position[op.node]
            if late or others[0].meta["value"].dtype != op.dst.meta["value"].dtype:
                break
            chain.append_sum(1.0, 0, "f32")
        elif _append_function(chain, post_op):
            others = ()
        else:
            break
        taken = ops[post_op.node] = replace(post_op, role=Role.OPAQUE)
        op = replace(op, behind=(*op.behind, taken), operands=(*op.operands, *others))
    return replace(op, post_ops=str(chain))


def _append_function(chain: PostOps, op: Op) -> bool:
    """Append a function of each element; return False where no post-op computes it."""
    module = op.module
    bounds = clip_bounds(module)
    if bounds is not None and (bounds == (0.0, math.inf) or all(map(math.isfinite, bounds))):
        append_clip(chain, bounds)
    elif isinstance(module, nn.GELU):
        chain.append_eltwise("gelu_tanh" if module.approximate == "tanh" else "gelu_erf")
    elif type(module) in _FUNCTIONS:
        chain.append_eltwise(*_FUNCTIONS[type(module)])
    else:
        return False
    return True
