# SPDX-License-Identifier: Apache-2.0
"""Tensors at chosen places in memory: odd addresses, the end of a page, in front of a canary."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)
LIBM = ctypes.CDLL("libm.so.6")
PAGE = mmap.PAGESIZE
PROT_NONE = 0
UPWARD = 0x800  # FE_UPWARD on x86


def dense_bytes(t: Tensor) -> int:
    """Bytes from the first to the last value: strides may be channels-last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() if t.numel() else 0


def place(t: Tensor, buffer: memoryview | bytearray, offset: int) -> Tensor:
    """A copy of t, strides included, that starts at buffer[offset]."""
    if not t.numel():
        return t
    size = dense_bytes(t) // t.element_size()
    flat = torch.frombuffer(buffer, dtype=t.dtype, count=size, offset=offset)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


def misaligned(t: Tensor, by: int) -> Tensor:
    """A copy whose address is `by` modulo 64."""
    buffer = bytearray(dense_bytes(t) + 128)
    base = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    return place(t, buffer, -base % 64 + by)


_pages: list[mmap.mmap] = []  # stay mapped: freeing would need PROT_NONE taken back


def before_guard_page(t: Tensor) -> Tensor:
    """A copy whose last byte is the last one before a page that faults."""
    size = -(-dense_bytes(t) // PAGE) * PAGE
    memory = mmap.mmap(-1, size + PAGE)
    _pages.append(memory)
    result = place(t, memory, size - dense_bytes(t))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), PROT_NONE) == 0
    return result


def run_on_guarded_heap(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` in another process, in which `guard_heap(True)` starts to guard tensors."""
    library, source = directory / "guard_heap.so", str(Path(__file__).with_name("guard_heap.c"))
    build = ["cc", "-O1", "-fPIC", "-shared", "-o", str(library), source, "-ldl"]
    subprocess.run(build, check=True, capture_output=True)
    path = os.pathsep.join(sys.path)
    prologue = "import ctypes, faulthandler\nguard_heap = ctypes.CDLL(None).guard_heap\n"
    prologue += "faulthandler.enable()\n"
    return subprocess.run(
        [sys.executable, "-c", prologue + code],
        env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def rounding_upward() -> Iterator[None]:
    before = LIBM.fegetround()
    LIBM.fesetround(UPWARD)
    try:
        yield
        assert LIBM.fegetround() == UPWARD, "the op must restore the rounding mode"
    finally:
        LIBM.fesetround(before)


@contextmanager
def flushing_denormals() -> Iterator[None]:
    tiny = torch.tensor(1e-40)
    assert torch.set_flush_denormal(True)
    try:
        yield
        assert not (tiny * 1.0).any(), "the op must restore the flush mode"
    finally:
        torch.set_flush_denormal(False)
