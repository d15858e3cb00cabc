# SPDX-License-Identifier: Apache-2.0
"""Results' memory: their own while anybody uses it, then that of results to come."""

import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torchq
import torchq.functional as TF

MIB = 1 << 20


def values(count: int, value: int) -> Tensor:
    """An op's result: ``count`` bytes of this value."""
    return TF.quantize(torch.full((count,), float(value)), 1.0, 0)


def idle() -> int:
    return torchq.memory_info()["idle_bytes"]


@pytest.fixture(autouse=True)
def nothing_idle() -> Iterator[None]:
    """64 blocks that nobody takes would be left; these push out what other tests have left."""
    blocks = [values(1 << 14, 0) for _ in range(64)]
    del blocks
    yield


def test_a_result_takes_the_memory_of_one_that_died() -> None:
    first = values(MIB, 1)
    place = first.data_ptr()
    view = first[5:]
    del first
    assert values(MIB, 2).data_ptr() != place  # the view holds it
    assert bool((view == 1).all())
    del view
    malloc = torch.zeros(MIB, dtype=torch.uint8)
    assert values(MIB, 3).data_ptr() == place
    assert values(MIB - 9999, 4).data_ptr() == place
    assert values(MIB // 2 - 9999, 5).data_ptr() != place  # it would waste half
    assert bool((malloc == 0).all())


def test_the_one_that_died_last_is_taken_first() -> None:
    blocks = [values(MIB, i) for i in range(4)]
    places = [block.data_ptr() for block in blocks]
    for _ in range(4):
        del blocks[0]
    assert [values(MIB, i).data_ptr() for i in (7, 8)] == [places[3]] * 2
    assert values(2 * MIB, 9).data_ptr() not in places


def test_what_is_kept_is_bounded() -> None:
    blocks = [values(3 * MIB, i) for i in range(40)]
    assert all(bool((block == i).all()) for i, block in enumerate(blocks))
    del blocks
    assert 61 * MIB < idle() <= 64 * MIB
    del_large = values(65 * MIB, 1)
    del del_large
    assert 61 * MIB < idle() <= 64 * MIB
    small = [values(1 << 14, 0) for _ in range(200)]
    del small
    assert idle() == 64 << 14
    tiny = [values((1 << 14) - 1, 0) for _ in range(200)]
    del tiny
    assert idle() == 64 << 14


def test_results_change_size_and_owner_as_all_tensors_do() -> None:
    src = values(MIB, 3)
    grown = values(MIB, 3).resize_(3 * MIB)
    grown[MIB:] = 4
    shrunk = values(MIB, 5).resize_(10)
    array = values(MIB, 6).numpy()
    shared = values(MIB, 7).share_memory_()
    lazy = torch._lazy_clone(src)
    lazy[0] = 9
    empty = TF.quantize(torch.empty(0, 3), 1.0, 0)
    others = [values(MIB, 8) for _ in range(8)]
    assert bool((src == 3).all()) and lazy[0] == 9 and bool((lazy[1:] == 3).all())
    assert bool((grown[:MIB] == 3).all()) and bool((grown[MIB:] == 4).all())
    assert bool((shrunk == 5).all()) and (array == 6).all() and bool((shared == 7).all())
    assert empty.shape == (0, 3) and empty.resize_(MIB).numel() == MIB
    assert bool((pickle.loads(pickle.dumps(others[0])) == 8).all())


def test_threads_have_results_of_their_own() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        kept: list[tuple[int, Tensor]] = []
        for i in range(300):
            value = (seed * 37 + i) % 256
            kept.append((value, values(20_000 + 7000 * (i % 5), value)))
            if len(kept) > 6:
                expected, block = kept.pop(i % 6)
                if not bool((block == expected).all()):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_strides_are_those_of_empty_like(order: tuple[int, ...]) -> None:
    src = torch.randn(2, 3, 4, 5).permute(order)
    for same in (src, src[:, :1], src[..., ::2], src[:1].expand(3, -1, -1, -1)):
        dst = TF.quantize(same, 0.1, 3)
        assert dst.stride() == torch.empty_like(same).stride()


def test_the_profiler_sees_memory_that_is_taken_again() -> None:
    src = torch.ones(MIB)
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True) as profile:
            TF.quantize(src, 1.0, 0)
        (event,) = (e for e in profile.key_averages() if e.key == "torchq::quantize")
        assert event.self_cpu_memory_usage >= MIB or event.cpu_memory_usage >= MIB


PAGE_FAULTS = """
import resource, torch, torchq.functional as TF
src = torch.ones(1 << 20)
faults = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    TF.quantize(src, 1.0, 0)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[15])
"""


def test_calls_do_not_wait_for_fresh_pages() -> None:
    """Runs with a malloc that takes every result from the system: 256 pages a call."""
    assert resource.getpagesize() == 4096
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 5
