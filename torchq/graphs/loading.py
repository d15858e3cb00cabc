# SPDX-License-Identifier: Apache-2.0
"""Loads a state into a graph of many modules.

``nn.Module.load_state_dict`` looks at all names for each module, which takes a minute for 10,000 of
them. Here each name is looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def by_owner(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each module, by its name and their full names."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        found.setdefault(key.rpartition(".")[0], {})[key] = value
    return found


def load_each(
    graph: nn.Module, state: Mapping[str, Tensor], assign: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state, as ``load_state_dict(state, strict=False)`` does.

    Returns:
        Names that the state lacks, and names that the graph has no tensor for.

    Raises:
        RuntimeError: shapes or dtypes differ.
    """
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    owned, known = by_owner(state), set[str]()
    metadata: dict[str, object] = {"assign_to_params_buffers": True} if assign else {}
    for name, module in graph.named_modules(remove_duplicate=False):
        known.add(name)
        prefix, own = (f"{name}." if name else ""), dict(owned.get(name, {}))
        given = dict(metadata), True, missing, unexpected, errors
        module._load_from_state_dict(own, prefix, *given)
    unexpected += [key for name, own in owned.items() if name not in known for key in own]
    if errors:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(graph).__name__}: " + "; ".join(errors)
        )
    return missing, unexpected
