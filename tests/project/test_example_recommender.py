# SPDX-License-Identifier: Apache-2.0
"""A recommender of DLRM's shape from end to end: bags, layers, products of pairs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchq
from torchq.nn import QEmbeddingBag

RUN = Path(__file__).parents[2] / "examples" / "recommender" / "run.py"

pytestmark = pytest.mark.skipif(not RUN.exists(), reason="not in a source tree")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recommender", RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_from_end_to_end(example: Any, bits: Any, tmp_path: Path) -> None:
    """All tables have rows, all layers are int8, one graph takes the call, the file is small."""
    generator = torch.Generator().manual_seed(1)
    model = example.Recommender().eval()
    data = [example.batch(64, generator) for _ in range(3)]
    qmodel = torchq.quantize(model, data, config=torchq.QConfig(embedding_bits=bits), strict=True)
    assert all(type(bag) is QEmbeddingBag for bag in qmodel.bags)
    rows = torchq.explain(qmodel).rows
    assert all(row.quantized for row in rows if row.is_matmul or row.kind == "EmbeddingBag")
    assert {row.name for row in rows if row.kind == "EmbeddingBag"} == {
        f"bags.{i}" for i in range(4)
    }
    test = example.batch(100, generator)
    assert torchq.sqnr(model(*test), qmodel(*test)) > (25 if bits == 8 else 10)
    (graph,) = torchq.explain(qmodel).graphs
    assert (graph.graph_calls, graph.own_calls) == (1, 0)
    torchq.save(qmodel, tmp_path / "m.tq")
    assert torch.equal(torchq.load(tmp_path / "m.tq")(*test), qmodel(*test))
    rows_of_tables = 4 * 2000 * (32 * bits // 8 + (8 if bits == 8 else 4))
    assert (tmp_path / "m.tq").stat().st_size < rows_of_tables + 150_000
    numbers, items, offsets = test
    items[0, 5] = 2000
    with pytest.raises(IndexError, match=r"indices must lie in \[0, 1999\], .* got 2000 at"):
        qmodel(numbers, items, offsets)


def test_the_example_runs(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "STEPS", 30)
    example.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    right, size = [float(line[-5]) for line in lines], [float(line[-2]) for line in lines]
    assert abs(right[1] - right[0]) < 1 and abs(right[2] - right[0]) < 5
    assert size[1] < 0.32 * size[0] and size[2] < 0.2 * size[0]
