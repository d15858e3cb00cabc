# SPDX-License-Identifier: Apache-2.0
"""Embeddings with quantized rows in converted models: both flows, torch.ao's, files, ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
import torch.nn.functional as F
from onnx_runtime import session
from torch import Tensor, nn

import torchq
from torchq.nn import QEmbedding, QEmbeddingBag

warnings.filterwarnings("ignore", category=DeprecationWarning)
INDICES = torch.randint(0, 200, (4, 9))


class Tagger(nn.Module):
    """Words and positions, two linear layers, and perhaps a weight that two modules share."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 32, padding_idx=0)
        self.places = nn.Embedding(16, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 200, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        y: Tensor = self.head(h + self.down(F.relu(self.up(h))))
        return y


class Bags(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 32, mode=mode)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        y: Tensor = self.out(self.bag(x, offsets))
        return y


BAG = torch.randint(0, 200, (40,)), torch.tensor([0, 7, 7, 30])


def model(tied: bool = False) -> Tagger:
    torch.manual_seed(5)
    return Tagger(tied).eval()


def bytes_of(module: nn.Module) -> int:
    """Returns the size of the distinct tensors in a state dict."""
    tensors = {t.data_ptr(): t.nbytes for t in module.state_dict().values()}
    return sum(tensors.values())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_quantize(bits: Any, dynamic: bool, tmp_path: Path) -> None:
    """The graph and the modules have the rows; what the report and the file say agrees."""
    config = torchq.QConfig(dynamic=dynamic, embedding_bits=bits)
    quantized: Any = torchq.quantize(model(), [INDICES], example_inputs=INDICES, config=config)
    assert type(quantized) is Tagger
    assert type(quantized.words) is QEmbedding
    assert type(quantized.places) is QEmbedding
    expected = model()(INDICES)
    assert torchq.sqnr(expected, quantized(INDICES)) > (25 if bits == 8 else 12)
    rows = {row.name: row for row in torchq.explain(quantized).rows}
    assert (rows["words"].kind, rows["words"].quantized) == ("Embedding", True)
    assert f"bits={bits}" in str(torchq.explain(quantized))
    codes = 216 * 32 * bits // 8 + 216 * (8 if bits == 8 else 4)
    assert f"{codes:,} bytes" in str(torchq.explain(quantized))
    others = bytes_of(torchq.quantize(model(), [INDICES], example_inputs=INDICES,
                                      config=torchq.QConfig(dynamic=dynamic)))  # fmt: skip
    assert bytes_of(quantized) < others - 216 * 32 * 4 + codes + 2000
    torchq.save(quantized, tmp_path / "m.tq")
    loaded = torchq.load(tmp_path / "m.tq")
    assert torch.equal(loaded(INDICES), quantized(INDICES))
    scripted = torch.jit.script(quantized)
    assert torch.equal(scripted(INDICES), quantized(INDICES))
    exported = torch.export.export(quantized, (INDICES,)).module()
    assert torch.equal(exported(INDICES), quantized(INDICES))


def test_the_graph_reads_the_rows_of_the_module() -> None:
    quantized: Any = torchq.quantize(model(), [INDICES], config=torchq.QConfig(embedding_bits=8))
    assert torchq.explain(quantized).graphs
    rows = [t for t in quantized.state_dict().values() if t.shape == quantized.words.rows.shape]
    assert len({t.data_ptr() for t in rows}) == 1
    assert not any(t.shape == (200, 32) and t.dtype == torch.float32
                   for t in quantized.state_dict().values())  # fmt: skip


@pytest.mark.parametrize("recipe", ["fast", "best"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_report_has_no_row_of_what_a_graph_does_inside(dynamic: bool, recipe: Any) -> None:
    """Each table is one row, in int8, whether or not a graph looks its rows up by a function."""
    config = torchq.QConfig(dynamic=dynamic, recipe=recipe, embedding_bits=8)
    prepared = torchq.calibrate(torchq.prepare(model(), INDICES, config), [INDICES])
    for one in (prepared, torchq.convert(prepared)):
        rows = [row for row in torchq.explain(one).rows if row.name.startswith(("words", "places"))]
        assert {row.name for row in rows} == {"words", "places"}
        assert all(row.quantized and not row.reason for row in rows)
    bags = torchq.quantize(Bags().eval(), [BAG], config=config)
    (row,) = [row for row in torchq.explain(bags).rows if row.name.startswith("bag")]
    assert (row.name, row.kind, row.quantized) == ("bag", "EmbeddingBag", True)


def test_overrides_choose() -> None:
    config = torchq.QConfig(embedding_bits=8)
    overrides = {"places": None, "words": torchq.QConfig(embedding_bits=4)}
    quantized: Any = torchq.quantize(model(), [INDICES], config=config, overrides=overrides)
    assert type(quantized.places) is nn.Embedding
    assert quantized.words.bits == 4
    only = torchq.quantize(model(), [INDICES], overrides={"words": config})
    assert type(only.words) is QEmbedding
    assert type(only.places) is nn.Embedding
    for bits in (7, True, "8"):
        with pytest.raises(ValueError, match="embedding_bits must be None, 8 or 4, got"):
            torchq.QConfig(embedding_bits=bits)  # type: ignore[arg-type]
    assert "embeddings u8/4 per row" in str(torchq.QConfig(embedding_bits=4))


def test_a_tied_head_keeps_its_meaning() -> None:
    """The head multiplies by the float weight, in int8 of its own; the rows are the embedding's."""
    config = torchq.QConfig(embedding_bits=8)
    expected = model(tied=True)(INDICES)
    quantized: Any = torchq.quantize(model(tied=True), [INDICES], config=config)
    assert type(quantized.words) is QEmbedding
    assert torchq.sqnr(expected, quantized(INDICES)) > 25
    kept: Any = torchq.quantize(
        model(tied=True), [INDICES], config=config, overrides={"head": None}
    )
    assert torch.equal(kept.head.weight, model(tied=True).head.weight)
    assert torchq.sqnr(expected, kept(INDICES)) > 25


# quantize_dynamic


def test_quantize_dynamic_takes_what_is_asked_for() -> None:
    tagger = model()
    assert type(torchq.quantize_dynamic(tagger).words) is nn.Embedding
    only: Any = torchq.quantize_dynamic(tagger, {nn.Embedding})
    assert (type(only.words), type(only.up)) == (QEmbedding, nn.Linear)
    assert only.words.bits == 8
    named: Any = torchq.quantize_dynamic(tagger, {"words", nn.Linear})
    assert (type(named.words), type(named.places)) == (QEmbedding, nn.Embedding)
    assert type(named.up) is not nn.Linear
    around: Any = torchq.quantize_dynamic(tagger, {"": torchq.QConfig(embedding_bits=4)})
    assert around.words.bits == 4
    assert type(around.up) is not nn.Linear
    kept: Any = torchq.quantize_dynamic(
        tagger, {"": torchq.QConfig(embedding_bits=4), "words": None}
    )
    assert type(kept.words) is nn.Embedding
    assert "words" in {r.name for r in torchq.explain(only).rows if r.quantized}
    assert torchq.sqnr(tagger(INDICES), named(INDICES)) > 25


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_dtypes_of_torch_ao(mode: str) -> None:
    """quint8 and quint4x2 mean embeddings alone, as there."""
    bags = Bags(mode).eval()
    for dtype, bits, spec in [
        (torch.quint8, 8, None),
        (torch.quint4x2, 4, None),
        (torch.quint4x2, 4, {nn.EmbeddingBag}),
        (torch.qint8, 8, {nn.EmbeddingBag}),
        (torch.quint8, 8, {"bag"}),
        (torch.quint8, 8, {""}),
        (torch.qint8, 8, {nn.EmbeddingBag: ao.float_qparams_weight_only_qconfig}),
        (torch.qint8, 4, {"bag": ao.float_qparams_weight_only_qconfig_4bit}),
    ]:
        quantized: Any = torchq.quantize_dynamic(bags, spec, dtype)
        assert (type(quantized.bag), quantized.bag.bits) == (QEmbeddingBag, bits)
        assert (type(quantized.out), quantized.bag.mode) == (nn.Linear, mode)
        assert torchq.sqnr(bags(*BAG), quantized(*BAG)) > (30 if bits == 8 else 10)
    both: Any = torchq.quantize_dynamic(
        bags,
        {
            nn.EmbeddingBag: ao.float_qparams_weight_only_qconfig,
            nn.Linear: ao.default_dynamic_qconfig,
        },
    )
    assert type(both.bag) is QEmbeddingBag
    assert type(both.out) is not nn.Linear
    assert type(torchq.quantize_dynamic(model(), None, torch.quint4x2).words) is nn.Embedding
    assert type(torchq.quantize_dynamic(model(), None, torch.quint8).words) is QEmbedding
    for spec in ({nn.Linear}, {"out"}, {nn.Linear: ao.float_qparams_weight_only_qconfig}):
        with pytest.raises(ValueError, match="nothing in it has a dynamic form"):
            torchq.quantize_dynamic(bags, spec, torch.quint8)


def test_in_place_hooks_and_shared_tables() -> None:
    tagger = model()
    tagger.places.weight = tagger.words.weight
    calls: list[str] = []
    tagger.words.register_forward_hook(lambda *_: calls.append("words"))
    assert torchq.quantize_dynamic(tagger, {nn.Embedding}, inplace=True) is tagger
    words: Any = tagger.words
    places: Any = tagger.places
    assert words.rows is places.rows
    assert words is not places
    tagger(INDICES)
    assert calls == ["words"]


def test_an_embedding_with_code_of_its_own_stays_float() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 8

    own = nn.Sequential(Scaled(20, 8)).eval()
    quantized = torchq.quantize_dynamic(own, {nn.Embedding})
    assert type(quantized[0]) is Scaled  # type: ignore[index]
    (row,) = torchq.explain(quantized).rows
    assert (row.quantized, row.reason) == (False, "its code is its own")


# torch.ao


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
def test_from_torch_ao(bits: int) -> None:
    """Codes, scales and offsets are kept; results differ by float rounding."""
    qconfig = ao.float_qparams_weight_only_qconfig
    if bits == 4:
        qconfig = ao.float_qparams_weight_only_qconfig_4bit
    tagger, bags = model(), Bags("sum").eval()
    old = ao.quantize_dynamic(tagger, {nn.Embedding: qconfig}, torch.quint8)
    new: Any = torchq.from_torch_ao(old)
    assert (type(new.words), new.words.bits) == (QEmbedding, bits)
    if bits == 8:  # torch.ao's Embedding reads 4-bit rows as if they were of 8 bits
        torch.testing.assert_close(new(INDICES), old(INDICES), rtol=1e-5, atol=1e-5)
    assert torchq.sqnr(tagger(INDICES), new(INDICES)) > (30 if bits == 8 else 12)
    old = ao.quantize_dynamic(bags, {nn.EmbeddingBag: qconfig}, torch.quint8)
    new = torchq.from_torch_ao(old)
    assert (type(new.bag), new.bag.bits) == (QEmbeddingBag, bits)
    torch.testing.assert_close(new(*BAG), old(*BAG), rtol=1e-5, atol=1e-5)
    assert new.bag.rows.shape[1] == 32 * bits // 8 + (8 if bits == 8 else 4)


# ONNX


@pytest.mark.parametrize("bits", [8, 4])
def test_to_onnx(bits: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    config = torchq.QConfig(embedding_bits=bits)
    quantized = torchq.quantize(model(), [INDICES], config=config)
    path = tmp_path / "m.onnx"
    torchq.to_onnx(quantized, path, INDICES)
    runtime = session(path)
    (name,) = (i.name for i in runtime.get_inputs())
    got = torch.from_numpy(runtime.run(None, {name: INDICES.numpy()})[0])
    assert torchq.sqnr(quantized(INDICES), got) > 40
    assert path.stat().st_size < 216 * 32 * 4 + 32 * 64 * 2 + 32 * 200 + 9000


class Ranker(nn.Module):
    """Bags, and enough behind them for a graph."""

    def __init__(self, mode: str, kind: str) -> None:
        super().__init__()
        self.bag, self.kind = nn.EmbeddingBag(200, 32, mode=mode), kind
        self.out = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        given = {"offsets": (more,), "factors": (None, more)}.get(self.kind, ())
        y: Tensor = self.out(self.bag(x, *given))
        return y + more.float().mean()


@pytest.mark.parametrize("mode,kind", [("sum", "factors"), ("mean", ""), ("max", "")])
def test_bags_of_one_size_to_onnx(mode: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    inputs = INDICES, torch.randn(4, 9)
    config = torchq.QConfig(embedding_bits=8)
    quantized = torchq.quantize(Ranker(mode, kind).eval(), [inputs], config=config)
    torchq.to_onnx(quantized, tmp_path / "m.onnx", inputs)
    runtime = session(tmp_path / "m.onnx")
    names = [i.name for i in runtime.get_inputs()]
    arrays = dict(zip(names, (x.numpy() for x in inputs), strict=True))
    got = torch.from_numpy(runtime.run(None, arrays)[0])
    assert torchq.sqnr(quantized(*inputs), got) > 40


@pytest.mark.parametrize(
    "bits,message", [(8, "bags with offsets have none: pass"), (None, "float bags have none")]
)
def test_other_bags_have_no_onnx(bits: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    config = torchq.QConfig(embedding_bits=bits)
    quantized = torchq.quantize(Ranker("sum", "offsets").eval(), [BAG], config=config)
    with pytest.raises(NotImplementedError, match=message):
        torchq.to_onnx(quantized, tmp_path / "m.onnx", BAG)
    assert not (tmp_path / "m.onnx").exists()
