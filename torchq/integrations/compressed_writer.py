# SPDX-License-Identifier: Apache-2.0
"""Writes the dynamic linear layers of a model of transformers as a folder of compressed-tensors."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import kind_text
from torchq.integrations.compressed_files import INDEX, INT, METHOD, PACKED, pack_nibbles
from torchq.nn.dynamic import DynamicQLinear
from torchq.nn.dynamic_int4 import DynamicQLinearInt4
from torchq.nn.float_modules import is_experts
from torchq.nn.leaf import QuantizedLeaf
from torchq.nn.module import QModule
from torchq.quantization.ranges import check_choice
from torchq.serialization.graph_text import GRAPH_KEY

Linear = DynamicQLinear | DynamicQLinearInt4
_REMEDY = (
    "Quantize the float model with torchq.QConfig(dynamic=True), or add weight_bits=4 and a "
    "group_size that divides the inputs; keep other layers float with overrides."
)


def to_compressed_tensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    scheme_4bit: Literal["W4A16", "W4A8"] = "W4A16",
) -> None:
    """Write a folder that transformers, vLLM and :func:`from_compressed_tensors` load.

    The linear layers keep their integers and scales, so ``from_compressed_tensors`` gives the same
    bits. Other readers quantize sources in their own way: W8A8 has one symmetric scale for each row
    of a source. The rest of the model becomes float, and so does a layer that is tied to an
    embedding.

    Args:
        model: of transformers, with dynamic linear layers in int8 or 4 bits.
        path: of the folder; files of the same names in it are replaced.
        scheme_4bit: what other readers do with the sources of 4-bit weights: leave them in float,
            or quantize each row to int8.

    Raises:
        TypeError: the model is not one of transformers.
        ValueError: no layer or another kind of layer is quantized, which the message names;
            ``path`` is a file.

    Example::

        qmodel = torchq.quantize(model, None, inputs, torchq.QConfig(dynamic=True, weight_bits=4))
        torchq.to_compressed_tensors(qmodel, "model-W4A16")
    """
    check_choice("to_compressed_tensors", "scheme_4bit", scheme_4bit, ("W4A16", "W4A8"))
    save = getattr(type(model), "save_pretrained", None)
    if not isinstance(model, nn.Module) or save is None or not hasattr(model, "config"):
        raise TypeError(
            "torchq.to_compressed_tensors: model must be one of transformers, got "
            f"{kind_text(model)}. Use torchq.save for other models."
        )
    if Path(path).is_file():
        raise ValueError(
            f"torchq.to_compressed_tensors: path must be a folder, got the file '{path}'. Pass the "
            "name of a new folder."
        )
    layers = _layers(model)
    own = [n for n, module in model.named_modules() if isinstance(module, QuantizedLeaf)]
    state = {
        key: tensor
        for key, tensor in model.state_dict().items()
        if not _is_of_graph(key) and not _is_within(key, own)
    }
    for name, layer in layers.items():
        written = _int8(layer) if isinstance(layer, DynamicQLinear) else _int4(layer, scheme_4bit)
        bias = {} if layer.bias is None else {"bias": layer.bias}
        state |= {f"{name}.{key}": value for key, value in {**written, **bias}.items()}
    plain = copy.copy(model)  # of which transformers saves another configuration and no packing
    vars(plain).pop("hf_quantizer", None)
    config: Any = copy.deepcopy(model.config)
    config.quantization_config = _scheme(model, layers, scheme_4bit)
    vars(plain)["config"] = config
    (Path(path) / INDEX).unlink(missing_ok=True)  # readers would take the files that it names
    save(plain, Path(path), state_dict=state)


def _layers(model: nn.Module) -> dict[str, Linear]:
    """Return the quantized linear layers by name; raise ValueError where one has no form.

    A layer that is tied to an embedding is left out: its weight is in the folder, in float.
    """
    ties = getattr(model, "all_tied_weights_keys", {})
    tied = {key.removesuffix(".weight") for key in (*ties, *ties.values())}
    found, problems, left_out = dict[str, Any](), dict[str, str](), list[str]()
    for name, module in model.named_modules():
        if _is_of_graph(name) or _is_within(name, (*found, *problems, *left_out)):
            continue
        if is_experts(module):
            problems[name] = "has experts"
        elif not isinstance(module, QModule):
            continue
        elif not isinstance(module, QuantizedLeaf):
            problems[name] = f"is a {type(module).__name__}"
        elif name in tied:
            left_out.append(name)
        elif why := _why_not(module):
            problems[name] = why
        else:
            found[name] = module.layer
    if problems or not found:
        got = "; ".join(f"'{name}' {why}" for name, why in [*problems.items()][:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            "torchq.to_compressed_tensors: model must have dynamic linear layers and no other "
            f"quantized ones, got {got or 'none'}{more}. {_REMEDY}"
        )
    return found


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in modules)


def _is_of_graph(name: str) -> bool:
    return f".{GRAPH_KEY}." in f".{name}."


def _why_not(leaf: QuantizedLeaf) -> str:
    """Return why a layer has no form in the files, or ""."""
    layer = leaf.layer
    if not isinstance(layer, DynamicQLinear | DynamicQLinearInt4):
        return f"is a {type(layer).__name__}"
    if leaf._turned:
        return "is a Conv1D"
    if layer.src_factor is not None:
        return "has factors for the channels of its source"
    if isinstance(layer, DynamicQLinear):
        return "" if layer.per_row else "has one scale for all rows of its source"
    if layer.in_features % layer.group_size:
        return f"has {layer.in_features} inputs in groups of {layer.group_size}"
    return ""


def _int8(layer: DynamicQLinear) -> dict[str, Tensor]:
    scale = layer.weight_scale.reshape(-1, 1).clone()
    return {"weight": layer.packed().unpack(), "weight_scale": scale}


def _int4(layer: DynamicQLinearInt4, scheme: str) -> dict[str, Tensor]:
    codes, scale, zero = layer.packed().unpack()
    found = {"weight_scale": scale.to(torch.bfloat16)}  # which they are
    if scheme == "W4A8":
        found["weight"] = codes.to(torch.int8) - 8
        if not layer.symmetric:
            found["weight_zero_point"] = zero.to(torch.int8) - 8
        return found
    found["weight_packed"] = pack_nibbles(codes)
    found["weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64, device="cpu")
    if not layer.symmetric:
        found["weight_zero_point"] = pack_nibbles(zero.t()).t().contiguous()
    return found


def _scheme(model: nn.Module, layers: dict[str, Linear], scheme_4bit: str) -> dict[str, object]:
    """Return the quantization_config of config.json."""
    kinds = dict[tuple[int, bool], list[str]]()
    for name, each in layers.items():
        kind = (0, True) if isinstance(each, DynamicQLinear) else (each.group_size, each.symmetric)
        kinds.setdefault(kind, []).append(name)
    groups: dict[str, dict[str, object]] = {}
    for (size, symmetric), names in kinds.items():
        only = len(kinds) == 1
        groups[f"group_{len(groups)}"] = {
            "targets": ["Linear"] if only else _both_names(model, names),
            "weights": _weights(size, symmetric),
            "input_activations": None if size and scheme_4bit == "W4A16" else _ROWS,
            "output_activations": None,
            "format": PACKED if size and scheme_4bit == "W4A16" else INT,
        }
    forms = {group["format"] for group in groups.values()}
    linear = (nn.Linear, QuantizedLeaf)
    floats = [
        name
        for name, module in model.named_modules()
        if isinstance(module, linear) and name not in layers and not _is_of_graph(name)
    ]
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": _both_names(model, floats),
    }


def _both_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return names of layers in the model and in the files, where transformers renames some.

    transformers reads the former, and vLLM the latter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    empty = torch.empty(0, dtype=torch.float32, device="cpu")
    suffix, found = ".weight", dict[str, None]()
    for name in names:
        stored = revert_weight_conversion(model, {f"{name}{suffix}": empty})
        found |= dict.fromkeys([name, *(key.removesuffix(suffix) for key in stored)])
    return [*found]


def _weights(group_size: int, symmetric: bool) -> dict[str, object]:
    if not group_size:
        return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    form = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    return {**form, "strategy": "group", "group_size": group_size}


_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
