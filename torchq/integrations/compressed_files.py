# SPDX-License-Identifier: Apache-2.0
"""Reads folders that llm-compressor wrote.

The format is that of https://github.com/vllm-project/compressed-tensors: ``config.json`` says how
layers are quantized, and safetensors hold int8 weights with their scales beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.quantization.int4 import GROUP_SIZES
from torchq.quantization.qparams import QParams

METHOD = "compressed-tensors"
_FORMATS = ("int-quantized", "naive-quantized")
_PACKED = "pack-quantized"
_SCALE = ".weight_scale"


@dataclass(frozen=True)
class Int8Layer:
    """A quantized layer of the files, but its weight.

    Attributes:
        shape: of the weight.
        scales: of the weight, one or one per output channel.
        src: fixed parameters of the source; None for those of each row.
    """

    shape: tuple[int, ...]
    scales: Tensor
    src: QParams | None


@dataclass(frozen=True)
class Int4Layer:
    """A layer of the files with a 4-bit weight in groups.

    Attributes:
        shape: of the weight.
        file: that holds it.
        name: of the layer there.
        group_size: values of a row that share a scale.
    """

    shape: tuple[int, ...]
    file: Path
    name: str
    group_size: int

    def read(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return integers from -8 to 7, scales, zero points of these integers, and the bias."""
        with _opened(self.file.parent, self.file) as file:
            given = {key.rpartition(".")[2]: key for key in file.keys() if self._has(key)}  # noqa: SIM118
            found = {short: file.get_tensor(key) for short, key in given.items()}
        weight = unpack_nibbles(found["weight_packed"])[:, : self.shape[1]]
        zero = found.get("weight_zero_point")
        if zero is not None:
            zero = unpack_nibbles(zero.t()).t()[: self.shape[0]]
        return weight, found["weight_scale"], zero, found.get("bias")

    def _has(self, key: str) -> bool:
        return key.rpartition(".")[0] == self.name


Layers: TypeAlias = dict[str, Int8Layer | Int4Layer]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return eight integers from -8 to 7 for each int32 of a row, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device="cpu")
    return ((packed.unsqueeze(-1) >> shifts & 15) - 8).flatten(-2).to(torch.int8)


def read_folder(folder: Path) -> tuple[dict[str, Any], Layers]:
    """Return what config.json says, and the quantized layers by name.

    Raises:
        ValueError: it is no such folder, is damaged, or has layers without a form here.
    """
    facts = _read_json(folder / "config.json")
    _check_scheme(folder, facts)
    return facts, _read_layers(folder, _weight_files(folder))


def refused(folder: Path, got: str, remedy: str = "Copy the folder anew.") -> ValueError:
    """Return the error for a folder that cannot be loaded."""
    return ValueError(
        "torchq.from_compressed_tensors: path must be a folder of compressed-tensors with int8 "
        f"linear layers, got '{folder}': {got}. {remedy}"
    )


def scheme_of(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config of a config.json, or {}."""
    inner = facts.get("text_config")
    for place in (facts, inner if isinstance(inner, dict) else {}):
        found = place.get("quantization_config") or place.get("compression_config")
        if isinstance(found, dict):
            return found
    return {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refused(file.parent, f"its {file.name} cannot be read: {_line(error)}") from None
    if not isinstance(found, dict):
        raise refused(file.parent, f"its {file.name} holds a {type(found).__name__}, not an object")
    return found


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _check_scheme(folder: Path, facts: dict[str, Any]) -> None:
    """Raise ValueError where the configuration says something that has no form here."""
    scheme = scheme_of(facts)
    method = scheme.get("quant_method", "none")
    if method != METHOD:
        raise refused(folder, f"its quant_method is {method}", "Load it with transformers.")
    groups = scheme.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused(folder, "its quantization_config has no config_groups")
    problems = [
        f"'{key}' is set"
        for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config")
        if scheme.get(key)
    ]
    if (scheme.get("sparsity_config") or {}).get("format", "dense") != "dense":
        problems.append("'sparsity_config' is set")
    for name, group in groups.items():
        if isinstance(group, list):
            problems += [] if name in ("W8A8", "INT8") else [f"'{name}' is another preset"]
        else:
            own = group.get("format") or scheme.get("format", "")
            problems += [f"'{name}' has {problem}" for problem in _why_not(group, own)]
    if problems:
        raise refused(
            folder,
            "; ".join(problems),
            "Compress the float model with the scheme W8A8 (INT8) or W4A16.",
        )


def _why_not(group: dict[str, Any], form: str) -> list[str]:
    """Return what of a group has no form here."""
    problems = []
    weights, sources = group.get("weights") or {}, group.get("input_activations")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if (bits, kind, strategy) == (4, "int", "group"):
        if weights.get("group_size") not in GROUP_SIZES or form != _PACKED:
            problems.append(f"groups of {weights.get('group_size')} in the format {form or 'none'}")
    elif (bits, kind) != (8, "int"):
        groups = f" in groups of {weights['group_size']}" if strategy == "group" else ""
        problems.append(f"{bits}-bit {kind} weights{groups}")
    elif strategy not in ("channel", "tensor"):
        problems.append(f"weights with one scale for each {strategy}")
    elif not weights.get("symmetric", True):
        problems.append("weights with zero points")
    elif form not in _FORMATS:
        problems.append(f"the format {form or 'none'}")
    if group.get("output_activations"):
        problems.append("quantized outputs")
    if (
        sources
        and bits == 4
        and (sources.get("strategy"), sources.get("dynamic")) != ("token", True)
    ):
        problems.append("sources of 4-bit weights with other scales than those of each row")
    elif sources:
        how = sources.get("strategy") or "tensor", sources.get("dynamic", False)
        if (sources.get("num_bits", 8), sources.get("type", "int")) != (8, "int"):
            problems.append(f"{sources.get('num_bits')}-bit {sources.get('type')} sources")
        elif how not in (("token", True), ("tensor", True), ("tensor", False)):
            problems.append(f"sources with one scale for each {how[0]}, dynamic {how[1]}")
    return problems


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise refused(folder, f"its {index.name} has no weight_map")
    return [folder / Path(name).name for name in sorted(set(names.values()))]


def _read_layers(folder: Path, files: Iterable[Path]) -> Layers:
    """Return the quantized layers by their names in the files; their weights are only looked at."""
    shapes: dict[str, tuple[str, list[int]]] = {}
    small: dict[str, Tensor] = {}
    places: dict[str, Path] = {}
    for path in files:
        with _opened(folder, path) as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                shapes[key] = file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()
                places[key] = path
                if key.endswith(("_scale", "_zero_point", "_shape")):
                    small[key] = file.get_tensor(key)
    names = [key.removesuffix(_SCALE) for key in shapes if key.endswith(_SCALE)]
    if not names:
        raise refused(folder, "no weight_scale in its files")
    found: Layers = {}
    for name in names:
        own = places.get(f"{name}.weight_packed")
        found[name] = (
            _layer(folder, name, shapes, small)
            if own is None
            else _int4_layer(own, name, shapes, small, places)
        )
    return found


def _opened(folder: Path, path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "torchq.from_compressed_tensors: safetensors must be installed, got no such module. "
            "Run: pip install 'torchq-cpu[transformers]'"
        ) from error
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise refused(folder, f"its {path.name} cannot be read: {_line(error)}") from None


def _layer(
    folder: Path,
    name: str,
    shapes: dict[str, tuple[str, list[int]]],
    small: dict[str, Tensor],
) -> Int8Layer:
    dtype, shape = shapes.get(f"{name}.weight", ("no", []))
    scales = small[f"{name}{_SCALE}"].float().reshape(-1)
    if dtype != "I8" or len(shape) != 2:
        raise refused(folder, f"'{name}.weight' has dtype {dtype} and shape {shape}")
    if scales.numel() not in (1, shape[0]) or not bool(((scales > 0) & scales.isfinite()).all()):
        raise refused(folder, f"'{name}{_SCALE}' must be positive, 1 or {shape[0]} of them")
    zero = small.get(f"{name}.weight_zero_point")
    if zero is not None and bool(zero.any()):
        raise refused(folder, f"'{name}.weight' has zero points")
    fixed = small.get(f"{name}.input_scale")
    if fixed is None:
        return Int8Layer(tuple(shape), scales, None)
    offset = small.get(f"{name}.input_zero_point")
    if fixed.numel() != 1 or not 0 < float(fixed) < float("inf"):
        raise refused(folder, f"'{name}.input_scale' must be one positive number")
    zero_point = 0 if offset is None else int(offset.reshape(-1)[0])
    src = QParams.per_tensor(float(fixed), zero_point, torch.int8)
    return Int8Layer(tuple(shape), scales, src)


def _int4_layer(
    path: Path,
    name: str,
    shapes: dict[str, tuple[str, list[int]]],
    small: dict[str, Tensor],
    places: dict[str, Path],
) -> Int4Layer:
    folder = path.parent
    scales, shape = small[f"{name}{_SCALE}"], small.get(f"{name}.weight_shape")
    if shape is None or shape.numel() != 2 or scales.dim() != 2:
        raise refused(folder, f"'{name}' has no weight_shape, or its scales have no groups")
    outputs, inputs = map(int, shape)
    groups = scales.shape[1]
    size = next((size for size in GROUP_SIZES if -(-inputs // size) == groups), 0)
    packed = ("I32", [outputs, -(-inputs // 8)])
    if not size or scales.shape[0] != outputs or shapes[f"{name}.weight_packed"] != packed:
        raise refused(folder, f"'{name}.weight_packed' does not fit its shape and scales")
    zero = shapes.get(f"{name}.weight_zero_point", ("I32", [-(-outputs // 8), groups]))
    if zero != ("I32", [-(-outputs // 8), groups]) or not bool(scales.isfinite().all()):
        raise refused(folder, f"'{name}' has scales or zero points that do not fit its shape")
    own = {places[key] for key in places if key.rpartition(".")[0] == name}
    if f"{name}.weight_g_idx" in places or len(own) > 1:
        raise refused(folder, f"'{name}' has groups in another order, or is spread over files")
    return Int4Layer((outputs, inputs), path, name, size)
