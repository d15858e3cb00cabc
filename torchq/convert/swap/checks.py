# SPDX-License-Identifier: Apache-2.0
"""Refuse what no flow takes: no model, one of another dtype or device, verbs out of order."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchq.attributes.arguments import FLOATS, place_of
from torchq.capture.module_kinds import MATMUL, RECURRENT
from torchq.convert.self_contained import SELF_CONTAINED
from torchq.convert.swap.observed import ObservedLeaf
from torchq.graphs.code import is_exported
from torchq.nn.embedding import QEmbedding, QEmbeddingBag
from torchq.nn.module import QModule
from torchq.quantization.observers import Observer
from torchq.runtime.isa import isa

_TABLES = (QEmbedding, QEmbeddingBag)
"""What a prepared model may have quantized already."""
_QUANTIZED = re.compile(
    r"torch\.ao\.nn\.(intrinsic\.|sparse\.)?quantized\.(?!.*FloatFunctional)"
    r"|torchao\.quantization\.linear_quant_modules\."
)
"""Begins the full names of int8 modules of other tools."""


def check_prepared(op: str, prepared: nn.Module) -> None:
    """Raise ValueError unless :func:`torchq.prepare` made it, and it was not converted since."""
    parts = [type(module) for module in prepared.modules()]
    converted = any(issubclass(cls, QModule) and not issubclass(cls, _TABLES) for cls in parts)
    if converted or not hasattr(prepared, "torchq_report"):
        state = ", which is converted" if converted else " without observers"
        raise ValueError(
            f"torchq.{op}: prepared must come from torchq.prepare, got {type(prepared).__name__}"
            f"{state}. Call torchq.prepare on the float model first, and keep what it returns."
        )


def check_mode(op: str, model: nn.Module) -> None:
    """Raise ValueError if a module is in training mode."""
    modules = [(name, m) for name, m in model.named_modules() if type(m) is not nn.Module]
    training = [place_of(name) for name, m in modules if m.training]
    if training:
        raise ValueError(
            f"torchq.{op}: model must be in eval mode, got training mode in {training[0]} "
            f"({len(training)} modules). Call model.eval() first."
        )


def check_not_quantized(model: nn.Module) -> None:
    """Raise ValueError for a model that torch.ao or torchao has quantized."""
    names = [(name, _full_name(module)) for name, module in model.named_modules()]
    found = [(name, full) for name, full in names if _QUANTIZED.match(full)]
    tensors = [(name, _full_name(value)) for name, value in model.named_parameters()]
    found += [(name, full) for name, full in tensors if full.startswith("torchao.")]
    for name, full in found:
        tool = "torchao" if "torchao" in full else "torch.ao"
        raise ValueError(
            f"torchq.prepare: model must be a float model, got {full} in {place_of(name)}: {tool} "
            "has quantized it already. Prepare the model that it was made from, or take this one "
            f"with torchq.from_{tool.replace('.', '_')}."
        )


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def check_model(model: nn.Module) -> None:
    """Raise what :func:`torchq.prepare` promises."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torchq.prepare: model must be an nn.Module, got {type(model).__name__}. A function "
            "can be called in the forward of one."
        )
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise TypeError(
            f"torchq.prepare: model must be the Python module, got a {type(model).__name__}, which "
            "is compiled. Prepare the module that it was made from, and compile the converted one."
        )
    check_not_quantized(model)
    if not is_exported(model):
        check_mode("prepare", model)
    isa()  # raises for a TORCHQ_ISA that is not available here
    for name, module in model.named_modules():
        place, trained = place_of(name), type(module).__module__.startswith("torchq.qat.")
        if trained or isinstance(module, (Observer, ObservedLeaf, QModule, *SELF_CONTAINED)):
            also = ", or give this one to torchq.convert" if trained else ""
            raise ValueError(
                f"torchq.prepare: model must be a float model, got {type(module).__name__} in "
                f"{place}. Prepare the model that it was made from{also}."
            )
        own = list(module.parameters(recurse=False))
        if any(map(is_lazy, own)):
            raise ValueError(
                f"torchq.prepare: model must have its parameters, got none yet in {place}, a "
                f"{type(module).__name__}. Run the model on one input first."
            )
        if isinstance(module, (*MATMUL, *RECURRENT)):
            if dtypes := {p.dtype for p in own} - {*FLOATS}:
                raise TypeError(
                    "torchq.prepare: model must be float32, bfloat16 or float16, got "
                    f"{dtypes.pop()} in {place}. Call model.float() first."
                )
            check_finite("prepare", module, name)
        if devices := {p.device.type for p in own} - {"cpu"}:
            raise ValueError(
                f"torchq.prepare: model must be on the CPU, got {devices.pop()} in {place}. Call "
                "model.cpu() first, and give it tensors on the CPU."
            )


def check_finite(op: str, module: nn.Module, prefix: str = "", recurse: bool = False) -> None:
    """Raise ValueError for a parameter with NaN or inf, which calibration would blame on data."""
    for name, parameter in module.named_parameters(prefix, recurse):
        if parameter.is_meta or bool(torch.isfinite(parameter).all()):
            continue
        nans, infs = int(parameter.isnan().sum()), int(parameter.isinf().sum())
        raise ValueError(
            f"torchq.{op}: '{name}' of the model must be finite, got "
            f"{nans} NaN and {infs} inf among {parameter.numel()} values. Repair the checkpoint, "
            "and load it anew."
        )
