# SPDX-License-Identifier: Apache-2.0
"""Checks what a release needs beside tests that pass; `make release-check` runs both commands.

python tests/wheel/release.py tree               the checkout is a release: its version is told
python tests/wheel/release.py same WHEEL WHEEL   two builds are the same bytes
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def read(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


def git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def what_the_tree_lacks(root: Path) -> list[str]:
    """Returns what has to be done before this checkout is a release."""
    found = []
    if git(root, "status", "--porcelain"):
        found.append("the tree has changes that are not committed")
    version = re.search(r'^__version__ = "(.*)"$', read(root, "torchq/__init__.py"), re.MULTILINE)[
        1
    ]
    if re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version) is None:
        found.append(f"the version {version} is not MAJOR.MINOR.PATCH")
    if f"v{version}" in git(root, "tag", "--no-contains", "HEAD").split():
        found.append(f"version {version} was released before: v{version} is another commit")
    if [tag for tag in git(root, "tag", "--points-at", "HEAD").split() if tag != f"v{version}"]:
        found.append(f"the tag of this commit is not v{version}")
    sections = re.split(r"^## ", read(root, "CHANGELOG.md"), flags=re.MULTILINE)[1:]
    unreleased, newest = sections[0], sections[1] if len(sections) > 1 else ""
    if unreleased.strip() != "[Unreleased]":
        found.append("CHANGELOG.md still has changes under [Unreleased]")
    if re.match(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n", newest) is None:
        found.append(f"CHANGELOG.md has no section [{version}] with a date below [Unreleased]")
    about = tomllib.loads(read(root, "pyproject.toml"))
    if not about["tool"]["torchq"]["published"]:
        found.append("pyproject.toml: published is false")
    for name, address in about["project"]["urls"].items():
        if ".invalid/" in address:
            found.append(f"pyproject.toml: the address {name} is a placeholder")
    return found


def what_differs(one: Path, other: Path) -> list[str]:
    """Returns the files that differ in two wheels, or the wheels if only their containers do."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        names = sorted({*first.namelist(), *second.namelist()})
        both = {*first.namelist()} & {*second.namelist()}
        differ = [n for n in names if n not in both or first.read(n) != second.read(n)]
    return differ or [f"times, rights or order of files in {one} and {other}"]


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    problems = what_the_tree_lacks(ROOT) if command == "tree" else what_differs(*map(Path, paths))
    for problem in problems:
        print(f"torchq: {'differs: ' * (command == 'same')}{problem}", file=sys.stderr)
    sys.exit(bool(problems))
