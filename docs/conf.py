# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration of the site: ``make docs`` writes it to docs/_build/html."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import public

import torchq

about = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
addresses = about["project"]["urls"]

project = "torchq"
author = about["project"]["authors"][0]["name"]
copyright = f"{author}, Apache-2.0"
version = release = torchq.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "public",
    "generated",
    "notebooks",
    "pictures",
]
# Examples are part of the pages of the names that they belong to.
exclude_patterns = ["_build", "_templates", "_extensions", "reference/examples"]
templates_path = ["_templates"]
# One backtick around a name of torchq links to its page.
default_role = "py:obj"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

notebook_site = addresses["Documentation"]

napoleon_use_ivar = True
napoleon_custom_sections = [("Shapes", "params_style"), ("Buffers", "params_style")]
autosummary_context = {"public": public.names()}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"torchq {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt", "versions.json"]
html_copy_source = False
html_show_sphinx = False
html_context = {"versions_site": addresses["Documentation"]}
html_sidebars = {
    "**": [
        *(f"sidebar/{part}.html" for part in ("brand", "search", "versions", "scroll-start")),
        *(f"sidebar/{part}.html" for part in ("navigation", "ethical-ads", "scroll-end")),
    ]
}
html_theme_options = {
    "navigation_with_keys": True,
    "footer_icons": [
        {"name": name, "url": addresses[name], "html": name, "class": ""}
        for name in ("Source", "Issues")
    ],
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
