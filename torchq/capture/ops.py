# SPDX-License-Identifier: Apache-2.0
"""Operations of a graph: their roles, and the float modules that compute them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from torchq.attributes.arguments import FLOATS
from torchq.attributes.post_ops import PostOps
from torchq.report import reasons


class Role(enum.Enum):
    """How an operation relates to scales."""

    MATMUL = "a sum of products: reads int8, emits int8 or float32"
    NORM = "a factor and a shift per channel: folds into a MATMUL, or becomes a depthwise one"
    PRODUCT = "a matrix product of tensors, or attention: reads int8, emits int8 or float32"
    DYNAMIC = "attention or linear, quantized by what it reads in each call: float32 in and out"
    COMBINE = "several tensors in, requantized: add, mul, cat"
    SLOPES = "a leaky relu with one slope per channel: a post-op of a MATMUL"
    UNARY = "a function of each element: a post-op, or a table between two int8 tensors"
    MEAN = "an average over all positions: finer than its source, so with parameters of its own"
    POOL = "keeps scale and zero point, in a kernel of its own"
    MOVE = "moves elements: torch's own operation on int8"
    PAD = "moves elements, and puts real zeros around them"
    PASS = "returns what it got"
    FAKE = "rounds to levels: says what the scale and zero point are"
    SHAPE = "asks for sizes only"
    OPAQUE = "anything else, in float32"


class Split(NamedTuple):
    """A mask whose leading sizes are those of the product of queries and keys."""

    mask: fx.Node


Step: TypeAlias = tuple[Callable[..., object], tuple[Argument | Split, ...]]
"""A function of scores, and its arguments: None for the scores, nodes, numbers, a Split."""
_OF_STRIDES = ("as_strided", "as_strided_copy", "as_strided_scatter", "view_as_complex")


@dataclass(frozen=True, eq=False)
class Recognized:
    """Role of a call, with the module that computes it in float and the nodes it reads.

    Attributes:
        role: see Role.
        module: float module on the sources; None for what torch computes on int8 as well.
        srcs: nodes.
        flatten: whether the result's spatial dims, all 1, are dropped.
        pad: zeros before and after each spatial dim, of a PAD: (begin..., end...).
        reason: why it has to stay float all the same.
        note: what the report says of it, where it is int8.
        affine: (scale, shift) in float64, which broadcast against the result, where it is
            ``x * scale + shift`` of its first source: a matmul in front of it takes that over.
        weight_scale: of a MATMUL, where its weight was fake-quantized: one, or one per channel.
        size: that the module is called with at run time, with nodes; None for none. Of a transposed
            convolution, the output_padding.
        steps: of attention: what is done to the product of queries and keys, in order, in front of
            the softmax; a single bool mask that is added says what is seen.
        split: of attention: leading sizes that queries and keys get; None for their own.
        joined: leading sizes that the result gets back; values are then split, too.
        is_matmul: whether the function is a convolution or linear, int8 or not.
    """

    role: Role
    module: nn.Module | None
    srcs: list[fx.Node]
    flatten: bool = False
    pad: tuple[list[int], list[int]] | None = None
    reason: str = ""
    note: str = ""
    affine: tuple[Tensor, Tensor] | None = None
    weight_scale: Tensor | None = None
    is_matmul: bool = False
    size: Argument = None
    steps: tuple[Step, ...] = ()
    split: Sequence[Argument] | None = None
    joined: Sequence[Argument] | None = None


@dataclass(frozen=True, eq=False)
class Op(Recognized):
    """An operation of the graph; the attributes of Recognized and these.

    Passes replace operations; nothing changes them. What is absorbed, or behind, is as it was then:
    ``Plan.ops`` has the roles of now.

    Attributes:
        node: its node.
        name: qualified name: of the module, or of the caller and the function; each only once.
        base: of a module, the name without the number of the call: what overrides match.
        kind: class of the module, or name of the function.
        requested: whether an override keeps it float.
        owner: module of the float model, if it is one.
        absorbed: operations in front of it that it computes as well.
        behind: operations behind a DYNAMIC that it computes as well.
        post_ops: text of these.
        operands: nodes that the post-ops read.
    """

    node: fx.Node = field(kw_only=True)
    name: str = field(kw_only=True)
    base: str = field(kw_only=True)
    kind: str = field(kw_only=True)
    requested: bool = False
    owner: nn.Module | None = None
    absorbed: tuple[Op, ...] = ()
    behind: tuple[Op, ...] = ()
    post_ops: str = ""
    operands: tuple[fx.Node, ...] = ()

    @property
    def dst(self) -> fx.Node:
        """Return the node of its result; the converted graph computes it there."""
        return self.behind[-1].node if self.behind else self.node


class Arguments(dict[str, Any]):
    """Arguments by name; constants are values, what depends on the inputs is a node.

    Attributes:
        nodes: the same, with constants as nodes too.
    """

    def __init__(self) -> None:
        """Empty."""
        super().__init__()
        self.nodes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the argument."""
        return self[name]

    def varies(self, name: str) -> bool:
        """Return whether an argument is computed at run time."""
        nodes: list[fx.Node] = []
        fx.node.map_arg(self[name], nodes.append)
        return bool(nodes)

    def why_varying(self, *allowed: str) -> str:
        """Return that other arguments than those ``allowed`` are computed at run time, or ""."""
        found = [name for name in self if name not in allowed and self.varies(name)]
        return reasons.AT_RUN_TIME.format(argument=found[0]) if found else ""


class Pointwise(nn.Module):
    """A function of each element, with constant arguments beside the tensor."""

    def __init__(self, function: Callable[..., object], *args: object, position: int = 0) -> None:
        """Take a ``function`` of torch; the tensor is at ``position``."""
        super().__init__()
        self.function, self.arguments, self.position = function, args, position

    def forward(self, src: Tensor) -> Tensor:
        """Apply it."""
        args = [*self.arguments]
        args.insert(self.position, src)
        result = self.function(*args)
        assert isinstance(result, Tensor)
        return result


def clip_bounds(module: nn.Module | None) -> tuple[float, float] | None:
    """Return the bounds of an activation that only clips."""
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one
        return float(module.min_val), float(module.max_val)
    return (0.0, math.inf) if isinstance(module, nn.ReLU) else None


def append_clip(chain: PostOps, clip: tuple[float, float]) -> PostOps:
    """Append a relu or clip to the chain and return it."""
    if clip == (0.0, math.inf):
        chain.append_eltwise("relu")
    else:
        largest = torch.finfo(torch.float32).max  # a clip has no infinite bounds
        low, high = (min(max(bound, -largest), largest) for bound in clip)
        chain.append_eltwise("clip", low, high)
    return chain


def is_resampling(op: Op) -> bool:
    """Return whether it repeats elements to reach another size."""
    return op.role is Role.MOVE and "upsample_nearest" in str(op.node.meta["aten"])


def reads_strides(node: fx.Node) -> bool:
    """Return whether a call reads other elements where its source has other strides."""
    name = str(node.meta.get("aten")).partition("::")[2]
    return name.partition(".")[0] in _OF_STRIDES or name == "view.dtype"


def only_reader(node: fx.Node, ops: Mapping[fx.Node, Op]) -> Op | None:
    """Return the one operation that reads a node, if it reads it once and may be fused."""
    users = list(node.users)
    op = ops.get(users[0]) if len(users) == 1 else None
    if op is None or op.requested or op.role is Role.OPAQUE or op.srcs.count(node) != 1:
        return None
    return op


def have_one_size(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two tensors have the same sizes for all sizes of the inputs."""
    same = a.meta["value"].shape == b.meta["value"].shape
    return bool(same and a.meta["sizes"] == b.meta["sizes"])


def is_float(node: fx.Node) -> bool:
    """Return whether it is a tensor of float32, bfloat16 or float16."""
    return node.meta["value"].dtype in FLOATS


def is_size(node: fx.Node) -> bool:
    """Return whether it is a number that the model computes from sizes."""
    return bool(node.meta["static"]) and node.meta["value"].is_number


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a tensor; () for anything else."""
    return node.meta["value"].shape or ()
