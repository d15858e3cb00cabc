# SPDX-License-Identifier: Apache-2.0
"""Hours of a service in one process: equal bits, flat memory.

    python tests/fuzz/soak.py --minutes 60

Each round starts eight threads that end with it. They call models on ever other shapes, and load,
map, copy, pickle and convert them at the same time; now and then a spawned process does. The first
third of the time is for warming up. After it, memory must not grow.
"""

from __future__ import annotations

import argparse
import copy
import gc
import multiprocessing
import pickle
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchq

THREADS = 8
GROWTH = 32 << 20
"""Bytes that memory may grow by after the warm-up: what an allocator's arenas vary by."""


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(24, 48), nn.LSTM(48, 32, batch_first=True)
        self.norm, self.last = nn.LayerNorm(32), nn.Linear(32, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rnn(self.first(x).relu())[0]
        return self.last(nn.functional.scaled_dot_product_attention(x, x, self.norm(x)))


def images() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 24, 3, 2, 1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, groups=24),
        ),
        *(nn.Hardswish(), nn.Conv2d(24, 48, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(48, 10),
    )


def sample(name: str, pick: random.Random) -> Tensor:
    """An input of a random size."""
    batch, length = pick.randint(1, 4), pick.randint(7, 59)  # smaller images fail their guards
    shape = (batch, 3, length, 66 - length) if name == "images" else (batch, length, 24)
    return torch.randn(shape, generator=torch.Generator().manual_seed(pick.randrange(1000)))


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "images": (images, {}),
    "sequences": (Sequences, {}),
    "dynamic": (Sequences, {"dynamic": True}),
}


@cache
def made(name: str) -> nn.Module:
    torch.manual_seed(0)  # of all threads: before they start
    model: nn.Module = MODELS[name][0]().eval()
    return model


def quantized(name: str) -> nn.Module:
    data = [sample(name, random.Random(seed)) for seed in range(4)]
    config = torchq.QConfig(**MODELS[name][1])
    return torchq.quantize(made(name), data, config=config)


@torch.inference_mode()
def bits(model: nn.Module, x: Tensor) -> bytes:
    return bytes(model(x).contiguous().numpy().data)


def spawned(path: Path, name: str, seed: int) -> bytes:
    """Loads a file in a process of its own."""
    return bits(torchq.load(path, made(name), mmap=True), sample(name, random.Random(seed)))


class Soak:
    """The models, their files, and the results that all ways must give."""

    def __init__(self, folder: Path) -> None:
        self.models = {name: quantized(name) for name in MODELS}
        self.paths = {name: folder / name for name in MODELS}
        for name, model in self.models.items():
            torchq.save(model, self.paths[name])
        self.counts: Counter[str] = Counter()
        self.expected: dict[tuple[str, int], bytes] = {}
        for name, model in self.models.items():
            for seed in range(40):
                self.expected[name, seed] = bits(model, sample(name, random.Random(seed)))

    def model(self, way: str, name: str) -> nn.Module:
        own, path = self.models[name], self.paths[name]
        match way:
            case "load":
                return torchq.load(path, made(name))
            case "map":
                return torchq.load(path, mmap=True)
            case "copy":
                return copy.deepcopy(own)
            case "pickle":
                loaded: nn.Module = pickle.loads(pickle.dumps(own))
                return loaded
            case "convert":
                return quantized(name)
        return own

    def work(self, seed: int) -> None:
        """Runs the work of one thread."""
        pick = random.Random(seed)
        torch.set_num_threads(pick.choice([1, 1, 2]))
        ways = ["load", "map", "copy", "pickle", *["call"] * 12, *["convert"] * (seed % 40 == 0)]
        with torchq.use_isa(pick.choice(torchq.supported_isas()[1:])):  # the reference is slow
            for way in pick.sample(ways, 5):
                name = pick.choice(list(MODELS))
                model = self.model(way, name)
                for _ in range(3):
                    key = name, pick.randrange(40)
                    x = sample(name, random.Random(key[1]))
                    assert bits(model, x) == self.expected[key], f"other bits: {way} of {key}"
                self.counts[way] += 1
        if seed % 50 == 0:
            torchq.release_memory()

    def round(self, number: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for done in [pool.submit(self.work, number * THREADS + i) for i in range(THREADS)]:
                done.result()
        if number % 100 == 20:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found = process.apply(spawned, (self.paths["images"], "images", number % 40))
            assert found == self.expected["images", number % 40], "other bits: spawned"
            self.counts["spawn"] += 1


def resident() -> int:
    """Return the process's bytes, without 0.2 MB that torch.export caches for each conversion."""
    FakeTensorMode.cache_clear()
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="default 60")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    warm = time.monotonic() + 20 * args.minutes
    before: list[int] = []
    after: list[int] = []
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder))
        while time.monotonic() < end or len(after) < 3:
            soak.round(number)
            (before if time.monotonic() < warm or len(before) < 3 else after).append(resident())
            number += 1
            if number % 100 == 0:
                print(f"{number} rounds, {resident() >> 20} MB, {dict(soak.counts)}", flush=True)
    last = sorted(after[-max(len(after) // 4, 1) :])
    growth = last[len(last) // 2] - max(before)
    print(f"{number} rounds of {THREADS} threads: {dict(soak.counts)}, all with equal bits")
    print(f"memory: {max(before) >> 20} MB at most when warm, {growth / 2**20:+.1f} MB at the end")
    return int(growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
