# SPDX-License-Identifier: Apache-2.0
"""Builds ``peer.cpp`` against the oneDNN wheels on PyPI, in ``build/onednn-<version>/``."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Version of oneDNN: its wheels. All of 3.13 need SYCL, whose CPU is a device of OpenCL.
_WHEELS = {
    "3.13": {
        "onednn": "2026.1.0",
        "onednn-devel": "2026.1.0",
        "tbb": "2023.2.0",
        "tcmlib": "1.6.0",
        "umf": "1.2.0",
        "intel-cmplr-lib-rt": "2026.2.0",
        "intel-cmplr-lib-ur": "2026.2.0",
        "intel-opencl-rt": "2026.2.0",
        "intel-sycl-rt": "2026.2.0",
    },
    "3.2": {"onednn-devel-cpu-gomp": "2023.2.0", "onednn-cpu-gomp": "2023.2.0"},
    "2.6": {"onednn-devel-cpu-gomp": "2022.2.1", "onednn-cpu-gomp": "2022.2.1"},
}
_SYCL = ("3.13",)
# Half of the runtime's bytes: other devices, link-time optimization, debugging.
_NEEDLESS = re.compile("libsycl-|level_zero|sanitizer|icx-lto|libtcm_debug|[.]py$")
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


def downloaded(version: str) -> bool:
    """Returns True if building a version's program downloads nothing."""
    return (_BUILD / f"onednn-{version}").is_dir()


def environment(version: str, threads: int) -> dict[str, str]:
    """Returns the variables under which a version's program finds its CPU and takes its threads."""
    if version not in _SYCL:
        return {"OMP_NUM_THREADS": str(threads)}
    driver = _BUILD / f"onednn-{version}" / "lib" / "libintelocl.so"
    return {"OCL_ICD_FILENAMES": str(driver), "DPCPP_CPU_NUM_CUS": str(threads)}


def _download(version: str, root: Path) -> None:
    """Puts the headers and the libraries of the wheels into ``root``."""
    with tempfile.TemporaryDirectory(dir=_BUILD) as scratch:
        wheels = [f"{name}=={release}" for name, release in _WHEELS[version].items()]
        # Not `pip install --target`, which drops a wheel's data/lib.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
        command = [*pip, "--only-binary=:all:", f"--dest={scratch}", *wheels]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise WheelsUnavailableError(
                f"benchmarks.onednn: pip cannot download {', '.join(wheels)}: {reason}"
            )
        staged = Path(scratch) / "root"
        for wheel in Path(scratch).glob("*.whl"):
            _unpack(wheel, staged)
        staged.rename(root)


def _unpack(wheel: Path, root: Path) -> None:
    """Writes a wheel's headers and libraries, each content once: wheels repeat it for each name."""
    first: dict[tuple[int, int], str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = member.filename.partition(".data/data/")[2]
            folder, _, name = path.rpartition("/")
            if not name or _NEEDLESS.search(name):
                continue
            if not folder.startswith("include/oneapi") and folder != "lib":
                continue
            (root / folder).mkdir(parents=True, exist_ok=True)
            same = first.setdefault((member.CRC, member.file_size), name)
            if folder == "lib" and same != name:
                (root / path).symlink_to(same)
            else:
                (root / path).write_bytes(archive.read(member))


def _compile(version: str, root: Path, program: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler.split()[0]) is None:
        raise RuntimeError(
            f"benchmarks.onednn: no C++ compiler {compiler!r} found. Install g++ or set CXX."
        )
    fresh = program.with_suffix(".new")
    library = root / "lib" / f"libdnnl.so.{version.split('.')[0]}"
    # DT_RPATH, unlike DT_RUNPATH, also finds what the library itself needs.
    linking = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/lib,--allow-shlib-undefined"
    flags = ["-O2", "-std=c++17", "-fopenmp", f"-I{root / 'include'}", linking]
    command = [*compiler.split(), *flags, str(_SOURCES[0]), str(library), "-o", str(fresh)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(
            f"benchmarks.onednn: {compiler} cannot compile peer.cpp:\n{result.stderr}"
        )
    fresh.replace(program)
