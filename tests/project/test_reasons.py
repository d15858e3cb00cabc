# SPDX-License-Identifier: Apache-2.0
"""Sentences of the report stand in one file, once, and each of them is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchq.report import reasons

SENTENCES = {name: text for name, text in vars(reasons).items() if name.isupper()}
OTHERS = {
    path: path.read_text()
    for path in Path(reasons.__file__).parents[1].rglob("*.py")
    if path != Path(reasons.__file__)
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_reason_is_used_and_written_once(name: str) -> None:
    assert any(re.search(rf"\breasons\.{name}\b", source) for source in OTHERS.values())
    start = SENTENCES[name].partition("{")[0].strip()
    written = [path for path, source in OTHERS.items() if f'"{start}' in source]
    assert len(start) < 15 or not written


def test_what_has_no_int8_form_is_said_nowhere_else() -> None:
    ends = [path for path, source in OTHERS.items() if 'has no int8 form"' in source]
    assert not ends


def test_reasons_differ() -> None:
    assert len({*SENTENCES.values()}) == len(SENTENCES) > 60
