# SPDX-License-Identifier: Apache-2.0
"""``QConfig(cache_bits=8)``: caches of keys and values in int8, with a scale for each row.

What is expected comes from the model's own code with layers of a cache that round what they keep.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import test_cached_calls as calls
import test_cached_decoders as decoders
import torch
from test_cached_calls import assert_near, own, quantized, tokens
from torch import Tensor, nn

import torchq
import torchq.functional as TF
from tests.support.slow import rest_slow
from torchq.convert.dispatch import dispatches
from torchq.planning import cached
from torchq.report import reasons

tf = pytest.importorskip("transformers", minversion="5.24")

QUICK = ("llama", "some windows")
CACHE_8 = torchq.QConfig(dynamic=True, cache_bits=8)
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", calls.SIZES),
    "gpt neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {k: v for k, v in calls.SIZES.items() if k != "num_key_value_heads"},
    ),
}
FITTING = ("gpt2", "qwen3", "windows", "qwen2", "gpt neox")
RUNS = (("llama", False), ("some windows", True), ("gpt neox", False))


def model(family: str = "llama", **sizes: Any) -> nn.Module:
    if family in calls.FAMILIES:
        return calls.model(family, **sizes)
    name, config, known = MORE[family]
    torch.manual_seed(0)
    made: nn.Module = getattr(tf, name)(getattr(tf, config)(**known, **sizes)).eval()
    return made


def rounded(rows: Tensor) -> Tensor:
    return TF.decompress_rows(TF.compress_rows(rows)).to(rows.dtype)


@contextmanager
def rounding() -> Iterator[None]:
    """Let caches keep rounded rows; where they had none, the call itself reads those it has."""

    def update_of(known: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_first = not self.is_initialized or self.get_seq_length() == 0
            found = known(self, rounded(keys), rounded(values), *args, **kwargs)
            return (keys, values) if is_first else found

        return update

    with pytest.MonkeyPatch.context() as patch:
        for name in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            layer = getattr(tf.cache_utils, name)
            patch.setattr(layer, "update", update_of(vars(layer)["update"]))
        yield


def layers(cache: Any) -> list[Any]:
    held = [getattr(cache, f"{name}_attention_cache", None) for name in ("self", "cross")]
    return [layer for one in (held if held[0] else [cache]) for layer in one.layers]


def opened(output: Any) -> Any:
    """Return an output with the real values of its cache."""
    output = copy.deepcopy(output)
    for layer in layers(output.cache):
        assert layer.keys.dtype == layer.values.dtype == torch.int8
        layer.keys, layer.values = map(TF.decompress_rows, (layer.keys, layer.values))
    return output


@pytest.mark.parametrize("family", rest_slow([*QUICK, *FITTING], *QUICK))
@torch.no_grad()
def test_every_kind_of_call_takes_the_graph(family: str) -> None:
    converted, dispatch = quantized(model(family), config=CACHE_8)
    graph = [type(module).__name__ for module in dispatch.graph.modules()]
    assert graph.count("CompressedAttention") == 2 and graph.count("CachedCat") == 4
    runs = 0
    for rows, hidden, parts in (
        (1, 0, (1, 1, 1)), (1, 0, (30, 1)), (3, 4, (12, 1, 1)), (2, 5, (20, 3, 1)),
        (4, 3, (5, 6, 9)), (1, 0, (7, 2, 2, 1)),
    ):  # fmt: skip
        ids = tokens(rows, sum(parts))
        mask = torch.ones_like(ids)
        mask[0, :hidden] = 0
        ends = [*itertools.accumulate(parts)]
        caches = [tf.DynamicCache(config=converted.config) for _ in range(2)]
        for part, end in zip(ids.split(parts, 1), ends, strict=True):
            for more in ({}, {"attention_mask": mask[:, :end]}):
                given = [{**more, "cache": copy.deepcopy(cache)} for cache in caches]
                found = converted(part, **given[0])
                with rounding():
                    expected = own(converted, part, **given[1])
                runs += 1
                if more or not hidden:
                    assert_near(opened(found), expected)
            caches = [found.cache, expected.cache]
    assert (dispatch.graph_calls, dispatch.own_calls) == (runs, 0)


@pytest.mark.parametrize(("family", "room"), rest_slow([("llama", True), *RUNS], ("llama", True)))
@pytest.mark.parametrize("way", rest_slow(calls.GENERATED, "greedy", "beams"))
def test_generate(way: str, family: str, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if room:  # as in large caches
        monkeypatch.setattr("torchq.nn.cached_cat._LEAST_BYTES", 0)
    converted, dispatch = quantized(model(family), config=CACHE_8)
    rows = 1 if way == "prompt lookup" else 2
    ids = tokens(rows, 5)
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3] = mask[0, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    given |= calls.GENERATED[way]
    torch.manual_seed(1)
    found = converted.generate(ids, **given)
    assert dispatch.graph_calls > 1 and dispatch.own_calls == 0
    forward = vars(converted).pop("forward")
    torch.manual_seed(1)
    with rounding():
        expected = converted.generate(ids, **given)
    vars(converted)["forward"] = forward
    assert torch.equal(found, expected)


def test_assisted_decoding_gives_the_same_tokens() -> None:
    converted, dispatch = quantized(model(), config=CACHE_8)
    assistant, calls_of_it = quantized(model(num_hidden_layers=1), config=CACHE_8)
    ids = tokens(1, 6)
    given = {"max_new_tokens": 12, "do_sample": False}
    found = converted.generate(ids, assistant_model=assistant, **given)
    assert torch.equal(found, converted.generate(ids, **given))
    assert dispatch.own_calls == calls_of_it.own_calls == 0 < calls_of_it.graph_calls


@torch.no_grad()
def test_the_cache_of_the_caller_is_a_quarter_and_a_scale() -> None:
    converted, dispatch = quantized(model(), config=CACHE_8)
    ids, cache = tokens(2, 12), tf.DynamicCache(config=converted.config)
    assert converted(ids[:, :9], cache=cache).cache is cache
    assert type(cache) is tf.DynamicCache
    assert {(t.dtype, t.shape) for layer in layers(cache) for t in (layer.keys, layer.values)} == {
        (torch.int8, (2, 2, 9, 8 + 4))
    }
    cache.crop(-2)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert converted(ids.flip(0)[:, 7:], cache=cache).cache is cache
    assert cache.get_seq_length() == 12 and dispatch.own_calls == 0
    with rounding():
        before = own(converted, ids.flip(0)[:, :7]).cache
        whole = own(converted, ids.flip(0)[:, 7:], cache=before).cache
    for layer, expected in zip(layers(cache), layers(whole), strict=True):
        assert torchq.sqnr(expected.values, TF.decompress_rows(layer.values)) > 35


@torch.no_grad()
def test_float_caches_and_compressed_ones_go_on_anywhere() -> None:
    """Other conversions of the model and its own code give the same; a float model raises."""
    float_model = model()
    converted, dispatch = quantized(float_model, config=CACHE_8)
    plain, other = quantized(float_model)
    ids, more = tokens(2, 9), tokens(2, 3)
    rows, floats = converted(ids).cache, float_model(ids).cache
    expected = float_model(more, cache=copy.deepcopy(floats)).logits
    for run, cache in itertools.product((converted, plain), (rows, floats)):
        found = run(more, cache=copy.deepcopy(cache))
        dtype = torch.int8 if run is converted else torch.float32
        assert {layer.keys.dtype for layer in layers(found.cache)} == {dtype}
        assert torchq.sqnr(expected, found.logits) > 25
    assert dispatch.own_calls == other.own_calls == 0
    with pytest.warns(UserWarning, match="does not run its int8 graph"):
        found = converted(more, cache=rows, output_hidden_states=True)
    assert torchq.sqnr(expected, found.logits) > 25 and dispatch.own_calls == 1
    assert {layer.keys.dtype for layer in layers(rows)} == {torch.float32}
    assert converted(more, cache=rows).cache.get_seq_length() == 15
    assert {layer.keys.dtype for layer in layers(rows)} == {torch.int8}
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        float_model(more, cache=rows)


@pytest.mark.parametrize(
    "family", rest_slow(["spelled out", "some windows, spelled out"], "spelled out")
)
@torch.no_grad()
def test_where_attention_is_spelled_out_the_cache_stays_float(family: str) -> None:
    converted, dispatch = quantized(model(family), config=CACHE_8)
    plain, _ = quantized(model(family))
    ids = tokens(2, 9)
    assert_near(converted(ids), plain(ids))
    assert {layer.keys.dtype for layer in layers(converted(ids).cache)} == {torch.float32}
    assert reasons.NOT_8 in str(torchq.explain(converted)) and dispatch.own_calls == 0


@torch.no_grad()
def test_an_override_keeps_the_cache_of_a_layer_float() -> None:
    overrides = {"model.layers.0.self_attn": torchq.QConfig(dynamic=True)}
    converted = torchq.quantize(model(), None, (tokens(1, 9),), CACHE_8, overrides=overrides)
    cache = converted(tokens(2, 7)).cache
    assert [layer.keys.dtype for layer in layers(cache)] == [torch.float32, torch.int8]
    step = tokens(2, 2)
    before = copy.deepcopy(cache)
    before.layers[1].keys, before.layers[1].values = (
        TF.decompress_rows(t) for t in (cache.layers[1].keys, cache.layers[1].values)
    )
    expected = own(converted, step, cache=before).logits
    assert torchq.sqnr(expected, converted(step, cache=cache).logits) > 35
    text = str(torchq.explain(converted))
    assert reasons.GROWS in text and reasons.GROWS_8 in text


@pytest.mark.slow
@torch.no_grad()
def test_what_else_reads_keys_leaves_both_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's attention reads both or none; here it is told that one value has another reader."""
    known, asked = cached._is_rows, list[Any]()

    def is_rows(node: Any, readers: Any) -> bool:
        asked.append(node)
        return node is not asked[0] and known(node, readers)

    monkeypatch.setattr(cached, "_is_rows", is_rows)
    converted, _ = quantized(model(), config=CACHE_8)
    kinds = [layer.keys.dtype for layer in layers(converted(tokens(2, 7)).cache)]
    assert sorted(kinds, key=str) == [torch.float32, torch.int8]
    kinds_of_values = [layer.values.dtype for layer in layers(converted(tokens(2, 7)).cache)]
    assert kinds == kinds_of_values


@torch.no_grad()
def test_more_tokens_than_the_op_takes_run_the_models_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchq.capture.limits.MAX_REDUCTION", 10)
    converted, dispatch = quantized(model(), config=CACHE_8)
    ids = tokens(1, 13)
    cache = converted(ids[:, :10]).cache
    assert dispatch.graph_calls == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [converted(ids[:, i : i + 1], cache=cache).logits for i in (10, 11, 12)]
    assert dispatch.own_calls == 3
    expected = own(converted, ids).logits[:, 10:]
    assert torchq.sqnr(expected, torch.cat(found, 1)) > 30


@pytest.mark.parametrize("config", [CACHE_8, torchq.QConfig(cache_bits=8)], ids=str)
def test_copies_and_files_give_the_same_bits(config: torchq.QConfig, tmp_path: Path) -> None:
    float_model = model("some windows")
    data = None if config.dynamic else [(tokens(2, length),) for length in (6, 10)]
    converted, _ = quantized(float_model, data=data, config=config)
    ids = tokens(2, 9)

    def results(run: Any) -> list[Tensor]:
        first = run(ids[:, :7])
        second = run(ids[:, 7:], cache=first.cache)
        return [*calls.tensors(second), first.logits]

    with torch.no_grad():
        expected = results(converted)
        assert torchq.sqnr(float_model(ids[:, :7]).logits, expected[-1]) > 15
        torchq.save(converted, tmp_path / "model")
        loaded = torchq.load(tmp_path / "model", float_model)
        for again in (loaded, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert all(map(torch.equal, results(again), expected))
            (dispatch,) = dispatches(again)
            assert dispatch.own_calls == 0


def test_the_prepared_model_keeps_float() -> None:
    prepared: Any = torchq.prepare(model(), (tokens(1, 9),), torchq.QConfig(cache_bits=8))
    with torch.no_grad():
        first = prepared(tokens(2, 8))
        prepared(tokens(2, 1), cache=first.cache)
    assert {layer.keys.dtype for layer in layers(first.cache)} == {torch.float32}
    for _ in range(2):  # converting leaves the prepared model as it is
        converted: Any = torchq.convert(prepared)
        with torch.no_grad():
            cache = converted(tokens(2, 8)).cache
            assert {layer.keys.dtype for layer in layers(cache)} == {torch.int8}
            prepared(tokens(2, 1), cache=cache)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_models_in_half_precision(half: torch.dtype) -> None:
    converted, dispatch = quantized(model().to(half), config=CACHE_8)
    ids, more = tokens(2, 9), tokens(2, 2)
    cache = converted(ids).cache
    assert {layer.keys.dtype for layer in layers(cache)} == {torch.int8}
    with rounding():
        expected = own(converted, more, cache=own(converted, ids).cache).logits
    found = converted(more, cache=copy.deepcopy(cache)).logits
    assert found.dtype == half and dispatch.own_calls == 0
    assert torchq.sqnr(expected.float(), found.float()) > 25
    with pytest.warns(UserWarning, match="does not run its int8 graph"):
        other = converted(more, cache=cache, output_hidden_states=True)
    assert torchq.sqnr(expected.float(), other.logits.float()) > 25
    assert {layer.keys.dtype for layer in layers(cache)} == {half}


@pytest.mark.parametrize("family", rest_slow(["whisper", "bart", "m2m100", "t5"], "whisper"))
@torch.no_grad()
def test_encoder_decoder_caches(family: str) -> None:
    example = {**decoders.source(family, 1), "decoder_input_ids": tokens(1, 4)}
    converted: Any = torchq.quantize(decoders.model(family), None, example, CACHE_8)
    plain, _ = decoders.quantized(family)
    dispatch = decoders.of_decoder(converted)
    given = decoders.source(family, 2, 3)
    graph = [type(module).__name__ for module in dispatch.graph.modules()]
    assert graph.count("CompressedAttention") == 4
    first = {**given, "decoder_input_ids": tokens(2, 4)}
    found, expected = converted(**first), plain(**first)
    mask = {k: v for k, v in given.items() if k == "attention_mask"}
    for count in (1, 2, 1):
        held = layers(found.past_key_values)
        assert {layer.keys.dtype for layer in held} == {torch.int8}
        step = {**mask, "decoder_input_ids": tokens(2, count)}
        step["encoder_outputs"] = (expected.encoder_last_hidden_state,)
        found = converted(**step, past_key_values=found.past_key_values)
        expected = plain(**step, past_key_values=expected.past_key_values)
        assert torchq.sqnr(expected.logits, found.logits) > 30
    assert dispatch.own_calls == 0
    sequences = converted.generate(**given, max_new_tokens=6, num_beams=2, do_sample=False)
    assert sequences.shape[0] == 2 and dispatch.own_calls == 0


@pytest.mark.parametrize("bits", [4, 7, True, 8.5, "8", 0])
def test_other_bits(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"QConfig: cache_bits must be None or 8, got .*Leave it"):
        torchq.QConfig(cache_bits=bits)


def test_the_configuration_and_a_model_without_a_cache_say_so() -> None:
    assert str(CACHE_8).endswith("caches s8 per row")
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    converted = torchq.quantize(net, None, (torch.randn(2, 8),), CACHE_8)
    assert reasons.NO_CACHE in str(torchq.explain(converted))
    assert reasons.NO_CACHE not in str(torchq.explain(quantized(model(), config=CACHE_8)[0]))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_code_takes_a_compressed_cache() -> None:
    converted, _ = quantized(model("llama"), config=CACHE_8)
    past, more = converted(tokens(2, 7), use_cache=True).past_key_values, tokens(2, 2)
    expected = converted(more, past_key_values=copy.deepcopy(past)).logits
    found = torch.compile(converted, backend="eager")(more, past_key_values=past).logits
    assert torchq.sqnr(expected, found) > 30
    assert past.layers[0].keys.dtype == torch.float32
