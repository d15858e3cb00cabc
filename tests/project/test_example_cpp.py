# SPDX-License-Identifier: Apache-2.0
"""A libtorch program runs a converted model and gives Python's bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchq.ops import LIBRARY_PATH

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchscript_cpp"
pytestmark = pytest.mark.slow


def cmake() -> str:
    """The one beside this Python (the test extra installs it), or else the system's."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("cmake", path=search)
    assert found, "no cmake: pip install cmake"
    return found


def call(*command: object) -> subprocess.CompletedProcess[str]:
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchscript_cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    call(cmake(), "-S", EXAMPLE, "-B", folder, prefix)
    call(cmake(), "--build", folder)
    call(sys.executable, EXAMPLE / "export.py", folder)
    return folder / "run"


def test_same_bits_as_python(program: Path) -> None:
    paths = [program.with_name(name) for name in ("model.pt", "input.pt", "output.pt")]
    ran = call(program, LIBRARY_PATH, *paths)
    assert ran.stdout.endswith(" ms\n")
    assert torch.equal(torch.load(paths[2]), torch.load(program.with_name("expected.pt")))


def test_errors_are_one_line(program: Path) -> None:
    model = program.with_name("model.pt")
    for arguments, message in (
        ([], "usage:"),
        (["missing.so", model, model, "out"], "missing.so"),
        ([LIBRARY_PATH, model, "missing.pt", "out"], "cannot read missing.pt"),
    ):
        ran = subprocess.run([program, *arguments], capture_output=True, text=True)
        assert ran.returncode in (1, 2)
        assert message in ran.stderr


def test_a_library_in_the_working_directory(program: Path) -> None:
    """Without a slash: dlopen alone would look in the system's folders."""
    paths = [program.with_name(name) for name in ("model.pt", "input.pt", "output.pt")]
    command = [program, LIBRARY_PATH.name, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=LIBRARY_PATH.parent)
    assert ran.returncode == 0, ran.stderr
