# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel beside each torch release and Python, and runs smoke.py there.

Each pair gets a fresh virtual environment, and no compiler on PATH. Models that the built tree
saved have to give the same bits. Downloads are kept in build/wheel-test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from stubs import output, write_stubs

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "wheel-test"
SMOKE = Path(__file__).with_name("smoke.py")
# The oldest Python of each torch release that torchq supports too.
RELEASES = {"2.13.0": 10, "2.14.1": 10, "2.15.0": 11}
PYTHONS = range(10, 14)
TORCH_NEEDS = ["typing_extensions", "filelock", "sympy", "networkx", "jinja2", "fsspec", "numpy"]


def find_python(minor: int) -> str | None:
    """Returns an interpreter of Python 3.minor, on PATH or of pyenv, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    name = f"python3.{minor}"
    for python in (shutil.which(name), *pyenv.glob(f"3.{minor}.*/bin/{name}")):
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return str(python)
    return None


def torch_wheel(release: str, minor: int) -> Path:
    """Downloads a release of torch unless an earlier run did."""
    folder = WORK / "downloads"
    pattern = f"torch-{release}*-cp3{minor}-cp3{minor}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        output(
            *pip, "--python-version", f"3.{minor}", f"torch=={release}", PIP_CONSTRAINT=os.devnull
        )
    return next(folder.glob(pattern))


def try_pair(wheel: Path, release: str, minor: int, python: str) -> dict[str, str]:
    """Returns the digests of one torch release with one Python, in a fresh environment."""
    venv = WORK / f"torch-{release}-py3.{minor}"
    shutil.rmtree(venv, ignore_errors=True)
    output(python, "-m", "venv", venv)
    inside = venv / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # constraints of the user's own pip configuration are about other environments
    output(*pip, "--no-deps", torch_wheel(release, minor), PIP_CONSTRAINT=os.devnull)
    output(*pip, *TORCH_NEEDS)
    output(*pip, "--no-deps", wheel)
    packages = Path(
        output(inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    stubs = venv / "stubs"
    write_stubs(packages / "torch" / "lib", inside.resolve(), stubs)
    nowhere = venv / "empty"
    nowhere.mkdir()
    environment = {"PATH": str(nowhere), "CXX": "/nonexistent", "LD_LIBRARY_PATH": str(stubs)}
    digests = json.loads(output(inside, "-I", SMOKE, "read", WORK / "models", **environment))
    shutil.rmtree(venv)
    return dict(digests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="*", choices=RELEASES, default=list(RELEASES))
    parser.add_argument("--python", nargs="*", type=int, default=list(PYTHONS), metavar="MINOR")
    args = parser.parse_args()
    (WORK / "models").mkdir(parents=True, exist_ok=True)
    expected = json.loads(
        output(sys.executable, SMOKE, "write", WORK / "models", PYTHONPATH=str(ROOT))
    )
    failures = 0
    for release in args.torch:
        for minor in args.python:
            name = f"torch {release}, Python 3.{minor}"
            python = find_python(minor)
            if minor < RELEASES[release]:
                continue
            if python is None:
                print(f"{name}: no such Python here, not tried")
                continue
            try:
                digests = try_pair(args.wheel.resolve(), release, minor, python)
            except RuntimeError as error:
                print(f"{name}: FAILED\n{error}")
                failures += 1
                continue
            differ = [key for key in expected if digests.get(key) != expected[key]]
            failures += bool(differ)
            print(
                f"{name}: {'same bits' if not differ else 'OTHER BITS in ' + ', '.join(differ)}",
                flush=True,
            )
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
