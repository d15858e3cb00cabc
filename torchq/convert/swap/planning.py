# SPDX-License-Identifier: Apache-2.0
"""Decide for each leaf: int8, or float and why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchq.affine import reduction
from torchq.config import Overrides, QConfig, resolve
from torchq.convert.module_kinds import MATMUL, MAX_REDUCTION, NO_DYNAMIC_FORM
from torchq.convert.phases import why_coarse
from torchq.convert.self_contained import RECURRENT, observed
from torchq.convert.swap.calls import Recording
from torchq.convert.swap.observed import ObservedLeaf
from torchq.nn.experts import is_experts
from torchq.nn.leaf import take_hooks, without_hooks

OTHER_CODE = "the model's code does something else with another kind of layer"
_TOO_LONG = f"it sums more than {MAX_REDUCTION} products, which could overflow int32"


class Plan:
    """Decisions for one recorded model.

    Attributes:
        recording: the run of the float model.
        reasons: leaf that was called -> why it stays float, or "".
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        config: QConfig,
        overrides: Overrides | None,
    ) -> None:
        """Decides; nothing is changed yet."""
        self.recording = recording
        self._model, self._config, self._overrides = model, config, overrides
        self.reasons = {
            name: self._why_float(name)
            for name, layer in recording.leaves.items()
            if (isinstance(layer, (*MATMUL, *RECURRENT)) or is_experts(layer))
            and recording.calls[name]
        }

    @property
    def quantized(self) -> list[str]:
        """Names of the leaves that become int8."""
        return [name for name, reason in self.reasons.items() if not reason]

    def config(self, name: str) -> QConfig | None:
        """Returns how to quantize a module; None keeps it float."""
        return resolve(self._overrides, name, self._config)

    def leave_float(self, names: Iterable[str]) -> None:
        """Keeps leaves float for whose sake the model's code would do something else."""
        self.reasons.update(dict.fromkeys(names, OTHER_CODE))

    def replacements(self, names: Iterable[str], contiguous: bool) -> dict[str, nn.Module]:
        """Returns the observed leaves by name; ``contiguous`` is for convolutions."""
        result: dict[str, nn.Module] = {}
        for name in names:
            layer, config = without_hooks(self.recording.leaves[name]), self.config(name)
            assert config is not None
            leaf = (
                observed(layer, config, name)
                if isinstance(layer, RECURRENT) or is_experts(layer)
                else ObservedLeaf(layer, config, name, contiguous)
            )
            result[name] = take_hooks(leaf, self._model.get_submodule(name))
        return result

    def _why_float(self, name: str) -> str:
        config, layer = self.config(name), self.recording.leaves[name]
        calls = self.recording.calls[name]
        if config is None:
            return "kept float by an override"
        if is_experts(layer):
            return ""
        if isinstance(layer, RECURRENT):
            if max(p.size(-1) for p in layer.parameters() if p.dim() > 1) > MAX_REDUCTION:
                return _TOO_LONG
        else:
            assert isinstance(layer, MATMUL)
            if config.dynamic and not isinstance(layer, nn.Linear):
                return NO_DYNAMIC_FORM
            if reduction(layer) > MAX_REDUCTION:
                return _TOO_LONG
            if any(call.more for call in calls):
                return "called with other arguments than its source"
            if coarse := why_coarse(self.recording.phases.get(name)):
                return coarse
        dtypes = {dtype for call in calls for dtype in call.dtypes} - {torch.float32}
        if isinstance(layer, RECURRENT):
            dtypes.discard(torch.int64)  # of packed sequences
        if dtypes:
            return f"its source is {dtypes.pop()}, not torch.float32"
        if isinstance(layer, (nn.Linear, *RECURRENT)):
            return ""
        for call in calls:
            if len(call.shape) != len(layer.get_parameter("weight").shape):
                return f"its source {list(call.shape)} has no batch dimension"
        return ""
