# SPDX-License-Identifier: Apache-2.0
"""Layers of torchq's own files: imports go down only, and what a module says is public is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torchq

ROOT = Path(torchq.__file__).parent
FILES = {
    ".".join(("torchq", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
FOLDERS = {module.split(".")[1] for module in FILES if module.count(".") > 1}
LOW = {"attributes", "runtime", "quantization", "functional", "nn", "models"} & FOLDERS
HIGH = {"convert", "qat", "onednn", "analysis"} & FOLDERS


def imported(module: str, nodes: Iterator[ast.AST] | list[ast.stmt]) -> set[str]:
    """The modules that these statements name; not the packages that hold them."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            parts = {f"{base}.{name.name}" for name in node.names}
            found.update(part if part in TREES else base for part in parts)
    return found.intersection(TREES) - {module, "torchq"}


ALL = {module: imported(module, ast.walk(tree)) for module, tree in TREES.items()}
"""Module -> what it imports, in functions, too."""


def folder(module: str) -> str:
    name = f"{module}.".split(".")[1]
    return name if name in FOLDERS else ""


def test_no_import_leads_back() -> None:
    above, done = list[str](), set[str]()

    def visit(module: str) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            above.append(module)
            for other in sorted(imported(module, TREES[module].body)):
                visit(other)
            done.add(above.pop())

    for module in TREES:
        visit(module)


def test_low_folders_import_no_high_ones() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in ALL.items()
        for other in others
        if folder(module) in LOW and folder(other) in HIGH
    ]
    assert not upward


def test_no_circle_between_folders() -> None:
    """Not even by imports in functions, which circles would be hidden in."""
    edges = {(folder(m), folder(other)) for m, others in ALL.items() for other in others}
    edges = {(a, b) for a, b in edges if a and b and a != b}
    assert not {tuple(sorted(edge)) for edge in edges if edge[::-1] in edges}


def test_chains_of_imports_are_short() -> None:
    """Who reads a file should not have to know thirty others."""

    @cache
    def chain(module: str) -> list[str]:
        below = [chain(other) for other in imported(module, TREES[module].body)]
        return [module, *max(below, key=len, default=[])]

    longest = max(map(chain, set(TREES) - {"torchq"}), key=len)
    assert len(longest) <= 16, " > ".join(longest)


def test_a_name_is_a_module_or_a_function() -> None:
    """But for the folder of the flow, whose name the verb has."""
    both = set[str]()
    for module in TREES:
        parent, _, name = module.rpartition(".")
        found = getattr(import_module(parent or module), name, None) if parent else None
        if found is not None and not isinstance(found, ModuleType):
            both.add(module)
    assert both == {"torchq.convert"}


def test_public_names_are_all_there() -> None:
    """A module with `__all__` lists every function and class without an underscore."""
    for module, tree in TREES.items():
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for names in listed:
            missing = {name for name in defined if name[0] != "_"} - set(names)
            assert not missing, f"{module}.__all__ lacks {sorted(missing)}"
