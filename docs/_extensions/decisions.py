# SPDX-License-Identifier: Apache-2.0
"""Pictures of the passes that decide: a small model before and after each, from torchq's own plans.

A row is a value or a call of the captured model, in order. A box is what becomes one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torchq import QConfig
from torchq.capture.graph import function_name
from torchq.capture.ops import Op, Role
from torchq.convert.parts import find_parts
from torchq.planning.passes import PASSES
from torchq.planning.plan import Plan
from torchq.report import reasons

STATIC = QConfig()


@dataclass(frozen=True)
class Example:
    """A model, the inputs it is captured with, how it is to be quantized, and its coarse layer."""

    model: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    config: QConfig = STATIC
    coarse: str = ""


@dataclass(frozen=True)
class Cell:
    """One call at one moment.

    Attributes:
        name: of the call.
        unit: number of the box that it is part of.
        state: what is decided of it: one of STATES.
        value: of its result: a letter for its scale, or its type; "" before these are decided.
    """

    name: str
    unit: int
    state: str
    value: str = ""


STATES = {
    "input": "",
    "call": "?",
    "known": "known",
    "int8": "int8",
    "dynamic": "int8 by rows",
    "float": "float",
}
"""State of a cell -> what the picture says."""


class Model(nn.Module):
    """Layers by name, and a function that calls them."""

    def __init__(self, call: Callable[..., Tensor], **layers: nn.Module) -> None:
        """Take the function and the layers."""
        super().__init__()
        self.call = call
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the function makes of the inputs."""
        return self.call(self, *inputs)


class FakeQuantizerBase(nn.Module):
    """Stand-in for the fake quantizers of torchao, which are known by this name and their config.

    They give each row (token) levels by its own range.
    """

    config = SimpleNamespace(
        granularity=type("PerToken", (), {})(), is_dynamic=True, dtype=torch.int8
    )

    def forward(self, x: Tensor) -> Tensor:
        """Return the values at the levels."""
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale


def _attention(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.transpose(1, 2) / 4 + mask).softmax(-1) @ v


def _rotary(m: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = m.linear(x)
    return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin


def _step(m: Any, q: Tensor, k: Tensor, cache: Tensor) -> Tensor:
    return m.linear(q) @ torch.cat([cache, k], 1).transpose(1, 2)


def _residual(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.norm(m.conv(x)) + x)


def _joined(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.conv1(x))
    return m.conv3(F.max_pool2d(torch.cat([y, m.conv2(y)], 1), 2))


def _conv(inputs: int = 4, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _linears(**outputs: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(16, count) for name, count in outputs.items()}


def _feed_forward() -> nn.Module:
    layers = {"up": nn.Linear(16, 32), "down": nn.Linear(32, 16), "norm": nn.LayerNorm(16)}
    return Model(lambda m, x: m.norm(x + m.down(F.gelu(m.up(x)))), **layers)


def _recurrent() -> nn.Module:
    lstm = nn.LSTM(16, 16, batch_first=True)
    return Model(lambda m, x: m.head(m.lstm(x)[0]), lstm=lstm, **_linears(head=4))


def _rows() -> dict[str, Tensor]:
    return {"x": torch.ones(2, 8, 16)}


_IMAGE = {"x": torch.ones(2, 4, 8, 8)}
EXAMPLES = {
    "recognize": Example(
        lambda: Model(lambda m, x: F.relu(m.linear(x)).cumsum(1), **_linears(linear=16)), _rows()
    ),
    "leave_cached": Example(
        lambda: Model(_step, **_linears(linear=16)),
        {"q": torch.ones(2, 3, 16), "k": torch.ones(2, 3, 16), "cache": torch.ones(2, 8, 16)},
    ),
    "fuse_attention": Example(
        lambda: Model(_attention),
        {"q": torch.ones(2, 8, 16), "k": torch.ones(2, 8, 16), "v": torch.ones(2, 8, 16)}
        | {"mask": torch.ones(8, 8)},
    ),
    "read_tokens": Example(
        lambda: Model(
            lambda m, x: m.linear(m.fake(x)), fake=FakeQuantizerBase(), **_linears(linear=8)
        ),
        _rows(),
    ),
    "quantize_rows": Example(_feed_forward, _rows(), QConfig(dynamic=True)),
    "leave_lengths": Example(
        lambda: Model(lambda m, x: m.head(m.linear(x).sum(1)), **_linears(linear=16, head=4)),
        _rows(),
    ),
    "join_rotaries": Example(
        lambda: Model(_rotary, **_linears(linear=16)),
        {name: torch.ones(2, 8, 16) for name in ("x", "cos", "sin")},
        QConfig(dynamic=True),
    ),
    "find_units": Example(_recurrent, _rows()),
    "fuse": Example(lambda: Model(_residual, conv=_conv(), norm=nn.BatchNorm2d(4)), _IMAGE),
    "leave_angles": Example(
        lambda: Model(
            lambda m, x: m.head(torch.sin(1000 * m.linear(x))), **_linears(linear=16, head=4)
        ),
        _rows(),
    ),
    "leave_sized": Example(
        lambda: Model(lambda m, x: torch.tanh(m.linear(x).sum(1)), **_linears(linear=16)), _rows()
    ),
    "leave_coarse": Example(_feed_forward, _rows(), coarse="up"),
    "find_groups": Example(
        lambda: Model(_joined, conv1=_conv(), conv2=_conv(), conv3=_conv(8)), _IMAGE
    ),
    "choose_int8": Example(
        lambda: Model(
            lambda m, x: torch.tanh(m.norm(m.down(F.gelu(m.up(x))))),
            up=nn.Linear(16, 32), down=nn.Linear(32, 16), norm=nn.LayerNorm(16),
        ),
        _rows(),
    ),
    "host_tables": Example(_feed_forward, _rows()),
}  # fmt: skip


@cache
@torch.no_grad()
def plans(name: str) -> tuple[Plan, Plan]:
    """Return the plans of a pass's example before and after it."""
    example = EXAMPLES[name]
    torch.manual_seed(0)
    inputs = tuple(torch.randn(x.shape) for x in example.inputs.values())
    (part,) = find_parts(example.model().eval(), inputs, {}).found
    why = reasons.ROWS.format(decibels=9)
    owned = {node.meta.get("owner"): node for node in part.captured.graph.nodes}
    coarse = {owned[example.coarse]: why} if example.coarse else None
    plan = Plan(part.captured, example.config, coarse=coarse)
    for step in PASSES:
        before, plan = plan, step(plan)
        if step.__name__ == name:
            return before, plan
    raise KeyError(name)


def cells(name: str) -> tuple[list[Cell], list[Cell]]:
    """Return one cell for each input and call of a pass's example, before and after it."""
    before, after = plans(name)
    letters: dict[fx.Node, str] = {}

    def scale(plan: Plan, node: fx.Node) -> str:
        return letters.setdefault(plan.root(node), chr(ord("A") + len(letters)))

    def dtype(plan: Plan, node: fx.Node) -> str:
        return "u8" if plan.is_int8(node) else "f32"

    value = {"find_groups": scale, "choose_int8": dtype}.get(name, lambda plan, node: "")
    names = list(EXAMPLES[name].inputs)
    return list(_cells(before, names, lambda *_: "")), list(_cells(after, names, value))


def _cells(plan: Plan, inputs: list[str], value: Callable[[Plan, fx.Node], str]) -> Iterator[Cell]:
    boxes, numbers = dict(_boxes(plan)), dict[object, int]()
    for node in plan.captured.graph.nodes:
        if node.op == "placeholder":
            name, (unit, state) = inputs[len(numbers)], (node, "input")
        elif node.op.startswith("call_") and node.meta["varying"]:
            own = str(node.target) if node.op == "call_module" else node.meta["owner"]
            name, (unit, state) = own or function_name(node), boxes.get(node, (node, "call"))
        else:
            continue
        text = "" if node in plan.inside else value(plan, node)
        yield Cell(name, numbers.setdefault(unit, len(numbers)), state, text)


def _boxes(plan: Plan) -> Iterator[tuple[fx.Node, tuple[object, str]]]:
    """Yield for each call what it is part of, and the state of that; later ones count."""
    for node, op in plan.ops.items():
        yield node, (node, _state(op))
    for op in plan.ops.values():
        if op.absorbed or op.behind:
            for part in (*op.absorbed, op, *op.behind):
                yield part.node, (op, _state(op))
    for layer in plan.layers:
        state = "dynamic" if layer.reason.startswith(reasons.DYNAMIC) else "float"
        for part in (*(a for p in layer.parts for a in p.absorbed), *layer.parts):
            yield part.node, (layer, state if layer.reason else "int8")
    for layer, host in plan.table_hosts.items():
        for part in layer.parts:
            yield part.node, (host, "int8")


def _state(op: Op) -> str:
    if op.role is Role.OPAQUE:
        return "float" if op.reason else "int8"
    return "dynamic" if op.role is Role.DYNAMIC else "known"


_ROW, _WIDTH, _GAP = 28, 250, 70


def draw(name: str) -> str:
    """Return the picture of a pass."""
    columns = cells(name)
    height = 30 + _ROW * max(map(len, columns))
    width = 2 * _WIDTH + _GAP + 40
    title = f"{name}: {_told(columns[0])}; then {_told(columns[1])}"
    parts = [f"<title>{escape(title)}</title>"]
    for x, head, column in zip((0, _WIDTH + _GAP), ("before", "after"), columns, strict=True):
        parts.append(f'<text class="soft" x="{x + 12}" y="18">{head}</text>')
        parts += _column(column, x)
    y = 30 + (height - 30) / 2
    arrow = f'<path class="axis" d="M{_WIDTH + 34} {y}h22m-6 -5l6 5l-6 5"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="max-width:{width}px">{"".join(parts)}{arrow}</svg>'
    )


def _told(column: list[Cell]) -> str:
    return ", ".join(f"{cell.name} {STATES[cell.state]}".rstrip(" ?") for cell in column)


def _column(column: list[Cell], x: int) -> Iterator[str]:
    first = 0
    for row, cell in enumerate(column):
        y = 30 + _ROW * row
        if row + 1 == len(column) or column[row + 1].unit != cell.unit:
            tall = _ROW * (row + 1 - first) - 4
            box = f'x="{x + 1}" y="{30 + _ROW * first}" width="{_WIDTH - 2}" height="{tall}"'
            yield f'<rect class="{cell.state}" {box} rx="7"/>'
            yield _text(x + _WIDTH - 12, 48 + _ROW * first, STATES[cell.state], "soft", "end")
            for i in range(first, row + 1):
                yield _text(x + 12, 48 + _ROW * i, column[i].name)
            first = row + 1
        if cell.value:
            yield _text(x + _WIDTH + 8, y + 18, cell.value, "ours")


def _text(x: float, y: float, text: str, css: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{css}" text-anchor="{anchor}">{escape(text)}</text>'
