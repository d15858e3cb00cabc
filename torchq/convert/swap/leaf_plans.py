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
from torchq.nn.float_modules import is_experts, other_tensors
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
        why: leaf that was called -> why it stays float or is dynamic, or "".
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
        self.why = {
            name: self._decided(name)
            for name, layer in recording.leaves.items()
            if (isinstance(layer, (*MATMUL, *RECURRENT)) or is_experts(layer))
            and recording.calls[name]
        }

    @property
    def quantized(self) -> list[str]:
        """Names of the leaves that become int8."""
        return [name for name, reason in self.why.items() if _is_quantized(reason)]

    def config(self, name: str) -> QConfig | None:
        """Return how to quantize a module; None keeps it float."""
        return resolve(self._overrides, name, self._config)

    def leave_float(self, names: Iterable[str]) -> None:
        """Keep leaves float for whose sake the model's code would do something else."""
        self.why.update(dict.fromkeys(names, reasons.OTHER_CODE))

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
                    layer, config, name, self._is_chosen(name), contiguous, self._why_dynamic(name)
                )
            )
            if self._is_chosen(name) and isinstance(leaf, ObservedRNN | ObservedRNNCell):
                leaf.rows = None  # an override says how
            result[name] = take_hooks(leaf, self._model.get_submodule(name))
        return result

    def _is_chosen(self, name: str) -> bool:
        """Return whether an override gives a module its configuration."""
        return resolve(self._overrides, name, None) is not None

    def _why_dynamic(self, name: str) -> str:
        """Return why a leaf has no one scale for its source, or ""."""
        config, averages = self.config(name), name in self.recording.averages
        if not averages or config is None or config.by_rows or self._is_chosen(name):
            return ""
        return f"{reasons.DYNAMIC}{reasons.LENGTH}"

    def _decided(self, name: str) -> str:
        config, layer = self.config(name), self.recording.leaves[name]
        calls = self.recording.calls[name]
        dtypes = {dtype for call in calls for dtype in call.dtypes}
        if config is None:
            return reasons.OVERRIDE
        if is_experts(layer):
            return reasons.OWN_EXPERTS if other_tensors(layer) else ""
        if isinstance(layer, RECURRENT):
            return why_float(layer, config, dtypes - {torch.int64})  # of packed sequences
        if any(call.more for call in calls):
            return reasons.OTHER_ARGUMENTS
        if why := why_coarse(self.recording.phases.get(name)):
            return why
        for shape, dtype in {(call.shape, dtype) for call in calls for dtype in call.dtypes}:
            captured = one_layer(layer, name, shape, dtype)
            if why := _why_float(decided(captured, self._config, self._overrides)):
                return why
        return self._why_dynamic(name)


def plan_of(leaf: ObservedLeaf, coarse: str | None = None) -> Plan:
    """Return what is decided of an observed leaf alone.

    Args:
        leaf: of the prepared model.
        coarse: why graphs that call it do not have it static, "" where they have; None where none
            calls it.
    """
    weight = leaf.module.get_parameter("weight")
    captured = one_layer(leaf.module, leaf.name, (1,) * weight.dim(), weight.dtype)
    overrides = {escape(leaf.name): leaf.config} if leaf.chosen else None
    why = leaf.why_dynamic or coarse
    layer = [node for node in captured.graph.nodes if node.op == "call_module"]
    found = None if why is None else dict.fromkeys(layer if why else (), why)
    return decided(captured, leaf.config, overrides, found)


def _why_float(plan: Plan) -> str:
    """Return why the layer of a plan stays float, or ""."""
    found = [op.reason for op in plan.ops.values() if op.role is Role.OPAQUE]
    return next(filter(None, [*found, *(layer.reason for layer in plan.layers)]), "")


def _is_quantized(reason: str | None) -> bool:
    return reason == "" or (reason is not None and reason.startswith(reasons.DYNAMIC))


def report_rows(model: nn.Module, leaves: Leaves) -> list[Row]:
    """Return one row per module without children, or with parameters of its own."""
    return [
        _row(name, module, leaves)
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(False), None) is not None
    ]


def _row(name: str, module: nn.Module, leaves: Leaves) -> Row:
    known = leaves.why.get(name)
    reason = _without_layer(name, module, leaves) if known is None else known
    calls = len(leaves.recording.calls.get(name, ()))
    made = leaves.recording.leaves.get(name, module)
    kind = getattr(module, "original_name", type(module).__name__)  # of TorchScript
    is_matmul = isinstance(made, (*MATMUL, *RECURRENT)) or is_experts(made)
    is_matmul |= isinstance(module, torch.jit.ScriptModule) and kind in _SCRIPTED
    requested = leaves.config(name) is None
    own = module.named_parameters(recurse=is_matmul)
    weights = tuple(f"{name}.{key}".lstrip(".") for key, _ in own)
    row = Row(name, kind, _is_quantized(known), reason, name, is_matmul, requested, max(calls, 1))
    return replace(row, weights=weights)


def _without_layer(name: str, module: nn.Module, leaves: Leaves) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return reasons.SCRIPTED
    if name not in leaves.recording.leaves:
        if isinstance(module, RECURRENT):
            return reasons.OWN_RECURRENT
        return reasons.NO_LEAF
    if leaves.recording.calls[name]:
        return reasons.OWN_CALL
    if name in leaves.recording.read:
        return reasons.READ
    return reasons.NOT_CALLED
