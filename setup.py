# SPDX-License-Identifier: Apache-2.0
"""Builds torchq's library, ops against torch and torch-free kernels per tier, and torchq._C."""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

try:
    import torch
except ImportError:
    sys.exit(
        "torchq: building needs torch in this environment: run `pip install torch==2.13.0` "
        "and then `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).resolve().parent
# To build for another machine: _PYTHON_HOST_PLATFORM, a variable of Python, names it, CXX is its
# compiler, and TORCHQ_TORCH the unpacked folder of its torch, of the same release as ours.
HOST, MACHINE = os.uname().machine, sysconfig.get_platform().partition("-")[2]
TORCH = Path(os.environ.get("TORCHQ_TORCH") or Path(torch.__file__).parent)
# Objects stay here, also for editable installs, so that a second build is quick.
BUILD = ROOT / "build" / (f"torch-{torch.__version__}" + (f"-{MACHINE}" if MACHINE != HOST else ""))
# GCC 12 reports its own _mm512_undefined_* and torch's SmallVector as uninitialized.
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
COMMON = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
# Folders stay out of messages, so that each machine builds the same bytes.
COMMON += [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, TORCH.parent)]
# Without these GCC 12 moves accumulators between registers in the K loops: 160 moves, with them 0.
KERNEL = ["-fira-region=all", "-frename-registers"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"]
# Includes name files from here. Objects of kernels/ and isa/ have no other include path.
INCLUDE = f"-I{ROOT / 'csrc'}"
# Tiers of this machine -> their flags. Each family of kernels has an object for each tier, with the
# trait in csrc/isa/<tier>.h. None of them sees a torch header.
TIERS: dict[str, list[str]] = {}
if MACHINE == "x86_64":
    TIERS = {
        "amx": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
        "avx512_vnni": [*AVX512, "-mavx512vnni"],
        "avx512": AVX512,
        "avx2": ["-mavx2", "-mfma"],
        "avx2_vnni": ["-mavx2", "-mfma", "-mavxvnni"],
    }
elif MACHINE == "aarch64":
    # GCC 12 else moves loads in front of a tile's products: up to 25 stack accesses in a K loop.
    NEON = ["-fno-schedule-insns"]
    TIERS = {
        "neon": NEON,
        "neon_dotprod": [*NEON, "-march=armv8.2-a+dotprod"],
        "neon_i8mm": [*NEON, "-march=armv8.2-a+i8mm"],
    }
# Families without products of bytes. Tiers that add an instruction for these take the objects of
# the tiers without it (csrc/kernels/table.h).
SHARED = {"attention", "embedding", "pool", "rows"}
PRODUCTS = ("_vnni", "_dotprod", "_i8mm")

# Folders of the library's other objects, which see torch.
LIBRARY = ["csrc", "csrc/runtime", "csrc/epilogue", "csrc/ops/*"]
# Precompiled. Where a compiler refuses one, it includes the header itself.
PRECOMPILED = {name: BUILD / "pch" / f"{name}.gch" for name in ("tensor_pch.h", "torch_pch.h")}

# TORCHQ_EMULATE=1: kernels above AVX2 in software, for tests on CPUs that lack them.
EMULATED = bool(os.environ.get("TORCHQ_EMULATE"))
DEFINES = ["-DTORCHQ_EMULATED"] if EMULATED else []
if EMULATED:
    import simde_py

    intrinsics = str(ROOT / "tests/emulated/intrinsics.h")
    flags = ["-mavx2", "-mfma", "-O1", "-w", "-Wno-psabi", "-isystem", simde_py.get_include()]
    TIERS |= {tier: [*flags, "-include", intrinsics] for tier in TIERS.keys() - {"avx2"}}

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
    """Return the headers of a Python on PATH or of pyenv, None without them.

    They serve AArch64, too, where types have the same sizes; not those of Debian's own Python,
    whose pyconfig.h differs by machine.
    """
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
    """Major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


class BuildTorchq(build_ext):
    """Compiles all objects in one run of ninja, then links each extension."""

    def get_ext_filename(self, ext_name: str) -> str:
        """Only torchq._C belongs to one Python, and says so in its name."""
        if ext_name.endswith("libtorchq"):
            return str(Path(*ext_name.split(".")).with_suffix(".so"))
        name, _, version = ext_name.partition("@")
        file = str(super().get_ext_filename(name)).replace(HOST, MACHINE)
        running = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
        return file.replace(running, f"cpython-{version}") if version else file

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
        # The same variables as setuptools reads for the linker, in front of our flags.
        for variable in ("CFLAGS", "CXXFLAGS", "CPPFLAGS"):
            compiler += shlex.split(os.environ.get(variable, ""))
        ninja = Ninja(compiler)
        kernels = [ninja.add(*kernel) for kernel in kernel_objects()]
        flags = [*self.compiler.compiler_so[1:], *torch_flags()]
        for name, target in PRECOMPILED.items():
            ninja.add(target, f"csrc/{name}", [*flags, "-x", "c++-header"])
        linked = []
        for ext in self.extensions:
            folder = BUILD / ext.name.rpartition(".")[2]
            python = [f"-I{path}" for path in [*ext.include_dirs, *self.include_dirs]]
            objects = [*kernels] if ext is library else []
            for source in ext.sources:
                target = folder / Path(source).with_suffix(".o")
                header = header_of(source)
                # The folder of PRECOMPILED in front of csrc/: the compiler takes the first found.
                own = [f"-I{BUILD / 'pch'}", "-include", header, *flags]
                own += [] if ext is library else python
                objects.append(ninja.add(target, source, own, after=PRECOMPILED[header]))
            # A copy without sources is linked: those of the extension are what an sdist packs.
            linked.append(copy.copy(ext))
            linked[-1].sources, linked[-1].depends = [], objects
            linked[-1].extra_objects = objects
        ninja.run()
        for ext in linked:
            self.build_extension(ext)
        built_for = f"torch {torch.__version__}, {MACHINE}"
        library_file = Path(self.get_ext_fullpath("torchq.libtorchq"))
        library_file.with_name("built_for.txt").write_text(f"{built_for}\n")


class Ninja:
    """The file of a run of ninja, which compiles what has changed, or what its command names."""

    def __init__(self, compiler: list[str]) -> None:
        """Take the compiler with flags of all objects."""
        self.compiler = compiler
        self.text = "rule compile\n  command = $run -MMD -MF $out.d\n  depfile = $out.d\n"
        self.text += "  deps = gcc\n  description = $name\n"

    def add(self, target: Path, source: str, flags: list[str], after: Path | None = None) -> str:
        """Compile a source to a target, where there is another file to wait for, after that."""
        command = [*self.compiler, *flags, "-c", str(ROOT / source), "-o", str(target)]
        needs = f" | {self.path(after)}" if after else ""
        self.text += f"build {self.path(target)}: compile {self.path(ROOT / source)}{needs}\n"
        self.text += f"  run = {shlex.join(command).replace('$', '$$')}\n"
        self.text += f"  name = {target.relative_to(BUILD)}\n"
        return str(target)

    def path(self, path: Path) -> str:
        """Return a path as ninja reads it."""
        return "".join(f"${c}" if c in "$: " else c for c in str(path))

    def run(self) -> None:
        """Compile; end the build where that fails."""
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "build.ninja").write_text(self.text)
        command = [sys.executable, "-m", "ninja", "-j", str(jobs())]
        if subprocess.run(command, cwd=BUILD).returncode != 0:
            sys.exit("torchq: compiling failed; the compiler's message is above.")


def kernel_objects() -> list[tuple[Path, str, list[str]]]:
    """Return the object, source and flags of each family of kernels in each tier."""
    common = [*COMMON, *KERNEL, *WARNINGS, INCLUDE]
    objects = [(BUILD / "isa/reference.o", "csrc/kernels/reference.cpp", common)]
    for tier, flags in TIERS.items():
        trait = "".join(part.capitalize() for part in tier.split("_"))
        for path in sorted(ROOT.glob("csrc/kernels/*/*.cpp")):
            family = path.parent.name
            if family in SHARED and tier.endswith(PRODUCTS):
                continue
            if (family == "amx") == (tier == "amx"):
                isa = ["-include", f"isa/{tier}.h", f"-DTORCHQ_ISA={trait}"]
                target = BUILD / "isa" / tier / f"{path.stem}.o"
                objects.append((target, str(path.relative_to(ROOT)), [*common, *flags, *isa]))
    return objects


def torch_flags() -> list[str]:
    """Return flags of objects that see torch. Debug information, which the linker drops, is off."""
    folders = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    system = [flag for path in folders for flag in ("-isystem", str(path))]
    return [*COMMON, *WARNINGS, "-g0", "-fopenmp", INCLUDE, *system, *DEFINES]


def header_of(source: str) -> str:
    """Return the precompiled header of a file, by what it includes."""
    text = (ROOT / source).read_text(encoding="utf-8")
    wide = re.search("<(torch/|ATen/ops/|ATen/core/dispatch/|ATen/ExpandUtils)", text)
    return "torch_pch.h" if wide else "tensor_pch.h"


def extension(name: str, folders: list[str], libraries: list[str], link: list[str]) -> Extension:
    """Return a shared library of the C++ files in these folders."""
    sources = sorted(str(p.relative_to(ROOT)) for d in folders for p in ROOT.glob(f"{d}/*.cpp"))
    return Extension(
        f"torchq.{name}",
        sources,
        library_dirs=[str(TORCH / "lib")],
        libraries=["c10", "torch", "torch_cpu", *libraries],
        extra_link_args=["-fopenmp", "-Wl,-O1", *STRIP, *link],
        language="c++",
    )


class Torchq(Distribution):
    """Completes what pyproject.toml says of the project."""

    def parse_config_files(self, *args: object, **kwargs: object) -> None:
        """Make links and pictures of README absolute: its text is the page on PyPI, too."""
        super().parse_config_files(*args, **kwargs)
        source, tag = self.metadata.project_urls["Source"], f"v{self.metadata.version}"

        def absolute(link: re.Match[str]) -> str:
            return f"{link[0]}{source}/{'raw' if link[1] else 'blob'}/{tag}/"

        text = self.metadata.long_description
        self.metadata.long_description = re.sub(r"(!?)\[[^]]*\]\((?![a-z]+:|#)", absolute, text)


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
    distclass=Torchq,
    platforms=["Linux x86_64", "Linux aarch64"],  # no classifier names a machine
    ext_modules=[library, *bindings],
    cmdclass={"build_ext": BuildTorchq, "bdist_wheel": Wheel},
)
