# SPDX-License-Identifier: Apache-2.0
"""QEmbedding and QEmbeddingBag: float modules in, every form of a module out."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
import torchq.functional as TF
from torchq.nn import QEmbedding, QEmbeddingBag

INDICES = torch.tensor([[1, 5, 9], [0, 0, 29]])
FLAT, OFFSETS = torch.tensor([1, 5, 9, 0, 0, 29, 7]), torch.tensor([0, 3, 3, 5])


def embedding(bits: Any = 8, **options: Any) -> QEmbedding:
    torch.manual_seed(3)
    return QEmbedding.from_float(nn.Embedding(30, 12, padding_idx=0), bits=bits, **options)


def bag(mode: str = "sum", bits: Any = 8, **options: Any) -> QEmbeddingBag:
    torch.manual_seed(3)
    return QEmbeddingBag.from_float(nn.EmbeddingBag(30, 12, mode=mode, **options), bits=bits)


def calls() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    return [
        (embedding(), (INDICES,)),
        (embedding(4), (INDICES.int(),)),
        (bag("mean", padding_idx=5), (INDICES,)),
        (bag("max", 4), (FLAT, OFFSETS)),
        (bag("sum"), (FLAT, OFFSETS, torch.rand(7))),
        (bag("sum", 4, include_last_offset=True), (FLAT, torch.tensor([0, 3, 7]))),
    ]


NAMES = ["8", "4", "mean", "max 4", "weighted", "last offset"]
each_call = pytest.mark.parametrize("index", range(6), ids=NAMES)


@each_call
def test_agrees_with_the_float_module(index: int) -> None:
    """Equal for the dequantized weight, and within steps for the original one."""
    module, args = calls()[index]
    assert isinstance(module, (QEmbedding, QEmbeddingBag))
    torch.manual_seed(3)
    if isinstance(module, QEmbedding):
        first: nn.Module = nn.Embedding(30, 12, padding_idx=0)
        second: nn.Module = nn.Embedding(30, 12, _weight=module.weight + 0)
    else:
        kept = {"mode": module.mode, "include_last_offset": module.include_last_offset}
        kept["padding_idx"] = module.padding_idx
        first = nn.EmbeddingBag(30, 12, **kept)  # type: ignore[arg-type]
        second = nn.EmbeddingBag(30, 12, _weight=module.weight + 0, **kept)  # type: ignore[arg-type]
    got = module(*args)
    torch.testing.assert_close(got, second(*args), rtol=1e-5, atol=1e-5)
    assert torchq.sqnr(first(*args).detach(), got) > (35 if module.bits == 8 else 15)


@each_call
def test_state_copies_and_files(index: int, tmp_path: Path) -> None:
    module, args = calls()[index]
    expected = module(*args)
    assert sorted(module.state_dict()) == ["rows", "spec"]
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    blank: Any = type(module).from_spec(module.read_spec())  # type: ignore[operator]
    blank.load_state_dict(module.state_dict())
    torchq.save(nn.Sequential(module), tmp_path / "m.safetensors")
    places = nn.Sequential(nn.Identity()).eval()
    (loaded,) = torchq.load(tmp_path / "m.safetensors", places).children()
    for other in (*copies, blank, loaded):
        assert type(other) is type(module)
        assert other.extra_repr() == module.extra_repr()  # type: ignore[operator]
        assert torch.equal(other(*args), expected)


@each_call
def test_graphs(index: int) -> None:
    module, args = calls()[index]
    expected = module(*args)
    scripted = torch.jit.script(module)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    for run in (scripted, torch.jit.load(buffer), torch.jit.trace(module, args)):
        assert torch.equal(run(*args), expected)
    exported = torch.export.export(module, args)
    assert torch.equal(exported.module()(*args), expected)
    assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(*args), expected)


def test_indices_of_any_number_with_export() -> None:
    dims = {"input": {0: torch.export.Dim("n")}, "offsets": {0: torch.export.Dim("bags")}}
    program = torch.export.export(bag(), (FLAT, OFFSETS), dynamic_shapes={**dims})
    more = torch.arange(30), torch.tensor([0, 2, 9])
    assert torch.equal(program.module()(*more), bag()(*more))


def test_names_and_attributes_of_the_float_module() -> None:
    module = embedding()
    assert str(module) == "QEmbedding(30, 12, padding_idx=0, bits=8, scales=f32)"
    assert str(bag("max", 4)) == "QEmbeddingBag(30, 12, mode=max, bits=4, scales=f16)"
    assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (30, 12, 0)
    assert module.weight.shape == (30, 12)
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight[3:5], TF.embedding(torch.tensor([3, 4]), module.packed()))
    with pytest.raises(AttributeError, match="num_embeddings of a layer must be what it was"):
        module.num_embeddings = 7


def test_a_tied_weight_reads_the_rows() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words: Any = embedding()

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.words(x), self.words.weight)

    model = Tied()
    reals = model.words.packed().dequantize()
    expected = F.linear(reals[INDICES], reals)
    torch.testing.assert_close(model(INDICES), expected)
    torch.testing.assert_close(torch.export.export(model, (INDICES,)).module()(INDICES), expected)
    torch.testing.assert_close(torch.jit.script(model)(INDICES), expected)


def test_max_norm_is_applied_once() -> None:
    float_module = nn.Embedding(30, 12, max_norm=1.0)
    with torch.no_grad():
        float_module.weight *= 5
    module = QEmbedding.from_float(float_module)
    every = torch.arange(30)
    assert torchq.sqnr(float_module(every).detach(), module(every)) > 35
    assert float(module.weight.norm(dim=1).max()) < 1.02


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_float_dtypes(dtype: torch.dtype) -> None:
    float_module = nn.Embedding(30, 12).to(dtype)
    module = QEmbedding.from_float(float_module)
    assert torchq.sqnr(float_module.weight.float(), module.weight.float()) > 35
    result = torch.float32 if dtype == torch.float64 else dtype
    index, weights = torch.tensor([[3, 7]]), torch.ones(1, 2, dtype=result)
    bag = QEmbeddingBag.from_float(nn.EmbeddingBag(30, 12, mode="sum").to(dtype))
    for got in (module(index), module.weight, bag(index, None, weights), bag.weight):
        assert got.dtype == result


def test_a_state_of_another_table_does_not_load() -> None:
    state = embedding().state_dict()
    with pytest.raises(RuntimeError, match="spec"):
        embedding(4).load_state_dict(state)
    for other in (embedding().half(), embedding().double()):  # integers stay what they are
        assert torch.equal(other(INDICES), embedding()(INDICES))


def test_loads_into_a_module_on_meta() -> None:
    spec = embedding().read_spec()
    with torch.device("meta"):
        module = QEmbedding.from_spec(spec)
    module.load_state_dict(embedding().state_dict(), assign=True)
    assert torch.equal(module(INDICES), embedding()(INDICES))
