# SPDX-License-Identifier: Apache-2.0
"""Experts of a mixture whose weights are one tensor for all, as in transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.functional.placeholders import OF_A_NAME, count_modules
from torchq.nn.float_modules import expert_weights
from torchq.nn.module import QModule, Spec


class QExperts(QModule):
    """Experts with dynamic linear layers; every row is quantized by its own range.

    ``dst[row] = sum over k of weights[row, k] * down[e](gate(up[e](src[row])))``, where
    ``e = index[row, k]``.

    Shapes:
        hidden_states: float32, bfloat16 or float16 ``(rows, features)``.
        top_k_index: int64 ``(rows, k)``, the experts of a row; others than experts count nothing.
        top_k_weights: float32, bfloat16 or float16 ``(rows, k)``.
    """

    def __init__(self, up: list[nn.Module], down: list[nn.Module], gate: nn.Module | None) -> None:
        """``gate`` is the float module, without its weights."""
        super().__init__()
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self._set_spec(experts=len(up))
        self._gate = [gate]  # in a list: no submodule

    @classmethod
    def from_float(cls, module: nn.Module, quantize: Callable[[nn.Linear], QModule]) -> QExperts:
        """Return the experts of a module for which :func:`is_experts` holds.

        ``quantize`` makes the dynamic form of a float linear layer.
        """
        layers: list[list[nn.Module]] = []
        for name in expert_weights(module):
            weight = getattr(module, name)
            biases = getattr(module, f"{name}_bias", None) if module.has_bias else None
            made: list[nn.Module] = []
            for i in range(weight.shape[0]):
                linear = nn.Linear(1, 1, device="meta")
                own = weight[i].detach().t() if module.is_transposed else weight[i].detach()
                linear.weight = nn.Parameter(own.contiguous(), False)
                bias = None if biases is None else nn.Parameter(biases[i].detach(), False)
                linear.register_parameter("bias", bias)
                linear.out_features, linear.in_features = own.shape
                made.append(quantize(linear))
            layers.append(made)
        experts = cls(layers[0], layers[1], None)
        experts.adopt(module)
        return experts

    @classmethod
    def from_spec(cls, spec: Spec) -> QExperts:
        """Return experts whose layers have specs of their own; :meth:`adopt` comes next."""
        count = spec["experts"]
        count_modules(count * 2 * OF_A_NAME)
        return cls([nn.Identity()] * count, [nn.Identity()] * count, None)

    def adopt(self, module: nn.Module) -> None:
        """Take the activation of a float module of the same class."""
        gate = copy.copy(module)
        gate.__dict__["_parameters"] = {}
        self._gate = [gate]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the experts that rows ask for."""
        dst = torch.zeros_like(hidden_states)
        gate: Any = self._gate[0]
        for expert in torch.unique(top_k_index).tolist():
            if not 0 <= expert < len(self.up):
                continue
            rows, place = torch.where(top_k_index == expert)
            inner = self.up[expert](hidden_states[rows])
            inner = gate._apply_gate(inner) if gate.has_gate else gate.act_fn(inner)
            result = self.down[expert](inner) * top_k_weights[rows, place, None]
            dst.index_add_(0, rows, result.to(dst.dtype))
        return dst
