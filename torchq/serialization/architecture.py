# SPDX-License-Identifier: Apache-2.0
"""Compares the model that a file was saved from with the one that it is loaded into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchq.capture.module_kinds import MATMUL
from torchq.convert.swap.leaves import equivalent_layer
from torchq.graphs.loading import by_owner
from torchq.nn.batch_norm import weight_of
from torchq.nn.experts import QExperts
from torchq.nn.float_modules import expert_weights
from torchq.nn.leaf import QuantizedLeaf
from torchq.serialization.states import outer_of, under

_SHAPING = (
    *("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride"),
    *("padding", "dilation", "groups", "padding_mode", "output_padding"),
    *("input_size", "hidden_size", "num_layers", "proj_size", "bidirectional", "batch_first"),
    *("num_embeddings", "embedding_dim", "padding_idx", "mode", "include_last_offset"),
)
"""Attributes of float layers that quantized ones have, too, and that their results depend on."""
_MOST = 20


def check_architecture(
    where: str,
    model: nn.Module,
    leaves: Mapping[str, nn.Module],
    loaded: nn.Module,
    given: Mapping[str, Tensor],
) -> None:
    """Raise ValueError if layers of a file take the places of other ones, or tensors do not fit.

    Args:
        where: begins the message.
        model: float; the file replaces some of its layers.
        leaves: quantized layers of the file by name.
        loaded: the model with these layers in their places.
        given: state that the file has, without graphs.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    own, found = nn.Module.state_dict(loaded, keep_vars=True), list[str]()
    for name, leaf in leaves.items():
        if name in modules:
            found += _of_layers(name, leaf, modules[name])
        else:
            found.append(f"'{name}' is a {_kind(leaf)} in the file, not in the model")
    found += _of_tensors(*({k: v for k, v in state.items() if outer_of(k, leaves) is None}
                           for state in (given, own)))  # fmt: skip
    found += _of_shared(loaded, given)
    if found:
        more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise ValueError(
            f"{where} and the model must be of one architecture, got these differences: "
            f"{'; '.join(found[:_MOST])}{more}. Pass the architecture the file was saved from, or "
            "quantize this one."
        )


def _of_layers(name: str, leaf: nn.Module, module: nn.Module) -> Iterator[str]:
    """Yield how a float layer differs from the one that a quantized layer was made of."""
    if isinstance(module, nn.Identity) and not isinstance(leaf, QuantizedLeaf):
        return  # keeps the place of a module that a user composes the model of
    kind, pairs = _kind(leaf), dict[str, tuple[object, object]]()
    expected = getattr(nn, kind, None)
    if isinstance(leaf, QExperts):
        pairs = _of_experts(leaf, module)
    elif isinstance(expected, type):
        layer: nn.Module | None = module
        if isinstance(leaf, QuantizedLeaf) and not isinstance(module, MATMUL):
            layer = equivalent_layer(module)  # of another class that computes the same
            if layer is not None:
                pairs = {"weight": (leaf._shape, list(weight_of(layer).shape))}
        if layer is None and not type(module).__module__.startswith("torch.nn."):
            return  # its code is traced with weights, and may have none
        if not isinstance(layer, expected):
            yield f"'{name}' is a {kind} in the file, a {type(module).__name__} in the model"
            return
        if layer is module:
            names = [key for key in _SHAPING if hasattr(leaf, key) and hasattr(module, key)]
            pairs = {key: (getattr(leaf, key), getattr(module, key)) for key in names}
    for key, (in_file, in_model) in pairs.items():
        if in_file != in_model:
            full = f"{name}.{key}".lstrip(".")
            yield f"'{full}' is {in_file} in the file, {in_model} in the model"


def _kind(leaf: nn.Module) -> str:
    """Return the class of torch.nn that a quantized layer has the place of."""
    layer = leaf.layer if isinstance(leaf, QuantizedLeaf) else leaf
    return re.sub(r"^(Dynamic)?Q|Int4$", "", type(layer).__name__)


def _of_experts(leaf: QExperts, module: nn.Module) -> dict[str, tuple[object, object]]:
    """Return the shapes of stacked weights in the file and in the model."""
    pairs: dict[str, tuple[object, object]] = {}
    for key, layer in zip(expert_weights(module), (leaf.up, leaf.down), strict=True):
        shape = [layer.out_features, layer.in_features]
        shape = shape[::-1] if module.is_transposed else shape
        pairs[key] = [layer.groups, *shape], [*getattr(module, key).shape]
    return pairs


def _of_tensors(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield how the tensors of float modules differ."""
    for key in sorted(given.keys() | own.keys()):
        in_file, in_model = (
            [*state[key].shape] if key in state else None for state in (given, own)
        )
        if in_file is None:
            yield f"'{key}' is {in_model} in the model, not in the file"
        elif in_model is None:
            yield f"'{key}' is {in_file} in the file, not in the model"
        elif in_file != in_model:
            yield f"'{key}' is {in_file} in the file, {in_model} in the model"


def _of_shared(model: nn.Module, given: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield modules that the model has under several names, and the file with several values.

    Those of one name would be computed with under all of them.
    """
    names, owned = dict[nn.Module, str](), by_owner(given)
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(module, name)
        for key, value in owned.get(name, {}).items() if first != name else ():
            other = given.get(under(first, key.rpartition(".")[2]), value)
            if other is not value and not _are_equal(other, value):
                yield f"'{key}' is that of '{first}' in the model, another one in the file"
                break


def _are_equal(first: Tensor, second: Tensor) -> bool:
    alike = (first.dtype, first.shape) == (second.dtype, second.shape)
    return alike and torch.equal(first, second)
