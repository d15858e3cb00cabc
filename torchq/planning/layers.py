# SPDX-License-Identifier: Apache-2.0
"""Operations that become one quantized op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from torchq.capture.ops import Op, Role
from torchq.nn.batch_norm import Affine, fold_affines
from torchq.nn.fake_quantize import FakeQuantize

HARD = (Role.MATMUL, Role.PRODUCT)
"""Roles of products: they quantize their sources, and int8 makes them faster."""
KEEPING = (Role.MOVE, Role.PASS, Role.POOL, Role.PAD)
"""Roles of what keeps the scale and zero point of its source."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Operations that become one quantized op.

    Attributes:
        op: the main operation.
        srcs: nodes it reads, without the residual.
        dst: node of its result; the converted graph computes the layer there.
        parts: the operations it consists of; those behind the main one are fused into it.
        affines: factors and shifts of its channels behind it, for the weight or its scales.
        clip: bounds of a relu, relu6 or hardtanh behind it.
        residual: node added before the clip.
        pad: zeros before and after each spatial dim, beside those of the module.
        function: of a UNARY, what the whole chain computes.
        slopes: of a leaky relu behind it, one per channel.
        fake: the fake quantizer of its result.
        src_factors: what each channel of its source was divided by; float modules lack them.
        may_emit_int8: whether a configuration lets its destination be int8.
        reason: why it stays float; "" where it is quantized.
    """

    op: Op
    srcs: Sequence[fx.Node]
    dst: fx.Node
    parts: tuple[Op, ...]
    affines: tuple[Affine, ...] = ()
    clip: tuple[float, float] | None = None
    residual: fx.Node | None = None
    pad: tuple[list[int], list[int]] | None = None
    function: Callable[[Tensor], Tensor] | None = None
    slopes: Tensor | None = None
    fake: FakeQuantize | None = None
    src_factors: Tensor | None = None
    may_emit_int8: bool = True
    reason: str = ""

    @property
    def reads(self) -> list[fx.Node]:
        """All nodes it reads."""
        return [*self.srcs] if self.residual is None else [*self.srcs, self.residual]

    @property
    def role(self) -> Role:
        """Return the role of the main operation; a NORM is a depthwise MATMUL."""
        if self.function is not None:
            return Role.UNARY
        return Role.MATMUL if self.op.role is Role.NORM else self.op.role

    def float_module(self) -> nn.Module:
        """Return the main operation with the factors and shifts folded into its float weight."""
        return fold_affines(self.unfolded(), self.affines)

    def unfolded(self) -> nn.Module:
        """Return the main operation alone; of a NORM, a convolution that changes nothing."""
        norm = self.op.role is Role.NORM
        module = _identity(self.dst.meta["value"].shape) if norm else self.op.module
        assert module is not None
        return module


def _identity(shape: tuple[int, ...]) -> nn.Module:
    """Return a convolution of one tap per channel that changes nothing."""
    cls = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    conv = cls(shape[1], shape[1], 1, groups=shape[1], bias=False)
    conv.weight = nn.Parameter(torch.ones_like(conv.weight), False)
    return conv.eval()
