# SPDX-License-Identifier: Apache-2.0
"""Models with encoder and decoder: one graph takes each call of the decoder, with its cache."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.capture.cached import CachedExample
from torchq.convert.dispatch import Dispatch, dispatches

tf = pytest.importorskip("transformers", minversion="5.24")

DYNAMIC = torchq.QConfig(dynamic=True)
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
          "decoder_start_token_id": 2}  # fmt: skip
SIZES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
WHISPER = {"num_mel_bins": 16, "max_source_positions": 12, "max_target_positions": 64,
           "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**SIZES, **WHISPER}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", SIZES),
    "m2m100": ("M2M100ForConditionalGeneration", "M2M100Config", SIZES),
    "marian": ("MarianMTModel", "MarianConfig", {**SIZES, "attn_implementation": "eager"}),
}
GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "a prompt": {"decoder_input_ids": torch.tensor([[2, 7, 9], [2, 8, 4]])},
    "without a cache": {"use_cache": False},
}


def model(family: str) -> Any:
    name, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(tf, name)(getattr(tf, config)(**TOKENS, **sizes)).eval()


def source(family: str, rows: int, hidden: int = 0) -> dict[str, Tensor]:
    """Return what the encoder reads; ``hidden`` tokens of the first row are padding."""
    if family == "whisper":
        return {"input_features": torch.randn(rows, 16, 24)}
    ids = torch.randint(5, 90, (rows, 11))
    mask = torch.ones_like(ids)
    mask[0, 11 - hidden :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, 90, (rows, length))


@functools.cache
def quantized(family: str) -> tuple[Any, Dispatch]:
    """Return the model, and the dispatch of its decoder."""
    example = {**source(family, 1), "decoder_input_ids": tokens(1, 4)}
    converted = torchq.quantize(model(family), None, example, DYNAMIC)
    return converted, of_decoder(converted)


def of_decoder(converted: nn.Module) -> Dispatch:
    found = [d for d in dispatches(converted) if isinstance(d.example, CachedExample)]
    (dispatch,) = found
    assert dispatch.module is converted.get_decoder()  # type: ignore[operator]
    dispatch.graph_calls = dispatch.own_calls = 0
    return dispatch


def own(dispatch: Dispatch, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the decoder's own code gives on the same quantized layers."""
    forward = vars(dispatch.module).pop("forward")
    try:
        return run(*args, **kwargs)
    finally:
        vars(dispatch.module)["forward"] = forward


def parts(output: Any) -> list[Any]:
    cache = output["cache"]
    return [cache.self_attention_cache, cache.cross_attention_cache]


def assert_near(found: Any, expected: Any) -> None:
    """Compare results, and the cache with all that it holds."""
    assert type(found) is type(expected) and [*found] == [*expected]
    assert torchq.sqnr(expected[0], found[0]) > 35
    if "cache" not in found:
        return
    assert type(found.cache) is type(expected.cache)
    assert found.cache.is_updated == expected.cache.is_updated
    for a, b in zip(parts(found), parts(expected), strict=True):
        assert type(a) is type(b)
        for layer, other in zip(a.layers, b.layers, strict=True):
            assert vars(layer).keys() == vars(other).keys() and layer.is_initialized
            for x, y in ((layer.keys, other.keys), (layer.values, other.values)):
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
                assert torchq.sqnr(y, x) > 35


def one(
    run: Any, dispatch: Dispatch | None, given: Any, ids: Tensor, cached: int, more: Any
) -> Any:
    """Call the model behind ``cached`` tokens, which its own code takes where there is a graph."""
    cache = None
    if cached:
        mask = more.get("decoder_attention_mask")
        seen = {} if mask is None else {"decoder_attention_mask": mask[:, :cached]}
        begin = {"decoder_input_ids": ids[:, :cached], **given, **seen}
        cache = (own(dispatch, run, **begin) if dispatch else run(**begin)).cache
    return run(decoder_input_ids=ids[:, cached:], cache=cache, **given, **more)


@pytest.mark.parametrize("family", rest_slow(FAMILIES, "bart", "whisper"))
@torch.no_grad()
def test_every_kind_of_call_takes_the_graph(family: str) -> None:
    converted, dispatch = quantized(family)
    dispatch.graph_calls = dispatch.own_calls = calls = 0
    for rows, cached, count, hidden, left in (
        *((1, 0, 1, 0, 0), (1, 0, 9, 0, 0), (3, 0, 5, 4, 2), (1, 1, 1, 0, 0), (1, 8, 1, 0, 0)),
        *((2, 8, 1, 5, 2), (4, 5, 3, 0, 1), (1, 2, 3, 2, 0)),
    ):
        given: dict[str, Any] = dict(source(family, rows, hidden))
        first = converted.get_encoder()(**given)
        given = {"encoder_outputs": first} | (
            {"attention_mask": given["attention_mask"]} if "attention_mask" in given else {}
        )
        ids = tokens(rows, cached + count)
        mask = torch.ones_like(ids)
        mask[0, :left] = 0

        seen = {"decoder_attention_mask": mask} if left else {}
        for more in (seen, {**seen, "use_cache": True} if cached else {**seen, "use_cache": False}):
            found = one(converted, dispatch, given, ids, cached, more)
            calls += 1
            assert (dispatch.graph_calls, dispatch.own_calls) == (calls, 0)
            assert_near(found, own(dispatch, one, converted, None, given, ids, cached, more))


@pytest.mark.parametrize("way", GENERATED)
@pytest.mark.parametrize("family", rest_slow(["whisper", "t5"], "whisper"))
def test_generate(family: str, way: str) -> None:
    converted, dispatch = quantized(family)
    before = dispatch.graph_calls, dispatch.own_calls
    given = {**source(family, 2, 3), "max_new_tokens": 8, "do_sample": False, **GENERATED[way]}
    torch.manual_seed(1)
    found = converted.generate(**given)
    assert dispatch.graph_calls > before[0] + 1 and dispatch.own_calls == before[1]
    torch.manual_seed(1)
    assert torch.equal(found, own(dispatch, converted.generate, **given))


@torch.no_grad()
def test_keys_and_values_of_the_encoder_are_computed_once_and_stay() -> None:
    converted, dispatch = quantized("t5")
    given, cache = source("t5", 2), tf.EncoderDecoderCache(tf.DynamicCache(), tf.DynamicCache())
    output = converted(**given, decoder_input_ids=tokens(2, 3), cache=cache)
    assert output.cache is cache and cache.is_updated == {0: True, 1: True}
    layer = cache.cross_attention_cache.layers[0]
    keys = layer.keys
    given = {"attention_mask": given["attention_mask"], "encoder_outputs": (
        torch.randn(2, 11, 32),)}  # fmt: skip
    step = converted(**given, decoder_input_ids=tokens(2, 1), cache=cache)
    assert step.cache is cache and layer.keys is keys and cache.get_seq_length() == 4
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-2)
    step = converted(**given, decoder_input_ids=tokens(2, 2), cache=cache)
    assert cache.get_seq_length() == 4 and torch.equal(layer.keys[0], keys[1])
    assert dispatch.own_calls == 0


@torch.no_grad()
def test_other_caches_and_states_take_the_models_own_code() -> None:
    converted, dispatch = quantized("bart")
    decoder, states = converted.get_decoder(), torch.randn(2, 7, 32)
    ids = tokens(2, 3)
    before = dispatch.graph_calls, dispatch.own_calls
    caches = [tf.DynamicCache(), tf.DynamicCache()]
    half = tf.EncoderDecoderCache(*caches)
    half.is_updated = {0: True, 1: True}  # of states that it does not have
    with pytest.raises((IndexError, TypeError, AttributeError)):  # as of the model's own code
        decoder(ids, encoder_hidden_states=states, cache=half)
    static = tf.StaticCache(config=converted.config, max_cache_len=16)
    other = tf.EncoderDecoderCache(static, tf.DynamicCache())
    with pytest.warns(UserWarning, match="encoder states are of other kinds"):
        assert decoder(ids, encoder_hidden_states=states, cache=other).cache is other
    given = decoder(ids, encoder_hidden_states=states).cache
    calls = [{"cache": cache, "use_cache": False} for cache in (given, copy.deepcopy(given))]
    found, expected = (decoder(ids[:, :1], encoder_hidden_states=states, **call) for call in calls)
    assert torch.equal(found[0], expected[0])
    with pytest.raises((ValueError, RuntimeError)):
        decoder(ids[:1, :1], encoder_hidden_states=states[:1], cache=given)  # of another batch
    assert dispatch.graph_calls == before[0] + 1


@pytest.mark.slow
def test_a_static_conversion_is_saved_with_its_graphs(tmp_path: Path) -> None:
    float_model = model("whisper")
    data = [{**source("whisper", 2), "decoder_input_ids": tokens(2, n)} for n in (4, 7)]
    converted = torchq.quantize(float_model, data)
    assert "one graph takes each call of 'model.decoder' with a cache" in str(
        torchq.explain(converted)
    )
    given = {**source("whisper", 2), "decoder_input_ids": tokens(2, 5)}
    with torch.no_grad():
        expected = converted(**given)
        assert torchq.sqnr(float_model(**given).logits, expected.logits) > 20
        torchq.save(converted, tmp_path / "model")
        loaded = torchq.load(tmp_path / "model", float_model)
        for again in (loaded, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            dispatch, found = of_decoder(again), again(**given)
            assert torch.equal(found.logits, expected.logits)
            step = {"encoder_outputs": (found.encoder_last_hidden_state,), "cache": found.cache}
            again(**step, decoder_input_ids=tokens(2, 1))
            assert (dispatch.graph_calls, dispatch.own_calls) == (2, 0)


def test_speech_recognition_of_the_pipeline() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    converted, dispatch = quantized("whisper")
    words = {f"w{i}": i for i in range(100)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))

    class Tokenizer(tf.PreTrainedTokenizerFast):
        def _decode_asr(self, outputs: Any, **options: Any) -> tuple[str, dict[str, object]]:
            return self.decode(np.concatenate([o["tokens"][0] for o in outputs])), {}

    tokenizer = Tokenizer(tokenizer_object=made, pad_token="w0", eos_token="w1")
    listen = tf.pipeline(
        "automatic-speech-recognition",
        model=converted,
        tokenizer=tokenizer,
        feature_extractor=tf.WhisperFeatureExtractor(
            feature_size=16, chunk_length=1, hop_length=667, n_fft=800
        ),
    )
    audio = np.sin(np.arange(16000) / 9).astype(np.float32)
    before = dispatch.graph_calls, dispatch.own_calls
    text = listen(audio, generate_kwargs={"max_new_tokens": 8})["text"]
    assert dispatch.graph_calls > before[0] + 4 and dispatch.own_calls == before[1]
    assert text == own(dispatch, listen, audio, generate_kwargs={"max_new_tokens": 8})["text"]


def test_files_whose_decoder_has_half_a_cache() -> None:
    known: Any = quantized("t5")[1].example
    values = {**known.values, "cache": known.values["cache"][:6]}
    with pytest.raises(ValueError, match="keys and values of a cache"):
        CachedExample(known.cls, known.arguments, [], values, known.structure)
