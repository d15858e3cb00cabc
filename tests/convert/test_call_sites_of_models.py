# SPDX-License-Identifier: Apache-2.0
"""The graph of a converted model calls ops past its modules."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import linecache
import pickle
import weakref

import pytest
import torch
from calls import assert_same, python_calls
from flows import graph_of
from torch import Tensor, nn
from torch.fx.graph_module import _loader

import torchq


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x)) + self.b(x)
        return self.pool(torch.cat([x, torch.sigmoid(x)], 1))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), Block(), nn.Conv2d(16, 4, 1)).eval()


def test_a_converted_model_calls_no_module():
    src = torch.randn(2, 3, 12, 12)
    model = torchq.quantize(network(), [src], src)
    expected = model(src)
    called_modules = sum(n.op == "call_module" for n in graph_of(model).graph.nodes)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(same(src), expected)
        with python_calls() as called:
            assert_same(same(src), expected)
        # the model itself, and the first layer, which quantizes its float source
        assert called.count("_call_impl") == 2 < called_modules
    hooked = []
    graph_of(model).get_submodule("1.a").register_forward_hook(lambda *_: hooked.append(1))
    assert_same(model(src), expected)
    assert hooked == [1]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(src), expected)


@pytest.mark.parametrize("name", ["0", "1", "1.pool"])
def test_modules_that_are_compiled_where_they_are(name: str):
    """A compiled module has the original's parts, but not among its own modules."""
    src = torch.randn(2, 3, 12, 12)
    model = torchq.quantize(network(), [src], src)
    graph = graph_of(model)
    expected, part = model(src), graph.get_submodule(name)
    graph.set_submodule(name, torch.compile(part, backend="eager"))
    assert_same(model(src), expected)
    assert_same(copy.deepcopy(model)(src), expected)
    graph.set_submodule(name, part)
    assert_same(model(src), expected)


def test_a_model_that_is_gone_is_not_kept_alive():
    src = torch.randn(1, 3, 12, 12)
    model = torchq.quantize(network(), [src], src)
    inner = graph_of(model).get_submodule("1.a")
    inner.owner = [model]
    inner.register_forward_hook(functools.partial(lambda owner, *_: None, model))
    model(src)
    gone = weakref.ref(model)
    del model, inner
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_copies_take_their_source_with_them() -> None:
    """Python and torch.fx keep the source of all code that they were given, 20 KB a graph."""
    src = torch.randn(2, 3, 12, 12)
    model = torchq.quantize(network(), [src], src)

    def kept() -> int:
        gc.collect()
        graphs = [file for file in linecache.cache if file.startswith("<")]  # others are files
        return len(graphs) + len(_loader.eval_cache)

    before = kept()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert kept() > before
    for copied in copies:
        assert "_site(getitem" in inspect.getsource(graph_of(copied)._run)
    del copies, copied
    assert kept() <= before  # less where another test's models went
