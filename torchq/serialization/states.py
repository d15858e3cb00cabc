# SPDX-License-Identifier: Apache-2.0
"""From the tensors of a file to modules; each step takes time in proportion to the tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq.attributes.json_text import values_in
from torchq.functional.placeholders import (
    OF_A_NAME,
    count,
    count_modules,
    replaced_placeholders,
)
from torchq.nn.module import QModule, read_spec, text_bytes

State = Mapping[str, Tensor]
_LONGEST_SPEC = 1 << 20
"""Bytes; a module writes its own anew, which takes ten times as many."""


def under(name: str, key: str) -> str:
    """Return the name that something of a module has in the state of the model."""
    return f"{name}.{key}" if name else key


def inside(state: State, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    start = f"{prefix}." if prefix else ""
    return {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}


def outer_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the shortest of these names that a name is, or begins with."""
    if "" in modules:
        return ""
    end = name.find(".")
    while end >= 0:
        if name[:end] in modules:
            return name[:end]
        end = name.find(".", end + 1)
    return name if name in modules else None


def quantized_modules(state: dict[str, Tensor]) -> dict[str, nn.Module]:
    """Return name -> quantized module, from the specs in a state.

    Raises:
        ValueError: a spec is not of torchq, or the specs ask for more than the file allows.
    """
    modules: dict[str, nn.Module] = {}
    made: dict[int, nn.Module] = {}  # of a spec: a module that has several names is one
    # By text, since many layers have the same: a module, and its buffers, which copies share.
    empty: dict[bytes, tuple[nn.Module, dict[int, Tensor]]] = {}
    # Outer modules first: a quantized module may itself hold one.
    for name in sorted(_with_spec(state), key=lambda name: name.count(".") + bool(name)):
        spec = state[under(name, "spec")]
        module, is_known = made.get(id(spec)), id(spec) in made
        if module is None:
            text = text_bytes(spec)
            if len(text) > _LONGEST_SPEC:
                raise ValueError(
                    f"torchq.load: the spec of '{name[:60]}' must have at most {_LONGEST_SPEC} "
                    f"bytes, got {len(text)}. Was it written by torchq.save?"
                )
            count("bytes of texts", len(text))
            count("values of specs", values_in(text))
            if text in empty:
                count_modules(OF_A_NAME * sum(len(m._modules) for m in empty[text][0].modules()))
            else:
                count_modules()
                with replaced_placeholders():
                    own = _without_values(build(read_spec(spec)))
                empty[text] = own, {id(buffer): buffer for buffer in own.buffers()}
            own, shared = empty[text]
            module = made[id(spec)] = copy.deepcopy(own, dict(shared))
            _fill(module, state, name, text)
        outer = outer_of(name, modules)
        if outer is None:
            modules[name] = module
        else:
            _put(modules[outer], name[len(outer) + bool(outer) :], module, is_known)
    return modules


def _with_spec(state: State) -> Iterator[str]:
    return (k.removesuffix("spec").rstrip(".") for k in state if f".{k}".endswith(".spec"))


def _put(outer: nn.Module, name: str, module: nn.Module, is_known: bool) -> None:
    """Put a module in the place of a part of a quantized one.

    Raises:
        ValueError: there is no such part, or the module is a part of another one: levels of parts
            that have two names each would be 2^levels parts.
    """
    parent, _, own = name.rpartition(".")
    owner = outer.get_submodule(parent)
    empty = vars(owner).get(own, owner) is None and not own.startswith("_")
    if is_known and owner._modules.get(own) is module:  # the outer one has two names
        return
    if is_known or (own not in owner._modules and not empty):
        raise ValueError(
            f"torchq.load: the parts of {type(outer).__name__} must be its own, got '{name[:60]}'. "
            "Was it written by torchq.save?"
        )
    setattr(owner, own, module)


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy of a module that takes no memory for its tensors."""
    return copy.deepcopy(module, {id(own): own.to("meta") for own in module.buffers()})


def _fill(module: nn.Module, state: State, name: str, text: bytes) -> None:
    """Give a module of this spec the tensors of a state; loading refuses what does not fit."""
    for key, own in module._buffers.items():
        given = state.get(under(name, key))
        if own is None or given is None or key in module._non_persistent_buffers_set:
            continue
        if key == "spec" and text != module._spec_text.encode():  # type: ignore[operator,union-attr]
            continue
        if (own.shape, own.dtype) == (given.shape, given.dtype):
            module._buffers[key] = given


Held = list[tuple[dict[str, Any], str, Tensor]]
"""Tables of modules, names in them, and their tensors."""


def held_by(model: nn.Module) -> Held:
    """Return the tensors of float modules, which :func:`replace_held` takes."""
    found: Held = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        if not isinstance(module, QModule):
            found += [
                (held, *item) for held in tables for item in held.items() if _is_plain(item[1])
            ]
    return found


def replace_held(before: Held) -> None:
    """Give tensors that a model had the values of those that it has now in their places.

    Its code may keep them in lists, too, as tied weights.
    """
    for held, name, old in before:
        new: Any = held.get(name)
        if _is_plain(new) and new.device == old.device:
            old.data = new.data


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def set_apart(modules: Iterable[nn.Module]) -> None:
    """Copy each tensor of a packed weight that another module has, too, once for all its names.

    The code of a model and the caller of a graph may write to what they are given, and the sums and
    bounds of packed weights were checked once.

    Raises:
        ValueError: packed weights share a part of their tensors. Another state for one of them
            would change the other.
    """
    parts = list(modules)
    packed = {id(m): _addresses(m) for m in parts if isinstance(m, QModule)}
    checked = _checked(weight for weights in packed.values() for weight in weights)
    copies: dict[tuple[int, type], Tensor] = {}
    for module in parts:
        own = set[int]().union(*packed.get(id(module), ()))
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for held in tables:
            for name, tensor in held.items():
                if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                    continue  # not of a file
                address = tensor.data_ptr()
                if address in checked and address not in own:
                    key = address, type(tensor)
                    if key not in copies:
                        copies[key] = copy.deepcopy(tensor)
                    held[name] = copies[key]


def _checked(weights: Iterable[frozenset[int]]) -> set[int]:
    """Return the addresses of all packed weights."""
    known: dict[int, frozenset[int]] = {}
    for weight in weights:
        if any(known.setdefault(address, weight) != weight for address in weight):
            raise ValueError(
                "torchq.load: packed weights of layers must share all of their tensors or none, "
                "got layers that share a part. Was it written by torchq.save?"
            )
    return {*known}


def _addresses(module: QModule) -> list[frozenset[int]]:
    """Return where the tensors of each packed weight of a module are."""
    weights = module._packed_weights().values()
    return [frozenset(p.data_ptr() for p in w.tensors().values()) - {0} for w in weights]


def build(spec: dict[str, object]) -> QModule:
    """Build a quantized module of this spec, its tensors still to be loaded."""
    name = spec["class"]
    if name not in QModule.registry:
        raise ValueError(
            f"torchq.load: the spec's class must be one of {sorted(QModule.registry)}, got "
            f"'{name}'. The file was written by another version of torchq: quantize the model "
            "again, and save it with this one."
        )
    return QModule.registry[name].from_spec(spec)
