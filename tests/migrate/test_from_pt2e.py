# SPDX-License-Identifier: Apache-2.0
"""Graphs of torchao's PT2E: results within one step, and nothing compiled or calibrated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same
from torch import Tensor, nn

import torchq
from torchq.convert.dispatch import dispatches
from torchq.nn import QConv2d, QModule

pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")

SRC = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def converted(model: nn.Module, *srcs: Any, dynamic: bool = False, **kwargs: Any) -> Any:
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
    quantizer = x86.X86InductorQuantizer().set_global(config)
    logging.disable(logging.WARNING)  # of what torchao cannot load here
    with torch.no_grad():
        exported = torch.export.export(model.eval(), srcs, kwargs).module()
        prepared = pt2e.prepare_pt2e(exported, quantizer)
        prepared(*srcs, **kwargs)
        result = pt2e.convert_pt2e(prepared)
    logging.disable(logging.NOTSET)
    return result


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, src: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(src)))
        x = torch.relu(self.depthwise(x) + x)
        x = nn.functional.max_pool2d(x, 2)
        x = torch.cat([x, torch.relu(self.point(x))], 1)
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


torch.manual_seed(0)
PLAIN = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 64, 5)
)


@pytest.mark.parametrize("model", (PLAIN, Residual()), ids=("plain", "residual"))
def test_static(model: nn.Module, tmp_path: Path):
    old = converted(model, SRC)
    new = torchq.from_pt2e(old)
    with torch.no_grad():
        expected = old(SRC)
    torch.testing.assert_close(new(SRC), expected, rtol=0, atol=1e-5)
    rows = [row for row in torchq.explain(new).rows if row.is_matmul]
    assert rows and all(row.quantized for row in rows)
    (graph,) = torchq.explain(new).graphs
    assert graph.graph_calls == 1 and graph.own_calls == 0
    torch.testing.assert_close(type(new).forward(new, SRC), expected, rtol=0, atol=1e-5)
    torchq.save(new, tmp_path / "model")
    assert_same(torchq.load(tmp_path / "model")(SRC), new(SRC))


def test_weights_keep_their_integers_and_scales():
    old = converted(PLAIN, SRC)
    (dispatch,) = dispatches(torchq.from_pt2e(old))
    layers = [
        m for m in dispatch.graph.modules() if isinstance(m, QModule) and hasattr(m, "weight_scale")
    ]
    for i, layer in enumerate(layers):
        assert_same(layer.packed().unpack(), getattr(old, f"_frozen_param{i}"))
        assert_same(layer.weight_scale, getattr(old, f"_scale_{i}"))
    assert len(layers) == 3 and isinstance(layers[0], QConv2d)


def test_no_float_weights_are_left():
    new = torchq.from_pt2e(converted(PLAIN, SRC))
    floats = [v for v in new.state_dict().values() if v.is_floating_point() and v.dim() > 1]
    assert not floats


def test_other_batches_take_the_graph():
    new = torchq.from_pt2e(converted(Residual(), SRC))
    for batch in (1, 5):
        assert new(SRC[:1].expand(batch, -1, -1, -1)).shape == (batch, 5)
    assert torchq.explain(new).graphs[0].own_calls == 0


def test_dynamic():
    model, src = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(3, 16)
    old = converted(model, src, dynamic=True)
    new = torchq.from_pt2e(old)
    with torch.no_grad():
        assert torchq.sqnr(old(src), new(src)) > 35
    assert [row.quantized for row in torchq.explain(new).rows] == [True, True]


def test_keyword_arguments_and_several_results():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 3)

        def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(y)}

    x, y = torch.randn(2, 8), torch.randn(2, 8)
    old = converted(Two(), x, y=y)
    new = torchq.from_pt2e(old)
    with torch.no_grad():
        for key, expected in old(x, y=y).items():
            torch.testing.assert_close(new(x, y=y)[key], expected, rtol=0, atol=1e-5)


def test_not_taken():
    with pytest.raises(ValueError, match="without them"):
        torchq.from_pt2e(torch.export.export(PLAIN.eval(), (SRC,)).module())
    with pytest.raises(ValueError, match=r"conv2d.* has no dynamic form"):
        torchq.from_pt2e(converted(PLAIN, SRC, dynamic=True))
    with pytest.raises(TypeError, match="GraphModule"):
        torchq.from_pt2e(PLAIN)
