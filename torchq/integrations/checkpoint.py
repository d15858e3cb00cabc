# SPDX-License-Identifier: Apache-2.0
"""Quantized layers of a folder that transformers wrote."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from torchq.functional.placeholders import limited_placeholders
from torchq.nn.experts import QExperts
from torchq.nn.leaf import Leaf
from torchq.nn.module import LAYOUT_VERSION, read_spec
from torchq.serialization.states import quantized_modules
from torchq.serialization.tensor_file import digest, is_short

QUANTIZED = (Leaf, QExperts)
"""What takes the place of float modules."""
_DIGESTS = "torchq_digests"
_STORED = {"layer.weight": "weight", "rows": "weight"}
"""Names that packed tensors of a quantized layer have in files: those of the float weight.

Their shapes are others. So transformers refuses the folder where torchq is not registered; under
names of their own they would be left over, and the float weights random. Earlier releases did so.
"""


def stored_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of a model with the names that files have."""
    modules = model.named_modules(remove_duplicate=False)
    leaves = [name for name, module in modules if isinstance(module, Leaf)]
    names = {f"{n}.{own}": f"{n}.{stored}" for n in leaves for own, stored in _STORED.items()}
    return {names.get(key, key): value for key, value in model.state_dict().items()}


def packed_name(leaf: nn.Module) -> str:
    """Return the layer's own name of its packed tensor."""
    return next(name for name in _STORED if name in leaf.state_dict())


def stored_name(name: str, key: str, places: Container[str]) -> str:
    """Return the name in files of a layer's tensor; ``places`` are the names that there are."""
    stored = f"{name}.{_STORED.get(key, key)}"
    return stored if stored in places else f"{name}.{key}"


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return metadata of safetensors files: digests of the quantized layers, without names.

    transformers renames layers while it saves and loads them.
    """
    leaves = (module for module in model.modules() if isinstance(module, QUANTIZED))
    return {_DIGESTS: " ".join(sorted({digest(leaf.state_dict()) for leaf in leaves}))}


def read_leaves(files: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return name -> quantized layer, its tensors still to be loaded.

    The files say which layers are quantized, so nothing depends on how they were chosen.

    Args:
        files: of safetensors; digests in their metadata are checked.

    Raises:
        ValueError: there are no such files, or they are damaged, incomplete or of another version.
    """
    paths = list(files or ())
    with ExitStack() as stack:
        opened = [stack.enter_context(_opened(path)) for path in paths]
        places = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - no mapping
        if long := [key for key in places if not is_short(key)]:
            raise _refused(paths, f"the name {long[0][:60]!r}..., which is too long")
        specs = {k: f.get_tensor(k) for k, f in places.items() if f".{k}".endswith(".spec")}
        if not specs:
            raise _refused(paths, "no quantized layer in them")
        for key, spec in specs.items():
            if (version := read_spec(spec).get("version")) != LAYOUT_VERSION:
                raise _refused(paths, f"'{key}' of layout version {version}, not {LAYOUT_VERSION}")
        with limited_placeholders(_bytes_of(paths)):
            leaves = quantized_modules(specs)
        states = {
            name: {key: stored_name(name, key, places) for key in leaf.state_dict()}
            for name, leaf in leaves.items()
        }
        wanted = {key for state in states.values() for key in state.values()}
        if missing := sorted(wanted - places.keys()):
            raise _refused(paths, f"none of {missing[:5]}")
        known = {d for f in opened for d in (f.metadata() or {}).get(_DIGESTS, "").split()}
        found = {
            name: digest({short: places[key].get_tensor(key) for short, key in state.items()})
            for name, state in (states if known else {}).items()  # earlier releases wrote none
        }
        if changed := [name for name, own in found.items() if own not in known]:
            raise _refused(paths, f"other tensors of {changed[:5]} than were saved")
        if known - {*found.values()}:
            raise _refused(paths, "fewer quantized layers than were saved")
    return leaves


@contextmanager
def refusing(files: Iterable[str] | None) -> Iterator[None]:
    """Turn what changed files raise, which may be anything, into ValueErrors that name them."""
    try:
        yield
    except (ImportError, MemoryError):  # these are of the machine, not of the files
        raise
    except Exception as error:
        if str(error).startswith("torchq.TorchqConfig"):
            raise
        raise _refused(list(files or ()), f"{type(error).__name__}: {error}") from error


def _bytes_of(paths: Iterable[str]) -> int:
    """Return the size of files; an index may name one in many ways, such as "./a" for "a"."""
    found = map(os.stat, paths)
    return sum({(own.st_dev, own.st_ino): own.st_size for own in found}.values())


def _opened(path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise _refused([path], str(error)) from error


def _refused(files: list[str], why: str) -> ValueError:
    return ValueError(
        "torchq.TorchqConfig: a folder whose config.json names torchq must hold the safetensors "
        f"files that save_pretrained wrote, got {files}: {why}. Load the float model "
        "with quantization_config=torchq.TorchqConfig(), and save it anew."
    )
