# SPDX-License-Identifier: Apache-2.0
"""Selects the instruction set that runs: one tier of those that the CPU has.

They are ``reference``, on x86-64 ``avx2``, ``avx2_vnni``, ``avx512``, ``avx512_vnni`` and ``amx``,
on AArch64 ``neon``, ``neon_dotprod`` and ``neon_i8mm``. All return the same bits. The default is
the best one; ``TORCHQ_ISA=avx2`` selects another for the process, :func:`use_isa` for a block of
code.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import torchq.runtime.library  # noqa: F401  loads the ops
from torchq.attributes.options import Tier
from torchq.runtime.cpus import usable_cpus


def supported_isas() -> list[Tier]:
    """Return the tiers this CPU can run, slowest first."""
    tiers: list[Tier] = torch.ops.torchq._supported_isas()
    return tiers


def isa() -> Tier:
    """Return the tier that ops called from this thread run on.

    Raises:
        ValueError: ``TORCHQ_ISA`` names a tier this CPU lacks.
    """
    tier: Tier = torch.ops.torchq._isa()
    return tier


@contextmanager
def use_isa(isa: Tier) -> Iterator[None]:
    """Run the ops of this thread on one tier, captured when each op starts.

    Raises:
        ValueError: this CPU lacks the tier; the message lists those it has.
    """
    if isa not in supported_isas():
        raise ValueError(
            f"torchq: isa={isa} is not available here; this CPU supports: "
            f"{', '.join(supported_isas())}."
        )
    before: str = torch.ops.torchq._select_isa(isa)
    try:
        yield
    finally:
        torch.ops.torchq._select_isa(before)


def last_kernel() -> str:
    """Kernel and tier of this thread's last op, as in ``"gemm:avx512_vnni"``; empty before it."""
    kernel: str = torch.ops.torchq._last_kernel()
    return kernel


def cpu_info() -> dict[str, object]:
    """Model, architecture, tiers, the selected tier, threads, and torch's name for the CPU.

    ``cpus``: how many this process may use, by its affinity and the quotas of its cgroups.
    ``tuned_for``: the core whose numbers kernels are tuned by; ``TORCHQ_CPU`` names another one.
    """
    return {
        "model": _model_name(),
        "machine": platform.machine(),
        "supported_isas": supported_isas(),
        "isa": isa(),
        "tuned_for": torch.ops.torchq._cpu(),
        "threads": torch.get_num_threads(),
        "cpus": usable_cpus(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def memory_info() -> dict[str, int]:
    """Memory torchq keeps between calls.

    ``scratch_bytes``: the working memory of all threads that ran an op. It grows to what the
    largest call of a thread needed. A thread keeps 1 MiB of it, and more as long as all threads
    together keep at most 64 MiB. ``idle_bytes``: memory that results no longer in use have left to
    those to come, at most 64 MiB. There is nothing else: geometry is worked out in every call, not
    cached by shape. :func:`release_memory` frees both.
    """
    return {
        "scratch_bytes": int(torch.ops.torchq._scratch_bytes()),
        "idle_bytes": int(torch.ops.torchq._idle_bytes()),
    }


def release_memory() -> int:
    """Free the memory torchq keeps between calls; return how many bytes that were.

    The next calls allocate it again. Threads that run an op at this moment keep theirs.
    :func:`memory_info` says what there is.
    """
    return int(torch.ops.torchq._release_memory())
