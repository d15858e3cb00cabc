# SPDX-License-Identifier: Apache-2.0
"""Quantized layers of a folder that transformers wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torchq.functional.placeholders import limited_placeholders
from torchq.nn.module import LAYOUT_VERSION, read_spec
from torchq.serialization import quantized_modules


def read_leaves(files: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return name -> quantized layer, its tensors still to be loaded.

    The files say which layers are quantized, so nothing depends on how they were chosen.

    Args:
        files: of safetensors; only the layers' specs are read.

    Raises:
        ValueError: there are no such files, or they are incomplete or of another version.
    """
    names: set[str] = set()
    specs: dict[str, Tensor] = {}
    for path in files or ():
        with _opened(path) as file:
            names.update(file.keys())
            for key in file.keys():  # noqa: SIM118 - no mapping
                if f".{key}".endswith(".spec"):
                    specs[key] = file.get_tensor(key)
    if not specs:
        raise _refused(files, "no quantized layer in them")
    for key, spec in specs.items():
        if (version := read_spec(spec).get("version")) != LAYOUT_VERSION:
            raise _refused(files, f"'{key}' of layout version {version}, not {LAYOUT_VERSION}")
    with limited_placeholders(sum(map(os.path.getsize, files or ()))):
        leaves = quantized_modules(specs)
    wanted = {f"{name}.{key}" for name, leaf in leaves.items() for key in leaf.state_dict()}
    if missing := sorted(wanted - names):
        raise _refused(files, f"none of {missing[:5]}")
    return leaves


def _opened(path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise _refused([path], str(error)) from error


def _refused(files: Iterable[str] | None, why: str) -> ValueError:
    return ValueError(
        "torchq.TorchqConfig: a folder whose config.json names torchq must hold the safetensors "
        f"files that save_pretrained wrote, got {list(files or ())}: {why}. Load the float model "
        "with quantization_config=torchq.TorchqConfig(), and save it anew."
    )
