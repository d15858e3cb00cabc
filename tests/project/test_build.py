# SPDX-License-Identifier: Apache-2.0
"""Errors of import and build: one sentence with the remedy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh import python

import torchq
from torchq.ops import LIBRARY_PATH
from torchq.runtime import library

ROOT = Path(__file__).parents[2]
PACKAGE = Path(torchq.__file__).parent

needs_source = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="not in a source tree: setup.py is missing"
)


def run(args: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the Python files without the library; the only torchq on the path."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(PACKAGE, tmp_path / "torchq", ignore=ignore))


def import_error(package: Path) -> str:
    """The last line of the traceback of `import torchq`."""
    result = python("import torchq", str(package.parent))
    assert result.returncode == 1, result.stdout
    return result.stderr.strip().splitlines()[-1]


def test_a_missing_library(package: Path):
    message = import_error(package)
    assert message.startswith("ImportError: torchq: "), message
    assert str(package / LIBRARY_PATH.name) in message
    assert "was not built" in message and "pip install --no-build-isolation -e ." in message
    assert f"This is Python {platform.python_version()}, torch {torch.__version__}" in message


def test_a_library_that_does_not_load(package: Path):
    """Another torch's library fails in the dynamic linker, as a broken file does."""
    (package / LIBRARY_PATH.name).write_bytes(b"\x7fELF, but no library")
    message = import_error(package)
    assert message.startswith(f"ImportError: torchq: {LIBRARY_PATH.name} does not load here: ")
    assert "was built for unknown" in message and f"This is torch {torch.__version__}" in message
    assert "`pip install --no-build-isolation -e .`" in message


def test_a_binding_that_does_not_load(package: Path):
    """No file at all would not do: an editable install then finds that of its own tree."""
    shutil.copy(LIBRARY_PATH, package)
    (package / Path(torchq._C.__file__).name).write_bytes(b"\x7fELF, but no library")
    message = import_error(package)
    assert message.startswith("ImportError: torchq: torchq._C does not load in Python 3.")
    assert f"There is {Path(torchq._C.__file__).name}." in message
    assert "`pip install --no-build-isolation -e .`" in message


@pytest.mark.parametrize("release", ["2.12.1", "2.16.0+cpu", "3.0.0a0"])
def test_a_release_of_torch_that_was_not_tried(package: Path, release: str):
    shutil.copy(LIBRARY_PATH, package)
    (package / "built_for.txt").write_text("torch 2.13.0+cpu, x86_64\n")
    code = f"import torch; torch.__version__ = {release!r}; import torchq"
    result = python(code, str(package.parent))
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith(
        "ImportError: torchq: torchq is for torch 2.13 to before 2.16, and was built for torch "
        f"2.13.0+cpu, x86_64. This is torch {release}, "
    )
    assert "Install torch>=2.13,<2.16 and torchq-cpu for it" in message


@needs_source
def test_the_metadata_names_the_same_releases_of_torch():
    oldest, newest = (f"{major}.{minor}" for major, minor in library.SUPPORTED_TORCH)
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(f'"torch>={oldest},<{newest}"') == text.count('"torch>') == 2


# Of manylinux_2_28, whose oldest members are Debian 10's glibc and GCC 8's libstdc++.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GOMP": (4, 5)}


@pytest.mark.parametrize(
    "library", [LIBRARY_PATH, Path(torchq._C.__file__)], ids=["libtorchq", "_C"]
)
def test_symbols_are_those_of_manylinux_2_28(library: Path):
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True).stdout
    found = re.findall(r"\(?(GLIBC|GLIBCXX|CXXABI|GOMP)_([0-9.]+)\)? +(\S+)", symbols)
    assert len(found) > 20
    late = [s for s in found if tuple(map(int, s[1].split("."))) > NEWEST[s[0]]]
    assert not late


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the build reads."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "torchq").mkdir()
    shutil.copy(ROOT / "torchq" / "__init__.py", tmp_path / "torchq")
    return tmp_path


def build(source: Path, **environment: str) -> str:
    """The only line that a failing build says on stderr."""
    result = run(["setup.py", "-q", "build_ext"], source, **environment)
    assert result.returncode == 1, result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("torchq: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1] == lines[0]
    return lines[0]


@needs_source
def test_no_compiler(source: Path):
    message = build(source, CXX="/nonexistent")
    assert "no working C++ compiler: `/nonexistent --version` failed" in message
    assert "Install g++" in message and "CXX" in message


@needs_source
def test_a_compiler_that_fails(source: Path):
    assert "no working C++ compiler: `false --version` failed" in build(source, CXX="false")


@needs_source
def test_no_torch(source: Path):
    shadow = source / "shadow" / "torch"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('No module named torch')\n")
    message = build(source, PYTHONPATH=str(shadow.parent))
    assert message.startswith("torchq: building needs torch in this environment: ")
    assert "pip install torch" in message


@needs_source
def test_an_old_torch(source: Path):
    code = "import torch; torch.__version__ = '2.4.1+cpu'; import runpy, sys; "
    code += "sys.argv = ['setup.py', '-q', 'build_ext']; runpy.run_path('setup.py')"
    result = run(["-c", code], source)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "torchq: torch 2.13 or newer is required, found 2.4.1+cpu."
    )


@needs_source
def test_a_kernel_that_does_not_compile(source: Path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no compiler")
    kernels = source / "csrc" / "kernels" / "reference.cpp"
    kernels.write_text(kernels.read_text() + "\n#error broken on purpose\n")
    for header in source.glob("csrc/*_pch.h"):  # these are compiled first, for half a minute
        header.write_text("")
    message = build(source, MAX_JOBS="1")
    assert message == "torchq: compiling failed; the compiler's message is above."
    assert not list(source.glob("**/*.so"))


def test_the_torch_release_that_the_library_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build notes it beside the library."""
    monkeypatch.setattr(library, "LIBRARY_PATH", tmp_path / "libtorchq.so")
    assert library.built_for() == "unknown"
    (tmp_path / "built_for.txt").write_text("torch 2.13.0+cpu, x86_64\n")
    assert library.built_for() == "torch 2.13.0+cpu, x86_64"


COMPILER = """#!{python}
# Writes empty files, and logs its flags for kernels.
import fcntl, pathlib, sys, time
here = pathlib.Path({folder!r})
def log(text):
    with open(here / "log", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(text + "\\n")
args = sys.argv[1:]
if "-o" in args:
    is_kernel = any("/csrc/kernels/" in a for a in args)
    if is_kernel:
        log("begin " + " ".join(args))
        time.sleep(0.05)
    pathlib.Path(args[args.index("-o") + 1]).write_text("")
    if is_kernel:
        log("end")
"""


class Compiles:
    """Builds with a compiler that only logs; each call gives the lines of the kernels' objects."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.log = source, folder / "log"
        self.compiler = folder / "compiler"
        self.compiler.write_text(COMPILER.format(python=sys.executable, folder=str(folder)))
        self.compiler.chmod(0o755)

    def __call__(self, *prefix: str, **environment: str) -> list[str]:
        self.log.write_text("")
        base = {k: v for k, v in os.environ.items() if k not in ("CFLAGS", "CXXFLAGS", "MAX_JOBS")}
        subprocess.run(
            [*prefix, sys.executable, "setup.py", "-q", "build_ext"],
            cwd=self.source,
            env={**base, "CXX": str(self.compiler)} | environment,
            capture_output=True,
            timeout=120,
        )
        return self.log.read_text().splitlines()


@pytest.fixture
def compiles(source: Path, tmp_path: Path) -> Compiles:
    folder = tmp_path / "compiler"
    folder.mkdir()
    return Compiles(source, folder)


def count(lines: list[str]) -> int:
    return sum(line.startswith("begin") for line in lines)


@needs_source
@pytest.mark.slow
def test_kernels_are_compiled_again_where_their_command_changes(compiles: Compiles):
    objects = count(compiles())
    families = len([*compiles.source.glob("csrc/kernels/*/*.cpp")]) - 1  # that of amx is one tier's
    shared = 4  # families of which two tiers take the objects of another one
    expected = {"x86_64": 4 * families - 2 * shared + 2, "aarch64": 3 * families - 2 * shared + 1}
    assert objects == expected.get(os.uname().machine, 1)
    assert count(compiles()) == 0
    lines = compiles(CFLAGS="-DONE", CXXFLAGS="-DTWO", CPPFLAGS="-DTHREE='a b'")
    assert count(lines) == sum(" -DONE -DTWO -DTHREE=a b " in line for line in lines) == objects
    assert count(compiles(CXX=f"env {compiles.compiler}")) == objects, "a compiler with arguments"


@needs_source
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["MAX_JOBS", "affinity"])
def test_one_compiler_at_a_time(compiles: Compiles, limit: str):
    if limit == "MAX_JOBS":
        lines = compiles(MAX_JOBS="1")
    elif shutil.which("taskset") is None:
        pytest.skip("taskset is not installed")
    else:
        lines = compiles("taskset", "-c", str(min(os.sched_getaffinity(0))))
    assert [line.split()[0] for line in lines] == ["begin", "end"] * count(lines), lines
