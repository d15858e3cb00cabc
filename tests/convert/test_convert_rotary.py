# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings that a model spells out are one op where they stay float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx_runtime import session
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.convert.dispatch import dispatches
from torchq.planning import passes
from torchq.planning.rotary import join_rotaries

SIZE, DYNAMIC = 8, torchq.QConfig(dynamic=True)
Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def chunked(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=3)


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, rest = x[..., :4], x[..., 4:]
    cos, sin = cos[..., :4], sin[..., :4]
    return torch.cat([rotated * cos + turned(rotated) * sin, rest], dim=-1)


ROTATIONS: dict[str, Rotation] = {
    "as Llama": lambda x, cos, sin: (x * cos) + (turned(x) * sin),
    "sum the other way": lambda x, cos, sin: turned(x) * sin + x * cos,
    "products the other way": lambda x, cos, sin: cos * x + sin * turned(x),
    "chunks": lambda x, cos, sin: x * cos + chunked(x) * sin,
    "a part": partial,
}


def with_reader(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    product = x * cos
    return product + turned(x) * sin + product


def read_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    other = turned(x)
    return x * cos + other * sin + other


def other_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., :4], x[..., 4:]), -1) * sin


def unequal(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin


OTHERS: dict[str, Rotation] = {
    "a product is read again": with_reader,
    "what is turned is read again": read_turned,
    "the lower half is negative": other_halves,
    "parts of other sizes": unequal,
    "turned the other way": lambda x, c, s: x * c + torch.cat((x[..., 4:], -x[..., :4]), -1) * s,
    "along positions": lambda x, c, s: x * c + torch.cat((-x[..., 4:], x[..., :4]), -2)[
        ..., : x.shape[-2], :].repeat(1, 1, 1, 2) * s,
    "of another tensor": lambda x, cos, sin: x.abs() * cos + turned(x) * sin,
    "a difference": lambda x, cos, sin: x * cos - turned(x) * sin,
    "twice the sum": lambda x, cos, sin: torch.add(x * cos, turned(x) * sin, alpha=2),
}  # fmt: skip


class Model(nn.Module):
    """Linear layers around a rotation of heads by the angles of positions."""

    def __init__(self, rotate: Rotation) -> None:
        super().__init__()
        self.rotate = rotate
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        angles = torch.outer(torch.arange(64.0), torch.rand(SIZE // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(x.shape[0], x.shape[1], 2, SIZE).transpose(1, 2)
        out = self.rotate(heads, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return self.last(out.transpose(1, 2).reshape(x.shape))


def without(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passes, "PASSES", [p for p in passes.PASSES if p is not join_rotaries])


def rotaries(model: nn.Module) -> int:
    ops = torch.ops.torchq
    return sum(
        node.target is ops.rotary.default for d in dispatches(model) for node in d.graph.graph.nodes
    )


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_is_one_op(name: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, data = Model(ROTATIONS[name]).eval(), [torch.randn(2, 7, 16) for _ in range(3)]
    config = torchq.QConfig() if static else DYNAMIC
    qmodel = torchq.quantize(model, data, config=config)
    assert rotaries(qmodel) == 1
    (row,) = [row for row in torchq.explain(qmodel).rows if row.kind == "rotary"]
    assert row.name == "rotary" and not row.quantized and "in one operation" in row.reason
    without(monkeypatch)
    plain = torchq.quantize(model, data, config=config)
    assert rotaries(plain) == 0
    for shape in ((2, 7, 16), (1, 2, 16), (5, 40, 16)):
        x = torch.randn(shape)
        assert torch.equal(qmodel(x), plain(x))
        assert torchq.sqnr(model(x), qmodel(x)) > 20


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_rotation_stays(name: str) -> None:
    torch.manual_seed(0)
    rotate = OTHERS[name]
    model, x = Model(rotate).eval(), torch.randn(2, 8, 16)
    if name == "along positions":
        model.rotate = lambda x, c, s: x * c + torch.cat((-x[:, :, 4:], x[:, :, :4]), 2) * s
    qmodel = torchq.quantize(model, example_inputs=x, config=DYNAMIC)
    assert rotaries(qmodel) == 0 and "rotary" not in str(torchq.explain(qmodel))
    assert torchq.sqnr(model(x), qmodel(x)) > 20


class Given(nn.Module):
    """Sine and cosine are arguments: static products with them are int8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * cos + turned(x) * sin)


def test_products_that_would_be_int8_stay() -> None:
    torch.manual_seed(0)
    data = [tuple(torch.randn(3, 2, 5, SIZE)) for _ in range(3)]
    static = torchq.quantize(Given().eval(), data)
    assert rotaries(static) == 0
    assert any(row.kind == "mul" and row.quantized for row in torchq.explain(static).rows)
    assert rotaries(torchq.quantize(Given().eval(), example_inputs=data[0], config=DYNAMIC)) == 1


@pytest.mark.parametrize("overrides", [{"mul": None}, {"cat": torchq.QConfig()}], ids=str)
def test_overrides_of_parts_keep_them_apart(overrides: Any) -> None:
    model, x = Model(ROTATIONS["as Llama"]).eval(), torch.randn(2, 7, 16)
    qmodel = torchq.quantize(model, example_inputs=x, config=DYNAMIC, overrides=overrides)
    assert rotaries(qmodel) == 0


def test_other_dtypes_stay() -> None:
    model = Model(ROTATIONS["as Llama"]).eval().bfloat16()
    x = torch.randn(2, 7, 16).bfloat16()
    qmodel = torchq.quantize(model, example_inputs=x, config=DYNAMIC)
    assert rotaries(qmodel) == 0


def test_training_has_gradients() -> None:
    model, x = Model(ROTATIONS["as Llama"]), torch.randn(2, 7, 16)
    prepared = torchq.prepare_qat(model, x)
    prepared(x).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters() if p.requires_grad)
    assert torchq.convert(prepared.eval())(x).shape == x.shape


@pytest.mark.parametrize("name", ["as Llama", "a part"])
def test_everywhere(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(ROTATIONS[name]).eval(), torch.randn(2, 7, 16)
    qmodel = torchq.quantize(model, example_inputs=x, config=DYNAMIC)
    want = qmodel(x)
    assert torch.equal(torch.jit.script(qmodel)(x), want)
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", Model(ROTATIONS[name]).eval())
    assert rotaries(loaded) == 1 and torch.equal(loaded(x), want)
    with torch.no_grad():
        assert torch.equal(torch.export.export(qmodel, (x,)).module()(x), want)
    path = tmp_path / "model.onnx"
    torchq.to_onnx(torchq.quantize(model, [x]), path, x)
    run = session(path)
    (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
    assert torchq.sqnr(model(x), torch.from_numpy(got)) > 25


SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 8}),
    "phi3": ("Phi3", SIZES),
    "phi3, a part": ("Phi3", {**SIZES, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}  # fmt: skip


@pytest.mark.parametrize("family", rest_slow(DECODERS, "llama"))
def test_decoders(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tf = pytest.importorskip("transformers", minversion="5.24")
    name, sizes = DECODERS[family]

    def model() -> Any:
        torch.manual_seed(0)
        return getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**sizes)).eval()

    ids = torch.randint(3, 100, (1, 6))
    qmodel = torchq.quantize(model(), None, {"input_ids": ids}, DYNAMIC)
    assert rotaries(qmodel) == 4, "of a query and a key in each of two layers"
    torchq.save(qmodel, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", model())
    without(monkeypatch)
    plain = torchq.quantize(model(), None, {"input_ids": ids}, DYNAMIC)
    assert rotaries(plain) == 0
    prompts = torch.randint(3, 100, (3, 9))
    with torch.no_grad():
        assert torch.equal(qmodel(prompts).logits, plain(prompts).logits)
        options = {"max_new_tokens": 8, "do_sample": False}
        want = plain.generate(prompts, **options)
        for one in (qmodel, loaded):
            assert torch.equal(one.generate(prompts, **options), want)
    assert all(d.own_calls == 0 and d.graph_calls > 8 for d in dispatches(qmodel))
