# SPDX-License-Identifier: Apache-2.0
"""The flow on a traced graph: prepare and convert."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchq import eager
from torchq.config import Overrides, QConfig
from torchq.eager.leaves import stand_in
from torchq.explain import Row, check_strict
from torchq.fx.constants import compute_once
from torchq.fx.lowering import Lowering
from torchq.fx.module import QuantizedGraph
from torchq.fx.planning import Plan
from torchq.fx.prepared import Prepared
from torchq.fx.report import report_rows
from torchq.fx.tracing.capture import Captured, CaptureError, capture
from torchq.fx.tracing.fake import freeze_observers
from torchq.fx.tracing.memory import with_constants
from torchq.kinds import QUANTIZABLE
from torchq.running import Inputs, split_inputs, working_copy
from torchq.standalone import STANDALONE, converted, observed, stands_alone
from torchq.state import changes

__all__ = ["Prepared", "convert", "prepare", "prepare_call"]


@torch.inference_mode(False)
@torch.no_grad()
def prepare(
    model: nn.Module,
    example_inputs: Inputs,
    config: QConfig | None = None,
    overrides: Overrides | None = None,
) -> nn.Module:
    """The model as a graph, with observers at the values that will be int8.

    Arguments and errors are those of :func:`torchq.prepare`.

    Raises:
        CaptureError: the model's forward cannot be traced, nor its parts be swapped one by one.
    """
    config = QConfig() if config is None else config
    eager.check_model(model)
    args, kwargs = split_inputs(example_inputs)
    return prepare_call(model, args, kwargs, config, overrides)


@torch.inference_mode(False)
@torch.no_grad()
def prepare_call(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: QConfig,
    overrides: Overrides | None,
    prefix: str = "",
    contiguous: bool = False,
) -> Prepared:
    """:func:`prepare` for ``model(*args, **kwargs)``.

    With a ``prefix``, the model is a submodule of another one: names in overrides and messages
    begin with it, and patterns are not checked. ``contiguous``: its result's strides matter.
    """
    if stands_alone(model, config):
        raise CaptureError("it is a single module, which a graph would look into; swap it")
    model = working_copy(model)
    freeze_observers(model)
    captured = capture(copy.deepcopy(model), args, kwargs)  # its code may write to parameters
    captured.model = with_constants(model, captured.model)
    captured.prefix, captured.contiguous = prefix, contiguous
    compute_once(captured)
    opaque, rows = _prepare_opaque(captured, config, overrides)  # may add to the reasons
    plan = Plan(captured, config, overrides)
    if not prefix:
        plan.check_patterns([row for part in rows.values() for row in part])
    for name in plan.standalone:
        own = plan.config(name)
        assert own is not None
        opaque[name] = observed(captured.model.get_submodule(name), own, f"{prefix}{name}")
    prepared = Prepared(plan, opaque, report_rows(plan, rows))
    prepared.eval()
    return prepared


def _prepare_opaque(
    captured: Captured, config: QConfig, overrides: Overrides | None
) -> tuple[dict[str, nn.Module], dict[str, list[Row]]]:
    """Submodules that cannot be traced, prepared by swapping their modules.

    Raises:
        CaptureError: they share what they keep, which each would have for itself.
    """
    if guilty := _sharing(captured):
        raise CaptureError(
            f"what its submodule '{guilty[0]}' changes when it is called is shared with another "
            "one that cannot be traced either"
        )
    prepared: dict[str, nn.Module] = {}
    rows: dict[str, list[Row]] = {}
    for name, why in captured.untraceable.items():
        module = captured.model.get_submodule(name)
        if any(isinstance(stand_in(m), QUANTIZABLE) for m in module.modules()):
            args, kwargs = captured.examples[name]
            try:
                full = f"{captured.prefix}{name}."
                result = eager.prepare_call(module, args, kwargs, config, overrides, full)
            except Exception as error:  # of the model's own code, in a run of its own
                captured.untraceable[name] = f"{why}; nor by itself: {error}"
                continue
            prepared[name] = result
            rows[name] = list(result.torchq_report)  # type: ignore[arg-type]
    return prepared, rows


def _sharing(captured: Captured) -> list[str]:
    """Submodules that cannot be traced and that change what others of them read."""
    if len(captured.untraceable) < 2:
        return []
    model = copy.deepcopy(captured.model)

    def run(name: str) -> None:
        args, kwargs = copy.deepcopy(captured.examples[name])
        model.get_submodule(name)(*args, **kwargs)

    return changes(model, captured.untraceable, run)


@torch.inference_mode(False)
def convert(prepared: Prepared, strict: bool = False) -> QuantizedGraph:
    """The quantized model as a graph; see :func:`torchq.convert`."""
    if strict:
        check_strict(prepared.torchq_report)
    opaque = {}
    for name in prepared.opaque_names:
        module = prepared.graph_module.get_submodule(name)
        alone = isinstance(module, STANDALONE)
        opaque[name] = converted(module, name) if alone else eager.convert(module)
    return Lowering(prepared, opaque).run().with_report(prepared.torchq_report)
