# SPDX-License-Identifier: Apache-2.0
"""Loads a state into a model of many modules.

``nn.Module.load_state_dict`` looks at all names for each module, which takes a minute for 10,000 of
them. Here each name is looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys


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
    metadata: dict[str, object] = {"assign_to_params_buffers": True} if assign else {}
    for name, module in model.named_modules(remove_duplicate=False):
        known[name] = module
        prefix, lacks_none = (f"{name}." if name else ""), list[str]()
        given = dict(metadata), True, missing, lacks_none, errors
        looks_around = _looks_around(module)
        own = dict(owned.get(name, {}))
        if looks_around:
            own = {k: v for part in owned.values() for k, v in part.items() if k.startswith(prefix)}
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
            rest = {k: v for p in owned.values() for k, v in p.items() if k not in own}
            owned = by_owner(rest | kept)
        unexpected += [key for key in lacks_none if key.rpartition(".")[0] == name]
    unexpected += [key for name, own in owned.items() if name not in known for key in own]
    for module in reversed(known.values()):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, _IncompatibleKeys(missing, unexpected))
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}: " + "; ".join(errors)
        )
    return missing, unexpected


def _make_own(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> list[str]:
    """Replace the tensors for a fake quantizer of torch.ao by copies; return errors for shapes.

    Some take any shapes, and kernels of torch trust these to fit together. Calls write to scales
    and zero points, which a file can make second names of other tensors.
    """
    if not any(cls.__module__.startswith("torch.ao.quantization.") for cls in type(module).__mro__):
        return []
    errors, known = list[str](), {**module._parameters, **module._buffers}
    for key, given in tensors.items():
        own = known.get(key.removeprefix(prefix))
        tensors[key] = given.clone()
        if own is not None and own.shape != given.shape:
            shapes = f"{list(own.shape)}, got {list(given.shape)}"
            errors.append(f"'{key}' of the state must have shape {shapes}")
    return errors


def _looks_around(module: nn.Module) -> bool:
    """Return whether loading a module may read or change names that are not its own tensors."""
    own = type(module)._load_from_state_dict.__module__.partition(".")[0]
    return own not in ("torch", "torchq") or bool(module._load_state_dict_pre_hooks)
