# SPDX-License-Identifier: Apache-2.0
"""Models that keep something between calls, and how their conversions are compared."""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from flows import sqnr
from models import Wired
from torch import Tensor, nn

import torchq

Forward = Callable[[Any, Tensor], Tensor]
KEPT: dict[str, tuple[Forward, Callable[[nn.Module], None]]] = {}
TRACED: dict[str, tuple[Forward, Callable[[nn.Module], None]]] = {}


def keeps(cases: dict[str, Any], **attributes: Callable[[], Any]) -> Any:
    """A forward of a model with layers a and b and these attributes; tensors become buffers."""

    def start(model: nn.Module) -> None:
        for key, make in attributes.items():
            if key.startswith("buffer"):
                model.register_buffer(key, make())
            else:
                setattr(model, key, make())

    def add(forward: Forward) -> Forward:
        cases[forward.__name__] = forward, start
        return forward

    return add


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    forward, start = {**KEPT, **TRACED}[name]
    model = Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    start(model)
    return model.eval()


# Results that depend on earlier calls


@keeps(KEPT, cache=lambda: None)
def attribute(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) if m.cache is None else m.a(x) + m.cache
    m.cache = y
    return m.b(y)


@keeps(KEPT, cache=lambda: None)
def first_call(m: Any, x: Tensor) -> Tensor:
    """As an activation norm that looks at its first batch."""
    y = m.a(x)
    if m.cache is None:
        m.cache = y.mean(0)
    return m.b(y - m.cache)


@keeps(KEPT, cache=lambda: torch.zeros(4, 8))
def tensor(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) + m.cache
    m.cache = y * 0.5
    return m.b(y)


@keeps(KEPT, cache=lambda: torch.zeros(8, 8))
def slice_of_a_tensor(m: Any, x: Tensor) -> Tensor:
    m.cache[:4] += m.a(x)
    return m.b(m.cache[:4])


@keeps(KEPT, buffer=lambda: torch.zeros(4, 8))
def buffer_in_place(m: Any, x: Tensor) -> Tensor:
    before = m.buffer.clone()
    m.buffer.add_(m.a(x))
    return m.b(m.buffer - before * 0.5)


@keeps(KEPT, buffer=lambda: torch.zeros(4, 8))
def buffer_read_then_written(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) + m.buffer
    m.buffer.copy_(y)
    return m.b(y)


@keeps(KEPT, buffer=lambda: torch.zeros(4, 8))
def buffer_assigned(m: Any, x: Tensor) -> Tensor:
    m.buffer = m.buffer * 0.5 + m.a(x)
    return m.b(m.buffer)


@keeps(KEPT, buffer=lambda: torch.zeros(8, 8))
def buffer_slice(m: Any, x: Tensor) -> Tensor:
    m.buffer[:4] = m.a(x) + m.buffer[:4]
    return m.b(m.buffer[:4])


@keeps(KEPT, buffer=lambda: torch.zeros(()))
def buffer_count(m: Any, x: Tensor) -> Tensor:
    m.buffer += 1
    return m.b(m.a(x) * m.buffer)


@keeps(KEPT, count=lambda: 0)
def count(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return m.b(m.a(x)) * m.count


@keeps(KEPT, count=lambda: 0)
def count_beyond(m: Any, x: Tensor) -> Tensor:
    """Two calls do not show it."""
    m.count += 1
    y = m.a(x)
    return m.b(y) if m.count <= 3 else m.b(y * 2) + 1


@keeps(KEPT, odd=lambda: False)
def every_other(m: Any, x: Tensor) -> Tensor:
    m.odd = not m.odd
    y = m.a(x)
    return m.b(y if m.odd else -y)


@keeps(KEPT, history=list)
def history(m: Any, x: Tensor) -> Tensor:
    m.history.append(m.a(x))
    return m.b(torch.stack(m.history[-2:]).mean(0))


@keeps(KEPT, frames=list)
def window(m: Any, x: Tensor) -> Tensor:
    """Another way from the fourth call on."""
    y = m.a(x)
    m.frames = [*m.frames[-3:], y]
    return m.b(y) if len(m.frames) < 4 else m.b(torch.stack(m.frames).sum(0))


@keeps(KEPT, frames=lambda: deque(maxlen=2))
def frames(m: Any, x: Tensor) -> Tensor:
    m.frames.append(m.a(x))
    return m.b(sum(m.frames))


@keeps(KEPT, cache=dict)
def dictionary(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if x.shape[0] in m.cache:
        y = y + m.cache[x.shape[0]]
    m.cache[x.shape[0]] = y
    return m.b(y)


@keeps(KEPT, cache=lambda: SimpleNamespace(last=None))
def inside_an_object(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) if m.cache.last is None else m.a(x) + m.cache.last
    m.cache.last = y
    return m.b(y)


# Caches of what shapes decide, and what nobody reads


@keeps(TRACED, cache=dict)
def grid_by_shape(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in m.cache:
        m.cache[x.shape[0]] = torch.arange(x.shape[0])[:, None] / x.shape[0]
    return m.b(m.a(x) + m.cache[x.shape[0]])


@keeps(TRACED, length=lambda: None, cosines=lambda: None)
def rotary(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] != m.length:
        m.length = x.shape[0]
        m.cosines = torch.outer(torch.arange(x.shape[0]).type_as(x), torch.ones(8) * 0.3).cos()
    return m.b(m.a(x) * m.cosines)


@functools.lru_cache
def grid(rows: int) -> Tensor:
    return torch.arange(rows * 8).view(rows, 8) / (rows * 8)


@keeps(TRACED)
def cached_function(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) + grid(x.shape[0]))


@keeps(TRACED, last=lambda: None, seen=list, calls=lambda: 0)
def for_others_to_see(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    m.last, m.calls = y.softmax(-1), m.calls + 1
    m.seen.append(y)
    if not m.calls:
        return y
    return m.b(y)


@keeps(TRACED, buffer=lambda: torch.zeros(()))
def buffer_for_others(m: Any, x: Tensor) -> Tensor:
    m.buffer += 1
    return m.b(m.a(x))


@keeps(TRACED, y=lambda: None)
def on_the_way(m: Any, x: Tensor) -> Tensor:
    m.y = m.a(x)
    return m.b(m.y.relu())


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8) for _ in range(6)]


def follows(model: nn.Module, converted: nn.Module, data: list[Tensor]) -> list[Tensor]:
    """Call for call; both begin where they are. Gives the results."""
    found = []
    with torch.no_grad():
        for i, x in enumerate(data):
            found.append(converted(x).clone())
            assert sqnr(model(x), found[-1]) > 25, i
    return found


def quantized(model: nn.Module, data: list[Tensor]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torchq.prepare: Wired cannot be traced: its results")
        return torchq.quantize(model, data, data[0])
