# SPDX-License-Identifier: Apache-2.0
"""``torchq.convert`` of what ``torchq.prepare_qat`` made."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from torchq.attributes.post_ops import PostOps
from torchq.capture.module_kinds import RECURRENT
from torchq.convert.sources import name_sources
from torchq.convert.swap.checks import check_mode
from torchq.convert.swap.leaves import equivalent_layer
from torchq.convert.swap.weights import plain_layer
from torchq.models.inputs import Inputs
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.float_modules import is_experts
from torchq.nn.from_float import matmul_from_float, naming
from torchq.nn.leaf import QuantizedLeaf, take_hooks, without_padding
from torchq.nn.packed_weights import PackedWeights
from torchq.qat.hooks import DST, SRC, without_quantizers
from torchq.qat.known_scales import put, with_known_scales
from torchq.qat.quantizer import ActivationQuantizer, WeightQuantizer
from torchq.quantization.config import Overrides, QConfig, resolve
from torchq.report import reasons
from torchq.report.rows import Row, Weight, check_strict

KEY = "torchq_qat"
"""Name of the :class:`Settings` among a model's attributes."""
_NOT_ROUNDED = (
    "quantization-aware training did not round what it reads. Quantize it dynamically, by an "
    "override with QConfig(dynamic=True), or calibrate a float model of the trained weights"
)


@dataclass(frozen=True)
class Settings:
    """Arguments of :func:`torchq.prepare_qat` that its model keeps."""

    example_inputs: Inputs
    config: QConfig | None
    overrides: Overrides | None

    def convert(self, prepared: nn.Module, strict: bool) -> nn.Module:
        """Return the int8 model; ``torchq.convert`` calls this of the model's own settings.

        Raises:
            ValueError: the model is in training mode.
            RuntimeError: a range is not known, or ``strict`` and something stays float.
        """
        return _converted(prepared, self, strict)


@torch.inference_mode(False)
@torch.no_grad()
def _converted(prepared: nn.Module, settings: Settings, strict: bool) -> nn.Module:
    check_mode("convert", prepared)
    model = copy.deepcopy(prepared)
    del vars(model)[KEY]
    _fix_scales(model)
    model.eval()
    packed = PackedWeights()
    leaves = _leaves(model, settings, packed)
    names = {name: type(m).__name__ for name, m in model.named_modules() if _is_bare(m)}
    inputs, config = settings.example_inputs, settings.config or QConfig()
    if "" in leaves:
        return _alone(leaves[""], model)
    if strict:
        config = replace(config, strict=True)
    floats = [name for name, m in model.named_modules() if _needs_data(m, _config(settings, name))]
    overrides = settings.overrides
    result = with_known_scales(model, inputs, floats, config, overrides, _NOT_ROUNDED, packed)
    report: list[Row] = vars(result)["torchq_report"]
    rows = [_row(row, leaves, names) for row in report if _is_models(row)]
    without = leaves.keys() - {row.name for row in rows}
    rows += [_leaf_row(name, model.get_submodule(name)) for name in leaves if name in without]
    weights: list[Weight] = vars(result)["torchq_weights"]
    weights = [replace(weight, name=_plain_name(weight.name)) for weight in weights]
    vars(result).update(torchq_report=rows, torchq_weights=weights)
    if strict:
        check_strict(rows, weights)
    for module in result.modules():
        without_quantizers(module)
    put(result, leaves)
    return name_sources(result).eval()


def _alone(leaf: nn.Module, layer: nn.Module) -> nn.Module:
    """Return a model that is one layer, with its report."""
    vars(leaf).update(torchq_report=[_leaf_row("", layer)], torchq_weights=[])
    return leaf.eval()


def _fix_scales(model: nn.Module) -> None:
    """Put fake quantizers in the places of quantizers, and weights on their levels."""
    fixed: dict[nn.Module, FakeQuantize] = {}
    for name, module in list(model.named_modules()):
        for key in (SRC, DST):
            quantizer = module._modules.get(key)
            if isinstance(quantizer, ActivationQuantizer):
                if not quantizer.has_data:
                    raise RuntimeError(
                        f"torchq.convert: '{name}.{key}' must know its range, got "
                        f"{float(quantizer.min_value)} to {float(quantizer.max_value)}. Train "
                        "with data that reaches it, or load the state of a trained model."
                    )
                if quantizer not in fixed:
                    with naming(f"{name}.{key}"):
                        fixed[quantizer] = quantizer.fixed(quantizer.min_value)
                module._modules[key] = fixed[quantizer]
        if parametrize.is_parametrized(module, "weight"):
            steps: parametrize.ParametrizationList = module.parametrizations.weight
            if isinstance(steps[-1], WeightQuantizer):
                # on levels already, so that another rounding finds the same integers
                with naming(name):
                    fake = steps[-1].fixed(steps.original)
                steps.original = nn.Parameter(module.weight, False)
                steps[-1] = fake


def _leaves(model: nn.Module, settings: Settings, weights: PackedWeights) -> dict[str, nn.Module]:
    """Return the quantized layers by name, for code without a graph."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        src = module._modules.get(SRC)
        if isinstance(src, FakeQuantize):
            config = _config(settings, name)
            assert config is not None
            fake: Any = module.parametrizations.weight[-1]
            plain = without_quantizers(plain_layer(module))
            layer = equivalent_layer(plain)
            assert layer is not None
            scale = fake.output_scale.float()
            groups = getattr(layer, "groups", 1)
            if fake.axis == 1 and scale.numel() > 1:
                scale = scale.repeat(groups)
            with naming(name):
                qparams, _ = src.qparams(config.activation_dtype)
                plain_pad, pack = without_padding(layer), weights.packing(name)
                made = matmul_from_float(
                    plain_pad, qparams, None, config, PostOps(), scale, contiguous=True, pack=pack
                )
            found[name] = take_hooks(QuantizedLeaf.of(layer, made), plain)
    return found


def _config(settings: Settings, name: str) -> QConfig | None:
    return resolve(settings.overrides, name, settings.config or QConfig())


def _needs_data(module: nn.Module, config: QConfig | None) -> bool:
    """Return whether a module that is quantized by itself would have to be calibrated."""
    by_itself = isinstance(module, RECURRENT) or is_experts(module)
    return by_itself and config is not None and not config.dynamic


def _is_bare(module: nn.Module) -> bool:
    """Return whether a module has a quantizer, and no other children."""
    return DST in module._modules and module._modules.keys() <= {SRC, DST}


def _is_models(row: Row) -> bool:
    """Return whether a row is of something that the float model has."""
    return row.kind not in (FakeQuantize.__name__, parametrize.ParametrizationList.__name__)


def _plain_name(name: str) -> str:
    """Return the name of a parameter in the float model."""
    return name.replace(".parametrizations.", ".").removesuffix(".original")


def _leaf_row(name: str, layer: nn.Module) -> Row:
    """Return the row of a quantized layer that no graph has."""
    kind = type(layer).__name__.removeprefix("Parametrized")
    weights = (f"{name}.weight".lstrip("."),)
    return Row(name, kind, True, "", name, True, False, weights=weights)


def _row(row: Row, leaves: dict[str, nn.Module], bare: dict[str, str]) -> Row:
    """Return a row with the names of the float model; layers without a graph are int8 as well."""
    row = replace(row, weights=tuple(map(_plain_name, row.weights)))
    name = row.name.rpartition(".")[0]
    if row.name not in bare and name in bare:
        return replace(row, name=name, kind=bare[name])
    without_graph = row.name in leaves and row.reason == reasons.NO_LEAF
    return replace(row, quantized=True, reason="") if without_graph else row
