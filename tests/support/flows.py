# SPDX-License-Identifier: Apache-2.0
"""Checks that the tests of both flows share: a converted network beside the float one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import models
import torch
from torch import Tensor, nn

import torchq
from torchq import QConfig
from torchq.models.attached import graphs_of

CONFIGS = {
    "u7": QConfig(activation_bits=7),
    "s7": QConfig(activation_bits=7, activation_dtype=torch.int8),
    "s8": QConfig(activation_dtype=torch.int8),
    "s8-affine": QConfig(activation_dtype=torch.int8, activation_symmetric=False),
    "u8-symmetric": QConfig(activation_symmetric=True),
    "per-tensor": QConfig(weight_granularity="per_tensor"),
    "w7": QConfig(weight_bits=7),
    "minmax": QConfig(activation_observer="minmax"),
}


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, models.Output):
        result = [result.hidden, result.out]
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def sqnr(float_result: Tensor, result: Tensor) -> float:
    assert result.dtype == float_result.dtype and result.shape == float_result.shape
    noise = (float_result - result).square().sum()
    return float(10 * torch.log10(float_result.square().sum() / noise)) if noise > 0 else 200.0


def check(
    case: models.Case,
    prepare: Callable[..., nn.Module],
    convert: Callable[[nn.Module], nn.Module],
    config: QConfig | None = None,
    bound: float = 25.0,
    batches: bool = False,
) -> nn.Module:
    """Prepared equals float, converted is near it, and the report counts what it should.

    ``batches``: other batch sizes are tried, too.
    """
    model, data = build(case)
    expected = copy.deepcopy(model)
    prepared = prepare(model, data[0], config)
    with torch.no_grad():
        want = tensors(expected(data[1]))
        for a, b in zip(want, tensors(prepared(data[1])), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=2e-5)
        for a, b in zip(want, tensors(model(data[1])), strict=True):
            assert torch.equal(a, b), "prepare changed the model it was given"
    converted = convert(torchq.calibrate(prepared, data))
    for a, b in zip(want, tensors(converted(data[1])), strict=True):
        assert sqnr(a, b) > bound
    with torch.no_grad():
        for x in (torch.cat(data), data[0][:1]) if batches else ():
            for a, b in zip(tensors(expected(x)), tensors(converted(x)), strict=True):
                assert sqnr(a, b) > bound - 5
    rows = [row for row in torchq.explain(converted).rows if row.is_matmul]
    assert (sum(row.quantized for row in rows), len(rows)) == case[2:]
    return converted


def build(case: models.Case) -> tuple[nn.Module, list[Tensor]]:
    """A network with fixed weights, and batches for it."""
    make, shape, _, _ = case
    return models.randomize(make()), [torch.randn(shape) for _ in range(4)]


def graph_of(model: Any) -> Any:
    """The graph of the whole, or the model where it is one itself."""
    return dict(graphs_of(model)).get("", model)


def names(converted: nn.Module) -> list[str]:
    """Classes of the modules that the graph calls, in order."""
    graph = graph_of(converted)
    calls = [n for n in graph.graph.nodes if n.op == "call_module"]
    return [type(graph.get_submodule(n.target)).__name__ for n in calls]


def found(converted: nn.Module, *classes: type[nn.Module]) -> list[Any]:
    """Modules of these classes in the graph."""
    return [m for m in graph_of(converted).modules() if isinstance(m, classes)]


MISSES = "does not run its int8 graph"
"""Is in the warning of a call that runs the model's own code."""


def values(*shape: int) -> Tensor:
    """Random numbers whose range a few batches show."""
    return torch.rand(shape) * 2 - 1


def wired(forward: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    return models.Wired(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval().requires_grad_(False)


def near(model: nn.Module, converted: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Asserts that both give the same kind of result, and nearly the same numbers."""
    with torch.no_grad():
        expected = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        found = converted(*args, **kwargs)
    assert type(found) is type(expected)
    for a, b in zip(tensors(expected), tensors(found), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.numel() == 0 or torch.equal(a, b) or sqnr(a, b) > 25
    return found


def calls(converted: nn.Module) -> tuple[int, int]:
    """Returns how many calls took the graph of the whole model, and its own code."""
    (graph,) = torchq.explain(converted).graphs
    assert graph.module == ""
    return graph.graph_calls, graph.own_calls


def converted(flow: Any, model: nn.Module, data: list[Tensor], **more: object) -> nn.Module:
    """The model that ``torchq`` or ``torchq.eager`` makes of it; it is near the float one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result: nn.Module = flow.quantize(model, data, data[0], **more)
    with torch.no_grad():
        assert sqnr(model(data[0]), result(data[0])) > 30
    return result
