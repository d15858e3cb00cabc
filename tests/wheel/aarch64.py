# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel for AArch64 in an emulated Debian beside its torch, and runs smoke.py there.

python tests/wheel/aarch64.py root          downloads its Python and torch, half a gigabyte
python tests/wheel/aarch64.py test WHEEL    converts and runs models there, and compares bits

Models that this machine has saved have to give the same bits there, and theirs here. All is in
build/aarch64, and needs no rights of root. torch's own SVE code and its threads are left out:
the emulator fails in the former, and takes minutes to start the latter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from stubs import output, write_stubs

REPOSITORY = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")
WORK = REPOSITORY / "build" / "aarch64"
ROOT = WORK / "root"
PACKAGES = ROOT / "usr/lib/python3/dist-packages"
PYTHON = ROOT / "usr/bin/python3.11"
STUBS = WORK / "stubs"
SYSTEM = [ROOT / "lib/aarch64-linux-gnu", ROOT / "usr/lib/aarch64-linux-gnu"]
# Python 3.11 of Debian 12, and what it and torch need.
DEBIAN = "libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libuuid1"
DEBIAN += " libsqlite3-0 libreadline8 libtinfo6 libncursesw6 libcrypt1 libnsl2 libtirpc3"
DEBIAN += " python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib"
TORCH = [f"torch=={version('torch').partition('+')[0]}"]  # that of this environment
TORCH_NEEDS = ["numpy", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock"]
# CPUs of the emulator -> their tiers besides reference.
CPUS = {
    "neoverse-n1": ["neon", "neon_dotprod"],
    "max,sve=off": ["neon", "neon_dotprod", "neon_i8mm"],
}
# Without these files torch's detection of the CPU fails in the emulator.
CPU_INFO = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def make_root() -> None:
    """Downloads and unpacks Debian's packages and torch."""
    done = STUBS / "done"
    if done.exists() and done.read_text() == TORCH[0]:
        return
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in ("lists/partial", "cache/archives/partial", "packages"):
        (WORK / "apt" / folder).mkdir(parents=True)
    (WORK / "apt/status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::State::Lists": WORK / "apt/lists",
        "Dir::State::status": WORK / "apt/status",
        "Dir::Cache": WORK / "apt/cache",
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    output(*apt, "update")
    output(*apt, "download", *DEBIAN.split(), folder=WORK / "apt/packages")
    for package in (WORK / "apt/packages").glob("*.deb"):
        output("dpkg", "-x", package, ROOT)
    PACKAGES.mkdir(parents=True, exist_ok=True)
    install("--no-deps", *TORCH)
    install(*TORCH_NEEDS)
    cpu = ROOT / "sys/devices/system/cpu/cpu0/regs/identification/midr_el1"
    cpu.parent.mkdir(parents=True)
    cpu.write_text("0x00000000413fd0c1\n")
    (ROOT / "proc").mkdir()
    (ROOT / "proc/cpuinfo").write_text(CPU_INFO)
    write_stubs(PACKAGES / "torch/lib", PYTHON, STUBS, "aarch64-linux-gnu-", SYSTEM)
    done.write_text(TORCH[0])


def install(*packages: str) -> None:
    """Installs wheels for AArch64 in the root."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", PACKAGES, "--upgrade"]
    pip += ["--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64"]
    pip += ["--python-version=3.11", "--only-binary=:all:"]
    # constraints of the user's own pip configuration are about this machine
    output(*pip, *packages, PIP_CONSTRAINT=os.devnull)


def emulated(cpu: str, *arguments: object) -> str:
    """Runs Python in the emulator; returns its standard output. Importing torch takes a minute."""
    emulator = ["qemu-aarch64", "-cpu", cpu, "-L", ROOT, "-E", f"LD_LIBRARY_PATH={STUBS}"]
    return output(*emulator, "-E", "OMP_NUM_THREADS=1", PYTHON, "-I", *arguments)


def test(wheel: Path) -> list[str]:
    """Compares bits on both machines; returns what differs."""
    install("--no-deps", str(wheel))
    here, there = WORK / "models", WORK / "models-aarch64"
    for folder in (here, there):
        folder.mkdir(exist_ok=True)
    run_here = [sys.executable, SMOKE]
    expected = json.loads(output(*run_here, "write", here, PYTHONPATH=str(REPOSITORY)))
    problems = []
    for cpu, tiers in CPUS.items():
        doctor = emulated(cpu, "-m", "torchq", "doctor")
        print(f"{cpu}: {doctor}", flush=True)
        found = re.search(r"supported isas +(.*)", doctor)[1].split(", ")
        problems += [f"{cpu}: tiers {found}"] * (found != ["reference", *tiers])
        digests = json.loads(emulated(cpu, SMOKE, "read", here))
        print(f"{cpu}: {digests}", flush=True)
        problems += [f"{cpu}: {key}" for key in expected if digests.get(key) != expected[key]]
    theirs = json.loads(emulated([*CPUS][-1], SMOKE, "write", there))
    digests = json.loads(output(*run_here, "read", there, PYTHONPATH=str(REPOSITORY)))
    problems += [f"saved there: {key}" for key in theirs if digests.get(key) != theirs[key]]
    return problems


if __name__ == "__main__":
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64", "apt-get", "dpkg"):
        if shutil.which(tool) is None:
            sys.exit(
                f"torchq: this needs {tool}, which is missing. On Debian 12: "
                "apt install g++-aarch64-linux-gnu qemu-user"
            )
    make_root()
    if sys.argv[1] == "test":
        different = test(Path(sys.argv[2]).resolve())
        print("OTHER BITS: " + ", ".join(different) if different else "same bits")
        sys.exit(bool(different))
