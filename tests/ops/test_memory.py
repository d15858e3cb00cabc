# SPDX-License-Identifier: Apache-2.0
"""Ever new shapes must not grow memory: there is no cache by shape, and scratch stops growing."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import torchq
import torchq.functional as TF
from torchq.functional.packing import pack_conv, pack_linear


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def run(rng: random.Random, calls: int) -> None:
    """`calls` convolutions, linears and pools of random sizes up to 40x40."""
    dense = pack_conv(torch.ones(20, 3, 3, 3, dtype=torch.int8))
    depthwise = pack_conv(torch.ones(8, 1, 3, 3, dtype=torch.int8), groups=8)
    fc = pack_linear(torch.ones(33, 17, dtype=torch.int8))
    for _ in range(calls):
        batch, height, width = rng.randint(1, 3), rng.randint(3, 40), rng.randint(3, 40)
        shape = (batch, rng.choice((3, 8)), height, width)
        src = torch.zeros(shape, dtype=torch.uint8)
        if shape[1] == 3:
            TF.conv2d(src, dense, padding=rng.randint(0, 2))
        else:
            TF.conv2d(src, depthwise, padding=1, groups=8, stride=rng.randint(1, 2))
            TF.max_pool(src, 2)
        TF.linear(torch.zeros(rng.randint(1, 300), 17, dtype=torch.uint8), fc)


def test_memory_stays_flat() -> None:
    rng = random.Random(0)
    run(rng, 1000)  # scratch and the allocator reach their size
    scratch, resident = torchq.memory_info()["scratch_bytes"], resident_bytes()
    run(rng, 4000)  # about 10,000 op calls
    assert torchq.memory_info()["scratch_bytes"] <= 2 * scratch
    assert resident_bytes() - resident < 8 << 20


def test_scratch_is_counted() -> None:
    src, weight = (
        torch.zeros(1, 3, 64, 64, dtype=torch.uint8),
        torch.ones(8, 3, 3, 3).to(torch.int8),
    )
    TF.conv2d(src, weight, padding=1)  # padded in scratch
    assert torchq.memory_info()["scratch_bytes"] >= 66 * 66 * 3


WEIGHT = torch.ones(8, 3, 3, 3, dtype=torch.int8)


def convolve(size: int) -> torch.Tensor:
    """A convolution that pads its source in scratch, of 3 size^2 bytes and more."""
    return TF.conv2d(torch.full((1, 3, size, size), 3, dtype=torch.uint8), WEIGHT, padding=1)


def scratch_bytes() -> int:
    return torchq.memory_info()["scratch_bytes"]


def test_scratch_of_one_large_call_is_not_kept() -> None:
    torch.set_num_threads(2)
    torchq.release_memory()
    convolve(5000)  # 75 MB
    assert scratch_bytes() <= 2 << 20
    convolve(3000)
    assert scratch_bytes() > 27_000_000, "what fits the bound is kept"


def test_memory_is_given_back() -> None:
    expected = convolve(500)
    del expected
    expected = convolve(500)
    kept = sum(torchq.memory_info().values())
    assert kept > 750_000 and torchq.release_memory() == kept
    assert torchq.memory_info() == {"scratch_bytes": 0, "idle_bytes": 0}
    assert torch.equal(convolve(500), expected)
    assert torchq.release_memory() > 0 and torchq.release_memory() == 0


def test_memory_of_other_threads_is_given_back() -> None:
    """A waiting thread gives memory back and computes again; a thread in an op keeps its own."""
    expected, ready, stop, wrong = convolve(64), threading.Event(), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            if not torch.equal(convolve(64), expected):
                wrong.append(1)
            ready.set()

    def wait() -> None:
        convolve(500)
        ready.set()
        stop.wait()
        assert torch.equal(convolve(64), expected)

    for target in (wait, work):
        ready.clear(), stop.clear()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(target)
            ready.wait()
            if target is wait:
                assert torchq.release_memory() > 0 and scratch_bytes() == 0
            for _ in range(2000):
                torchq.release_memory()
            stop.set()
            done.result()
    assert not wrong
