# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a real browser: it renders, and a click sorts. Fails where there is none."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import nn

import torchq

pytestmark = pytest.mark.report

HEAD = "document.querySelectorAll('#layers th')[2]"
SORTS = {
    "click": f"{HEAD}.click()",
    "enter": f"{HEAD}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter'}}))",
}


def chromium(*arguments: str) -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "no chromium: install Debian's package of that name"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command = [program, *flags, "--virtual-time-budget=2000", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 5)
    ).eval()
    data = [torch.randn(4, 3, 8, 8)]
    prepared = torchq.calibrate(torchq.prepare(model, data[0]), data)
    path = tmp_path_factory.mktemp("report") / "report.html"
    torchq.write_report(path, model, prepared, torchq.convert(prepared), data, "three layers")
    return path


def test_screenshot(page: Path) -> None:
    shot = page.with_suffix(".png")
    chromium(f"--screenshot={shot}", "--window-size=1400,1100", page.as_uri())
    image = matplotlib.image.imread(shot)[..., :3]
    assert image.shape[:2] == (1100, 1400)
    background = image[-1, -1]
    marked = (abs(image - background).max(-1) > 0.2).mean(axis=1) > 0
    assert marked[:400].mean() > 0.3, "text, figures and histograms cover the upper part"
    bars = (image[..., 2] - image[..., 0] > 0.3).sum()
    assert bars > 300, "the histograms are drawn"


@pytest.mark.parametrize("width", [500, 800, 1400])
def test_nothing_is_wider_than_the_window(page: Path, width: int) -> None:
    measured = page.with_name("measured.html")
    script = "<script>document.title = document.documentElement.scrollWidth;</script></body>"
    measured.write_text(page.read_text().replace("</body>", script))
    document = chromium("--dump-dom", f"--window-size={width},800", measured.as_uri())
    assert int(document.split("<title>")[1].split("<")[0]) <= width


@pytest.mark.parametrize("how", SORTS)
def test_a_click_on_a_heading_sorts(page: Path, how: str) -> None:
    clicked = page.with_name("clicked.html")
    script = f"<script>{SORTS[how]};</script></body>"
    clicked.write_text(page.read_text().replace("</body>", script))
    document = chromium("--dump-dom", clicked.as_uri())
    assert 'aria-sort="ascending"' in document
    body = document[document.rindex("<tbody>") : document.rindex("</tbody>")]
    values = [row.split('data-v="')[1].split('"')[0] for row in body.split("<tr")[1:]]
    figures = [float(value) for value in values if value]
    assert len(figures) == 3 and figures == sorted(figures)
    assert values[-1] == "", "rows without a figure come last"


SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


@SCHEMES
def test_axe_finds_no_violation(page: Path, scheme: str) -> None:
    """Deque's checks of accessibility: names, contrast, headings, tables, in both schemes."""
    folder = importlib.util.find_spec("axe_playwright_python")
    assert folder is not None and folder.submodule_search_locations, "run make test-report"
    axe = Path(folder.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")
    checked = page.with_name("checked.html")
    text = page.read_text(encoding="utf-8")
    if scheme == "dark":
        text = text.replace("(prefers-color-scheme: dark)", "all")
    script = f"<script>{axe}</script><script>axe.run().then(found => {{"
    script += "const told = document.createElement('pre'); told.id = 'axe'; told.textContent = "
    script += "JSON.stringify([found.passes.length, found.violations.map(v => [v.id, v.help, "
    script += "v.nodes.map(n => n.html.slice(0, 120))])]); document.body.append(told);"
    script += "});</script></body>"
    checked.write_text(text.replace("</body>", script), encoding="utf-8")
    document = chromium("--dump-dom", checked.as_uri())
    told = re.search(r'<pre id="axe">(.*?)</pre>', document, re.DOTALL)
    assert told, "axe did not end"
    passes, violations = json.loads(html.unescape(told[1]))
    assert passes > 15 and violations == []
