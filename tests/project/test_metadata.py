# SPDX-License-Identifier: Apache-2.0
"""What the wheel and the pages say of the project: addresses, README as the page on PyPI."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESSES = ABOUT["project"]["urls"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_addresses_are_those_of_pyproject() -> None:
    assert f"]({ADDRESSES['Security']})" in read("SECURITY.md")
    assert f'repository-code: "{ADDRESSES["Source"]}"\n' in read("CITATION.cff")
    assert f"name: {ABOUT['project']['authors'][0]['name']}\n" in read("CITATION.cff")
