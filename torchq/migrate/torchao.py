# SPDX-License-Identifier: Apache-2.0
"""``torchq.from_torchao``: linear layers whose weights are int8 tensors of torchao."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import FLOATS
from torchq.migrate.leaves import dynamic_leaf, float_layer, int4_leaf, report, static_leaf
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Model, without_gradients, working_copy
from torchq.nn.leaf import QuantizedLeaf, take_hooks
from torchq.quantization.int4 import GROUP_SIZES
from torchq.quantization.qparams import QParams


@torch.inference_mode(False)
@torch.no_grad()
def from_torchao(model: Model) -> Model:
    """Take over a model on which torchao's ``quantize_`` was called.

    Linear layers keep the integers and scales of their weights. They quantize each row of a source
    by its own range, also where torchao multiplies by the weight in float, unless torchao has a
    fixed scale for sources. Scales of 4-bit groups are rounded to bfloat16.

    Args:
        model: its linear layers have int8 weights with one scale, or one per output channel: by
            ``Int8DynamicActivationInt8WeightConfig`` or ``Int8WeightOnlyConfig``, say. Or they have
            4-bit weights in groups of 32, 64 or 128: by ``Int8DynamicActivationIntxWeightConfig``.

    Returns:
        A copy with int8 layers, of the same class.

    Raises:
        TypeError: ``model`` is no nn.Module.
        ValueError: it has no tensors of torchao, or some have no form here, such as int8 groups
            within a row: the message names all of them, and why.

    Example:
        >>> import torch, torchq
        >>> from torch import nn
        >>> from torchao.quantization import Int8WeightOnlyConfig, quantize_
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> quantize_(model, Int8WeightOnlyConfig())
        >>> torchq.from_torchao(model)(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torchq.from_torchao: model must be an nn.Module, got {type(model).__name__}. Pass "
            "the model that quantize_ changed."
        )
    leaves: dict[str, nn.Module] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        if _is_theirs(module):
            problems.append(f"'{name}', a {type(module).__name__}: it has code of its own")
        for key, value in module.named_parameters(recurse=False):
            if not _is_theirs(value):
                continue
            reason = _why_not(module, key, value)
            if reason:
                problems.append(f"'{f'{name}.{key}'.lstrip('.')}': {reason}")
            else:
                leaves[name] = take_hooks(_leaf(module, value), module)
    if problems or not leaves:
        got = "; ".join(problems) or f"{type(model).__name__} without such tensors"
        raise ValueError(
            "torchq.from_torchao: model must have linear layers with int8 tensors of torchao, one "
            f"scale for each output channel or for all, got {got}. Leave these layers out of "
            "quantize_, or call torchq.quantize_dynamic on the float model."
        )
    if "" in leaves:
        return cast(Model, leaves[""].eval())
    copied = working_copy(model, {id(model.get_submodule(n)): m for n, m in leaves.items()},
                          "from_torchao")  # fmt: skip
    vars(copied)["torchq_report"] = report(copied, dict.fromkeys(leaves, "Linear"), {})
    return refusing_conversions(without_gradients(copied.eval()))


def is_torchao(model: nn.Module) -> bool:
    """Return whether a model has tensors of torchao."""
    return any(_is_theirs(parameter) for parameter in model.parameters())


def _is_theirs(value: object) -> bool:
    return type(value).__module__.startswith("torchao.")


def _why_not(module: nn.Module, key: str, value: Tensor) -> str:
    """Return why a tensor of torchao has no form here, or ""."""
    int8, scale = getattr(value, "qdata", None), getattr(value, "scale", None)
    if not isinstance(module, nn.Linear) or key != "weight":
        return f"only weights of linear layers have a form here, not those of {_kind(module)}"
    if not isinstance(int8, Tensor) or int8.dtype != torch.int8 or not isinstance(scale, Tensor):
        return f"{_kind(value)} holds no int8 values"
    if value.dtype not in FLOATS:
        return f"its layer takes {value.dtype}, and layers here take float32, bfloat16 or float16"
    groups = scale.numel() // max(1, int8.shape[0])
    if scale.numel() not in (1, int8.shape[0]):
        low, high = torch.aminmax(int8)
        if low < -8 or high > 7 or int8.shape[1] not in (groups * size for size in GROUP_SIZES):
            return f"it has {groups} scales for each output channel, and int8 layers here take one"
    elif _is_set(value, "zero_point"):
        return "it has zero points other than 0, which int8 weights here have not"
    if getattr(value, "act_pre_scale", None) is not None:
        return "its source is scaled in front of it: fold act_pre_scale into the float weight"
    source = getattr(value, "act_quant_scale", None)
    if source is not None and groups > 1:
        return "its source has a fixed scale, and 4-bit layers here choose one for each row"
    if source is not None and source.numel() != 1:
        return "its source has fixed scales for each row, and layers here take one"
    return ""


def _kind(value: object) -> str:
    return type(value).__name__


def _is_set(value: object, name: str) -> bool:
    found = getattr(value, name, None)
    return found is not None and bool(found.any())


def _leaf(module: nn.Linear, value: Any) -> QuantizedLeaf:
    outputs, inputs = value.qdata.shape
    if value.scale.numel() not in (1, outputs):
        scales = value.scale.detach().reshape(outputs, -1)
        zeros = value.zero_point.reshape(outputs, -1) if _is_set(value, "zero_point") else None
        return int4_leaf(module, value.qdata, scales, zeros, module.bias, inputs // scales.shape[1])
    scales = value.scale.detach().reshape(-1).float()
    fixed = getattr(value, "act_quant_scale", None)
    if fixed is None:
        return dynamic_leaf(module, value.qdata, scales)
    zero = getattr(value, "act_quant_zero_point", None)
    src = QParams.per_tensor(float(fixed), 0 if zero is None else int(zero), torch.int8)
    layer = nn.Linear(module.in_features, module.out_features, device="meta")
    weight = value.qdata.float() * scales.reshape(-1, 1)
    return static_leaf(float_layer(layer, weight, module.bias), scales, src, value.dtype)
