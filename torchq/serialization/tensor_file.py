# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files, with a digest in their metadata.

The format is that of https://github.com/huggingface/safetensors: the length of a header, the header
as JSON, the bytes of the tensors. A digest in the metadata covers header and tensors. It finds
damage: whoever forges a file can forge its digest.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchq.attributes.json_text import JsonObject, read_json, why_refused
from torchq.functional.placeholders import MOST_DIMS
from torchq.serialization.files import write_file

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BOOL": torch.bool, "C64": torch.complex64},
}
_ALIGNED = 64
"""Bytes of a cache line: where packed weights begin in a file."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA, _WRITER = "__metadata__", {"writer": "torchq"}
_RELEASE_0_1 = {"format": "pt", **_WRITER}
"""All metadata of files without a digest that torchq.save wrote once."""
_VERSION, _LATEST = "torchq_format", 2
"""Of header and digest: a file of a later version is refused, one without a version is of 1."""
_DIGESTS = {"1": "sha256", "2": "digest"}
"""Version -> name of the digest in the metadata."""
_LONGEST_NAME, _DEEPEST_NAME = 500, 64
"""Characters and levels of a tensor's name; the longest of known models have a fifth of them."""
_ROW = 1024
"""Words of 64 bits whose sum the digest has: 8 KB, so that a row of sums stays in L1."""


def is_short(name: str) -> bool:
    """Return whether a name is within the limits of files; some work takes its square of levels."""
    return len(name) <= _LONGEST_NAME and name.count(".") < _DEEPEST_NAME


def write_tensors(
    op: str,
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors and texts, whole or not at all.

    Raises:
        NotImplementedError: the format has no such dtype.
        OSError: the file cannot be written.
        ValueError: there are more tensors than :func:`read_tensors` takes from such a file, or a
            name has control characters.
    """
    if bad := [name for name in tensors if not name.isprintable()]:
        raise ValueError(
            f"{op}: names of tensors must be printable, got {bad[0]!r}. Rename the module."
        )
    header: JsonObject = {_METADATA: {**_RELEASE_0_1, _VERSION: str(_LATEST), **(metadata or {})}}
    views, end = [], 0
    order = sorted(tensors, key=lambda name: (*_alignment(tensors[name]), name))
    for name, tensor in ((name, tensors[name]) for name in order):
        if tensor.dtype not in _NAMES:
            raise NotImplementedError(
                f"{op}: tensors must have a dtype of safetensors, got {tensor.dtype} in '{name}'. "
                "Save the whole model with torch.save."
            )
        views.append(_bytes(tensor))
        start, end = end, end + views[-1].nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
    header[_METADATA][_DIGESTS[str(_LATEST)]] = _digest(header, views, _sums)
    text = json.dumps(header, separators=(",", ":")).encode()
    if why := why_refused(text, end or 1):
        raise ValueError(
            f"{op}: tensors must be few or large, so that reading them takes no more memory than "
            f"SECURITY.md says, got {len(tensors)} of {end} bytes; {why}. Save parts of the model."
        )
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    write_file(op, path, [len(text).to_bytes(8, "little"), text, *views])


def _alignment(tensor: Tensor) -> tuple[bool, int]:
    """Return the key that sorts tensors so that each is aligned in the file.

    Packed weights are whole cache lines, and come first. The others: the widest dtypes first.
    """
    return tensor.nbytes % _ALIGNED != 0, -tensor.element_size()


def read_tensors(path: Path, mapped: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata.

    Args:
        path: of the file.
        mapped: the tensors are the file, mapped to memory that processes share until they write to
            it; otherwise each is in memory of its own.

    Raises:
        ValueError: it is no safetensors file, or is damaged; says how.
    """
    with path.open("rb") as file:
        header, size = _header(file, path.stat().st_size)
        metadata = header.pop(_METADATA, {})
        version = metadata.get(_VERSION, "1")
        _check_version(version)
        expected = metadata.pop(_DIGESTS[version], None)
        tensors, views, end = {}, [], 0
        take = _mapped(file) if mapped else _copied(file)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            tensors[name], stored = _tensor(name, entry, end, size, take)
            views.append(stored)
            end += stored.nbytes
    if end != size:
        raise ValueError(f"its tensors should have {size} bytes, but have {end}")
    ours = metadata.get("writer") == "torchq" and metadata != _RELEASE_0_1
    marked = ours or expected is not None
    read = _whole if version == "1" else _sums
    if marked and expected != _digest({_METADATA: metadata, **header}, views, read):
        raise ValueError("it was damaged: its digest is another one")
    return tensors, metadata


def _bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's values as they are in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # an expanded tensor of one element is contiguous, with a stride of zero
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of tensors and their names, dtypes and shapes."""
    names = sorted(tensors)
    forms = {name: [str(tensors[name].dtype), list(tensors[name].shape)] for name in names}
    return _digest(forms, [_bytes(tensors[name]) for name in names], _sums)


_Read = Callable[[memoryview], bytes | memoryview]


def _digest(header: Mapping[str, object], views: Sequence[memoryview], read: _Read) -> str:
    """Return the digest of the digests of what is read of the header and of each tensor.

    The header is without its digest, with sorted keys.
    """
    text = memoryview(json.dumps(header, sort_keys=True).encode())
    parts = (hashlib.sha256(read(part)).digest() for part in [text, *views])
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _whole(part: memoryview) -> memoryview:
    """Return what version 1 takes a digest of: all bytes."""
    return part


def _sums(part: memoryview) -> bytes:
    """Return the sums of columns and of rows of 64-bit words, and the bytes that fill no row.

    A change of one word changes two sums. SHA-256 of all bytes takes eight times as long on a Zen
    4, which has instructions for it: 1.8 GB/s in place of 15.
    """
    whole = len(part) // (8 * _ROW)
    if whole == 0:
        return bytes(part)
    rest = 8 * _ROW * whole
    words = np.frombuffer(part[:rest], np.uint64).reshape(whole, _ROW)
    return b"".join([words.sum(0).tobytes(), words.sum(1).tobytes(), part[rest:]])


def _header(file: BinaryIO, size: int) -> tuple[JsonObject, int]:
    """Return the header, its form checked, and the number of bytes that follow it."""
    begin = file.read(8)
    if begin.startswith(b"PK\x03\x04"):
        raise ValueError(
            "it is an archive of torch.save, whose reader takes memory without a limit; "
            "safetensors.torch.save_file writes its tensors"
        )
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= size - 8:
        raise ValueError("it has no header of safetensors, or ends within it")
    try:
        header = read_json(file.read(length), size)
        metadata = header.get(_METADATA, {})
        texts = [*metadata, *metadata.values()]
        formed = all(isinstance(text, str) for text in texts) and all(
            entry["dtype"] in _DTYPES and _are_sizes(entry["shape"])
            and _are_sizes(entry["data_offsets"]) and len(entry["data_offsets"]) == 2
            and is_short(name)
            for name, entry in header.items() if name != _METADATA
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        formed = False
    if not formed:
        raise ValueError("its header is not one of safetensors")
    return header, size - 8 - length


def _check_version(version: str) -> None:
    if version not in _DIGESTS:
        raise ValueError(
            f"its format has version {version}, and this torchq reads up to {_LATEST}; a newer "
            "torchq reads it"
        )


def _are_sizes(values: object) -> bool:
    if type(values) is not list or len(values) > MOST_DIMS:  # the product of more takes long
        return False
    return {*map(type, values)} <= {int} and min([0, *values]) == 0 and max([0, *values]) < 2**63


_Take = Callable[[int, int], Tensor]
"""Returns the next bytes of a file: their number, and what their address must be a multiple of."""


def _copied(file: BinaryIO) -> _Take:
    def take(count: int, alignment: int) -> Tensor:
        stored = torch.empty(count, dtype=torch.uint8, device="cpu")
        if file.readinto(stored.numpy().data) != count:  # type: ignore[attr-defined]
            raise ValueError("it ends within a tensor")
        return stored

    return take


def _mapped(file: BinaryIO) -> _Take:
    whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = file.tell()

    def take(count: int, alignment: int) -> Tensor:
        nonlocal start
        if count == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        stored = torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=start)
        stored = stored.clone() if start % alignment else stored  # other tools align nothing
        start += count
        return stored

    return take


def _tensor(
    name: str, entry: JsonObject, start: int, size: int, take: _Take
) -> tuple[Tensor, memoryview]:
    """Return the next tensor of a file, and its bytes."""
    dtype, (begin, end) = _DTYPES[entry["dtype"]], entry["data_offsets"]
    count = dtype.itemsize
    for length in entry["shape"]:
        count *= length
    if begin != start or end - begin != count:
        raise ValueError(f"'{name}' must have {count} bytes from {start} on, not [{begin}, {end}]")
    if end > size:  # before so much memory is asked for
        raise ValueError(f"it ends within '{name}'")
    stored = take(count, dtype.itemsize)
    if dtype is torch.bool and count and int(stored.max()) > 1:
        raise ValueError(f"'{name}' holds bytes that are neither True nor False")
    try:
        return stored.view(dtype).view(entry["shape"]), stored.numpy().data
    except RuntimeError:
        raise ValueError(f"'{name}' cannot have shape {entry['shape']}") from None
