# SPDX-License-Identifier: Apache-2.0
"""Damaged and forged files, read by children that report.

    python tests/fuzz/fuzz_files.py --files 20000 --seed 0

A damaged file, some of whose bytes changed, gives the right numbers or one error that names it. A
forged file, whose parts changed under a valid digest, may hold another model. It gives an error of
the documented classes or a model; never a crash, a hang, or memory beyond three times the file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import resource
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from children import limit_memory, run_forked
from torch import Tensor, nn

import torchq
from torchq.serialization.tensor_file import read_tensors, write_tensors

BATCH = 100
SLACK = 64 << 20
"""Bytes beyond three times the file: Python's own, and the allocator's."""


class Attended(nn.Module):
    """Layers, tables, a product and functions: what a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.query, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.rnn, self.last = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.table(x) + 1)
        attended = nn.functional.scaled_dot_product_attention(self.query(x), x, x)
        return torch.cat([self.last(self.rnn(attended)[0]), x[..., :3]], -1).softmax(-1)


def _images() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.ConvTranspose2d(8, 8, 2, 2)),
        *(nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(32, 7), nn.Dropout(), nn.Tanh()),
    )


MODELS: list[tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = [
    (_images, torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8), {}),
    (Attended, torch.arange(10).reshape(2, 5) % 11, {}),
    (Attended, torch.arange(10).reshape(2, 5) % 11, {"dynamic": True, "embedding_bits": 8}),
]


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


class Kind:
    """Reads one kind of file."""

    name = ""
    refusals: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, path: Path, make: Callable[[], nn.Module], x: Tensor, options: Any) -> None:
        self.path, self.model, self.x = path, _made(make), x
        self.config = torchq.QConfig(**options)
        self.prepared = torchq.prepare(self.model, x, config=self.config)
        self.save()
        self.expected = self.use(self.load())
        self.content = path.read_bytes()
        self.tensors, self.metadata = read_tensors(path)

    def save(self) -> None:
        raise NotImplementedError

    def load(self) -> nn.Module:
        raise NotImplementedError

    def use(self, loaded: nn.Module) -> Tensor:
        raise NotImplementedError


class Weights(Kind):
    """A file of torchq.save, read with the float model."""

    name = "weights"
    refusals = (ValueError, RuntimeError)
    mapped = False

    def save(self) -> None:
        torchq.calibrate(self.prepared, [self.x])
        torchq.save(torchq.convert(self.prepared), self.path)

    def load(self) -> nn.Module:
        return torchq.load(self.path, self.model, mmap=self.mapped)

    def use(self, loaded: nn.Module) -> Tensor:
        with torch.inference_mode():
            result: Tensor = loaded(self.x)
        return result.clone()


class Graphs(Weights):
    """The same without the float model: the graph alone, mapped."""

    name = "graph"
    mapped = True

    def load(self) -> nn.Module:
        return torchq.load(self.path, mmap=self.mapped)


class Calibration(Kind):
    """A file of torchq.save_calibration."""

    name = "calibration"

    def save(self) -> None:
        torchq.calibrate(self.prepared, [self.x])
        torchq.save_calibration(self.prepared, self.path)
        self.empty = torchq.prepare(self.model, self.x, config=self.config)

    def load(self) -> nn.Module:
        return torchq.load_calibration(copy.deepcopy(self.empty), self.path)

    def use(self, loaded: nn.Module) -> Tensor:
        return torch.cat([v.double().flatten() for v in loaded.state_dict().values()])


# Mutations


def damage(pick: random.Random, kind: Kind) -> None:
    """Writes the file with bits or bytes changed, cut short, or with bytes more."""
    content = bytearray(kind.content)
    for _ in range(pick.choice([1, 1, 1, 2, 8])):
        # the header decides most, and is a small part of a large file
        at = pick.randrange(min(len(content), pick.choice([len(content), 4000, 8])))
        match pick.randrange(6):
            case 0:
                content = content[: max(at, 1)]
            case 1:
                content[at:at] = pick.randbytes(pick.randrange(1, 9))
            case 2:
                content[at : at + 64] = bytes(len(content[at : at + 64]))
            case 3:
                other = pick.randrange(len(content))
                content[at : at + 64] = content[other : other + 64]
            case _:
                content[at] ^= 1 << pick.randrange(8)
    kind.path.write_bytes(content)


VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 255, 2**15, 2**26, 2**31, 2**40, 2**62]
VALUES += [
    2**63,
    0.5,
    -1e30,
    float("nan"),
    float("inf"),
    "",
    "weight",
    "torch.nn.Linear",
    "aten.add",
    "x",
]
VALUES += [[], {}, [1], [2**40], "é" * 40, [[[]]], {"class": "QLinear"}]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside of a value of JSON."""
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def forge_text(pick: random.Random, text: str) -> str:
    """Another text: a value of the JSON replaced, removed or doubled, or a character."""
    value = json.loads(text)
    within = places(value) if isinstance(value, dict | list) else []
    if not within or pick.random() < 0.1:
        at = pick.randrange(len(text) + 1)
        return text[:at] + pick.choice(["", "{", "é", "0", '"', "[" * 3000]) + text[at + 1 :]
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        container, key = pick.choice(within)
        if isinstance(container, list) and not 0 <= key < len(container):
            continue
        match pick.randrange(4):
            case 0:
                container.pop(key, None) if isinstance(container, dict) else container.pop(key)
            case 1:
                other, place = pick.choice(within)
                if place in other if isinstance(other, dict) else 0 <= place < len(other):
                    container[key] = copy.deepcopy(other[place])
            case _:
                container[key] = copy.deepcopy(pick.choice(VALUES))
    return json.dumps(value)


def forge_tensor(pick: random.Random, value: Tensor) -> Tensor:
    flat = value.flatten().clone()
    match pick.randrange(6):
        case 0:
            return flat[: flat.numel() // 2]
        case 1:
            return torch.cat([flat, flat])
        case 2:
            dtypes = (
                torch.float32,
                torch.int8,
                torch.uint8,
                torch.int32,
                torch.int64,
                torch.bfloat16,
            )
            return value.to(pick.choice(dtypes))
        case 3:
            return value.reshape(pick.choice([(-1,), (1, -1), (-1, 1)])) if flat.numel() else value
        case 4:
            fill = pick.choice([0, 1, -1, float("nan"), float("inf"), 1e-45, 3e38, 200, 2**31 - 1])
            same = torch.full_like(value, 0) if value.dtype != torch.float32 else value * 0
            return same + fill if fill == fill or value.is_floating_point() else same
    if flat.numel():
        raw = flat.view(torch.uint8)
        raw[pick.randrange(raw.numel())] ^= 1 << pick.randrange(8)
    return flat.view(value.shape)


TEXTS = ".spec", ".torchq_graph", ".torchq_call", ".torchq_report", ".torchq_aliases"


def forge(pick: random.Random, kind: Kind) -> None:
    """Writes the file with other parts, and the digest that they have."""
    tensors, metadata = dict(kind.tensors), dict(kind.metadata)
    for _ in range(pick.choice([1, 1, 1, 2, 3])):
        texts = [name for name in tensors if f".{name}".endswith(TEXTS)]
        name = pick.choice(texts if texts and pick.random() < 0.6 else list(tensors))
        value = tensors[name]
        if name in texts and value.dtype == torch.uint8 and value.numel() and pick.random() < 0.9:
            raw, packed = bytes(value.flatten().numpy()), name.endswith("report")
            try:
                text = (zlib.decompress(raw) if packed else raw).decode()
                changed = forge_text(pick, text).encode()
            except (ValueError, zlib.error, RecursionError):  # changed before
                continue
            raw = zlib.compress(changed) if packed else changed
            tensors[name] = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8)
            continue
        match pick.randrange(6):
            case 0:
                del tensors[name]
            case 1:
                tensors[pick.choice(list(tensors))] = value
            case 2:
                tensors[pick.choice(["", ".", "a.b.spec", "spec", f"{name}.spec"])] = value
            case 3 if "observers" in metadata:
                key = pick.choice(list(metadata))
                with contextlib.suppress(ValueError, RecursionError):  # changed before, or no JSON
                    metadata[key] = forge_text(pick, metadata[key])
            case _:
                tensors[name] = forge_tensor(pick, value)
    write_tensors("fuzz", kind.path, tensors, metadata)


# Checks


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(kinds: dict[str, Kind], case: str) -> None:
    """Writes one file and reads it; raises where that breaks a promise."""
    name, way, seed = case.split()
    kind, pick = kinds[name], random.Random(f"{name} {way} {seed}")
    (damage if way == "damage" else forge)(pick, kind)
    before, size = peak(), kind.path.stat().st_size
    try:
        loaded = kind.load()
    except kind.refusals as error:
        assert str(kind.path) in str(error) and str(error).startswith("torchq."), repr(error)
        assert way != "damage" or type(error) is ValueError, repr(error)
        loaded = None
    grown = peak() - before
    assert grown <= 3 * size + SLACK, f"{grown >> 20} MB more for a file of {size >> 10} kB"
    if way == "damage" and loaded is not None:
        assert torch.equal(kind.use(loaded), kind.expected)
    elif loaded is not None:
        try:
            kind.use(loaded)
        except Exception as error:
            assert "INTERNAL ASSERT" not in str(error), error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20000, help="of each kind; default 20000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="a case of a report, run here and not in a child")
    args = parser.parse_args()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            f"{kind.name}-{i}": kind(Path(folder, f"{kind.name}-{i}"), *made)
            for i, made in enumerate(MODELS)
            for kind in (Weights, Graphs, Calibration)
            if kind is not Calibration or not made[2]  # dynamic layers have no observers
        }
        if args.case:
            check(kinds, args.case)
            return 0
        limit_memory(2 << 30)
        for name in kinds:
            each = -(-args.files // len(MODELS))
            for way in ("damage", "forge"):
                for first in range(0, each, BATCH):
                    numbers = range(first, min(first + BATCH, each))
                    cases = [f"{name} {way} {args.seed + number}" for number in numbers]
                    while cases:  # what a failure leaves of a batch
                        failure = run_forked(cases, lambda case: check(kinds, case))
                        if not failure:
                            break
                        failures.append(failure)
                        print(failure, flush=True)
                        failed = failure.split(": ", 1)[1].partition("\n")[0]
                        cases = cases[cases.index(failed) + 1 :]
            print(f"{name}: {2 * each} files, {len(failures)} failures so far", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
