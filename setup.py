# SPDX-License-Identifier: Apache-2.0
"""Builds torchq's library, ops against torch and one torch-free object per ISA, and torchq._C."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths
except ImportError:
    sys.exit(
        "torchq: building needs torch in this environment: run `pip install torch==2.13.0` "
        "and then `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).parent
# Objects stay here, also for editable installs, so that a second build is quick.
BUILD = ROOT / "build" / f"torch-{torch.__version__}"
# GCC 12 reports its own _mm512_undefined_* and torch's SmallVector as uninitialized.
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Without these GCC 12 moves accumulators between registers in the K loops: 160 moves, with them 0.
KERNEL = ["-fira-region=all", "-frename-registers"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
# Includes name files from here. Objects of kernels/ and isa/ have no other include path.
INCLUDE = f"-I{ROOT / 'csrc'}"
# Source file of each of a machine's ISA objects -> its flags. None of them sees a torch header.
ISA_FLAGS: dict[str, list[str]] = {"csrc/kernels/reference.cpp": []}
if os.uname().machine == "x86_64":
    ISA_FLAGS |= {
        "csrc/isa/avx2.cpp": ["-mavx2", "-mfma"],
        "csrc/isa/avx2_vnni.cpp": ["-mavx2", "-mfma", "-mavxvnni"],
        "csrc/isa/avx512.cpp": AVX512,
        "csrc/isa/avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
        "csrc/isa/amx.cpp": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    }
elif os.uname().machine == "aarch64":
    # GCC 12 else moves loads in front of a tile's products: up to 25 stack accesses in a K loop.
    NEON = ["-fno-schedule-insns"]
    ISA_FLAGS |= {
        "csrc/isa/neon.cpp": NEON,
        "csrc/isa/neon_i8mm.cpp": [*NEON, "-march=armv8.2-a+i8mm"],
    }

# Folders of the library's other objects, which see torch.
LIBRARY = ["csrc", "csrc/runtime", "csrc/epilogue", "csrc/ops/*"]
# Precompiled for these. Where a compiler refuses PRECOMPILED, it includes TORCH_HEADERS itself.
TORCH_HEADERS = "csrc/torch_pch.h"
PRECOMPILED = BUILD / "pch" / "torch_pch.h.gch"

# TORCHQ_EMULATE=1: kernels above AVX2 in software, for tests on CPUs that lack them.
EMULATED = bool(os.environ.get("TORCHQ_EMULATE"))
DEFINES = ["-DTORCHQ_EMULATED"] if EMULATED else []
if EMULATED:
    import simde_py

    intrinsics = str(ROOT / "tests/emulated/intrinsics.h")
    flags = ["-mavx2", "-mfma", "-O1", "-w", "-Wno-psabi", "-isystem", simde_py.get_include()]
    for source in ISA_FLAGS.keys() - {"csrc/kernels/reference.cpp", "csrc/isa/avx2.cpp"}:
        ISA_FLAGS[source] = [*flags, "-include", intrinsics]

# TORCHQ_SANITIZE=1: with Address- and UndefinedBehaviorSanitizer, for `make test-sanitized`.
STRIP = ["-s"]
if os.environ.get("TORCHQ_SANITIZE"):
    # vptr would need torch's type information; tensors may have any address. The kernels of AVX2
    # take the compiler 37 s; with all checks, inline, more than twice as long.
    STRIP = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr,alignment"]
    COMMON += ["-O1", "-fno-omit-frame-pointer", *STRIP]
    KERNEL += ["-fno-sanitize=null,alignment,object-size,pointer-overflow"]
    KERNEL += ["--param", "asan-instrumentation-with-call-threshold=0"]

# TORCHQ_WHEEL=1: one wheel for these versions of Python, with torchq._C for each that is found.
PYTHONS = ("3.10", "3.11", "3.12", "3.13") if os.environ.get("TORCHQ_WHEEL") else ()


def include_folder(version: str) -> str | None:
    """Return the headers of a Python on PATH or of pyenv, None without them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
    show = "import sysconfig; print(sysconfig.get_path('include'))"
    for python in filter(None, found):
        result = subprocess.run([python, "-c", show], capture_output=True, text=True)
        folder = Path(result.stdout.strip())
        if result.returncode == 0 and (folder / "Python.h").exists():
            return str(folder)
    return None


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
        """Keep objects in BUILD, also for editable installs, so that a second build is quick."""
        super().finalize_options()
        self.build_temp = str(BUILD)

    def get_ext_filename(self, ext_name: str) -> str:
        """Only torchq._C belongs to one Python, and says so in its name."""
        self.no_python_abi_suffix = ext_name.endswith("libtorchq")
        name, _, version = ext_name.partition("@")
        file = str(super().get_ext_filename(name))
        running = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
        return file.replace(running, f"cpython-{version}") if version else file

    def build_extension(self, ext: Extension) -> None:
        """Keep the objects of each library apart: those of torchq._C depend on the Python."""
        build_temp = self.build_temp
        self.build_temp = str(Path(build_temp, ext.name.rpartition(".")[2]))
        super().build_extension(ext)
        self.build_temp = build_temp

    def build_extensions(self) -> None:
        """Build everything; say in one sentence when that cannot work."""
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
        with ThreadPoolExecutor(jobs()) as pool:
            each = pool.map(lambda s: self.compile_first(compiler, s), [*ISA_FLAGS, TORCH_HEADERS])
            *objects, _ = each
        self.extensions[0].extra_objects.extend(objects)
        super().build_extensions()
        library = Path(self.get_ext_fullpath("torchq.libtorchq"))
        built_for = f"torch {torch.__version__}, {os.uname().machine}"
        library.with_name("built_for.txt").write_text(f"{built_for}\n")

    def compile_first(self, compiler: list[str], source: str) -> str:
        """Compile an ISA object or TORCH_HEADERS, unless this command made it from these files."""
        if source == TORCH_HEADERS:
            target, inputs = PRECOMPILED, [ROOT / source]
            flags = [*self.compiler.compiler_so[1:], *torch_flags(), "-x", "c++-header"]
        else:
            target = BUILD / "isa" / (Path(source).stem + ".o")
            inputs = [ROOT / source, *ROOT.glob("csrc/kernels/**/*.h"), *ROOT.glob("csrc/isa/*.h")]
            inputs += ROOT.glob("tests/emulated/*.h") if EMULATED else []
            flags = [*COMMON, *KERNEL, *WARNINGS, *ISA_FLAGS[source], INCLUDE]
        target.parent.mkdir(parents=True, exist_ok=True)
        newest = max(path.stat().st_mtime for path in inputs)
        command = [*compiler, *flags, "-c", str(ROOT / source), "-o", str(target)]
        made_by = target.with_suffix(".command")  # written when the object is complete
        text = shlex.join(command)
        known = target.exists() and made_by.exists() and made_by.read_text() == text
        if not known or target.stat().st_mtime < newest:
            made_by.unlink(missing_ok=True)
            print(f"torchq: compiling {source}", flush=True)
            if subprocess.run(command).returncode != 0:
                sys.exit(f"torchq: compiling {source} failed; the compiler's message is above.")
            made_by.write_text(text)
        return str(target)


def torch_flags() -> list[str]:
    """Return flags of objects that see torch. Debug information, which the linker drops, is off."""
    system = [flag for path in include_paths() for flag in ("-isystem", path)]
    return [*COMMON, *WARNINGS, "-g0", "-fopenmp", INCLUDE, *system, *DEFINES]


def extension(name: str, folders: list[str], libraries: list[str], link: list[str]) -> Extension:
    """Return a shared library of the C++ files in these folders."""
    sources = sorted(str(p.relative_to(ROOT)) for d in folders for p in ROOT.glob(f"{d}/*.cpp"))
    return Extension(
        f"torchq.{name}",
        sources,
        depends=[str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.h")],
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu", *libraries],
        # The folder of PRECOMPILED first: the compiler takes what it finds first.
        extra_compile_args=[
            f"-I{PRECOMPILED.parent}",
            *("-include", Path(TORCH_HEADERS).name),
            *torch_flags(),
        ],
        extra_link_args=["-fopenmp", "-Wl,-O1", *STRIP, *link],
        language="c++",
    )


class Wheel(bdist_wheel):
    """Tags the wheel of TORCHQ_WHEEL for every Python, since it has a torchq._C for each."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PYTHONS else (python, abi, platform)


# The library has no Python symbols, so a C++ program can load the same file.
library = extension("libtorchq", LIBRARY, [], ["-Wl,--no-undefined"])
bindings = [extension("_C", ["csrc/python"], ["torch_python"], [])]
for version in PYTHONS:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        continue
    include = include_folder(version)
    if include is None:
        print(f"torchq: no headers of Python {version} found: the wheel will not serve it.")
        continue
    bindings.append(
        extension(f"_C@{version.replace('.', '')}", ["csrc/python"], ["torch_python"], [])
    )
    bindings[-1].include_dirs.append(include)

setup(
    ext_modules=[library, *bindings],
    cmdclass={"build_ext": BuildTorchq.with_options(use_ninja=True), "bdist_wheel": Wheel},
)
