# SPDX-License-Identifier: Apache-2.0
"""Builds ``peer.cpp`` against the oneDNN wheels on PyPI, in ``build/onednn-<version>/``."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_WHEELS = {"3.2": "2023.2.0", "2.6": "2022.2.1"}  # version of oneDNN: version of its wheels
_SOURCES = [Path(__file__).with_name(name) for name in ("peer.cpp", "request.h")]
_BUILD = Path(__file__).resolve().parents[2] / "build"


class WheelsUnavailableError(RuntimeError):
    """The oneDNN wheels cannot be downloaded."""


def build(version: str = "3.2") -> Path:
    """Returns the program for a version of oneDNN, after downloading and compiling what is missing.

    Raises:
        ValueError: The version is not known.
        WheelsUnavailableError: pip cannot download the wheels.
        RuntimeError: There is no C++ compiler, or it fails.
    """
    if version not in _WHEELS:
        raise ValueError(
            f"benchmarks.onednn: version must be one of {list(_WHEELS)}, got {version!r}."
        )
    root = _BUILD / f"onednn-{version}"
    program = root / "peer"
    _BUILD.mkdir(exist_ok=True)
    with open(_BUILD / f"onednn-{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may start at once
        if not root.is_dir():
            _download(version, root)
        changed = max(source.stat().st_mtime for source in _SOURCES)
        if not program.exists() or program.stat().st_mtime < changed:
            _compile(version, root, program)
    return program


def _download(version: str, root: Path) -> None:
    """Puts the headers and the library of the wheels into ``root``."""
    library = f"lib/libdnnl.so.{version.split('.')[0]}"
    with tempfile.TemporaryDirectory(dir=_BUILD) as scratch:
        wheels = [f"onednn-{part}==" + _WHEELS[version] for part in ("devel-cpu-gomp", "cpu-gomp")]
        # Not `pip install --target`, which drops a wheel's data/lib.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        command = [*pip, "--only-binary=:all:", f"--dest={scratch}", *wheels]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise WheelsUnavailableError(
                f"benchmarks.onednn: pip cannot download {' and '.join(wheels)}: {reason}"
            )
        staged = Path(scratch) / "root"
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    path = name.partition(".data/data/")[2]
                    if path.startswith("include/oneapi/") or path == library:
                        (staged / path).parent.mkdir(parents=True, exist_ok=True)
                        (staged / path).write_bytes(archive.read(name))
        staged.rename(root)


def _compile(version: str, root: Path, program: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise RuntimeError(
            f"benchmarks.onednn: no C++ compiler {compiler!r} found. Install g++ or set CXX."
        )
    fresh = program.with_suffix(".new")
    library = root / "lib" / f"libdnnl.so.{version.split('.')[0]}"
    flags = ["-O2", "-std=c++17", "-fopenmp", f"-I{root / 'include'}", "-Wl,-rpath,$ORIGIN/lib"]
    command = [*compiler.split(), *flags, str(_SOURCES[0]), str(library), "-o", str(fresh)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"benchmarks.onednn: {compiler} cannot compile peer.cpp:\n{result.stderr}"
        )
    fresh.replace(program)
