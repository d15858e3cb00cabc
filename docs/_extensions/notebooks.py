# SPDX-License-Identifier: Apache-2.0
"""The directive ``notebook``: a link to the page as a Jupyter notebook, written beside it."""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from ipynb import notebook
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_DOCS = Path(__file__).parents[1]


class Notebook(SphinxDirective):
    """``{notebook}``: a link to the notebook of the page, which is written beside it."""

    def run(self) -> list[nodes.Node]:
        """Return the link."""
        self.env.metadata[self.env.docname]["notebook"] = True
        name = f"{Path(self.env.docname).name}.ipynb"
        link = f'<p><a href="{name}" download>This page as a notebook</a></p>'
        return [nodes.raw("", link, format="html")]


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the notebooks of all pages that have a link to one."""
    site = app.config.notebook_site
    for name, metadata in app.env.metadata.items():
        if error is None and "notebook" in metadata:
            made = json.dumps(notebook(_DOCS / f"{name}.md", site), indent=1)
            Path(app.outdir, f"{name}.ipynb").write_text(made + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_config_value("notebook_site", "", "env")
    app.add_directive("notebook", Notebook)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
