# SPDX-License-Identifier: Apache-2.0
"""Language models with a cache: one graph takes the prompt, each step, and chunks of tokens."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.support.slow import rest_slow
from torchq.capture.cached import CachedExample
from torchq.convert.dispatch import Dispatch, dispatches

tf = pytest.importorskip("transformers", minversion="5.24")

DYNAMIC = torchq.QConfig(dynamic=True)
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "spelled out": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "attn_implementation": "eager"}),
    "without a head": ("LlamaModel", "LlamaConfig", SIZES),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}),
    "windows": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 8}),
    "windows of two": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 2}),
    "some windows": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "head_dim": 8, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "some windows, spelled out": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**SIZES, "head_dim": 8, "sliding_window": 6}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    "a mixture": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SIZES, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
        | {"num_experts_per_tok": 2},
    ),
}
GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "without a cache": {"use_cache": False},
}


def model(family: str = "llama", **sizes: Any) -> nn.Module:
    name, config, known = FAMILIES[family]
    torch.manual_seed(0)
    made: nn.Module = getattr(tf, name)(getattr(tf, config)(**{**known, **sizes})).eval()
    return made


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, 90, (rows, length))


def quantized(float_model: nn.Module, **options: Any) -> tuple[Any, Dispatch]:
    """Return the model with a graph of the whole, and the graph's dispatch."""
    converted = torchq.quantize(
        float_model, options.pop("data", None), (tokens(1, 9),), options.pop("config", DYNAMIC)
    )
    (dispatch,) = dispatches(converted)
    assert dispatch.name == ""
    return converted, dispatch


def own(converted: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return what the model's own code gives on the same quantized layers."""
    return type(converted).forward(converted, *args, **kwargs)


def tensors(output: Any) -> list[Tensor]:
    """Return the first result, and keys and values."""
    layers = output["cache"].layers if "cache" in output else []
    return [output[0], *(t for layer in layers for t in (layer.keys, layer.values))]


def assert_near(found: Any, expected: Any) -> None:
    """Float parts are computed in another order, which may move an int8 value by a step."""
    assert type(found) is type(expected) and [*found] == [*expected]
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torchq.sqnr(b, a) > 35
    if "cache" in found:
        assert state(found["cache"]) == state(expected["cache"])


def state(cache: Any) -> list[object]:
    """Return what a cache holds besides keys and values."""
    every = [vars(cache), *map(vars, cache.layers)]
    return [{k: v for k, v in a.items() if k not in ("layers", "keys", "values")} for a in every]


@pytest.mark.parametrize("family", rest_slow(FAMILIES, "llama", "some windows"))
@torch.no_grad()
def test_every_kind_of_call_takes_the_graph(family: str) -> None:
    converted, dispatch = quantized(model(family))

    def result(run: Any, ids: Tensor, cached: int, mask: Tensor | None, more: Any) -> Any:
        if not cached:
            return run(ids, attention_mask=mask, **more)
        seen = None if mask is None else mask[:, :cached]
        before = own(converted, ids[:, :cached], attention_mask=seen)
        return run(ids[:, cached:], attention_mask=mask, cache=before.cache, **more)

    def of_own_code(*args: Any, **kwargs: Any) -> Any:
        return own(converted, *args, **kwargs)

    calls = 0
    for rows, cached, count, hidden in (
        *((1, 0, 1, 0), (1, 0, 30, 0), (3, 0, 12, 4), (1, 1, 1, 0), (1, 20, 1, 0)),
        *((2, 20, 1, 5), (4, 11, 6, 3), (1, 2, 3, 0), (1, 7, 1, 0), (1, 8, 2, 0), (2, 4, 9, 3)),
    ):
        ids = tokens(rows, cached + count)
        mask = torch.ones_like(ids)
        mask[0, :hidden] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, cached:]
        generated = {"position_ids": positions, "use_cache": True}
        generated |= {} if family == "without a head" else {"logits_to_keep": 1}
        for seen, more in ((None, {}), (mask, {}), (mask, generated)):
            expected = result(of_own_code, ids, cached, seen, more)
            assert_near(result(converted, ids, cached, seen, more), expected)
            calls += 1
    assert (dispatch.graph_calls, dispatch.own_calls) == (calls, 0)


@pytest.mark.parametrize(
    ("family", "room"),
    rest_slow(
        [("llama", False), ("llama", True), ("windows", True), ("some windows", False)],
        ("llama", False),
    ),
)
@pytest.mark.parametrize("way", rest_slow(GENERATED, "greedy", "beams"))
def test_generate(way: str, family: str, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if room:  # as in large caches
        monkeypatch.setattr("torchq.nn.cached_cat._LEAST_BYTES", 0)
    converted, dispatch = quantized(model(family))
    rows = 1 if way == "prompt lookup" else 2
    ids = tokens(rows, 5)
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :3] = mask[0, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **GENERATED[way]}
    torch.manual_seed(1)
    found = converted.generate(ids, **given)
    assert dispatch.graph_calls > 1 and dispatch.own_calls == 0
    forward = vars(converted).pop("forward")
    torch.manual_seed(1)
    expected = converted.generate(ids, **given)
    vars(converted)["forward"] = forward
    assert torch.equal(found, expected)


@torch.no_grad()
def test_the_cache_of_the_caller_grows() -> None:
    converted, dispatch = quantized(model())
    ids = tokens(1, 12)
    cache = tf.DynamicCache(config=converted.config)
    assert converted(ids[:, :4], cache=cache).cache is cache
    held = cache.layers[0].keys
    assert converted(ids[:, 4:9], past_key_values=cache).cache is cache
    cache.crop(-2)
    assert converted(ids[:, 7:], cache=cache).cache is cache
    assert cache.get_seq_length() == 12 and held.shape[2] == 4
    assert dispatch.own_calls == 0
    assert "cache" not in converted(ids, use_cache=False)
    whole = own(converted, ids).cache
    for layer, expected in zip(cache.layers, whole.layers, strict=True):
        assert torchq.sqnr(expected.values, layer.values) > 35


@torch.no_grad()
def test_caches_of_other_windows() -> None:
    """A cache may keep more tokens than a window has; not fewer, and no window of other layers."""
    converted, dispatch = quantized(model("windows"))
    ids = tokens(1, 30)
    every = own(converted, ids, cache=tf.DynamicCache())
    caches = {"all": tf.DynamicCache()}
    for window in (4, 12):
        config = copy.deepcopy(converted.config)
        config.sliding_window = window
        caches[str(window)] = tf.DynamicCache(config=config)
    with pytest.warns(UserWarning, match="cache, mask or positions are of other kinds"):
        found = {
            name: [converted(part, cache=cache) for part in ids.split([3, 9, 17, 1], 1)]
            for name, cache in caches.items()
        }
    assert (dispatch.graph_calls, dispatch.own_calls) == (10, 2)  # once the window of 4 is full
    for name, results in found.items():
        assert results[-1].cache.get_seq_length() == 30
        if name != "4":
            logits = torch.cat([result.logits for result in results], 1)
            assert torchq.sqnr(every.logits, logits) > 35
    plain, calls = quantized(model())
    cache = tf.DynamicCache(config=converted.config)
    for part in ids[:, :14].split([6, 6, 1, 1], 1):
        before = copy.deepcopy(cache)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the first call that does not take the graph
            assert_near(plain(part, cache=cache), own(plain, part, cache=before))
    assert (calls.graph_calls, calls.own_calls) == (2, 2)


@torch.no_grad()
def test_other_caches_masks_and_options_take_the_models_own_code() -> None:
    converted, dispatch = quantized(model())
    ids = tokens(2, 6)
    other = tf.StaticCache(config=converted.config, max_cache_len=16)
    with pytest.warns(UserWarning, match="cache, mask or positions are of other kinds"):
        converted(ids, cache=other)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    assert converted(ids, attention_mask=causal).logits.shape == (2, 6, 100)
    assert len(converted(ids, output_hidden_states=True).hidden_states) == 3
    sequences = torch.tensor([[0, 1, 2, 0, 1, 2]])  # two in a row, which must not see each other
    alone = converted(ids[:1, 3:], use_cache=False).logits
    both = converted(ids[:1], position_ids=sequences, use_cache=False).logits
    assert torchq.sqnr(alone, both[:, 3:]) > 35
    short = {"attention_mask": torch.ones(2, 5, dtype=torch.long)}
    assert_near(converted(ids, **short), own(converted, ids, **short))
    assert (dispatch.graph_calls, dispatch.own_calls) == (1, 5)
    before = converted(ids[:1]).cache
    with pytest.raises((ValueError, RuntimeError)):
        converted(ids, cache=before)  # of another batch


@torch.no_grad()
def test_rows_that_the_mask_or_positions_do_not_have() -> None:
    converted, dispatch = quantized(model())
    ids, mask = tokens(2, 5), torch.ones(1, 5, dtype=torch.long)
    with pytest.warns(UserWarning, match="cache, mask or positions are of other kinds"):
        found = converted(ids, attention_mask=mask)
    assert_near(found, own(converted, ids, attention_mask=mask))
    positions = torch.arange(5).expand(3, 5)
    with pytest.raises(ValueError, match=r"src must be \(\*, 32\)"):  # as of the model's own code
        converted(ids[:1], attention_mask=mask, position_ids=positions)
    assert dispatch.graph_calls == 0


@torch.no_grad()
def test_an_argument_given_twice() -> None:
    converted, dispatch = quantized(model())
    ids, cache = tokens(1, 5), tf.DynamicCache()
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        converted(ids, input_ids=ids)
    with pytest.raises(TypeError, match="multiple values for argument 'cache'"):
        converted(ids, None, None, None, past_key_values=cache)
    with pytest.raises(TypeError, match="takes from 1 to"):
        converted(*[ids] * 20)
    with pytest.warns(UserWarning, match="its argument 'cache' is given twice"):
        assert converted(ids, cache=cache, past_key_values=None).cache is cache
    assert cache.get_seq_length() == 5 and dispatch.graph_calls == 0


@pytest.mark.parametrize("family", rest_slow(["a mixture", "some windows"], "some windows"))
def test_a_static_conversion_is_saved_with_its_graph(family: str, tmp_path: Path) -> None:
    float_model = model(family)
    data = [(tokens(2, length),) for length in (6, 10)]
    converted, _ = quantized(float_model, data=data, config=torchq.QConfig())
    ids = tokens(2, 7)
    with torch.no_grad():
        expected = converted(ids)
        assert torchq.sqnr(float_model(ids).logits, expected.logits) > 25
        torchq.save(converted, tmp_path / "model")
        loaded = torchq.load(tmp_path / "model", float_model)
        for again in (loaded, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
            assert all(map(torch.equal, tensors(again(ids)), tensors(expected)))
            step = again(ids[:, :1], cache=again(ids).cache)
            assert step.cache.get_seq_length() == 8
            assert state(step.cache) == state(own(again, tokens(2, 8)).cache)
            (dispatch,) = dispatches(again)
            assert dispatch.own_calls == 0


@pytest.mark.parametrize(
    ("name", "config", "sizes"),
    [
        ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 1}),
        (
            "OPTForCausalLM",  # whose positions come from the mask
            "OPTConfig",
            {"vocab_size": 100, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
            | {"num_hidden_layers": 2, "num_attention_heads": 4},
        ),
    ],
)
@torch.no_grad()
def test_other_models_keep_graphs_of_their_parts(
    name: str, config: str, sizes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    float_model = getattr(tf, name)(getattr(tf, config)(**sizes)).eval()
    converted = torchq.quantize(float_model, None, (tokens(1, 9),), DYNAMIC)
    assert "" not in [dispatch.name for dispatch in dispatches(converted)]
    assert "DynamicCache" in str(torchq.explain(converted))
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    given = {"attention_mask": mask}
    assert torchq.sqnr(float_model(ids, **given).logits, converted(ids, **given).logits) > 25


def test_attention_to_a_cache_is_float_and_reads_each_head_once() -> None:
    converted, dispatch = quantized(model(), config=torchq.QConfig(), data=[(tokens(2, 9),)])
    kinds = [type(m).__name__ for m in dispatch.graph.modules()]
    assert kinds.count("CachedAttention") == 2 and "QAttention" not in kinds
    code: Any = dispatch.graph.code
    assert code.count(".expand(") == 1  # of the mask
    text = str(torchq.explain(converted))
    assert "a cache keeps in float" in text


@torch.no_grad()
def test_traces_are_of_the_models_own_code() -> None:
    """The positions that a call leaves out would be those of the traced sizes."""
    converted, dispatch = quantized(model())

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = converted

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.model(ids, use_cache=False).logits
            return logits

    traced = torch.jit.trace(Logits(), tokens(2, 6), check_trace=False)
    for rows, length in ((2, 6), (1, 9), (3, 1)):
        ids = tokens(rows, length)
        assert torchq.sqnr(own(converted, ids).logits, traced(ids)) > 35
    assert dispatch.graph_calls == 0


def test_files_that_say_to_have_a_cache_and_have_none() -> None:
    _, dispatch = quantized(model())
    known: Any = dispatch.example
    cache, ids = known.values["cache"], known.values["input_ids"]
    forged: list[dict[str, Any]] = [
        {}, {"cache": None}, {"cache": []}, {"cache": cache[:3]}, {"cache": [ids, ids]},
        *({"cache": [*cache, *windows]} for windows in ([4], [4, 0], ["4", 4], [4, None, 4])),
    ]  # fmt: skip
    for values in forged:
        with pytest.raises(ValueError, match="keys and values of a cache"):
            CachedExample(known.cls, known.arguments, [], values, known.structure)
    with pytest.raises(ValueError, match="keys and values of a cache"):
        CachedExample(nn.Linear, known.arguments, [], known.values, known.structure)
