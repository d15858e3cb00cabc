# SPDX-License-Identifier: Apache-2.0
"""Builds torchq's library, ops against torch and one torch-free object per ISA, and torchq._C."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths
except ImportError:
    sys.exit(
        "torchq: building needs torch in this environment: run `pip install torch==2.13.0` "
        "and then `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).parent
# GCC 12 reports its own _mm512_undefined_* and torch's SmallVector as uninitialized.
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Without these GCC 12 moves accumulators between registers in the K loops: 160 moves, with them 0.
KERNEL = ["-fira-region=all", "-frename-registers"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
# Source file of each ISA object -> its flags. None of them sees a torch header.
ISA_FLAGS = {
    "csrc/kernels/reference.cpp": [],
    "csrc/isa/avx2.cpp": ["-mavx2", "-mfma"],
    "csrc/isa/avx2_vnni.cpp": ["-mavx2", "-mfma", "-mavxvnni"],
    "csrc/isa/avx512.cpp": AVX512,
    "csrc/isa/avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "csrc/isa/amx.cpp": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
}

# TORCHQ_EMULATE=1: kernels above AVX2 in software, for tests on CPUs that lack them.
EMULATED = bool(os.environ.get("TORCHQ_EMULATE"))
DEFINES = ["-DTORCHQ_EMULATED"] if EMULATED else []
if EMULATED:
    import simde_py

    intrinsics = str(ROOT / "tests/emulated/intrinsics.h")
    flags = ["-mavx2", "-mfma", "-O1", "-w", "-Wno-psabi", "-isystem", simde_py.get_include()]
    for source in ISA_FLAGS.keys() - {"csrc/kernels/reference.cpp", "csrc/isa/avx2.cpp"}:
        ISA_FLAGS[source] = [*flags, "-include", intrinsics]


def jobs() -> int:
    """How many compilers run at a time: MAX_JOBS, as for torch's part, or the CPUs we may use."""
    asked = os.environ.get("MAX_JOBS", "")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(int(asked) if asked.isdigit() else cpus or 1, 1)


def torch_release() -> tuple[int, int]:
    """Major and minor version of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class BuildTorchq(BuildExtension):
    """Compiles the ISA objects first and links them into the extension."""

    def finalize_options(self) -> None:
        """Keeps objects in build/, also for editable installs, so that a second build is quick."""
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}")

    def get_ext_filename(self, ext_name: str) -> str:
        """Only torchq._C belongs to one Python, and says so in its name."""
        self.no_python_abi_suffix = ext_name.endswith("libtorchq")
        return str(super().get_ext_filename(ext_name))

    def build_extensions(self) -> None:
        """Builds everything; says in one sentence when that cannot work."""
        if torch_release() < (2, 13):
            sys.exit(f"torchq: torch 2.13 or newer is required, found {torch.__version__}.")
        name = os.environ.get("CXX") or "g++"
        compiler = shlex.split(name)
        try:
            subprocess.run([*compiler, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            sys.exit(
                f"torchq: no working C++ compiler: `{name} --version` failed. Install g++ 12 "
                "or newer, or set CXX."
            )
        # The same variables as setuptools reads for the other objects, in front of our flags.
        for variable in ("CFLAGS", "CXXFLAGS", "CPPFLAGS"):
            compiler += shlex.split(os.environ.get(variable, ""))
        x86 = os.uname().machine == "x86_64"
        sources = [s for s in ISA_FLAGS if x86 or "/isa/" not in s]
        with ThreadPoolExecutor(jobs()) as pool:
            objects = list(pool.map(lambda s: self.compile_isa(compiler, s), sources))
        self.extensions[0].extra_objects.extend(objects)
        super().build_extensions()
        library = Path(self.get_ext_fullpath("torchq.libtorchq"))
        library.with_name("built_for.txt").write_text(f"{torch.__version__}\n")

    def compile_isa(self, compiler: list[str], source: str) -> str:
        """Compiles one ISA object unless this command made it from what it could include now."""
        target = Path(self.build_temp) / "isa" / (Path(source).stem + ".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        inputs = [ROOT / source, *ROOT.glob("csrc/kernels/*.h"), *ROOT.glob("csrc/isa/*.h")]
        inputs += ROOT.glob("tests/emulated/*.h") if EMULATED else []
        newest = max(path.stat().st_mtime for path in inputs)
        flags = [*COMMON, *KERNEL, *WARNINGS, *ISA_FLAGS[source]]
        command = [*compiler, *flags, "-c", str(ROOT / source), "-o", str(target)]
        made_by = target.with_suffix(".command")  # written when the object is complete
        text = shlex.join(command)
        known = target.exists() and made_by.exists() and made_by.read_text() == text
        if not known or target.stat().st_mtime < newest:
            made_by.unlink(missing_ok=True)
            print(text, flush=True)
            if subprocess.run(command).returncode != 0:
                sys.exit(f"torchq: compiling {source} failed; the compiler's message is above.")
            made_by.write_text(text)
        return str(target)


def extension(name: str, folders: list[str], libraries: list[str], link: list[str]) -> Extension:
    """A shared library of the C++ files in these folders."""
    sources = sorted(str(p.relative_to(ROOT)) for d in folders for p in ROOT.glob(f"{d}/*.cpp"))
    system = [flag for path in include_paths() for flag in ("-isystem", path)]
    return Extension(
        f"torchq.{name}",
        sources,
        depends=[str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")],
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu", *libraries],
        extra_compile_args=[*COMMON, *WARNINGS, "-fopenmp", *system, *DEFINES],
        extra_link_args=["-fopenmp", "-Wl,-O1", "-s", *link],
        language="c++",
    )


setup(
    # The library has no Python symbols, so a C++ program can load the same file.
    ext_modules=[
        extension("libtorchq", ["csrc", "csrc/ops"], [], ["-Wl,--no-undefined"]),
        extension("_C", ["csrc/python"], ["torch_python"], []),
    ],
    cmdclass={"build_ext": BuildTorchq.with_options(use_ninja=True)},
)
