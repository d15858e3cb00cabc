# SPDX-License-Identifier: Apache-2.0
"""One row for each module of the float model that computes something by itself."""

from __future__ import annotations

from torch import nn

from torchq.eager.fuse import Layer
from torchq.eager.planning import Plan
from torchq.explain import NOT_CALLED, Row
from torchq.kinds import MATMUL, QUANTIZABLE
from torchq.standalone import FOREIGN, RECURRENT, is_foreign

__all__ = ["report_rows"]


def report_rows(model: nn.Module, plan: Plan) -> list[Row]:
    """One row per module of the float model that computes something by itself."""
    reporter = _Reporter(plan)
    return [
        reporter.row(name, module)
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(False), None) is not None
    ]


class _Reporter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls = plan.recording.calls_of()
        self.layer_of = {layer.name: layer for layer in plan.layers}
        self.fused_into: dict[str, list[Layer]] = {}
        for layer in plan.layers:
            for name in (*layer.absorbed, *layer.activations, layer.site):
                if name != layer.name and not plan.reasons[layer.name]:
                    self.fused_into.setdefault(name, []).append(layer)

    def row(self, name: str, module: nn.Module) -> Row:
        layer, hosts = self.layer_of.get(name), self.fused_into.get(name, [])
        quantized, reason, site = False, "", name
        if name in self.plan.standalone:
            reason = self.plan.standalone[name]
            quantized = not reason
        elif layer is not None:
            reason, site = self.plan.reasons[name], layer.site
            quantized = not reason
        if hosts:
            into = "fused into " + ", ".join(host.name for host in hosts)
            reason = f"{into}; elsewhere float: {reason}" if reason else into
            quantized, site = True, hosts[0].site
        elif layer is None and name not in self.plan.standalone:
            quantized, reason = self._without_layer(name, module)
        requested = self.plan.config(name) is None
        made = self.plan.recording.leaves.get(name, module)
        is_matmul = isinstance(made, (*MATMUL, *RECURRENT))
        own = name
        name, site = (f"{self.plan.prefix}{other}".rstrip(".") for other in (name, site))
        kind, calls = type(module).__name__, max(len(self.calls.get(own, [])), 1)
        return Row(name, kind, quantized, reason, site, is_matmul, requested, calls)

    def _without_layer(self, name: str, module: nn.Module) -> tuple[bool, str]:
        calls = self.calls.get(name, [])
        if is_foreign(module):
            return False, FOREIGN
        if name not in self.plan.recording.leaves:
            return False, "only leaf modules of torch.nn and torchq.nn have an int8 form"
        if not calls and name in self.plan.recording.exposed:
            return False, "its parameters are used outside of it, and it is not called"
        if not calls:
            return False, NOT_CALLED
        if all(call.moves for call in calls):
            passes = [self.plan.producer(call.inputs[0]) is not None for call in calls]
            return all(passes), "passes values on as they are"
        if isinstance(module, QUANTIZABLE):
            return False, "it returns no tensor"
        return False, f"{type(module).__name__} has no int8 form"
