# SPDX-License-Identifier: Apache-2.0
"""The example service: its answers, its load limit, its stop, and the death of a worker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch

import torchq

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
APP = ROOT / "examples" / "service" / "app.py"

pytestmark = pytest.mark.skipif(not APP.exists(), reason="not in a source tree")


@contextmanager
def service(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, str(APP), "--port", "0", *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server
        finally:
            server.terminate()
    assert server.returncode == 0


def test_the_image_has_every_file_of_the_service() -> None:
    copied = re.findall(r"examples/service/(\S+)", (ROOT / "Dockerfile").read_text())
    own = {path.name for path in APP.parent.glob("*.py")} - {"load_test.py", "locustfile.py"}
    assert own <= set(copied)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with service(folder) as (address, _):
        assert (folder / "model.tq").exists()
        yield address


def post(address: str, images: Any) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(images).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def ready(address: str) -> int:
    with urllib.request.urlopen(f"{address}/ready", timeout=60) as answer:
        found = json.load(answer)
    assert found["ready"] is True
    return int(found["worker"])


def test_it_says_what_runs(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert json.load(answer) == {"torchq": torchq.__version__, "isa": torchq.isa()}


@pytest.mark.parametrize("body", ["[]", "[[1, 2]]", "[[", '["a"]'])
def test_it_refuses_other_bodies(address: str, body: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(address, body.encode()))
    assert error.value.code == 400 and json.load(error.value)["error"]


def test_batches_have_the_bits_of_single_calls(address: str, folder: Path) -> None:
    model = torchq.load(folder / "model.tq")
    requests = [torch.randint(0, 256, (1 + i % 3, 64)) for i in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda images: post(address, images.tolist()), requests))
    for images, answer in zip(requests, answers, strict=True):
        expected = model(images.view(-1, 1, 8, 8).float() / 255)
        assert torch.equal(torch.tensor(answer["scores"]), expected)
        assert answer["classes"] == expected.argmax(1).tolist()


def test_a_dead_worker_takes_only_its_own_requests(address: str) -> None:
    clients, images = 6, [[7] * 64] * 20
    victim = ready(address)
    failures: list[float] = []
    killed = end = time.monotonic() + 600

    def client(_: int) -> int:
        answered = 0
        while time.monotonic() < end:
            try:
                assert len(post(address, images)["classes"]) == 20
                answered += 1
            except (OSError, HTTPException):  # the connection ended
                failures.append(time.monotonic())
        return answered

    with ThreadPoolExecutor(clients) as pool:
        counts = [pool.submit(client, i) for i in range(clients)]
        time.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(1.5)
        end = 0.0
        assert all(count.result() for count in counts)
    # each client had one request at most with the worker; none fails later
    assert len(failures) <= clients and all(at < killed + 1 for at in failures)
    limit = time.monotonic() + 120
    workers: set[int] = set()
    while len(workers) < 2 and time.monotonic() < limit:
        workers.add(ready(address))
    assert len(workers) == 2 and victim not in workers


@pytest.mark.slow
def test_overload_and_stop(folder: Path) -> None:
    """One service for both: starting it takes most of the time."""
    large, small = [[3] * 64] * 3000, [[3] * 64]
    with service(folder, "--workers=1", "--waiting=1", "--drain=1") as (address, server):
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda images: status(address, images), [large] * 16))
        assert {code for code, _ in answers} == {200, 503}
        assert all(retry == "1" for code, retry in answers if code == 503)
        assert status(address, small) == (200, None)
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(post, address, large)
            time.sleep(0.1)
            server.terminate()
            time.sleep(0.3)
            with pytest.raises(urllib.error.HTTPError) as error:
                ready(address)
            assert error.value.code == 503 and json.load(error.value)["ready"] is False
            assert len(accepted.result()["classes"]) == 3000
        assert server.wait(60) == 0
        with pytest.raises(OSError):
            ready(address)


def status(address: str, images: Any) -> tuple[int, str | None]:
    try:
        post(address, images)
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"]
    return 200, None
