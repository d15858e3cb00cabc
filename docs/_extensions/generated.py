# SPDX-License-Identifier: Apache-2.0
"""Directives whose text comes from the installed torchq: op schemas and the command line's help."""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from unittest import mock

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import torchq.__main__ as command_line

_WIDTH = 88


def schemas() -> dict[str, str]:
    """Return the schema of every public op, by its name."""
    found = {
        schema.name.removeprefix("torchq::"): str(schema).removeprefix("torchq::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("torchq::")
    }
    return {name: found[name] for name in sorted(found) if not name.startswith("_")}


def wrapped(schema: str) -> str:
    """Return a schema whose arguments are on indented lines, where it is too long for one."""
    if len(schema) <= _WIDTH:
        return schema
    name, rest = schema.split("(", 1)
    arguments, result = rest.rsplit(") -> ", 1) if "-> (" not in rest else rest.split(") -> ", 1)
    # Types stay beside their names.
    whole = ", ".join(argument.replace(" ", "\0") for argument in arguments.split(", "))
    lines = textwrap.wrap(whole, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"{name}(", *lines, f") -> {result}"]).replace("\0", " ")


def help_of(*arguments: str) -> str:
    """Return what ``python -m torchq ... --help`` prints."""
    printed = io.StringIO()
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1"}
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        command_line.main([*arguments, "--help"])
    return printed.getvalue()


def _block(text: str, language: str = "text") -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language)


class Ops(SphinxDirective):
    """List every op with its schema."""

    def run(self) -> list[nodes.Node]:
        """Return a heading and a block for each."""
        result: list[nodes.Node] = []
        for name, schema in schemas().items():
            title = nodes.rubric("", "", nodes.literal("", f"torch.ops.torchq.{name}"))
            title["ids"] = [f"op-{name.replace('_', '-')}"]
            result += [title, _block(wrapped(schema))]
        return result


class Commands(SphinxDirective):
    """Show the help of the command line, and of each of its commands."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        text = help_of()
        result: list[nodes.Node] = [_block(text)]
        names = re.search(r"\{([\w,-]+)\}", text)
        for name in names[1].split(",") if names else []:
            title = nodes.rubric("", "", nodes.literal("", name))
            title["ids"] = [f"command-{name}"]
            result += [title, _block(help_of(name))]
        return result


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("ops", Ops)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
