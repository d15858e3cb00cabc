# SPDX-License-Identifier: Apache-2.0
"""Loads a checked folder of compressed-tensors by ``from_pretrained`` of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq.integrations.compressed_files import Int4Layer, Int8Layer, Layers, opened, refused
from torchq.integrations.transformers import TorchqConfig, TorchqQuantizer, initialized
from torchq.migrate.leaves import dynamic_leaf, float_layer, int4_leaf, static_leaf
from torchq.nn.batch_norm import weight_of
from torchq.nn.leaf import take_hooks
from torchq.report import reasons

try:
    import transformers
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.quantizers.auto import register_quantizer
except ImportError as error:
    raise ImportError(
        "torchq.from_compressed_tensors: transformers 5.24 or a later 5.x must be installed, got "
        f"{error}. Run: pip install 'torchq-cpu[transformers]'"
    ) from error

_METHOD = "torchq_compressed_tensors"
_SCALES = r"\.(weight|input|output)_(scale|zero_point)$|\.weight_(packed|shape)$"


def load(folder: Path, facts: Mapping[str, object], layers: Layers, model_class: Any) -> nn.Module:
    """Return the model of a folder, with these layers in int8."""
    if model_class is None:
        model_class = _class_of(facts)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for part in (config, config.get_text_config()):  # else transformers' own reader takes it
            vars(part).pop("quantization_config", None)
        model = model_class.from_pretrained(
            folder,
            config=config,
            quantization_config=_Config(folder, layers),
            trust_remote_code=False,
        )
    except (ImportError, MemoryError):  # of the machine
        raise
    except Exception as error:  # of a folder that was changed: anything
        if str(error).startswith("torchq."):
            raise
        told = (str(error) or type(error).__name__).splitlines()[0]
        raise refused(folder, f"transformers says {told!r}") from error
    plain = TorchqConfig()
    model.config.quantization_config = model.hf_quantizer.quantization_config = plain
    result: nn.Module = model.eval()
    return result


def _class_of(facts: Mapping[str, object]) -> Any:
    """Return the class of models that a config.json names; AutoModel for any other name."""
    names = facts.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    known = isinstance(found, type) and issubclass(found, PreTrainedModel)
    return found if known else transformers.AutoModel


class _Config(TorchqConfig):
    """A configuration that knows the layers of the files."""

    def __init__(self, folder: Path, layers: Layers) -> None:
        super().__init__()
        self.quant_method, self.folder, self.layers = _METHOD, folder, layers

    def to_dict(self) -> dict[str, object]:
        """Return what config.json of the int8 model holds."""
        result: dict[str, object] = TorchqConfig().to_dict()
        return result


class _Quantizer(TorchqQuantizer):
    """Makes leaves of the int8 weights as they arrive."""

    quantization_config: _Config

    def __init__(self, quantization_config: _Config, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        self._layers: Layers = {}
        self._float: dict[str, nn.Module] = {}
        self._folder = quantization_config.folder

    def _decide(self, model: transformers.PreTrainedModel) -> dict[str, str]:
        """Wait for the names; :meth:`update_weight_conversions` decides."""
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, _SCALES}
        return {}

    def update_weight_conversions(
        self, weight_conversions: list[object], model: transformers.PreTrainedModel
    ) -> list[object]:
        """Find the layers of the files in the model, where transformers renames the weights."""
        state, problems = model.state_dict(), list[str]()
        renamings = [c for c in weight_conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in weight_conversions if isinstance(c, WeightConverter)]
        for name, layer in self.quantization_config.layers.items():
            key, converted = rename_source_key(
                f"{name}.weight", renamings, converters, model.base_model_prefix, state
            )
            place = key.removesuffix(".weight")
            if converted is None and key not in state:
                continue  # it belongs to a head that this class has not
            if problem := _why_not(model, key, converted is not None, layer):
                problems.append(f"'{name}' {problem}")
            self._layers[place] = layer
        if problems or not self._layers:
            raise refused(
                self._folder, "; ".join(problems) or "no layer of the model", "Ignore these layers."
            )
        for name, layer in self._layers.items():
            if isinstance(layer, Int4Layer):
                self._float[name] = model.get_submodule(name)
                model.set_submodule(name, nn.Identity())  # the leaf reads the file itself
        # one pattern, from the start: each of many would be tried at each character of each name
        if names := "|".join(map(re.escape, self._float)):
            model._keys_to_ignore_on_load_unexpected.add(rf"^(?:{names})\.(?:weight|bias)$")
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._reasons[name] = "" if name in self._layers else reasons.FLOAT_IN_FOLDER
        return weight_conversions

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: object
    ) -> PreTrainedModel:
        """Compute folded scales anew, which transformers takes for buffers that no file has."""
        opened_once = cache(partial(opened, self._folder))
        for name, module in self._float.items():
            layer = self._layers[name]
            assert isinstance(layer, Int4Layer)
            leaf = int4_leaf(module, *layer.read(opened_once(layer.file)), layer.group_size)
            model.set_submodule(name, take_hooks(leaf, module))
        model = super()._process_model_after_weight_loading(model, **kwargs)
        for name in self._layers:
            model.get_submodule(name).layer.refold()
        return model

    def make_leaf(self, model: nn.Module, name: str) -> bool:
        """Put a leaf of the int8 weight, which transformers made float32, in the layer's place."""
        module, layer = model.get_submodule(name), self._layers[name]
        weight = weight_of(module)
        assert isinstance(layer, Int8Layer)
        if layer.src is None:
            leaf = dynamic_leaf(module, weight.to(torch.int8), layer.scales)
        else:
            outputs, inputs = weight.shape
            meaning = weight * layer.scales.reshape(-1, 1)
            plain = float_layer(
                nn.Linear(inputs, outputs, device="meta"), meaning, module._parameters["bias"]
            )
            leaf = static_leaf(plain, layer.scales, layer.src)
        model.set_submodule(name, take_hooks(initialized(leaf), module))
        return True


def _why_not(model: PreTrainedModel, key: str, is_part: bool, layer: Int8Layer | Int4Layer) -> str:
    """Return why a layer of the files has no form in the model, or ""."""
    if is_part:
        return f"is a part of a larger weight of {type(model).__name__}"
    ties = model.all_tied_weights_keys
    if key in ties or key in ties.values():
        return "shares its weight with another module"
    module = model.get_submodule(key.removesuffix(".weight"))
    if not isinstance(module, nn.Linear):
        return f"is a {type(module).__name__}"
    if module.weight.shape != layer.shape:
        return f"has shape {list(layer.shape)}, not {list(module.weight.shape)}"
    if isinstance(layer, Int4Layer) and module.bias is not None and not layer.has_bias:
        return "has no bias"  # of other layers transformers says so
    return ""


register_quantizer(_METHOD)(_Quantizer)
