# SPDX-License-Identifier: Apache-2.0
"""torchq::rnn in processes that get fewer threads or cores than they ask for."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_region_that_gets_fewer_threads_than_it_asks_for() -> None:
    """A limit that torch does not know of: 7 parts on 2 or 3 threads."""
    code = (
        "import torch, rnn_cases as t\n"
        "case = t.Case('lstm', 64, 256, steps=5, batch=2)\n"
        "layer = t.make(case); x, h, c = t.inputs(case, layer)\n"
        "torch.set_num_threads(1); one = layer(x, None, h, c)[0]\n"
        "torch.set_num_threads(7); seven = layer(x, None, h, c)[0]\n"
        "assert torch.equal(one, seven); print('same')"
    )
    for limit in ("2", "3"):
        run = python(code, OMP_THREAD_LIMIT=limit, OMP_DYNAMIC="false")
        assert run.stdout.split() == ["same"], run.stderr


def test_four_processes_on_two_cores_finish() -> None:
    """Threads that wait for one without a core give theirs up.

    Two processes of two threads share each core, so at every barrier somebody waits for a thread
    that does not run. Spinning until the scheduler steps in takes 8 s of processor time for these
    2000 steps, giving up the core 0.05 s; up to 2 s where other processes take whole time slices.
    """
    code = (
        "import os, time, torch, rnn_cases as t\n"
        "number = 2 * (os.fork() == 0)\n"
        "number += os.fork() == 0  # four processes: threads start below\n"
        "cores = sorted(os.sched_getaffinity(0))[:2]\n"
        "os.sched_setaffinity(0, {cores[number % len(cores)]})\n"
        "torch.set_num_threads(2)\n"
        "case = t.Case('gru', 256, 256, steps=200)\n"
        "layer = t.make(case); x, h, c = t.inputs(case, layer)\n"
        "layer(x, None, h, c)\n"
        "before = time.process_time()\n"
        "for _ in range(10): layer(x, None, h, c)\n"
        "print(time.process_time() - before, flush=True)"
    )
    times = python(code).stdout.split()
    assert len(times) == 4 and max(map(float, times)) < 4


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """As users run it: `make test` tells threads that wait to sleep."""
    base = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**base, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return subprocess.CompletedProcess([], process.returncode, out, error)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return finished(start(code, **environment))
