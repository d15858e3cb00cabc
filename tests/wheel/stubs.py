# SPDX-License-Identifier: Apache-2.0
"""Runs commands, and writes stand-ins for the CUDA libraries that torch's CUDA builds want."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path


def output(*command: object, folder: Path | None = None, **environment: str) -> str:
    """Runs a command; returns its standard output."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{command}: {result.stdout}{result.stderr}")
    return result.stdout


def dynamic_symbols(library: Path, tools: str) -> tuple[set[str], dict[str, set[str]]]:
    """Returns the symbols that a library defines, and by version those that it wants."""
    defined: set[str] = set()
    wanted: dict[str, set[str]] = {}
    for line in output(f"{tools}objdump", "-T", library).splitlines():
        fields = line.split()
        if "*UND*" in fields:
            if "w" in fields:
                continue  # weak: may stay without a definition
            version = re.search(r"\(([^)]+)\)", line)
            wanted.setdefault(version[1] if version else "", set()).add(fields[-1])
        elif len(fields) > 5:
            defined.add(fields[-1])
    return defined, wanted


def write_stubs(
    torch_lib: Path, python: Path, folder: Path, tools: str = "", system: Sequence[Path] = ()
) -> None:
    """Writes libraries in place of those that torch's CUDA builds want and nobody installed.

    Their functions return 100, which says that there is no device. torch then imports and computes
    on the CPU without gigabytes of CUDA.
    For another machine, `tools` is the prefix of its compiler and objdump, such as
    "aarch64-linux-gnu-", and `system` are folders of its libraries.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = list(torch_lib.glob("*.so*"))
    missing: set[str] = set()
    owner_of: dict[str, str] = {}
    defined = dynamic_symbols(python, tools)[0]
    wanted: dict[str, set[str]] = {}
    for library in libraries:
        own, symbols = dynamic_symbols(library, tools)
        defined |= own
        for version, names in symbols.items():
            wanted.setdefault(version, set()).update(names)
        owner = ""
        for line in output(f"{tools}objdump", "-p", library).splitlines():
            if needed := re.match(r"\s*NEEDED\s+(\S+)", line):
                missing.add(needed[1])
            elif heading := re.search(r"required from (\S+):", line):
                owner = heading[1]
            elif owner and line.startswith("    0x"):
                owner_of[line.split()[-1]] = owner
    missing -= {library.name for library in libraries}
    for soname in sorted(missing):
        find = [*(f"-B{path}/" for path in system), f"-print-file-name={soname}"]
        found = Path(output(f"{tools}gcc", *find).strip())
        if found.is_absolute():  # else its name alone
            missing.remove(soname)
            defined |= dynamic_symbols(found, tools)[0]
    plain = wanted.pop("", set()) - defined
    for index, soname in enumerate(sorted(missing)):
        versions = {v: names for v, names in wanted.items() if owner_of.get(v) == soname}
        names = set().union(*versions.values(), plain if index == 0 else set())
        source = folder / "stub.c"
        functions = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
        source.write_text(functions)
        script = folder / "stub.map"
        script.write_text(
            "".join(
                f"{v} {{ global: {' '.join(f'{n};' for n in ns)} }};\n"
                for v, ns in versions.items()
            )
        )
        link = [f"-Wl,-soname,{soname}"]
        link += [f"-Wl,--version-script,{script}"] if versions else []
        output(f"{tools}gcc", "-w", "-shared", "-fPIC", source, "-o", folder / soname, *link)
