# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture whose weights are one tensor for all, as in transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchq.nn.float_modules import expert_weights, other_tensors
from torchq.nn.module import QModule, Spec

if TYPE_CHECKING:
    from torchq.nn.grouped import Grouped


class QExperts(QModule):
    """Experts with dynamic linear layers; every row is quantized by its own range.

    ``dst[row] = sum over k of weights[row, k] * down[e](gate(up[e](src[row])))``, where
    ``e = index[row, k]``. Weights of experts that no row asks for are not read.

    Shapes:
        hidden_states: float32, bfloat16 or float16 ``(rows, features)``.
        top_k_index: int64 ``(rows, k)``, the experts of a row; others than experts count nothing.
        top_k_weights: float32, bfloat16 or float16 ``(rows, k)``.
    """

    def __init__(self, up: nn.Module, down: nn.Module, gate: nn.Module | None) -> None:
        """``gate`` is the float module, without its weights."""
        super().__init__()
        self.up, self.down = up, down
        self._set_spec()
        self._gate = [gate]  # in a list: no submodule

    @classmethod
    def from_float(
        cls, module: nn.Module, quantize: Callable[[str, Tensor, Tensor | None], Grouped]
    ) -> QExperts:
        """Return the experts of a module for which :func:`is_experts` holds.

        ``quantize`` makes the layer of a weight ``(experts, out, in)``, by its name, and its bias.
        """

        def layer(name: str) -> Grouped:
            weight = getattr(module, name).detach()
            bias = getattr(module, f"{name}_bias", None) if module.has_bias else None
            return quantize(name, weight.mT if module.is_transposed else weight, bias)

        up, down = map(layer, expert_weights(module))
        experts = cls(up, down, None)
        experts.adopt(module)
        return experts

    @classmethod
    def from_spec(cls, spec: Spec) -> QExperts:
        """Return experts whose layers have specs of their own; :meth:`adopt` comes next."""
        return cls(nn.Identity(), nn.Identity(), None)

    def adopt(self, module: nn.Module) -> None:
        """Take the activation of a float module of the same class.

        Raises:
            ValueError: it has tensors of its own, which the state of these experts lacks.
        """
        if others := other_tensors(module):
            raise ValueError(
                "torchq.nn.QExperts: module must have weights and biases of experts only, got "
                f"'{others[0]}'. Keep it float: name it in overrides with None."
            )
        gate = copy.copy(module)
        gate.__dict__["_parameters"] = {}
        self._gate = [gate]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts that rows ask for."""
        gate: Any = self._gate[0]
        if gate is None:
            raise RuntimeError(
                "torchq.nn.QExperts: their activation must be that of a float module, got none. A "
                "file has none: pass torchq.load the float model, too."
            )
        count: Any = self.up.groups
        asked = top_k_index.reshape(-1)
        chosen, order = torch.where(asked < 0, count, asked).sort()  # others come last
        experts = torch.arange(count, dtype=chosen.dtype, device=chosen.device)
        ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        rows = order // top_k_index.shape[-1]
        inner = self.up(hidden_states[rows], ends)
        inner = gate._apply_gate(inner) if gate.has_gate else gate.act_fn(inner)
        result = self.down(inner, ends) * top_k_weights.reshape(-1)[order, None]
        return torch.zeros_like(hidden_states).index_add_(0, rows, result.to(hidden_states.dtype))
