# SPDX-License-Identifier: Apache-2.0
"""``torchq.quantize_dynamic``: what torch.ao.quantization.quantize_dynamic does, in its words."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from torchq.capture.module_kinds import (
    MATMUL,
    RECURRENT,
    is_patched,
    why_float,
    why_sums,
)
from torchq.convert.self_contained import converted, observed
from torchq.convert.swap.checks import check_model
from torchq.convert.swap.flow import plain_copy
from torchq.convert.swap.leaves import equivalent_layer
from torchq.convert.swap.observed import ObservedLeaf
from torchq.convert.swap.pretrained import refuse_save_pretrained
from torchq.convert.swap.weights import leave_fast_paths, split_attention
from torchq.convert.tables import TABLES, TableMaker
from torchq.migrate.spec import QINT8, Spec
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Model, without_gradients
from torchq.nn.float_modules import is_experts
from torchq.nn.leaf import take_hooks, without_hooks
from torchq.nn.packed_weights import PackedWeights
from torchq.qat.known_scales import put
from torchq.quantization.config import QConfig
from torchq.report import reasons
from torchq.report.rows import Row

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORMS = (nn.Linear, *_CONVS, *TABLES, *RECURRENT)


@torch.inference_mode(False)
@torch.no_grad()
def quantize_dynamic(
    model: Model,
    qconfig_spec: object = None,
    dtype: torch.dtype = QINT8,
    mapping: None = None,
    inplace: bool = False,
) -> Model:
    """Replace layers by dynamic ones: int8 weights, and sources quantized by their own range.

    It needs no data and no example inputs. The arguments are those of
    ``torch.ao.quantization.quantize_dynamic``. Each row of a source has its own scale, and weights
    have one scale per output channel.

    Args:
        model: float32, bfloat16 or float16. Its class and everything else in it stays.
        qconfig_spec: what to replace. None means linear and recurrent layers and cells. A set holds
            types of modules and qualified names; what has children stands for the linear and
            recurrent layers in it. Convolutions, ``nn.MultiheadAttention`` and embeddings are
            replaced where their type or name is given, embeddings also by ``embedding_bits`` of a
            QConfig around them. Depthwise convolutions, slower where they are dynamic, are replaced
            by name only. A dict maps such keys to a :class:`torchq.QConfig` or a QConfig of
            torch.ao, of which only the weight's scales count, or to None to keep the match float.
            A name goes before a type, and both before what is around a module.
        dtype: ``torch.qint8`` or ``torch.int8``, of the weights; a dict decides for itself.
            ``torch.quint8`` and ``torch.quint4x2`` mean embeddings alone, with rows of 8 bits
            (the default of embeddings) or 4.
        mapping: None. torch.ao takes other classes of quantized modules here.
        inplace: replace the layers in ``model`` itself, instead of in a copy.

    Returns:
        The model with dynamic layers, in eval mode; its parameters need no gradients any more.
        :func:`torchq.explain` tells what is int8.

    Raises:
        TypeError: ``model`` is no nn.Module, or of another dtype.
        ValueError: a key names nothing that has a dynamic form, ``dtype`` is another, or the model
            is quantized already. ``model`` is then as it was.

    Example:
        >>> import torch, torchq
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> quantized = torchq.quantize_dynamic(model, {nn.Linear})
        >>> quantized(torch.randn(2, 8)).shape
        torch.Size([2, 4])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"torchq.quantize_dynamic: model must be an nn.Module, got {type(model).__name__}. "
            "Pass the float model."
        )
    if mapping is not None:
        raise ValueError(
            "torchq.quantize_dynamic: mapping must be None, got one: the quantized modules are "
            "those of torchq.nn. Leave it out."
        )
    if inplace and equivalent_layer(model) is not None:
        raise ValueError(
            f"torchq.quantize_dynamic: model must hold the layers with inplace=True, got a "
            f"{type(model).__name__}, which is one. Take the result of inplace=False."
        )
    plain = plain_copy(model, {id(p): p for p in model.parameters()}).eval()
    check_model(plain)
    made, rows = _replacements(plain, qconfig_spec, dtype)
    if inplace:
        put(model, made)
        leave_fast_paths(model)
    else:
        places: dict[int, object] = {
            id(plain.get_submodule(name)): new for name, new in made.items()
        }
        model = copy.deepcopy(plain, places)
    vars(model)["torchq_report"] = rows
    refuse_save_pretrained(model)
    return refusing_conversions(without_gradients(model.eval()))


def _replacements(
    model: nn.Module, qconfig_spec: object, dtype: torch.dtype
) -> tuple[dict[str, nn.Module], list[Row]]:
    """Return the dynamic modules by name, and what became of each module."""
    layers = {name: layer for name, m in model.named_modules() if (layer := _layer(m)) is not None}
    spec = Spec(model, qconfig_spec, dtype, layers)
    attention = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    made: dict[str, nn.Module] = {}
    rows: list[Row] = []
    make_table = TableMaker()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in attention):
            continue  # it reads the weights of what is in it
        layer, config = layers.get(name), spec.config(name)
        reason = ""
        if layer is not None and config is not None:
            reason = _why_float(layer, config, spec.names(name))
        if layer is None or config is None or reason:
            rows += _left(name, module, layer is not None, config, reason)
        elif name in attention:
            made[name] = take_hooks(_attention(module, name, config), module)
            rows += [_row(f"{name}.{key}_proj", nn.Linear, "") for key in ("q", "k", "v", "out")]
        elif isinstance(layer, TABLES):
            made[name] = make_table(layer, config.embedding_bits or 8)
            rows.append(_row(name, type(module), "", is_matmul=False))
        else:
            made[name] = take_hooks(_dynamic(layer, name, config), module)
            rows.append(replace(_row(name, type(module), ""), reason=_note(layer)))
    return made, rows


def _layer(module: nn.Module) -> nn.Module | None:
    """Return the layer of torch.nn that a module is or computes; None where it has no form."""
    if type(module) is nn.MultiheadAttention:
        return None if is_patched(module) else module
    if is_experts(module):
        return module
    layer = equivalent_layer(module)
    return layer if isinstance(layer, _FORMS) else None


def _why_float(layer: nn.Module, config: QConfig, named: bool) -> str:
    if isinstance(layer, (nn.MultiheadAttention, *TABLES)):
        return ""
    if isinstance(layer, _CONVS) and layer.groups == layer.in_channels > 1 and not named:
        return reasons.SLOW_DEPTHWISE
    if isinstance(layer, RECURRENT):
        return why_float(layer, config, set())
    return why_sums(layer) if isinstance(layer, MATMUL) else ""


def _note(layer: nn.Module) -> str:
    """Return what the report says of a convolution that one memory format makes slower."""
    if isinstance(layer, _CONVS) and layer.weight[0].numel() == layer.in_channels <= 64:
        return reasons.CHANNELS_LAST
    return ""


def _dynamic(layer: nn.Module, name: str, config: QConfig) -> nn.Module:
    layer = without_hooks(layer)
    if isinstance(layer, RECURRENT) or is_experts(layer):
        return converted(observed(layer, config, name), name, PackedWeights())
    return ObservedLeaf(layer, config, name).dynamic(config, PackedWeights())


def _attention(module: nn.Module, name: str, config: QConfig) -> nn.Module:
    """Return attention that calls its four projections, which are dynamic."""
    holder = split_attention(nn.ModuleDict({"attention": module}), ["attention"])
    split = holder.get_submodule("attention")
    for key in ("q", "k", "v", "out"):
        full = f"{key}_proj"
        dynamic = _dynamic(split.get_submodule(full), f"{name}.{full}", config)
        split.set_submodule(full, dynamic)
    return split


def _left(
    name: str, module: nn.Module, has_form: bool, config: QConfig | None, reason: str
) -> list[Row]:
    """Return the row of a module that stays as it is, if it computes something by itself."""
    leaf = next(module.children(), None) is None
    if not leaf and next(module.parameters(recurse=False), None) is None:
        return []
    known = has_form or isinstance(module, (*_FORMS, nn.MultiheadAttention))
    if not reason:
        reason = reasons.NO_OWN_DYNAMIC_FORM
        if known:
            reason = reasons.OWN_CODE if config is not None else reasons.LEFT_OUT
    is_matmul = known and not isinstance(module, TABLES)
    return [_row(name, type(module), reason, is_matmul, config is None)]


def _row(
    name: str, kind: type, reason: str, is_matmul: bool = True, requested: bool = False
) -> Row:
    return Row(name, kind.__name__, not reason, reason, name, is_matmul, requested)
