# SPDX-License-Identifier: Apache-2.0
"""The page for users of torch.ao names all that is public there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch.ao.quantization as ao
from torch.ao.quantization import qconfig, quantize_fx

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "torch_ao_names.md"


def functions_of(module: object) -> list[str]:
    return [
        name
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize(
    "names",
    [ao.__all__, functions_of(quantize_fx), qconfig.__all__],
    ids=["quantization", "quantize_fx", "qconfig"],
)
def test_every_public_name_of_torch_ao_is_listed(names: list[str]) -> None:
    tables = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    listed = {name for line in tables for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}
    assert len(names) > 4
    assert sorted(set(names) - listed) == []
