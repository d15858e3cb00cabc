# SPDX-License-Identifier: Apache-2.0
"""Makes operations dynamic; linear layers take over the functions and additions behind them."""

from __future__ import annotations

import math

from torch import fx, nn

from torchq.attributes.options import EltwiseAlg
from torchq.attributes.post_ops import PostOps
from torchq.capture.ops import Op, Role, append_clip, clip_bounds, have_one_size, only_reader
from torchq.nn.float_modules import Add, Attention

_FUNCTIONS: dict[type, tuple[EltwiseAlg, float]] = {
    nn.Tanh: ("tanh", 0.0),
    nn.Sigmoid: ("logistic", 0.0),
    nn.SiLU: ("swish", 1.0),
    nn.Mish: ("mish", 0.0),
}
"""Class of a module -> algorithm and alpha of its post-op."""


def make_dynamic(op: Op, ops: dict[fx.Node, Op]) -> None:
    """Make attention and linear layers dynamic."""
    linear = op.role is Role.MATMUL and isinstance(op.module, nn.Linear)
    if not linear and not (op.role is Role.PRODUCT and isinstance(op.module, Attention)):
        return
    op.role = Role.DYNAMIC
    for part in op.absorbed:  # no layers, whatever their own configuration
        part.role = Role.OPAQUE
    if linear:
        _fuse_post_ops(op, ops)


def _fuse_post_ops(op: Op, ops: dict[fx.Node, Op]) -> None:
    """Extend a dynamic linear layer by what alone reads it: a function, an addition, or both."""
    chain, position = PostOps(), {node: i for i, node in enumerate(ops)}
    while (post_op := only_reader(op.dst, ops)) is not None:
        others = [src for src in post_op.srcs if src is not op.dst]
        if post_op.role is Role.PASS:
            pass
        elif isinstance(post_op.module, Add) and have_one_size(others[0], op.dst):
            # the sum is computed where the layer is: its other operand has to be there
            late = position.get(others[0], -1) > position[op.node]
            if late or others[0].meta["value"].dtype != op.dst.meta["value"].dtype:
                break
            chain.append_sum(1.0, 0, "f32")
            op.operands += others
        elif not _append_function(chain, post_op):
            break
        post_op.role = Role.OPAQUE
        op.behind.append(post_op)
    op.post_ops = str(chain)


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
