# SPDX-License-Identifier: Apache-2.0
"""The example service answers requests, and says what is wrong with bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchq

APP = Path(__file__).parents[2] / "examples" / "service" / "app.py"

pytestmark = pytest.mark.skipif(not APP.exists(), reason="not in a source tree")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    command = [sys.executable, str(APP), "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()
    assert (folder / "model.tq").exists()


def test_it_classifies(address: str) -> None:
    images = torch.randint(0, 256, (3, 64)).tolist()
    request = urllib.request.Request(address, json.dumps(images).encode())
    with urllib.request.urlopen(request) as answer:
        classes = json.load(answer)["classes"]
    assert len(classes) == 3 and all(0 <= c < 10 for c in classes)


def test_it_says_what_runs(address: str) -> None:
    with urllib.request.urlopen(address) as answer:
        assert json.load(answer) == {"torchq": torchq.__version__, "isa": torchq.isa()}


@pytest.mark.parametrize("body", ["[]", "[[1, 2]]", "[[", '["a"]'])
def test_it_refuses_other_bodies(address: str, body: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(address, body.encode()))
    assert error.value.code == 400 and json.load(error.value)["error"]
