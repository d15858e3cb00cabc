# SPDX-License-Identifier: Apache-2.0
"""Tiers: what their objects contain, how one is selected, and what importing torchq does."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fresh import python

import torchq
import torchq.functional as TF
from torchq.ops import LIBRARY_PATH

ROOT = Path(__file__).parents[2]
TIERS_OF = {
    "x86_64": ["avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx"],
    "aarch64": ["neon", "neon_dotprod", "neon_i8mm"],
}
TIERS = ["reference", *TIERS_OF.get(platform.machine(), [])]
FOLDER = ROOT / "build" / f"torch-{torch.__version__}" / "isa"
OBJECTS = [str(path.relative_to(FOLDER)) for path in FOLDER.glob("**/*.o")]
LIBC = {"memcpy", "memset", "memmove", "nearbyintf", "nearbyint", "rintf", "fmaf", "sqrtf", "fma"}
# Of libgcc and compiler-rt, linked statically: what __builtin_cpu_supports reads.
COMPILER = {"__cpu_model", "__cpu_features2"}
TUNING = {"torchq::cpu_tuning"}
TABLE = re.compile(r"torchq::Table<\(torchq::Tier\)\d, torchq::\w+(<\d> ?)?>::entries")

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
needs_objects = pytest.mark.skipif(
    not OBJECTS, reason=f"{FOLDER.relative_to(ROOT)} has no objects: not built here"
)


def nm(*args: str | Path) -> list[tuple[str, str]]:
    """(kind, name) of each symbol."""
    run = subprocess.run(["nm", *args], check=True, capture_output=True, text=True)
    return re.findall(r"^\w* +(\w) (.*)$", run.stdout, re.M)


DRIVERS = ("gemm/gemm", "gemm/gemm_matrix", "gemm/choose", "conv/choose", "conv/conv_dense")
DRIVERS += ("conv/conv_depthwise", "rnn/choose", "rnn/rnn_direction")


def included(file: Path) -> set[str]:
    """Return what a file of csrc/ includes, with what those files do."""
    names = set(re.findall(r'^#include [<"](.*)[>"]', file.read_text(), re.M))
    own = [ROOT / "csrc" / name for name in names if (ROOT / "csrc" / name).exists()]
    return names.union(*map(included, own))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_knows_no_tensor(driver: str):
    """Checks of tensors and their allocation stay in the files of the ops."""
    found = included(ROOT / "csrc/ops" / f"{driver}.cpp")
    assert "kernels/table.h" in found  # the walk goes into headers
    allowed = {"ATen/Parallel.h"}  # torch's threads
    assert not {name for name in found if name.startswith(("ATen/", "torch/"))} - allowed


# Objects


@needs_nm
@needs_objects
@pytest.mark.parametrize("file", OBJECTS)
def test_an_object_exports_its_tables_only(file: str):
    """An inline function with external linkage would be merged with another tier's copy."""
    symbols = nm("-C", FOLDER / file)
    exported = [(kind, name) for kind, name in symbols if kind.isupper() and kind != "U"]
    assert exported and not [name for kind, name in symbols if kind in "wWvVu"]
    for kind, name in exported:
        assert TABLE.fullmatch(name) or name == "torchq::kAmx"
        assert kind in "DR", "constant-initialized data"


@needs_nm
@needs_objects
@pytest.mark.parametrize("file", OBJECTS)
def test_an_object_needs_libc_only(file: str):
    """No torch, no C++ runtime, no allocation, no exception, no thread, no static initializer."""
    symbols = nm("-C", FOLDER / file)
    undefined = {name for kind, name in symbols if kind == "U"} - {"_GLOBAL_OFFSET_TABLE_"}
    unknown = {name for name in undefined - LIBC - COMPILER - TUNING if not TABLE.fullmatch(name)}
    assert not unknown
    assert not [name for _, name in symbols if "_GLOBAL__sub_I" in name]


def test_sources_of_the_objects_include_no_torch():
    files = [f for d in ("kernels", "isa") for f in ROOT.glob(f"csrc/{d}/**/*") if f.is_file()]
    assert len(files) > 60
    for file in files:
        includes = [line for line in file.read_text().splitlines() if line.startswith("#include")]
        for line in includes:
            assert not any(word in line for word in ("torch", "ATen", "c10")), (file.name, line)
            assert "<" in line or line.split('"')[1].startswith(("kernels/", "isa/")), line


@needs_nm
def test_the_library_has_no_python_symbols():
    """So that TorchScript and AOTInductor programs load it without Python."""
    symbols = nm("-D", LIBRARY_PATH)
    undefined = [name for kind, name in symbols if kind == "U"]
    assert len(undefined) > 50
    assert not [name for name in undefined if name.startswith(("Py", "_Py"))]
    exported = [name for kind, name in symbols if kind == "T" and "torchq" in name]
    assert not exported, "hidden visibility"


def test_one_openmp_runtime():
    """Two copies of libgomp are two thread pools that oversubscribe the machine."""
    code = (
        "import torch, torchq\n"
        "x = torch.zeros(1 << 20)\n"
        "torch.ops.torchq.quantize(x, torch.ones(()), torch.zeros((), dtype=torch.int32), 0)\n"
        "maps = {l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.split()[-1]}\n"
        "print(*sorted(maps), sep='\\n')"
    )
    run = python(code)
    assert run.returncode == 0, run.stderr
    libraries = [Path(line).name for line in run.stdout.splitlines()]
    found = [name for name in libraries if name.startswith(("libgomp", "libiomp", "libomp"))]
    assert len(found) == 1 and found[0].startswith("libgomp"), libraries


def test_import_is_silent():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", "import torchq"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# Selection


def test_supported_isas_are_ordered_and_start_with_the_reference():
    supported = torchq.supported_isas()
    assert supported == [tier for tier in TIERS if tier in supported]
    assert supported[0] == "reference"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else supported
    assert ("avx2" in supported) == ("avx2" in flags)
    assert ("avx2_vnni" in supported) == ("avx_vnni" in flags)
    assert ("avx512_vnni" in supported) == ("avx512_vnni" in flags)
    assert ("amx" in supported) == ("amx_int8" in flags)
    assert ("neon_dotprod" in supported) == ("asimddp" in flags)
    assert ("neon_i8mm" in supported) == ("i8mm" in flags)


def test_the_default_is_the_best_tier():
    run = python("import torchq; print(torchq.isa())")
    assert run.stdout.split() == [torchq.supported_isas()[-1]], run.stderr
    run = python("import torchq; print(torchq.isa())", TORCHQ_ISA="")
    assert run.stdout.split() == [torchq.supported_isas()[-1]], "empty is unset"


@pytest.mark.parametrize("tier", TIERS)
def test_environment_variable(tier: str):
    code = (
        "import torch, torchq\n"
        "q = torch.zeros(3, dtype=torch.uint8)\n"
        "torch.ops.torchq.lookup(q, torch.zeros(256, dtype=torch.uint8))\n"
        "print(torchq.isa(), torchq.last_kernel())"
    )
    run = python(code, TORCHQ_ISA=tier)
    if tier in torchq.supported_isas():
        assert run.stdout.split() == [tier, f"lookup:{tier}"], run.stderr
    else:
        assert "ValueError" in run.stderr and "is not available here" in run.stderr


def test_an_unknown_tier_raises_on_first_use_not_at_import():
    code = (
        "import torch, torchq\n"
        "print('imported', *torchq.supported_isas())\n"
        "q = torch.zeros(3, dtype=torch.uint8)\n"
        "for call in (torchq.isa,\n"
        "             lambda: torch.ops.torchq.lookup(q, torch.zeros(256, dtype=torch.uint8)),\n"
        "             torchq.cpu_info):\n"
        "    try: call()\n"
        "    except ValueError as error: print(error)\n"
        "with torchq.use_isa('reference'): print(torchq.isa())\n"
    )
    run = python(code, TORCHQ_ISA="nonsense")
    lines = run.stdout.splitlines()
    supported = torchq.supported_isas()
    assert lines[0].split() == ["imported", *supported], run.stderr
    message = "torchq: TORCHQ_ISA=nonsense is not available here; this CPU supports: "
    assert [line for line in lines if line.startswith("torchq")] == [
        message + ", ".join(supported) + "."
    ] * 3
    assert lines[-1] == "reference", "an explicit selection needs no default"


def run_something() -> str:
    """The tier that an op really ran on."""
    q = torch.zeros(3, dtype=torch.uint8)
    torch.ops.torchq.lookup(q, torch.zeros(256, dtype=torch.uint8))
    return torchq.last_kernel().split(":")[1]


def test_use_isa_runs_its_block_on_the_tier(isa: str):
    assert torchq.isa() == isa == run_something()


def test_use_isa_nests_and_restores():
    before = torchq.isa()
    for outer in torchq.supported_isas():
        with torchq.use_isa(outer):
            for inner in torchq.supported_isas():
                with torchq.use_isa(inner):
                    assert torchq.isa() == inner == run_something()
                assert torchq.isa() == outer == run_something()
        assert torchq.isa() == before == run_something()


def test_use_isa_restores_after_an_exception():
    before = torchq.isa()
    with pytest.raises(KeyError), torchq.use_isa("reference"):
        assert torchq.isa() == "reference"
        raise KeyError
    assert torchq.isa() == before
    with torchq.use_isa("reference"):
        with pytest.raises(ValueError), torchq.use_isa("nonsense"):
            raise AssertionError("unreachable")
        assert torchq.isa() == "reference", "a refused selection changes nothing"


@pytest.mark.parametrize("name", ["nonsense", "AVX2", "avx512_vnni ", " ", "avx10"])
def test_use_isa_refuses_what_this_cpu_lacks(name: str):
    with pytest.raises(ValueError) as caught, torchq.use_isa(name):
        pass
    message = str(caught.value).split("\nException raised")[0]
    supported = ", ".join(torchq.supported_isas())
    assert message.startswith("torchq: ") and f"={name} is not available here" in message
    assert message.endswith(f"this CPU supports: {supported}.")


def test_use_isa_refuses_an_empty_name():
    """No tier is called that; it must not quietly mean the default."""
    with pytest.raises(ValueError), torchq.use_isa(""):
        pass


def test_selection_belongs_to_the_thread():
    seen = {}
    inside, checked = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = torchq.isa()
        with torchq.use_isa("reference"):
            inside.set()
            checked.wait(10)
            seen["inside"] = run_something()

    default = torchq.isa()
    with torchq.use_isa(torchq.supported_isas()[0]):
        thread = threading.Thread(target=other)
        with torchq.use_isa(torchq.supported_isas()[-1]):
            thread.start()
            assert inside.wait(10)
            assert torchq.isa() == run_something() == torchq.supported_isas()[-1]
            checked.set()
            thread.join()
    assert seen == {"before": default, "inside": "reference"}, "threads start with the default"


def test_the_kernel_that_ran(isa: str):
    """Linear and convolutions are in their own files; these are the others."""
    src = torch.zeros(1, 5, 6, 7, dtype=torch.uint8)
    calls = {
        "max_pool": lambda: TF.max_pool(src, 2),
        "avg_pool": lambda: TF.avg_pool(src, 2),
        "convert": lambda: TF.quantize(torch.zeros(3, 4), 0.5),
        "add": lambda: TF.add(src, src, torchq.Attr()),
        "mul": lambda: TF.mul(src, src, torchq.Attr()),
        "lookup": lambda: TF.lookup(src, torch.zeros(256, dtype=torch.uint8)),
        "copy": lambda: TF.reorder(src, torch.uint8),
    }
    for kernel, call in calls.items():
        call()
        assert torchq.last_kernel() == f"{kernel}:{isa}"


def test_last_kernel_is_empty_after_an_op_without_work():
    run_something()
    TF.linear(torch.empty(0, 4, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.int8))
    assert torchq.last_kernel() == ""


def test_last_kernel_is_empty_before_the_first_op():
    result = []
    thread = threading.Thread(target=lambda: result.append(torchq.last_kernel()))
    thread.start()
    thread.join()
    assert result == [""]
    run_something()
    assert torchq.last_kernel() == f"lookup:{torchq.isa()}"


def test_cpu_info():
    info = torchq.cpu_info()
    assert set(info) >= {"machine", "supported_isas", "isa", "threads", "torch", "torch_capability"}
    assert info["isa"] == torchq.isa()
    assert info["supported_isas"] == torchq.supported_isas()
    assert info["threads"] == torch.get_num_threads()
    with torchq.use_isa("reference"):
        assert torchq.cpu_info()["isa"] == "reference"
