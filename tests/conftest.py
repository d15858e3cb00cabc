# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every test that asks for `isa` runs on all tiers that this CPU has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peers import start_onednn

import torchq
from benchmarks.onednn import Peer

ISAS = (
    "reference", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx",
    "neon", "neon_dotprod", "neon_i8mm",
)  # fmt: skip
# Tiers that must run here: CI sets it, so that a runner without them fails instead of skipping.
REQUIRED = [isa for isa in os.environ.get("TORCHQ_REQUIRE_ISAS", "").split(",") if isa]

_ran: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    unknown = sorted(set(REQUIRED) - set(ISAS))
    if unknown:
        raise pytest.UsageError(
            f"TORCHQ_REQUIRE_ISAS names {', '.join(unknown)}; tiers are {', '.join(ISAS)}."
        )


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test has the same random numbers, and may set the number of threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> None:
    """Narrow layers gain nothing from a second thread, and lose where it has to wait."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """oneDNN, in a process of its own."""
    with start_onednn() as started:
        yield started


@pytest.fixture
def benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``python -m benchmarks ...``, but here: a process of its own would import torch anew."""
    from benchmarks.__main__ import main

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *args])
        status = main()
        return subprocess.CompletedProcess(args, status, *capsys.readouterr())

    return run


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All tiers of a case run one after the other: the oracle's cached answer serves them all."""
    if "isa" in metafunc.fixturenames:
        tiers = [isa for isa in ISAS if isa in REQUIRED or isa in torchq.supported_isas()]
        metafunc.parametrize("isa", tiers, indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on one tier."""
    tier: str = request.param
    _ran.add(tier)
    if tier not in torchq.supported_isas():
        supported = ", ".join(torchq.supported_isas())
        pytest.fail(f"TORCHQ_REQUIRE_ISAS: this CPU lacks {tier}; it has {supported}")
    with torchq.use_isa(tier):
        yield tier


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done: the tiers that it ran count here."""
    _ran.update(getattr(node, "workeroutput", {}).get("isas", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With TORCHQ_REQUIRE_ISAS, a tier this CPU has must have run, unless no test asked for one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["isas"] = sorted(_ran)
        return
    missing = [isa for isa in torchq.supported_isas() if isa not in _ran]
    if REQUIRED and _ran and missing and session.exitstatus == pytest.ExitCode.OK:
        print(f"\nTORCHQ_REQUIRE_ISAS: no test ran on {', '.join(missing)}, which this CPU has")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
