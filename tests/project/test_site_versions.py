# SPDX-License-Identifier: Apache-2.0
"""The site's list of versions: this one alone without a network, and all that versions.json has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import torchq

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs/_templates/sidebar/versions.html"


def test_this_version_is_the_newest_of_the_site() -> None:
    versions = json.loads((ROOT / "docs/versions.json").read_text(encoding="utf-8"))
    assert versions[0] == torchq.__version__ and len(set(versions)) == len(versions)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Prints nothing for each request."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a site with one page; what the page needs of Sphinx is two values."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        version="1.1.0", versions_site=address, pathto=lambda name: "index.html", master_doc="index"
    )
    (tmp_path / "index.html").write_text(f"<!doctype html><title>t</title>{page}")
    yield address
    server.shutdown()
    server.server_close()


@pytest.mark.report
@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, [("index.html", "1.1.0")]),
        (["1.1.0"], [("index.html", "1.1.0")]),
        (
            ["1.2.0", "1.1.0", "1.0.0"],
            [("index.html", "1.1.0"), ("/index.html", "1.2.0"), ("/v1.0.0/index.html", "1.0.0")],
        ),
    ],
    ids=["none", "one", "three"],
)
def test_the_versions_in_a_browser(
    site: str, tmp_path: Path, listed: list[str] | None, expected: list[tuple[str, str]]
) -> None:
    if listed is not None:
        (tmp_path / "versions.json").write_text(json.dumps(listed))
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "no chromium: install Debian's package of that name"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    command = [program, *flags, "--dump-dom", f"{site}/index.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    links = re.findall(r'<a href="(.*?)".*?>(.*?)</a>', result.stdout)
    assert [(target.removeprefix(site), name) for target, name in links] == expected
    assert "<summary>Version 1.1.0</summary>" in result.stdout
