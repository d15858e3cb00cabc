# SPDX-License-Identifier: Apache-2.0
"""Loads a state into a model of many modules.

``nn.Module.load_state_dict`` looks at all names for each module, which takes a minute for 10,000 of
them. Here each name is looked at once, and once more for each module around it that has hooks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

_FAKES = ("torch.ao.quantization.", "torchao.quantization.")
"""Where fake quantizers of torch.ao and torchao are, which share their kernels."""


def by_owner(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each module, by its name and their full names."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        found.setdefault(key.rpartition(".")[0], {})[key] = value
    return found


def load_each(
    model: nn.Module, state: Mapping[str, Tensor], assign: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state, as ``load_state_dict(state, strict=False)`` does.

    Returns:
        Names that the state lacks, and names that the model has no tensor for.

    Raises:
        RuntimeError: shapes or dtypes differ.
    """
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    owned, known = by_owner(state), dict[str, nn.Module]()
    names = sorted(owned)
    metadata: dict[str, object] = {"assign_to_params_buffers": True} if assign else {}
    for name, module in model.named_modules(remove_duplicate=False):
        known[name] = module
        prefix, lacks_none = (f"{name}." if name else ""), list[str]()
        given = dict(metadata), True, missing, lacks_none, errors
        looks_around = _looks_around(module)
        inside = [n for n in (_within(names, name) if looks_around else [name]) if n in owned]
        own = {key: value for inner in inside for key, value in owned[inner].items()}
        kept = dict(own)
        if wrong := _make_own(module, kept, prefix):
            errors += wrong
            continue
        module._load_from_state_dict(kept, prefix, *given)
        if not looks_around:
            unexpected += lacks_none
            continue
        # It may rename or convert what is below it, and judges names that the modules there know.
        if kept.keys() != own.keys() or any(kept[k] is not v for k, v in own.items()):
            for inner in inside:
                del owned[inner]
            for inner, part in by_owner(kept).items():
                if names[(at := bisect_left(names, inner)) : at + 1] != [inner]:
                    names.insert(at, inner)
                owned.setdefault(inner, {}).update(part)
        # its own, and those that it took out for a graph, which no module here is asked for
        own_names = (k for k in lacks_none if k.rpartition(".")[0] == name or k not in kept)
        unexpected += own_names
    unexpected += [key for name, own in owned.items() if name not in known for key in own]
    for module in reversed(known.values()):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys(missing, unexpected))
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}: " + "; ".join(errors)
        )
    return missing, unexpected


def _within(names: list[str], name: str) -> list[str]:
    """Return those of sorted names that are a module's, or of what is in it."""
    if not name:
        return names.copy()
    at, start = bisect_left(names, name), f"{name}."
    first = bisect_left(names, start)
    last = bisect_right(names, start, first, key=lambda other: other[: len(start)])
    return [other for other in names[at : at + 1] if other == name] + names[first:last]


def _make_own(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> list[str]:
    """Replace the tensors for a fake quantizer of PyTorch by copies; return errors for shapes.

    Some take any shapes, and kernels of torch trust these to fit together. Calls write to scales
    and zero points, which a file can make second names of other tensors.
    """
    if not any(cls.__module__.startswith(_FAKES) for cls in type(module).__mro__):
        return []
    errors, known = list[str](), {**module._parameters, **module._buffers}
    for key, given in tensors.items():
        own = known.get(key.removeprefix(prefix))
        if own is not None and own.shape != given.shape:
            shapes = f"{list(own.shape)}, got {list(given.shape)}"
            errors.append(f"'{key}' of the state must have shape {shapes}")
        elif own is not None:  # a file may have many more names of a large tensor
            tensors[key] = given.clone()
    return errors


def _looks_around(module: nn.Module) -> bool:
    """Return whether loading a module may read or change names that are not its own tensors."""
    own = type(module)._load_from_state_dict.__module__.partition(".")[0]
    return own not in ("torch", "torchq") or bool(module._load_state_dict_pre_hooks)
