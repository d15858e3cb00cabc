# SPDX-License-Identifier: Apache-2.0
"""The public names of torchq, and how their docstrings become pages.

A name is public where the user imports it, whatever file defines it. So references to a defining
module, as type annotations have them, are resolved to the public name.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

MODULES = (
    "torchq",
    "torchq.nn",
    "torchq.functional",
    "torchq.observers",
    "torchq.eager",
    "torchq.packing",
    "torchq.saturation",
)
_SECTION = re.compile(
    r"(Args|Attributes|Buffers|Examples?|Note|Raises|Returns|Shapes|Warns|Yields):$"
)


def names() -> dict[str, dict[str, list[str]]]:
    """Return the names in each public module, as ``{"functions": [...], "classes": [...]}``."""
    return {name: _members(name) for name in MODULES}


def _members(module_name: str) -> dict[str, list[str]]:
    module = importlib.import_module(module_name)
    found: dict[str, list[str]] = {"functions": [], "classes": [], "modules": []}
    for name in getattr(module, "__all__", None) or _defined(module):
        value = getattr(module, name)
        if inspect.ismodule(value):
            kind = "modules"
        else:
            kind = "classes" if inspect.isclass(value) else "functions"
        found[kind].append(name)
    return {kind: sorted(members, key=str.lower) for kind, members in found.items()}


def _defined(module: Any) -> list[str]:
    """Return the functions and classes that a module without ``__all__`` defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def literal_blocks(lines: list[str]) -> list[str]:
    """Return a docstring in which indented blocks outside of Google sections are literal."""
    result: list[str] = []
    in_section = in_block = False
    for line in lines:
        indented = line.startswith(" ")
        if line and not indented:
            in_section, in_block = bool(_SECTION.match(line)), False
        elif indented and not in_section and not in_block:
            before = next((text for text in reversed(result) if text), "")
            if result and not result[-1]:
                in_block = True
                if not before.endswith("::"):
                    result += [".. code-block:: text", ""]
        result.append(line)
    return result


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = literal_blocks(lines)
    if name in _EXAMPLES:
        lines += ["", ".. rubric:: Example", "", ".. code-block:: pycon", ""]
        lines += [f"   {line}" for line in _EXAMPLES[name]]


def _read_examples() -> dict[str, list[str]]:
    """Return the session under each heading of docs/reference/examples, by its public name."""
    found: dict[str, list[str]] = {}
    for path in sorted((Path(__file__).parents[1] / "reference/examples").glob("*.md")):
        for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
            name, _, text = section.partition("\n")
            found[name] = text.split("```pycon\n")[1].split("```")[0].splitlines()
    return found


def _aliases() -> dict[str, str]:
    """Return defining name -> public name of every public class and function."""
    found: dict[str, str] = {}
    for module, members in names().items():
        for name in [*members["functions"], *members["classes"]]:
            value = getattr(importlib.import_module(module), name)
            found.setdefault(f"{value.__module__}.{value.__qualname__}", f"{module}.{name}")
    return found


def _resolve(app: Sphinx, env: BuildEnvironment, node: Any, contnode: Any) -> nodes.Node | None:
    """Link a reference to a defining module, or a bare public name, to the public page."""
    if node.get("refdomain") != "py":
        return None
    target = str(node.get("reftarget", "")).removeprefix("~").removesuffix("()")
    candidates = [_ALIASES.get(target), *(f"{module}.{target}" for module in MODULES)]
    domain: Any = env.domains["py"]
    for candidate in candidates:
        if candidate in domain.objects:
            return domain.resolve_xref(  # type: ignore[no-any-return]
                env, node["refdoc"], app.builder, "obj", candidate, node, contnode
            )
    return None


_ALIASES: dict[str, str] = {}
_EXAMPLES: dict[str, list[str]] = {}


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx; before napoleon, which reads the Google sections."""
    _ALIASES.update(_aliases())
    _EXAMPLES.update(_read_examples())
    app.connect("autodoc-process-docstring", _process, priority=400)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True}
