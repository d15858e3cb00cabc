# SPDX-License-Identifier: Apache-2.0
"""What becomes of each module, from how recorded runs call it.

A layer that the model's own code calls takes and gives float32, whatever that code does with it. An
``nn.Sequential`` of torch's own modules that is called as a whole is known to the last operation:
it becomes a graph, in which int8 values go from layer to layer.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from torchq.affine import reduction
from torchq.config import Overrides, QConfig, resolve, unmatched_patterns
from torchq.eager.observed import ObservedLayer
from torchq.eager.recording import Call, Recording, is_hooked
from torchq.kinds import EXPOSED, MATMUL, MAX_REDUCTION, NO_DYNAMIC_FORM
from torchq.standalone import observed, stands_alone, why_float

HOOKED = "it has forward hooks, which would be lost"


class Plan:
    """Decisions for one recorded model.

    Attributes:
        layers: convolution or linear module that was called -> why it stays float, or "".
        standalone: module that is quantized by itself -> why it stays float, or "".
        sequences: ``nn.Sequential`` that becomes a graph -> its calls.
        products: functions that multiply by parameters: a name of its own -> its name.
    """

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        config: QConfig,
        overrides: Overrides | None,
        prefix: str = "",
    ) -> None:
        """Decides; nothing is changed yet. Names in overrides begin with ``prefix``."""
        self.recording, self.prefix = recording, prefix
        self._config, self._overrides = config, overrides
        self._model, self.calls = model, recording.calls_of()
        self.sequences = {
            name: recording.sequences[name]
            for name, module in model.named_modules()
            if name in recording.sequences and self._is_known(name, module)
        }
        self._strided = self._layout_matters()
        self.products = self._named_products()
        self.layers: dict[str, str] = {}
        self.standalone: dict[str, str] = {}
        for name, calls in self.calls.items():
            if stands_alone(calls[0].module, self.config(name)):
                self.standalone[name] = self._why_not_alone(calls)
            elif isinstance(calls[0].module, MATMUL):
                self.layers[name] = self._why_float(calls)

    def config(self, name: str) -> QConfig | None:
        """How to quantize a module; None keeps it float."""
        return resolve(self._overrides, f"{self.prefix}{name}", self._config)

    def check_patterns(self) -> None:
        """Raises ValueError for an override that matches no module."""
        names = [name for name, _ in self._model.named_modules()]
        names += [*(f"{name}.dst" for name in names), *self.products]
        unmatched = unmatched_patterns(self._overrides, names)
        if unmatched:
            raise ValueError(
                f"torchq.prepare: overrides must match module names, but {unmatched} match none. "
                f"The quantizable modules are {sorted({*self.layers, *self.standalone})}."
            )

    def leave_float(self, reason: str) -> None:
        """Keeps every layer float that would not be."""
        for found in (self.layers, self.standalone):
            found.update({name: why or reason for name, why in found.items()})

    def replacements(self) -> dict[str, nn.Module]:
        """Qualified name -> the module to put there, but for sequences."""
        result: dict[str, nn.Module] = {}
        for name in self.layers.keys() | self.standalone.keys():
            module, config = self.calls[name][0].module, self.config(name)
            if not (self.layers | self.standalone)[name]:
                assert module is not None and config is not None
                full = f"{self.prefix}{name}"
                result[name] = (
                    ObservedLayer(module, full, config, self.is_strided(self.calls[name]))
                    if name in self.layers
                    else observed(module, config, full)
                )
        return result

    def is_strided(self, calls: list[Call]) -> bool:
        """Whether the strides of what such calls give must be those of the float model."""
        return any(value in self._strided for call in calls for value in call.outputs)

    def _named_products(self) -> dict[str, str]:
        result, taken = dict[str, str](), {name for name, _ in self._model.named_modules()}
        for call in self.recording.products_with_weights():
            kind = call.name.strip("_")
            names = (f"{kind}_{i}" if i else kind for i in itertools.count())
            result[next(n for n in names if n not in taken and n not in result)] = kind
        return result

    def _why_not_alone(self, calls: list[Call]) -> str:
        name, module = calls[0].name, calls[0].module
        assert module is not None
        dtypes = {self.recording.values[value].dtype for call in calls for value in call.inputs}
        dtypes.discard(torch.int64)  # of packed sequences
        return why_float(module, self.config(name), dtypes, name in self.recording.exposed)

    def _why_float(self, calls: list[Call]) -> str:
        name, m = calls[0].name, calls[0].module
        config = self.config(name)
        if config is None:
            return "kept float by an override"
        if config.dynamic:
            return NO_DYNAMIC_FORM
        if name in self.recording.hooked:
            return HOOKED
        if name in self.recording.exposed:
            return EXPOSED
        assert isinstance(m, MATMUL)
        if reduction(m) > MAX_REDUCTION:
            return f"it sums more than {MAX_REDUCTION} products, which could overflow int32"
        for call in calls:
            if call.more:
                return "called with other arguments than its source"
            for source in (self.recording.values[value] for value in call.inputs):
                if source.dtype != torch.float32:
                    return f"its source is {source.dtype}, not torch.float32"
                if isinstance(m, nn.Linear):
                    continue
                if len(source.shape) != len(m.weight.shape):
                    return f"its source {list(source.shape)} has no batch dimension"
        return "" if any(call.outputs for call in calls) else "it returns no tensor"

    def _is_known(self, name: str, module: nn.Module) -> bool:
        """Whether nothing but its own forward calls what is in a sequence."""
        if not all(key.isdecimal() for key in module._modules):
            return False  # code may call a part by its name
        parts = dict(module.named_modules(prefix=name))
        known = {n for n, m in parts.items() if self.recording.leaves.get(n) is m}
        leaves = {n: m for n, m in parts.items() if n in known or type(m) is not nn.Sequential}
        matmuls = [m for m in leaves.values() if isinstance(m, MATMUL)]
        if len(leaves) < 2 or not matmuls or leaves.keys() - known:
            return False
        if any(map(is_hooked, parts.values())) or parts.keys() & self.recording.exposed:
            return False
        if self._has_other_names(module):
            return False
        whole = all(name in call.within for n in leaves for call in self.calls.get(n, ()))
        return whole and all(_is_plain(call) for call in self.recording.sequences[name])

    def _has_other_names(self, module: nn.Module) -> bool:
        """Whether a part is registered outside of it, too."""
        parts, everywhere = set(module.modules()), self._model.named_modules
        own = [n for n, m in everywhere(remove_duplicate=False) if m is module]
        return any(
            m in parts and n not in own and not n.startswith(tuple(map(inside, own)))
            for n, m in everywhere(remove_duplicate=False)
        )

    def _layout_matters(self) -> set[int]:
        """Values in front of ``view`` and the like, where the float model has them contiguous.

        Quantized convolutions give channels-last tensors, which ``view`` may refuse.
        """
        values, sources = self.recording.values, dict[int, list[int]]()
        for call in self.recording.calls:
            for value in call.outputs:
                sources.setdefault(value, []).extend(call.inputs)
        for name in self.sequences:
            for call in self.recording.sequences[name]:
                for value in call.outputs:
                    sources[value] = []
        waiting, seen = list(self.recording.strided), set[int]()
        while waiting:
            value = waiting.pop()
            if value not in seen and len(values[value].shape) > 2:
                seen.add(value)
                waiting.extend(sources.get(value, ()))
        return {value for value in seen if values[value].contiguous}


def inside(name: str) -> str:
    """What the names of a module's parts begin with."""
    return f"{name}." if name else ""


def _is_plain(call: Call) -> bool:
    return (
        isinstance(call.source, Tensor) and call.source.dtype == torch.float32 and not call.writes
    )
