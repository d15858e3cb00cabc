# SPDX-License-Identifier: Apache-2.0
"""The page "How torchq decides": a section and a picture for each pass, and what these show."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torchq.planning.passes import PASSES

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_extensions"))
import decisions

ROOT = Path(__file__).parents[2]
NAMES = [step.__name__ for step in PASSES]

# name:box:state, and the scale or the type of the value where the pass decides that
SHOWN = {
    "recognize": (
        "x:0:input linear:1:call relu:2:call cumsum:3:call",
        "x:0:input linear:1:known relu:2:known cumsum:3:float",
    ),
    "leave_cached": (
        "q:0:input k:1:input cache:2:input linear:3:known cat:4:known transpose:5:known "
        "matmul:6:known",
        "q:0:input k:1:input cache:2:input linear:3:known cat:4:known transpose:5:known "
        "matmul:6:float",
    ),
    "fuse_attention": (
        "q:0:input k:1:input v:2:input mask:3:input transpose:4:known matmul:5:known div:6:known "
        "add:7:known softmax:8:float matmul:9:known",
        "q:0:input k:1:input v:2:input mask:3:input transpose:4:known matmul:5:known div:5:known "
        "add:5:known softmax:5:known matmul:5:known",
    ),
    "read_tokens": (
        "x:0:input fake:1:float linear:2:known",
        "x:0:input fake:1:dynamic linear:1:dynamic",
    ),
    "quantize_rows": (
        "x:0:input up:1:known gelu:2:known down:3:known add:4:known norm:5:float",
        "x:0:input up:1:dynamic gelu:1:dynamic down:2:dynamic add:2:dynamic norm:3:float",
    ),
    "leave_lengths": (
        "x:0:input linear:1:known sum:2:float head:3:known",
        "x:0:input linear:1:known sum:2:float head:3:dynamic",
    ),
    "join_rotaries": (
        "x:0:input cos:1:input sin:2:input linear:3:dynamic mul:4:known slice:5:known neg:6:known "
        "slice:7:known cat:8:known mul:9:known add:10:known",
        "x:0:input cos:1:input sin:2:input linear:3:dynamic mul:4:float slice:4:float neg:4:float "
        "slice:4:float cat:4:float mul:4:float add:4:float",
    ),
    "find_units": (
        "x:0:input lstm:1:float getitem:2:known head:3:known",
        "x:0:input lstm:1:int8 getitem:2:known head:3:known",
    ),
    "fuse": (
        "x:0:input conv:1:known norm:2:known add:3:known relu:4:known",
        "x:0:input conv:1:int8 norm:1:int8 add:1:int8 relu:1:int8",
    ),
    "leave_angles": (
        "x:0:input linear:1:int8 mul:1:int8 sin:2:int8 head:3:int8",
        "x:0:input linear:1:float mul:1:float sin:2:float head:3:int8",
    ),
    "leave_sized": (
        "x:0:input linear:1:int8 sum:2:float tanh:3:int8",
        "x:0:input linear:1:int8 sum:2:float tanh:3:float",
    ),
    "leave_coarse": (
        "x:0:input up:1:int8 gelu:2:int8 down:3:int8 add:3:int8 norm:4:float",
        "x:0:input up:1:dynamic gelu:2:int8 down:3:int8 add:3:int8 norm:4:float",
    ),
    "find_groups": (
        "x:0:input conv1:1:int8 relu:1:int8 conv2:2:int8 cat:3:int8 max_pool2d:4:known "
        "conv3:5:int8",
        "x:0:input:A conv1:1:int8 relu:1:int8:B conv2:2:int8:C cat:3:int8:C max_pool2d:4:known:C "
        "conv3:5:int8:D",
    ),
    "choose_int8": (
        "x:0:input up:1:int8 gelu:2:int8 down:3:int8 norm:4:float tanh:5:int8",
        "x:0:input:u8 up:1:int8:u8 gelu:2:int8:u8 down:3:int8:f32 norm:4:float:f32 "
        "tanh:5:float:f32",
    ),
    "host_tables": (
        "x:0:input up:1:int8 gelu:2:int8 down:3:int8 add:3:int8 norm:4:float",
        "x:0:input up:1:int8 gelu:1:int8 down:2:int8 add:2:int8 norm:3:float",
    ),
}


def test_the_page_has_a_section_and_a_picture_for_each_pass_in_order() -> None:
    page = (ROOT / "docs/concepts/decisions.md").read_text(encoding="utf-8")
    assert re.findall(r"^```\{picture\} (\w+)$", page, re.MULTILINE) == NAMES
    sections = re.split(r"^## (?=\d+\. )", page, flags=re.MULTILINE)[1:]
    assert len(sections) == len(NAMES)
    for number, (name, section) in enumerate(zip(NAMES, sections, strict=True), 1):
        assert section.startswith(f"{number}. ") and f"`{name}`" in section


@pytest.mark.parametrize("name", NAMES)
def test_what_a_picture_shows(name: str) -> None:
    for column, expected in zip(decisions.cells(name), SHOWN[name], strict=True):
        found = [f"{c.name}:{c.unit}:{c.state}:{c.value}".rstrip(":") for c in column]
        assert found == expected.split()
    picture = decisions.draw(name)
    boxes = re.findall(r'<rect class="(\w+)"', picture)
    assert len(boxes) == sum(
        len({cell.unit for cell in column}) for column in decisions.cells(name)
    )
