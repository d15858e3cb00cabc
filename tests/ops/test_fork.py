# SPDX-License-Identifier: Apache-2.0
"""A child of a process that ran threads: what the README says to do there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torchq

X = torch.linspace(-1, 1, 256 * 512).reshape(256, 512)


def converted() -> nn.Module:
    torch.manual_seed(0)
    return torchq.quantize(nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), [X])


def ends(run: Callable[[], Any], seconds: float = 60) -> bool:
    """Returns True if a forked child comes to the end of `run`."""
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_one_thread_in_the_child() -> None:
    torch.set_num_threads(2)
    model = converted()
    model(X)
    assert ends(lambda: (torch.set_num_threads(1), model(X)))


def answer(queue: Any, model: nn.Module) -> None:
    queue.put(model(X).numpy().tobytes())


def test_spawned_children() -> None:
    torch.set_num_threads(2)
    model = converted()
    expected = model(X).numpy().tobytes()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=answer, args=(queue, model))
    child.start()
    assert queue.get(timeout=120) == expected
    child.join()
