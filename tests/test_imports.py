# SPDX-License-Identifier: Apache-2.0
"""What torchq's own files import from each other, and which names they say are public."""

from __future__ import annotations

import ast
from pathlib import Path

import torchq

ROOT = Path(torchq.__file__).parent
FILES = {
    ".".join(("torchq", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


def imported(module: str) -> set[str]:
    """The modules that its code names, in functions, too; not the packages that hold them."""
    found = set[str]()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = {f"{node.module}.{name.name}" for name in node.names}
            found.update(part if part in TREES else node.module for part in parts)
    return found.intersection(TREES)


def test_no_import_leads_back():
    above, done = list[str](), set[str]()

    def visit(module: str) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            above.append(module)
            for other in sorted(imported(module)):
                visit(other)
            done.add(above.pop())

    for module in TREES:
        visit(module)


def test_the_flow_that_swaps_knows_nothing_of_the_other():
    for module in TREES:
        if module.startswith("torchq.eager"):
            assert not any(other.startswith("torchq.fx") for other in imported(module)), module


def test_public_names_are_all_there():
    """Where a module lists its names, it lists every function and class without an underscore."""
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
