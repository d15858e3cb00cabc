# SPDX-License-Identifier: Apache-2.0
"""The observers of a prepared model, and a digest of its weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from torchq.models.attached import computing_modules
from torchq.quantization.observers import Observer


def observers(prepared: nn.Module) -> dict[str, Observer]:
    """Return the observers of a prepared model by qualified name."""
    return {name: m for name, m in computing_modules(prepared).items() if isinstance(m, Observer)}


def weights_digest(prepared: nn.Module) -> str:
    """Return a digest of the float model: its parameters and its persistent buffers."""
    own = {id(t) for m in prepared.modules() if isinstance(m, Observer) for t in m.buffers()}
    state = nn.Module.state_dict(prepared, keep_vars=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        if id(tensor) not in own and "torchq_graph." not in name:
            values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()
