# SPDX-License-Identifier: Apache-2.0
"""Modules that keep sizes are exported as one call, and are the calls of ATen afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.capture.aten import plain_graph
from torchq.capture.exported import Exported, export
from torchq.models.state import twin


class Modules(nn.Module):
    """Calls the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8)
        self.rest = nn.Sequential(
            nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU(), nn.Hardtanh(0, 0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(self.conv(x)))


class Functions(Modules):
    """Calls the functions of the same modules."""

    def forward(self, x: Tensor) -> Tensor:
        n, x = self.norm, self.conv(x)
        x = F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)
        x = F.hardsigmoid(F.hardswish(F.silu(F.hardtanh(x, 0.0, 6.0))))
        return F.hardtanh(F.relu(x), 0.0, 0.5)


def captured(model: nn.Module, x: Tensor) -> tuple[Exported, list[tuple[str, str]]]:
    exported = export(model.eval(), (x,), {})
    graph = plain_graph(exported, twin(model)).graph
    calls = [n for n in graph.nodes if n.op.startswith("call_")]
    return exported, [(n.meta["aten"], n.meta["sizes"]) for n in calls]


def test_modules_give_the_graph_and_guards_of_their_functions() -> None:
    x = torch.randn(2, 3, 20, 24)
    modules, calls = captured(Modules(), x)
    functions, expected = captured(Functions(), x)
    assert any("torchq_capture" in str(n.target) for n in modules.program.graph.nodes)
    assert calls == expected and len(calls) == 8
    assert modules.guards == functions.guards


class Others(nn.Module):
    """Has an activation of a constant, and batch norms without weights or momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 8, 3), nn.ReLU()
        self.plain = nn.BatchNorm2d(8, affine=False)
        self.average = nn.BatchNorm2d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.average(self.plain(self.conv(x))) * self.act(torch.tensor(0.5))


def test_constants_and_other_batch_norms_give_the_same_numbers() -> None:
    """torch.export computes functions of constants, on the CPU."""
    model, x = Others().eval(), torch.randn(2, 3, 8, 8)
    exported = export(model, (x,), {})
    plain = plain_graph(exported, twin(model))
    expected = model(x)
    assert torch.equal(torch.fx.GraphModule(plain.model, plain.graph)(x), expected)
