# SPDX-License-Identifier: Apache-2.0
"""The kinds of files that are fuzzed: each writes one, changes it, and reads it."""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attacks import attack
from mutations import damaged, forge_tensor, forge_text
from torch import Tensor, nn

import torchq
from torchq.serialization.tensor_file import read_tensors, write_tensors


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
    ways: tuple[str, ...] = ("damage", "forge", "attack")
    refusals: tuple[type[Exception], ...] = (ValueError,)
    unsafe = ""
    """Why a library itself may give other numbers in each call, after :meth:`change`."""
    is_own = True
    """Whether torchq alone reads it, and promises to do nothing else, whatever is in the file."""
    variables: tuple[str, ...] = ()
    """Of the environment, which a library reads."""
    most_excused = 1.0
    """Share of files that may crash or take much memory where :meth:`excuse` has a reason."""

    def __init__(self, path: Path, make: Callable[[], nn.Module], x: Tensor, options: Any) -> None:
        self.path, self.model, self.x = path, _made(make), x
        self.reads: tuple[Path, ...] = (path,)
        self.config = torchq.QConfig(**options)
        self.prepared = torchq.prepare(self.model, x, config=self.config)
        self.save()
        self.expected = self.use(self.load())
        self.content = path.read_bytes()

    def save(self) -> None:
        raise NotImplementedError

    def load(self) -> nn.Module:
        raise NotImplementedError

    def use(self, loaded: nn.Module) -> Tensor:
        raise NotImplementedError

    def change(self, pick: random.Random, way: str) -> None:
        """Writes a damaged or a forged file."""
        if way == "damage":
            self.path.write_bytes(damaged(pick, self.content))
        else:
            self.path.write_bytes(self.content)
            (forge if way == "forge" else attack)(pick, self.path)

    def refuses(self, error: Exception, way: str) -> str:
        """Returns who refused the file; raises the error if nobody may do so in this way."""
        assert isinstance(error, self.refusals), error
        assert str(self.path) in str(error) and str(error).startswith("torchq."), repr(error)
        assert way != "damage" or type(error) is ValueError, repr(error)
        return "refused"

    def files(self) -> list[Path]:
        """Returns what is read."""
        return [self.path]

    def excuse(self) -> str:
        """Returns why a crash or memory is a library's own, or ""."""
        return ""

    def may_differ(self, way: str) -> str:
        """Returns why the changed file may give other numbers, or ""."""
        return "" if way == "damage" else "another model"


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
        loaded = torchq.load_calibration(copy.deepcopy(self.empty), self.path)
        if zlib.crc32(self.path.read_bytes()) % 8 == 0:  # of some: it takes half a second
            try:
                torchq.convert(copy.deepcopy(loaded))
            except (ValueError, RuntimeError) as error:  # which it documents
                raise ValueError(f"torchq.convert, of {self.path}: {error}") from error
        return loaded

    def use(self, loaded: nn.Module) -> Tensor:
        return torch.cat([v.double().flatten() for v in loaded.state_dict().values()])


TEXTS = ".spec", ".torchq_graph", ".torchq_call", ".torchq_report", ".torchq_aliases"


def forge(pick: random.Random, path: Path) -> None:
    """Writes the file with other parts, and the digest that they have."""
    tensors, metadata = read_tensors(path)
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
    write_tensors("fuzz", path, tensors, metadata)
