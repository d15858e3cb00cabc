# SPDX-License-Identifier: Apache-2.0
"""Calls of graphs name their overloads: no tensor becomes text, and no exception is swallowed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flows import calls, graph_of, near, values, wired
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.convert.dispatch import dispatches
from torchq.serialization import graph_text
from torchq.serialization.allowed import size

_PACKET = torch._ops.OpOverloadPacket.__call__.__code__
_MODULE = nn.Module.__getattr__.__code__
_TEXT = Tensor.__repr__.__code__


def waste(run: Callable[[], Any]) -> set[str]:
    """Return what a call does in vain: texts of tensors, failing look-ups, exceptions by place.

    Packets of one overload, which the modules of torchq call for TorchScript, try no other.
    """
    found: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> Any:
        code, name = frame.f_code, frame.f_code.co_filename
        if event == "call" and code is _TEXT:
            found.add("a tensor as text")
        if event == "call" and code is _PACKET and len(frame.f_locals["self"].overloads()) > 1:
            found.add(f"packet {frame.f_locals['self']}")
        if event == "call" and code is _MODULE and "<torchq" in frame.f_back.f_code.co_filename:
            found.add(f"look-up of {frame.f_locals['name']}")
        if event == "exception" and arg[2].tb_next is None:
            found.add(f"{arg[0].__name__} in {name}:{frame.f_lineno}")
        return note

    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(None)
    return found


def masks(m: Any, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    y = m.a(x).relu()
    both = (mask & other) | (mask ^ other)
    return m.b(y.masked_fill(~both[..., None], 0.0))


def looks_up(m: Any, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])[:, None]
    seen = mask[rows, other.long().cumsum(1) - 1]
    parts = torch.split(m.a(x), 4, dim=-1)
    return m.b(torch.cat(parts[::-1], -1)[..., :8] * seen[..., None])


def shifts(m: Any, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    n = (mask.long() << 2) >> other.long()
    return m.b(m.a(x).relu()) + (n % 3 + 2 ** other.long() - n**2)[..., None]


FUNCTIONS = [masks, looks_up, shifts]


def inputs(rows: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return values(rows, 5, 8), torch.rand(rows, 5) > 0.3, torch.rand(rows, 5) > 0.3


def loaded(model: nn.Module, converted: nn.Module, folder: Path) -> nn.Module:
    torchq.save(converted, folder / "model")
    return torchq.load(folder / "model", model)


@pytest.mark.parametrize("code", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_of_masks(code: Callable[..., Any], tmp_path: Path) -> None:
    model = wired(code)
    converted = torchq.quantize(model, [inputs(40), inputs()], strict=True)
    given = inputs(3)
    expected = near(model, converted, *given)
    others = loaded(model, converted, tmp_path), pickle.loads(pickle.dumps(converted))
    for other in (converted, *others):
        assert not waste(lambda: other(*given))  # noqa: B023
        assert torch.equal(other(*given), expected) and calls(other)[1] == 0
    torch.testing.assert_close(torch.jit.script(graph_of(converted))(*given), expected)
    exported = torch.export.export(converted, given, strict=False).module()
    assert torch.equal(exported(*given), expected)


def test_a_packet_in_a_graph_is_seen_and_so_is_the_text_that_it_makes() -> None:
    converted = torchq.quantize(wired(masks), [inputs(40)], strict=True)
    graph: Any = graph_of(converted)
    (node,) = (n for n in graph.graph.nodes if "bitwise_and" in str(n.target))
    node.target = torch.ops.aten.__and__
    graph.recompile()
    found = waste(lambda: converted(*inputs(3)))
    assert found >= {"a tensor as text", "packet aten.__and__"}


@pytest.mark.parametrize("code", FUNCTIONS, ids=lambda f: f.__name__)
def test_files_without_overloads_load_with_them(
    code: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overload follows from the arguments, whether tensors or what code computes of sizes."""
    model = wired(code)
    converted = torchq.quantize(model, [inputs(40)])
    graph: Any = graph_of(converted)
    wanted = [node.target for node in graph.graph.nodes]
    name_of = graph_text.name_of
    monkeypatch.setattr(graph_text, "name_of", lambda *target: _packet(name_of(*target)))
    other: Any = loaded(model, converted, tmp_path)
    found = [node.target for node in graph_of(other).graph.nodes if node.target is not size]
    assert found == wanted
    given = inputs(3)
    assert torch.equal(other(*given), converted(*given))


def _packet(name: str | None) -> str | None:
    library, found, op = (name or "").partition("::")
    return f"{library}::{op.partition('.')[0]}" if found else name


SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 100,
}  # fmt: skip
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BOTH = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()
}
SPEECH = {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", SIZES),
    "RobertaForSequenceClassification": ("RobertaConfig", {**SIZES, "pad_token_id": 1}),
    "DistilBertModel": (
        "DistilBertConfig",
        {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    ),
    "ModernBertModel": ("ModernBertConfig", {**SIZES, **TOKENS}),
    "DebertaV2Model": ("DebertaV2Config", SIZES),
    "ElectraModel": ("ElectraConfig", {**SIZES, "embedding_size": 16}),
    "MPNetModel": ("MPNetConfig", SIZES),
    "LlamaForCausalLM": ("LlamaConfig", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**SIZES, **TOKENS, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": 100, **T5}),
    "BartModel": ("BartConfig", {"vocab_size": 100, "d_model": 32, **BOTH, **TOKENS}),
    "WhisperModel": (
        "WhisperConfig",
        {
            "vocab_size": 100, "d_model": 32, **BOTH, **TOKENS, "max_source_positions": 50,
            "num_mel_bins": 16, "decoder_start_token_id": 1,
        },
    ),
    "Wav2Vec2Model": ("Wav2Vec2Config", {**SIZES, **SPEECH}),
}  # fmt: skip
DECODERS = ("LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM")
WITH_BOTH = ("T5ForConditionalGeneration", "BartModel", "WhisperModel")


def batch(name: str, rows: int, length: int) -> dict[str, Any]:
    """Texts of unequal lengths, padded in front for decoders; Whisper's mask is its decoder's."""
    ids = torch.randint(5, 90, (rows, length))
    mask = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
    if name == "WhisperModel":
        given = {"input_features": torch.randn(rows, 16, 100), "decoder_attention_mask": mask}
    elif name == "Wav2Vec2Model":
        seen = (torch.arange(400) < 400 - 50 * torch.arange(rows)[:, None]).long()
        given = {"input_values": torch.randn(rows, 400), "attention_mask": seen}
    else:
        given = {"input_ids": ids, "attention_mask": mask.flip(1) if name in DECODERS else mask}
    more: dict[str, Any] = {"use_cache": False} if name in DECODERS else {}
    return given | more | ({"decoder_input_ids": ids} if name in WITH_BOTH else {})


@pytest.mark.parametrize(
    "name",
    rest_slow(FAMILIES, "BertModel", "GPT2LMHeadModel"),
)
def test_models_of_transformers_with_masks(name: str) -> None:
    """Exceptions of the float model, which asks its configuration, say, do not count."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    config, sizes = FAMILIES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    converted = torchq.quantize(model, [batch(name, 3, 12), batch(name, 2, 9)])
    given = batch(name, 4, 11)
    with torch.no_grad():
        expected, found = model(**given)[0], converted(**given)[0]  # the first call reads code
        own = {found for found in waste(lambda: model(**given)) if " in " in found}
        assert not waste(lambda: converted(**given)) - own
    assert torchq.sqnr(expected, found) > 15
    graphs = dispatches(converted)
    assert graphs and all((graph.graph_calls, graph.own_calls) == (2, 0) for graph in graphs)
