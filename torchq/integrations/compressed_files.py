# SPDX-License-Identifier: Apache-2.0
"""Reads folders of compressed-tensors, such as those that llm-compressor writes.

The format is that of https://github.com/vllm-project/compressed-tensors: ``config.json`` says how
layers are quantized, and safetensors hold their integers with the scales beside them. 4-bit
integers have a byte each in the format int-quantized, and half of one in pack-quantized.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.attributes.json_text import JsonObject, read_json
from torchq.attributes.options import GroupSize
from torchq.quantization.int4 import GROUP_SIZES
from torchq.quantization.qparams import QParams

METHOD = "compressed-tensors"
INT, PACKED = "int-quantized", "pack-quantized"
INDEX = "model.safetensors.index.json"
_FORMATS = (INT, "naive-quantized")
_PRESETS = ("W8A8", "INT8", "W4A8", "W4A16", "W4A16_ASYM")
_ROW_GROUPS: GroupSize = 128
"""Size of groups, all of one scale, where a whole row has one."""
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
    """A layer of the files with a 4-bit weight.

    Attributes:
        shape: of the weight.
        file: that holds it.
        keys: names of its tensors there.
        group_size: values of a row that share a scale.
    """

    shape: tuple[int, ...]
    file: Path
    keys: Sequence[str]
    group_size: GroupSize

    @property
    def has_bias(self) -> bool:
        """Return whether the files have a bias."""
        return any(key.endswith(".bias") for key in self.keys)

    def read(self, file: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return integers from -8 to 7, scales, zero points of these integers, and the bias.

        ``file`` is what :func:`opened` gives, once for all layers: its header may be long.
        """
        found = {key.rpartition(".")[2]: file.get_tensor(key) for key in self.keys}
        zero = found.get("weight_zero_point")
        if "weight_packed" in found:
            weight = unpack_nibbles(found["weight_packed"])[:, : self.shape[1]]
            zero = None if zero is None else unpack_nibbles(zero.t()).t()[: self.shape[0]]
        else:
            weight = self._checked(found["weight"])
            zero = None if zero is None or not bool(zero.any()) else self._checked(zero)
        scales = self._by_group(found["weight_scale"])
        return weight, scales, None if zero is None else self._by_group(zero), found.get("bias")

    def _by_group(self, values: Tensor) -> Tensor:
        """Return values of a whole row, or of the tensor, for each group of each row."""
        outputs, inputs = self.shape
        rows = values.reshape(1 if values.numel() == 1 else outputs, -1)
        return rows.expand(outputs, -(-inputs // self.group_size))

    def _checked(self, integers: Tensor) -> Tensor:
        low, high = torch.aminmax(integers) if integers.numel() else (0, 0)
        if low < -8 or high > 7:
            name = self.keys[0].rpartition(".")[0]
            got = f"'{name}' has integers from {int(low)} to {int(high)}, not 4-bit ones"
            raise refused(self.file.parent, got)
        return integers


@dataclass(frozen=True)
class _Group:
    """Layers of one scheme.

    Attributes:
        targets: names, classes and patterns of layers.
        bits: of their weights.
        parts: tensors that each has beside its weight and scales.
    """

    targets: Collection[str]
    bits: int
    parts: Sequence[str]


Layers: TypeAlias = dict[str, Int8Layer | Int4Layer]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return eight integers from -8 to 7 for each int32 of a row, the lowest bits first."""
    pairs = packed.contiguous().view(torch.uint8)  # of rows in order, the low half first
    codes = torch.empty(*pairs.shape[:-1], 2 * pairs.shape[-1], dtype=torch.int8, device="cpu")
    codes[..., ::2], codes[..., 1::2] = pairs & 15, pairs >> 4
    return codes.sub_(8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return an int32 for each eight codes from 0 to 15 of a row, as uint8 ones."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return (padded[:, ::2] | padded[:, 1::2] << 4).contiguous().view(torch.int32)


def read_folder(folder: Path) -> tuple[dict[str, object], Layers]:
    """Return what config.json says, and the quantized layers by name.

    Raises:
        ValueError: it is no such folder, is damaged, or has layers without a form here.
    """
    try:
        facts = _read_json(folder / "config.json")
        _check_scheme(folder, facts)
        return facts, _read_layers(folder, _weight_files(folder), scheme_of(facts))
    except (ImportError, MemoryError):  # of the machine
        raise
    except Exception as error:  # of a configuration of other types: anything
        if str(error).startswith("torchq.from_compressed_tensors"):
            raise
        raise refused(folder, f"{type(error).__name__}: {_line(error)}") from error


def refused(folder: Path, got: str, remedy: str = "Copy the folder anew.") -> ValueError:
    """Return the error for a folder that cannot be loaded."""
    return ValueError(
        "torchq.from_compressed_tensors: path must be a folder of compressed-tensors with int8 "
        f"or 4-bit linear layers, got '{folder}': {got}. {remedy}"
    )


def scheme_of(facts: dict[str, object]) -> dict[str, object]:
    """Return the quantization_config of a config.json, or {}."""
    inner = facts.get("text_config")
    for place in (facts, inner if isinstance(inner, dict) else {}):
        found = place.get("quantization_config") or place.get("compression_config")
        if isinstance(found, dict):
            return found
    return {}


def _read_json(file: Path) -> dict[str, object]:
    try:
        found = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise refused(file.parent, f"its {file.name} cannot be read: {_line(error)}") from None
    if not isinstance(found, dict):
        raise refused(file.parent, f"its {file.name} holds a {type(found).__name__}, not an object")
    return found


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _check_scheme(folder: Path, facts: dict[str, object]) -> None:
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
    sparsity = scheme.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        problems.append("'sparsity_config' is set")
    for name, group in groups.items():
        if isinstance(group, list):
            problems += [] if name in _PRESETS else [f"'{name}' is another preset"]
        elif not _has_form(group):
            problems.append(f"'{name}' is no group of weights and input_activations")
        else:
            own = group.get("format") or scheme.get("format", "")
            problems += [f"'{name}' has {problem}" for problem in _why_not(group, own)]
    if problems:
        raise refused(
            folder,
            "; ".join(problems),
            f"Compress the float model with a scheme of {', '.join(_PRESETS)}.",
        )


def _has_form(group: object) -> bool:
    """Return whether a group of config_groups has the types that its format says."""
    if not isinstance(group, dict):
        return False
    parts = group.get("weights"), group.get("input_activations")
    return all(part is None or isinstance(part, dict) for part in parts)


def _groups(scheme: JsonObject) -> list[_Group]:
    """Return what the groups of a checked scheme say."""
    found = []
    for name, group in scheme["config_groups"].items():
        if isinstance(group, list):
            parts = ["weight_zero_point"] if name.endswith("_ASYM") else []
            found.append(_Group({*map(str, group)}, 4 if name.startswith("W4") else 8, parts))
            continue
        weights, sources = group.get("weights") or {}, group.get("input_activations") or {}
        parts = ["weight_zero_point"] if weights.get("symmetric") is False else []
        if sources and not sources.get("dynamic", False):
            parts += ["input_scale"]
            parts += ["input_zero_point"] if sources.get("symmetric") is False else []
        targets = {*map(str, group.get("targets") or [])}
        found.append(_Group(targets, weights["num_bits"], parts))
    return found


def _of_4_bits(name: str, groups: Sequence[_Group]) -> bool:
    """Return whether the scheme says so of a layer.

    Beside int8 ones, 4-bit integers of a byte with one scale a row are taken for int8 ones, unless
    the scheme names their layers.
    """
    fours = [group for group in groups if group.bits == 4]
    return len(fours) == len(groups) or any(name in group.targets for group in fours)


def _missing(name: str, bits: int, groups: Sequence[_Group], shapes: Collection[str]) -> list[str]:
    """Return tensors that a layer lacks, though its group has them.

    Its group is one that names it, or any: of 4-bit layers any of 4 bits.
    """
    named = [group for group in groups if group.bits == bits and name in group.targets]
    own = named or [group for group in groups if bits in (8, group.bits)]
    parts = [part for group in own for part in group.parts]
    return [p for p in parts if parts.count(p) == len(own) and f"{name}.{p}" not in shapes]


def _why_not(group: JsonObject, form: object) -> list[str]:
    """Return what of a group has no form here."""
    problems = []
    weights, sources = group.get("weights") or {}, group.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if bits is None:  # the format means 8, but its writers always name the number
        problems.append("weights without num_bits")
    elif (bits, kind) not in ((8, "int"), (4, "int")):
        groups = f" in groups of {weights['group_size']}" if strategy == "group" else ""
        problems.append(f"{bits}-bit {kind} weights{groups}")
    elif (bits, strategy) == (4, "group"):
        if weights.get("group_size") not in GROUP_SIZES:
            problems.append(f"4-bit weights in groups of {weights.get('group_size')}")
    elif strategy not in ("channel", "tensor"):
        problems.append(f"weights with one scale for each {strategy}")
    elif bits == 8 and not weights.get("symmetric", True):
        problems.append("weights with zero points")
    if form not in (*_FORMATS, *([PACKED] if bits == 4 else [])):
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
    index = folder / INDEX
    if not index.is_file():
        return [folder / "model.safetensors"]
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise refused(folder, f"its {index.name} has no weight_map")
    files = sorted(set(names.values()))
    if outside := [name for name in files if Path(name).name != name]:
        raise refused(folder, f"its {index.name} names a file elsewhere, {outside[0][:60]!r}")
    return [folder / name for name in files]


def _read_layers(folder: Path, files: Iterable[Path], scheme: dict[str, object]) -> Layers:
    """Return the quantized layers by their names in the files; their weights are only looked at."""
    shapes: dict[str, tuple[str, list[int]]] = {}
    small: dict[str, Tensor] = {}
    places: dict[str, dict[str, Path]] = {}
    for path in files:
        file = opened(folder, path)
        for key in file.keys():  # noqa: SIM118 - no mapping
            if key in shapes:
                raise refused(folder, f"'{key[:60]}' in two of its files")
            shapes[key] = file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()
            places.setdefault(key.rpartition(".")[0], {})[key] = path
            if key.endswith(("_scale", "_zero_point", "_shape")):
                small[key] = file.get_tensor(key)
    names = [key.removesuffix(_SCALE) for key in shapes if key.endswith(_SCALE)]
    if not names:
        raise refused(folder, "no weight_scale in its files")
    for key, (dtype, _) in shapes.items():  # transformers would take integers for float weights
        name, _, last = key.rpartition(".")
        integers = last == "weight_packed" or (last == "weight" and dtype == "I8")
        if integers and f"{name}{_SCALE}" not in shapes:
            raise refused(folder, f"'{name}' has no weight_scale")
    found: Layers = {}
    groups = _groups(scheme)
    for name in names:
        has_groups = small[f"{name}{_SCALE}"].shape[1:].numel() > 1
        if has_groups or _of_4_bits(name, groups) or f"{name}.weight_packed" in shapes:
            found[name] = _int4_layer(folder, name, shapes, small, places[name])
        else:
            found[name] = _layer(folder, name, shapes, small)
        bits = 4 if isinstance(found[name], Int4Layer) else 8
        if missing := _missing(name, bits, groups, shapes):
            raise refused(folder, f"'{name}' has no {missing[0]}")
    return found


def opened(folder: Path, path: Path) -> Any:
    """Return a file of safetensors of a folder."""
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
    if dtype != "I8" or len(shape) != 2 or 0 in shape:
        raise refused(folder, f"'{name}.weight' has dtype {dtype} and shape {shape}")
    scales = small[f"{name}{_SCALE}"].reshape(-1)
    scales = scales.float() if scales.numel() in (1, shape[0]) else scales
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
    folder: Path,
    name: str,
    shapes: dict[str, tuple[str, list[int]]],
    small: dict[str, Tensor],
    places: dict[str, Path],
) -> Int4Layer:
    scales, shape = small[f"{name}{_SCALE}"], small.get(f"{name}.weight_shape")
    own, zeros = f"{name}.weight_packed", f"{name}.weight_zero_point"
    if is_packed := own in shapes:
        outputs, inputs = map(int, [0, 0] if shape is None or shape.numel() != 2 else shape)
        expected = "I32", [outputs, -(-inputs // 8)]
    else:
        own = f"{name}.weight"
        outputs, inputs = [*shapes.get(own, ("", []))[1], 0, 0][:2]
        expected = "I8", [outputs, inputs]
    groups = -(-scales.numel() // max(outputs, 1))
    sizes = (size for size in GROUP_SIZES if -(-inputs // size) == groups)
    size = _ROW_GROUPS if groups == 1 else next(sizes, None)
    if not size or not inputs or shapes.get(own) != expected:
        raise refused(folder, f"'{own}' does not fit its shape and scales")
    if scales.numel() not in (1, outputs * groups) or not bool(scales.isfinite().all()):
        raise refused(folder, f"'{name}{_SCALE}' must be finite, {outputs} x {groups} of them")
    expected = ("I32", [-(-outputs // 8), groups]) if is_packed else ("I8", [outputs, groups])
    if shapes.get(zeros, expected) != expected:
        raise refused(folder, f"'{zeros}' must be {expected[0]} of shape {expected[1]}")
    file, *others = {*places.values()}
    if f"{name}.weight_g_idx" in places or others:
        raise refused(folder, f"'{name}' has groups in another order, or is spread over files")
    return Int4Layer((outputs, inputs), file, [*places], size)
