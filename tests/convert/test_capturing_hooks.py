# SPDX-License-Identifier: Apache-2.0
"""Hooks with which transformers collects hidden states do not keep calls from their graph."""

from __future__ import annotations

import pickle
import sys
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flows import calls, near, sqnr
from torch import Tensor, nn

import torchq

COLLECTED: list[Tensor] = []


def collect(module: nn.Module, args: Any, result: Tensor) -> None:
    """Keep the result of a layer, as the hooks of transformers do."""
    COLLECTED.append(result)


collect.__module__ = "transformers.utils.output_capturing"


class Encoder(nn.Module):
    """Installs hooks in the first call that asks for hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.pool = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: bool = False) -> Any:
        if hidden and not getattr(self, "_output_capturing_hooks_installed", False):
            self.up.register_forward_hook(collect)
            self._output_capturing_hooks_installed = True
        COLLECTED.clear()
        result = self.down(torch.relu(self.up(x)))
        pooled = torch.tanh(self.pool(result))
        return (result, pooled, *COLLECTED) if hidden else (result, pooled)


class Net(nn.Module):
    """Reads hidden states of an encoder, and not what it pools."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x, hidden=True)[2]
        return self.head(torch.relu(hidden))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8))).eval()


def test_a_net_that_reads_hidden_states_runs_its_graph() -> None:
    model, x = Net().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x])
    assert sqnr(model(x), converted(x)) > 25
    assert calls(converted) == (1, 0)
    pickle.loads(pickle.dumps(converted))


def test_a_call_of_a_part_leaves_the_graph_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = SimpleNamespace(_active_collector=ContextVar("collector", default=None))
    monkeypatch.setitem(sys.modules, collect.__module__, idle)
    model, x = Net().eval(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x])
    assert len(converted.encoder(x, hidden=True)) == 3
    converted(x)
    assert calls(converted) == (1, 0)


def test_hooks_that_collect_nothing_leave_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of transformers stay, and act in the calls that return hidden states."""
    name, seen = "transformers.utils.output_capturing", list[Tensor]()
    current = ContextVar[Any]("collector", default=None)
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(_active_collector=current))

    def collect(module: nn.Module, args: Any, result: Tensor) -> None:
        if current.get():
            seen.append(result)

    collect.__module__ = name
    model, x = layers(), torch.randn(4, 8)
    converted = torchq.quantize(model, [x])
    converted[1].register_forward_hook(collect)
    near(model, converted, x)
    assert calls(converted) == (1, 0) and not seen
    token = current.set({"hidden_states": []})
    with pytest.warns(UserWarning, match="a submodule has a hook"):
        near(model, converted, x)
    assert calls(converted) == (1, 1) and len(seen) == 1
    current.reset(token)
    near(model, converted, x)
    converted[1].register_forward_hook(lambda *_: seen.clear())
    near(model, converted, x)
    assert calls(converted) == (2, 2) and not seen
