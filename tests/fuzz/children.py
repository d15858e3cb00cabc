# SPDX-License-Identifier: Apache-2.0
"""Runs what may crash in forked children, with limits of time and memory."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable

import torch

SECONDS = 20  # of computing for one case, and ten times that by the clock: a hang is a crash


def limit_memory(beyond: int) -> None:
    """Lets this process and its children have so many bytes more than now; one thread."""
    torch.set_num_threads(1)  # a forked child has no worker threads
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + beyond, used + beyond))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_forked(cases: Iterable[str], check: Callable[[str], None]) -> str:
    """Checks cases in a child; "" or what happened and at which case.

    A case is text that says how to repeat it. It is written to a file before it runs, so that the
    parent knows it when the child is gone.
    """
    with tempfile.NamedTemporaryFile("r+") as log:
        child = os.fork()
        if child == 0:
            code, case = 1, ""
            try:
                for case in cases:
                    log.seek(0)
                    log.truncate()
                    log.write(case)
                    log.flush()
                    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # the default action ends
                    signal.alarm(10 * SECONDS)  # calls that never return, too
                    check(case)
                    signal.alarm(0)
                    signal.setitimer(signal.ITIMER_PROF, 0)
                code = 0
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                why = f"{type(error).__name__} at {last.name}:{last.lineno}: {str(error)[:300]}"
                log.write(f"\n    {why}")
                log.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return ""
        what = f"signal {signal.Signals(status & 127).name}" if status & 127 else "a wrong result"
        log.seek(0)
        return f"{what}: {log.read()}"
