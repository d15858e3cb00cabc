# SPDX-License-Identifier: Apache-2.0
"""Addresses are told once, and README is the page on PyPI."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from readme_renderer import markdown

import torchq

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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md"])
def test_pages_say_whether_the_package_is_published(page: str) -> None:
    assert ("not yet on PyPI" not in read(page)) == ABOUT["tool"]["torchq"]["published"]


@pytest.mark.skipif(ABOUT["tool"]["torchq"]["published"], reason="pip finds the wheel itself")
def test_the_command_for_a_wheel_takes_that_of_the_machine(tmp_path: Path) -> None:
    """dist/ has the wheels of both machines after make wheel-aarch64."""
    (command,) = re.findall(r"^    pip install (dist/.*)$", read("README.md"), re.MULTILINE)
    (tmp_path / "dist").mkdir()
    names = [f"torchq_cpu-1.2.3-py3-none-manylinux_2_28_{m}.whl" for m in ("x86_64", "aarch64")]
    for name in names:
        (tmp_path / "dist" / name).touch()
    found = subprocess.check_output(["bash", "-c", f"echo {command}"], cwd=tmp_path, text=True)
    assert found.split() == [f"dist/{name}" for name in names if platform.machine() in name]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    folder = tmp_path_factory.mktemp("metadata")
    code = "import sys; from setuptools import build_meta as b; "
    code += "b.prepare_metadata_for_build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True)
    return message_from_string(next(folder.glob("*/METADATA")).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def html(metadata: Message) -> str:
    """The page as PyPI shows it."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    rendered = markdown.render(metadata.get_payload())
    assert rendered is not None, "does not render, or the extra readme_renderer[md] is missing"
    return str(rendered)


def test_the_page_on_pypi_links_to_files_of_the_release(html: str) -> None:
    targets = re.findall(r'(?:href|src)="([^"]+)"', html)
    for folder in ("blob", "raw"):
        base = f"{ADDRESSES['Source']}/{folder}/v{torchq.__version__}/"
        files = [target.removeprefix(base) for target in targets if target.startswith(base)]
        assert files, folder
        assert not [name for name in files if not (ROOT / name).is_file()]
    assert not [target for target in targets if not re.match("https://|#", target)]


def test_the_page_on_pypi_keeps_its_tables_code_and_picture(html: str) -> None:
    assert html.count("<table>") == 2
    assert html.count("<img ") == html.count('<pre lang="python">') == 1


def test_the_wheel_has_the_notices_of_what_is_compiled_in(metadata: Message) -> None:
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
