# SPDX-License-Identifier: Apache-2.0
"""Decides for each leaf: int8, or float and why; one row of the report for each module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from glob import escape

import torch
from torch import nn

from torchq.capture.module_kinds import MATMUL, RECURRENT, why_float
from torchq.capture.one_layer import one_layer
from torchq.capture.ops import Role
from torchq.convert.self_contained import observed
from torchq.convert.swap.calls import Recording
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.float_modules import is_experts
from torchq.nn.leaf import take_hooks, without_hooks
from torchq.nn.rnn_observed import ObservedRNN, ObservedRNNCell
from torchq.planning.passes import decided
from torchq.planning.plan import Plan
from torchq.quantization.config import Overrides, QConfig, resolve
from torchq.quantization.recipes.phases import why_coarse
from torchq.report import reasons
from torchq.report.rows import Row

_SCRIPTED = {cls.__name__ for cls in (*MATMUL, nn.LSTM, nn.GRU, nn.RNN)}


class Leaves:
    """Decisions for the leaves of one recorded model, each of which is planned alone.

    Attributes:
        recording: the run of the float model.
        reasons: leaf that was called -> why it stays float or is dynamic, or "".
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        config: QConfig,
        overrides: Overrides | None,
    ) -> None:
        """Decide; nothing is changed yet."""
        self.recording = recording
        self._model, self._config, self._overrides = model, config, overrides
        self.reasons = {
            name: self._decided(name)
            for name, layer in recording.leaves.items()
            if (isinstance(layer, (*MATMUL, *RECURRENT)) or is_experts(layer))
            and recording.calls[name]
        }

    @property
    def quantized(self) -> list[str]:
        """Names of the leaves that become int8."""
        return [name for name, reason in self.reasons.items() if _is_quantized(reason)]

    def config(self, name: str) -> QConfig | None:
        """Return how to quantize a module; None keeps it float."""
        return resolve(self._overrides, name, self._config)

    def leave_float(self, names: Iterable[str]) -> None:
        """Keep leaves float for whose sake the model's code would do something else."""
        self.reasons.update(dict.fromkeys(names, reasons.OTHER_CODE))

    def replacements(self, names: Iterable[str], contiguous: bool) -> dict[str, nn.Module]:
        """Return the observed leaves by name; ``contiguous`` is for convolutions."""
        result: dict[str, nn.Module] = {}
        for name in names:
            layer, config = without_hooks(self.recording.leaves[name]), self.config(name)
            assert config is not None
            leaf = (
                observed(layer, config, name)
                if isinstance(layer, RECURRENT) or is_experts(layer)
                else ObservedLeaf(
                    layer, config, name, self._is_chosen(name), contiguous, self._degree(name)
                )
            )
            if self._is_chosen(name) and isinstance(leaf, ObservedRNN | ObservedRNNCell):
                leaf.rows = None  # an override says how
            result[name] = take_hooks(leaf, self._model.get_submodule(name))
        return result

    def _is_chosen(self, name: str) -> bool:
        """Return whether an override gives a module its configuration."""
        return resolve(self._overrides, name, None) is not None

    def _degree(self, name: str) -> float:
        """Return how the range of a leaf's source grows with sizes of the input."""
        return -0.5 if name in self.recording.averages else 0.0

    def _decided(self, name: str) -> str:
        config, layer = self.config(name), self.recording.leaves[name]
        calls = self.recording.calls[name]
        dtypes = {dtype for call in calls for dtype in call.dtypes}
        if config is None:
            return reasons.OVERRIDE
        if is_experts(layer):
            return ""
        if isinstance(layer, RECURRENT):
            return why_float(layer, config, dtypes - {torch.int64})  # of packed sequences
        if any(call.more for call in calls):
            return reasons.OTHER_ARGUMENTS
        if why := why_coarse(self.recording.phases.get(name)):
            return why
        for shape, dtype in {(call.shape, dtype) for call in calls for dtype in call.dtypes}:
            captured = one_layer(layer, name, shape, dtype, self._degree(name))
            if why := _why(decided(captured, self._config, self._overrides)):
                return why
        return ""


def plan_of(leaf: ObservedLeaf) -> Plan:
    """Return what is decided of an observed leaf alone."""
    weight = leaf.module.get_parameter("weight")
    shape = (1,) * weight.dim()
    captured = one_layer(leaf.module, leaf.name, shape, weight.dtype, leaf.degree)
    overrides = {escape(leaf.name): leaf.config} if leaf.chosen else None
    return decided(captured, leaf.config, overrides)


def _why(plan: Plan) -> str:
    """Return why the layer of a plan stays float or is dynamic, or ""."""
    found = [op.reason for op in plan.ops.values() if op.role in (Role.OPAQUE, Role.DYNAMIC)]
    return next(filter(None, [*found, *(layer.reason for layer in plan.layers)]), "")


def _is_quantized(reason: str | None) -> bool:
    return reason == "" or (reason is not None and reason.startswith(reasons.DYNAMIC))


def report_rows(model: nn.Module, plan: Leaves) -> list[Row]:
    """Return one row per module without children, or with parameters of its own."""
    return [
        _row(name, module, plan)
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(False), None) is not None
    ]


def _row(name: str, module: nn.Module, plan: Leaves) -> Row:
    known = plan.reasons.get(name)
    reason = _without_layer(name, module, plan) if known is None else known
    calls = len(plan.recording.calls.get(name, ()))
    made = plan.recording.leaves.get(name, module)
    kind = getattr(module, "original_name", type(module).__name__)  # of TorchScript
    is_matmul = isinstance(made, (*MATMUL, *RECURRENT)) or is_experts(made)
    is_matmul |= isinstance(module, torch.jit.ScriptModule) and kind in _SCRIPTED
    requested = plan.config(name) is None
    own = module.named_parameters(recurse=is_matmul)
    weights = tuple(f"{name}.{key}".lstrip(".") for key, _ in own)
    row = Row(name, kind, _is_quantized(known), reason, name, is_matmul, requested, max(calls, 1))
    return replace(row, weights=weights)


def _without_layer(name: str, module: nn.Module, plan: Leaves) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return reasons.SCRIPTED
    if name not in plan.recording.leaves:
        if isinstance(module, RECURRENT):
            return reasons.OWN_RECURRENT
        return reasons.NO_LEAF
    if plan.recording.calls[name]:
        return reasons.OWN_CALL
    if name in plan.recording.read:
        return reasons.READ
    return reasons.NOT_CALLED
