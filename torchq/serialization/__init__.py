# SPDX-License-Identifier: Apache-2.0
"""Saves and loads converted models: one file of plain tensors.

Each quantized module describes itself in its ``spec`` tensor, so the file needs nothing else: no
pickle, no calibration, no observers. The file is a safetensors file, whether or not that package is
installed, with a digest that ``torchq.load`` checks.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import overload

import torch
from torch import Tensor, nn

from torchq.attributes.arguments import check_type
from torchq.attributes.json_text import JsonObject, read_json
from torchq.capture.one_call import FLAGS, is_one_call, without_observers
from torchq.convert.dispatch import dispatches, full_state, memory
from torchq.convert.sources import name_sources
from torchq.convert.swap.pretrained import refuse_save_pretrained
from torchq.convert.swap.weights import leave_fast_paths, settled, split_attention
from torchq.functional.placeholders import OF_A_NAME, count, count_modules, limited_placeholders
from torchq.graphs.code import with_code
from torchq.graphs.loading import load_each
from torchq.graphs.module import QuantizedGraph
from torchq.models.conversions import refusing_conversions
from torchq.models.inputs import Model, working_copy
from torchq.nn.experts import QExperts
from torchq.nn.fake_quantize import FakeQuantize
from torchq.nn.module import QModule, text_bytes
from torchq.quantization.observers import Observer
from torchq.serialization.architecture import check_architecture
from torchq.serialization.call_text import CALL_KEY, describe, restore
from torchq.serialization.graph_text import GRAPH_KEY, decode, encode
from torchq.serialization.plain_modules import plain_module
from torchq.serialization.report_text import REPORT_KEY, read_report, write_report
from torchq.serialization.states import (
    held_by,
    inside,
    outer_of,
    quantized_modules,
    replace_held,
    set_apart,
    under,
)
from torchq.serialization.tensor_file import is_short, read_tensors, write_tensors

ALIAS_KEY = "torchq_aliases"
"""Name of the tensor that tells which names stand for another one's tensor."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the state of a converted model: a safetensors file, whole or not at all.

    An error or a crash leaves the file that was there. Other readers of safetensors read it too.

    Args:
        model: from :func:`torchq.convert`, or with FakeQuantize modules; its float modules are
            saved too.
        path: of the file.

    Raises:
        NotImplementedError: its graph calls functions that are not of torch, or a tensor has a
            dtype that safetensors does not know.
        OSError: the file cannot be written.
        TypeError: ``path`` is no path.
        ValueError: ``model`` was not converted.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(16, 4), nn.Tanh()).eval(), torch.randn(8, 16)
        >>> qmodel = torchq.quantize(model, [x])
        >>> torchq.save(qmodel, "model.safetensors")
        >>> torch.equal(torchq.load("model.safetensors", model)(x), qmodel(x))
        True
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"torchq.save: path must be a str or a Path, got {type(path).__name__}. For a buffer, "
            "torch.save(model, buffer) keeps the whole model."
        )
    report = getattr(model, "torchq_report", None)
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    kinds = (QModule, FakeQuantize)
    converted = report is not None or any(isinstance(m, kinds) for m in parts)
    if not converted or any(isinstance(m, Observer) for m in parts):
        raise ValueError(
            f"torchq.save: model must come from torchq.convert, got {type(model).__name__}, which "
            "has observers or nothing quantized. torchq.save_calibration is for prepared models."
        )
    state = _state(model)
    for dispatch in dispatches(model):
        state[under(dispatch.name, GRAPH_KEY)] = encode(dispatch.graph)  # type: ignore[arg-type]
        state[under(dispatch.name, CALL_KEY)] = describe(dispatch)
    if isinstance(model, QuantizedGraph):
        state[GRAPH_KEY] = encode(model)
    if report is not None:
        state[REPORT_KEY] = write_report(model)
    write_tensors("torchq.save", path, state)


@overload
def load(path: str | os.PathLike[str], model: None = None, mmap: bool = False) -> nn.Module: ...


@overload
def load(path: str | os.PathLike[str], model: Model, mmap: bool = False) -> Model: ...


def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, mmap: bool = False
) -> nn.Module:
    """Load a converted model from a file and the float model it came from.

    Args:
        path: written by :func:`save`.
        model: a float model of the same architecture, as it was before :func:`torchq.prepare`. It
            is copied, and its weights do not matter. None returns the graph alone. The saved model
            must then have been captured as a whole, with float modules of torch.nn only.
        mmap: map the file's weights to memory instead of reading them. Processes that map the file
            share them. Do not write to the file meanwhile; :func:`save` replaces it, which does not
            affect models that are loaded.

    Raises:
        TypeError: ``model`` is no nn.Module.
        FileNotFoundError: there is no such file.
        ValueError: the file is not of torchq.save or was damaged, a spec in it is not of torchq or
            names an unknown module class; or ``model`` is needed, or of another architecture. The
            message names every difference.
        RuntimeError: the tensors of the file's graphs do not fit together.

    Example:
        >>> model, x = nn.Sequential(nn.Linear(16, 4), nn.Tanh()).eval(), torch.randn(8, 16)
        >>> qmodel = torchq.quantize(model, [x])
        >>> torchq.save(qmodel, "model.safetensors")
        >>> alone = torchq.load("model.safetensors")  # the graph, without the model's class
        >>> torch.equal(alone(x), qmodel(x))
        True
    """
    if model is not None:
        check_type("torchq.load: model", model, nn.Module, "Pass the float model.")
    state = read_state(Path(path), mmap)
    try:
        with limited_placeholders(os.path.getsize(path)):
            return _loaded(state, model, path)
    except ValueError as error:
        if str(path) in str(error):
            raise
        text = str(error).removeprefix("torchq.load: ")
        raise ValueError(f"torchq.load: {path}: {text}") from error
    except (
        Exception
    ) as error:  # of a file without a digest, forged, or of another version: anything
        if str(error).startswith("torchq.load"):
            raise
        if model is None or type(error) is not RuntimeError:
            raise _not_ours(Path(path), f"{type(error).__name__}: {error}") from error
        raise RuntimeError(
            f"torchq.load: {path} and the model must fit together, but do not: {error} Pass the "
            "architecture the file was saved from, or copy the file anew."
        ) from error


def _loaded(
    state: dict[str, Tensor], model: nn.Module | None, path: str | os.PathLike[str]
) -> nn.Module:
    """Return what :func:`load` returns."""
    report = state.pop(REPORT_KEY, None)
    for alias, name in _json(state.pop(ALIAS_KEY, None)).items():
        if not is_short(alias):
            raise ValueError(f"names of its tensors are too long, got {alias[:60]!r}")
        state[alias] = state[name]
    # torch writes what a fused fake quantizer observes by the sizes of its source. Each once: a
    # tensor of a file may have many names.
    flags = {id(t): t for name, t in state.items() if name.rpartition(".")[2] in FLAGS}
    for flag in flags.values():
        flag.zero_()
    if GRAPH_KEY in state and (model is None or CALL_KEY not in state):
        loaded, state = _graph_alone(state)
    else:
        loaded, state = _with_class(model, state, path)
    state |= _parameters(loaded, state)
    before = held_by(loaded)
    missing, unexpected = load_each(loaded, state)
    if missing or unexpected:
        raise RuntimeError(
            f"torchq.load: {path} and the model must fit together, but the file lacks "
            f"{missing[:5]} and has {unexpected[:5]} too many. Pass the architecture the file was "
            "saved from."
        )
    graphs = [m for dispatch in dispatches(loaded) for m in dispatch.graph.modules()]
    set_apart([*loaded.modules(), *graphs])
    replace_held(before)
    refuse_save_pretrained(loaded)
    if report is not None:
        told = read_report(report)
        if hidden := told.keys() & {*loaded._modules, *loaded._parameters, *loaded._buffers}:
            raise ValueError(f"its report has the name of a part, {min(hidden)!r}")
        vars(loaded).update(told)
    return refusing_conversions(name_sources(loaded).eval().requires_grad_(False))


def _parameters(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a state, with the dtypes and strides of the model's.

    Names of one tensor share a parameter where these agree. A float convolution rounds otherwise
    for other strides.
    """
    made: dict[object, nn.Parameter] = {}
    found: dict[str, Tensor] = {}
    for name, own in model.named_parameters(remove_duplicate=False):
        if (given := state.get(name)) is not None:
            if given.dtype.itemsize < min(own.dtype.itemsize, 2):  # it would grow four times
                raise ValueError(f"'{name}' must be {own.dtype}, got {given.dtype}")
            key = id(given), own.dtype, own.stride()
            if key not in made and given.shape == own.shape:
                value = given.to(own.dtype)
                if value.stride() != own.stride():
                    value = torch.empty_like(own).copy_(value)
                made[key] = nn.Parameter(value, requires_grad=False)
            found[name] = made.get(key, given)  # of another shape: load_state_dict says so
    return found


def _json(text: Tensor | None) -> dict[str, str]:
    if text is None:
        return {}
    raw = text_bytes(text)
    count("bytes of texts", len(raw))
    return dict(read_json(raw))


def _graph_alone(state: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the graph of the whole model, without the model's class, and its tensors."""
    text = state.pop(GRAPH_KEY)
    own = inside(state, GRAPH_KEY) or state
    return _graph(text, own), own


def _graph(text: Tensor, state: dict[str, Tensor], model: nn.Module | None = None) -> nn.Module:
    """Return a graph whose tensors are still to be loaded; ``model`` has its float modules."""
    quantized, copies = quantized_modules(state), dict[int, object]()

    def module(name: str, source: str | None, plain: JsonObject | None = None) -> nn.Module:
        if source is None:
            outer = outer_of(name, quantized)
            if outer is None:
                raise KeyError(name)
            return quantized[outer].get_submodule(name[len(outer) + bool(outer) :])
        if plain is not None:
            return plain_module(plain)
        if model is None:
            raise ValueError(
                f"torchq.load: the file's graph calls the float module '{source}': model must be "
                "given. Pass a float model of the architecture the file was saved from."
            )
        part = model.get_submodule(source)
        if not is_one_call(part):  # others may read beyond tensors of a file, or run code on words
            raise ValueError(
                "torchq.load: float modules that the file's graph calls must be recurrent ones or "
                f"fake quantizers, got a {type(part).__name__}. Was it written by torchq.save?"
            )
        count_modules(OF_A_NAME * sum(1 for _ in part.modules()))  # which each name is asked for
        return copy.deepcopy(part, copies)  # each part once

    return decode(text, module, state)


def _with_class(
    model: nn.Module | None, state: dict[str, Tensor], path: str | os.PathLike[str]
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of the model with the leaves and graphs of the state, and its tensors."""
    if model is None:
        raise ValueError(
            f"torchq.load: {path} holds a model that was captured in parts, or not at all: model "
            "must be given. Pass a float model of the architecture the file was saved from."
        )
    calls = [key for key in state if f".{key}".endswith(f".{CALL_KEY}")]
    names = [key.removesuffix(CALL_KEY).rstrip(".") for key in calls]
    texts = {n: (state.pop(under(n, GRAPH_KEY)), state.pop(under(n, CALL_KEY))) for n in names}
    for name in names:
        _submodule(model, name, path)
    given, of_graphs = _by_graph(state, texts)
    leaves = quantized_modules(given)
    projections = [f".{key}".rpartition(".q_proj.") for key in state]
    model = split_attention(model, {name[1:] for name, found, _ in projections if found})
    modules = dict(model.named_modules(remove_duplicate=False))
    memo: dict[int, object] = {id(modules[n]): m for n, m in leaves.items() if n in modules}
    for name, leaf in leaves.items():
        if isinstance(leaf, QExperts) and name in modules:
            leaf.adopt(modules[name])
    # its float layers became what prepare made of them
    loaded = without_observers(with_code(working_copy(model, memo, "load")))
    kept = {key.partition(".parametrizations.")[0] for key in state if ".parametrizations." in key}
    loaded = settled(loaded, kept)
    leave_fast_paths(loaded)
    check_architecture(f"torchq.load: {path}", model, leaves, loaded, given)
    _check_owners({name: _submodule(loaded, name, path) for name in texts})
    for name, (graph, call) in texts.items():
        made = _graph(graph, of_graphs[name], _submodule(loaded, name, path))
        restore(_submodule(loaded, name, path), made, name, call)
    return loaded, state


def _check_owners(owners: dict[str, nn.Module]) -> None:
    """Refuse a graph within a module that has one: its copies would hold those for the inner one.

    Levels of graphs that each copy twice would be 2^levels copies.
    """
    modules = {id(module) for module in owners.values()}
    for name, module in owners.items():
        inner = any(id(part) in modules for part in module.modules() if part is not module)
        if inner or len(modules) < len(owners):
            raise ValueError(
                f"torchq.load: modules with graphs must be apart, got others within '{name}', or "
                "two graphs of one. Was it written by torchq.save?"
            )


def _by_graph(
    state: dict[str, Tensor], graphs: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the tensors of the model itself, and those of the graphs of these modules.

    A module that has two names has its graph under both in the file, and under one of them here.
    """
    given, of_graphs = dict[str, Tensor](), {name: dict[str, Tensor]() for name in graphs}
    for key, value in state.items():
        owner, _, own = f".{key}".partition(f".{GRAPH_KEY}.")
        if own and owner[1:] in of_graphs:
            of_graphs[owner[1:]][own] = value
        else:
            given[key] = value
    known = {id(value) for graph in of_graphs.values() for value in graph.values()}
    again = [k for k, v in given.items() if f".{GRAPH_KEY}." in f".{k}" and id(v) in known]
    for key in again:
        del given[key]
    return given, of_graphs


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, and text that tells other names of each."""
    state: dict[str, Tensor] = {}
    seen: dict[object, str] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in full_state(model).items():
        if memory(tensor) in seen:
            aliases[name] = seen[memory(tensor)]
            continue
        seen[memory(tensor)] = name
        value = tensor.detach().contiguous()
        storage = value.untyped_storage()
        whole = storage.nbytes() == value.numel() * value.element_size()
        if not whole or storage.data_ptr() in storages:
            value = value.clone()
        storages.add(storage.data_ptr())
        state[name] = value
    if aliases:
        text = json.dumps(aliases, separators=(",", ":"))
        state[ALIAS_KEY] = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
    return state


def _submodule(model: nn.Module, name: str, path: str | os.PathLike[str]) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise RuntimeError(
            f"torchq.load: {path} has a quantized module '{name}', but the model has no such "
            "module. Pass the architecture the file was saved from."
        ) from error


def read_state(path: Path, mmap: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a file that :func:`save` wrote, by name.

    Args:
        path: of the file.
        mmap: see :func:`load`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is another file.
    """
    if not path.exists():
        raise FileNotFoundError(f"torchq.load: {path} does not exist.")
    if path.is_dir():
        raise _not_ours(path, "it is a directory")
    try:
        state, metadata = read_tensors(path, mmap)
    except ValueError as error:
        raise _not_ours(path, str(error)) from None
    known = GRAPH_KEY, REPORT_KEY
    ours = metadata.get("writer") == "torchq"
    if not (ours or any(k in known or f".{k}".endswith(".spec") for k in state)):
        raise _not_ours(path, "it holds no quantized module")
    return state


def _not_ours(path: Path, why: str) -> ValueError:
    return ValueError(
        f"torchq.load: path must be a file written by torchq.save, got {path}, which is not one: "
        f"{why}. Save the converted model with torchq.save, or copy the file anew."
    )
