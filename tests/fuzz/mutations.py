# SPDX-License-Identifier: Apache-2.0
"""Ways to damage bytes, and to forge JSON and tensors."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch
from torch import Tensor


def damaged(pick: random.Random, content: bytes | bytearray) -> bytearray:
    """Returns the bytes with bits or bytes changed, cut short, or with bytes more."""
    content = bytearray(content)
    for _ in range(pick.choice([1, 1, 1, 2, 8])):
        # the header decides most, and is a small part of a large file
        at = pick.randrange(max(1, min(len(content), pick.choice([len(content), 4000, 8]))))
        match pick.randrange(6):
            case 0:
                content = content[: max(at, 1)]
            case 1:
                content[at:at] = pick.randbytes(pick.randrange(1, 9))
            case 2:
                content[at : at + 64] = bytes(len(content[at : at + 64]))
            case 3:
                other = pick.randrange(len(content))
                content[at : at + 64] = content[other : other + 64]
            case _:
                content[at] ^= 1 << pick.randrange(8)
    return content


VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 255, 2**15, 2**26, 2**31, 2**40, 2**62]
VALUES += [
    2**63,
    0.5,
    -1e30,
    float("nan"),
    float("inf"),
    "",
    "weight",
    "torch.nn.Linear",
    "aten.add",
    "x",
]
VALUES += [[], {}, [1], [2**40], "é" * 40, [[[]]], {"class": "QLinear"}]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside of a value of JSON."""
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def forge_text(pick: random.Random, text: str) -> str:
    """Another text: a value of the JSON replaced, removed or doubled, or a character."""
    value = json.loads(text)
    within = places(value) if isinstance(value, dict | list) else []
    if not within or pick.random() < 0.1:
        at = pick.randrange(len(text) + 1)
        return text[:at] + pick.choice(["", "{", "é", "0", '"', "[" * 3000]) + text[at + 1 :]
    for _ in range(pick.choice([1, 1, 1, 2, 4])):
        container, key = pick.choice(within)
        if isinstance(container, list) and not 0 <= key < len(container):
            continue
        match pick.randrange(4):
            case 0:
                container.pop(key, None) if isinstance(container, dict) else container.pop(key)
            case 1:
                other, place = pick.choice(within)
                if place in other if isinstance(other, dict) else 0 <= place < len(other):
                    container[key] = copy.deepcopy(other[place])
            case _:
                container[key] = copy.deepcopy(pick.choice(VALUES))
    return json.dumps(value)


def forge_tensor(pick: random.Random, value: Tensor) -> Tensor:
    flat = value.flatten().clone()
    match pick.randrange(6):
        case 0:
            return flat[: flat.numel() // 2]
        case 1:
            return torch.cat([flat, flat])
        case 2:
            dtypes = (
                torch.float32,
                torch.int8,
                torch.uint8,
                torch.int32,
                torch.int64,
                torch.bfloat16,
            )
            return value.to(pick.choice(dtypes))
        case 3:
            return value.reshape(pick.choice([(-1,), (1, -1), (-1, 1)])) if flat.numel() else value
        case 4:
            fill = pick.choice([0, 1, -1, float("nan"), float("inf"), 1e-45, 3e38, 200, 2**31 - 1])
            same = torch.full_like(value, 0) if value.dtype != torch.float32 else value * 0
            return same + fill if fill == fill or value.is_floating_point() else same
    if flat.numel():
        raw = flat.view(torch.uint8)
        raw[pick.randrange(raw.numel())] ^= 1 << pick.randrange(8)
    return flat.view(value.shape)
