# SPDX-License-Identifier: Apache-2.0
"""Attention: every step against the oracle, bit by bit, and its error against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from calls import F32, S8, U8, assert_same
from cases import random_q
from reference_arithmetic import f32, f64, fma32, rne
from reference_primitives import Params, centered, to_dst
from test_eltwise import attr_of
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq.nn import AttentionOptions, DynamicQAttention, QAttention
from torchq.nn.float_modules import Attention
from torchq.quantization.qparams import QParams

PARAMS = {U8: (0.021, 117), S8: (0.017, -9)}
TO = {U8: (0.013, 120), S8: (0.019, 5), F32: (1.0, 0)}
COARSE = [0.999928057, 0.693260968, 0.242611125, 0.0551716536]


def exp2_coarse(t: Tensor) -> Tensor:
    """2^t of float32 t <= 0: a cubic on the fraction, times a power of two."""
    t = torch.where(t > -120, t, torch.where(t.isnan(), t, f32(-120.0)))
    whole = rne(t).float()
    y = torch.full_like(t, COARSE[-1])
    for c in COARSE[-2::-1]:
        y = fma32(y, t - whole, f32(c).expand_as(y))
    return f32(y.double() * torch.exp2(whole.double()))


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: list[Params],
    to: tuple[Params, torch.dtype],
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The docstring of `torchq.functional.attention`, each float32 step rounded once."""
    scale = f32(f64(params[0][0]) * f64(params[1][0]) * query.shape[-1] ** -0.5)
    unsigned_shift = 128 if key.dtype == U8 else 0
    acc = centered(query, params[0]) @ (key.long() - unsigned_shift).mT
    x = f32(f32(acc).double() * scale.double())
    shift = 128 if value.dtype == U8 else 0
    v_scale, v_zero = params[2]
    offset = f32(-f64(v_scale) * (v_zero - shift))
    return to_dst(attended(x, value.long() - shift, f64(v_scale), offset, mask, is_causal), *to)


def attended(
    x: Tensor, value: Tensor, v_scale: Tensor, offset: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """From scores on; ``value`` are integers."""
    length, keys = x.shape[-2:]
    if mask is not None:
        x = x + (torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask)
    if is_causal:
        x = x.masked_fill(torch.ones(length, keys).triu(1).bool(), -math.inf)
    top = x.amax(-1, keepdim=True)
    invalid = (x.isnan().any(-1) | (top == math.inf).any(-1)).unsqueeze(-1)
    e = exp2_coarse(f32((x - top).double() * f64(math.log2(math.e))))
    c, p = torch.zeros(*x.shape[:-1], 16), []
    for block in F.pad(e, (0, -keys % 16)).split(16, -1):
        after = fma32(block, f32(254.0).expand_as(block), c)
        p.append(rne(after) - rne(c))
        c = after
    weights = torch.cat(p, -1)[..., :keys].masked_fill(x == -math.inf, 0).nan_to_num()
    total = f32(weights.sum(-1, keepdim=True))
    sums = f32(weights.long() @ value)
    factor = f32(v_scale / total.double())
    y = fma32(sums, factor.expand_as(sums), offset.expand_as(sums))
    return torch.where(total == 0, 0.0, y).masked_fill(invalid, math.nan)


def symmetric(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Integers and their scale, one for all of ``dims``; NaN where a value is not finite."""
    largest = x.abs().amax(dims, keepdim=True).clamp(min=1e-30)
    scale = f32(largest.double() / 127).masked_fill(~x.isfinite().all(dims, True), math.nan)
    factor = f32(1 / scale.double()).expand_as(x)
    q = rne(fma32(x, factor, torch.full_like(x, 128.0))) - 128
    return torch.where(factor.isnan(), 0.0, q).long(), scale


def seen_keys(mask: Tensor, heads: torch.Size) -> Tensor:
    """``(..., S)``: 0 for keys that the mask hides from every query that sees another one."""
    hidden = ~mask if mask.dtype == torch.bool else mask <= -1e4
    seen = ~hidden | hidden.all(-1, keepdim=True)
    return seen.any(-2).expand(*heads, -1).float()


def dynamic_oracle(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """The docstring of `torchq.functional.dynamic_attention`."""
    q, q_scale = symmetric(query, (-1,))
    k, k_scale = symmetric(key, (-1,))
    if mask is not None:
        whole = mask.broadcast_to(torch.broadcast_shapes(mask.shape, (1, key.shape[-2])))
        value = value * seen_keys(whole, query.shape[:2]).unsqueeze(-1)
    v, v_scale = symmetric(value, (-2, -1))
    of_keys = f32(k_scale.double() * f64(scale)).mT
    x = f32(f32(f32(q @ k.mT).double() * of_keys.double()).double() * q_scale.double())
    y = attended(x, v, v_scale.double(), torch.zeros(()), mask, is_causal)
    return y.masked_fill(v_scale.isnan(), math.nan)


def random_heads(
    n: int, heads: int, length: int, size: int, dtype: torch.dtype, seed: int
) -> Tensor:
    """(N, heads, L, E) as models have them: a view of (N, L, heads, E)."""
    return random_q((n, length, heads, size), dtype, seed).transpose(1, 2)


def masks(n: int, heads: int, length: int, keys: int) -> list[tuple[Tensor | None, bool]]:
    draw = torch.Generator().manual_seed(length + keys)
    added = torch.randn(n, 1, length, keys, generator=draw)
    added[0, 0, 0] = -math.inf
    added[0, 0, -1, -1] = torch.finfo(F32).min
    seen = torch.rand(n, 1, 1, keys, generator=draw) > 0.4
    return [
        (None, False),
        (None, True),
        (added, False),
        (added[0, 0], False),
        (seen.expand(n, heads, length, keys), False),
        (torch.full((length, keys), torch.finfo(F32).min), False),
        (torch.zeros(()).bool(), False),
    ]


# L, S, E, Ev: whole panels and blocks, tails of each, one query, one key, rows beyond a block
SHAPES = [(5, 64, 16, 64), (7, 5, 6, 10), (1, 200, 64, 16), (33, 1, 4, 1), (130, 197, 7, 33)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])
def test_attention(isa: str, shape: tuple[int, ...], dtype: torch.dtype):
    length, keys, size, value_size = shape
    other = S8 if dtype == U8 else U8
    query = random_heads(2, 3, length, size, dtype, 1)
    key = random_heads(2, 3, keys, size, other, 2)
    value = random_heads(1, 1, keys, value_size, dtype, 3)
    params = [PARAMS[t.dtype] for t in (query, key, value)]
    names = ("src0", "src1", "src2", "dst")
    for (mask, is_causal), dst_dtype in zip(
        masks(2, 3, length, keys), itertools.cycle([F32, U8, S8]), strict=False
    ):
        to = TO[dst_dtype]
        attr = attr_of(**dict(zip(names, [*params, to], strict=True)))
        got = TF.attention(query, key, value, mask, is_causal, None, attr, dst_dtype)
        expected = oracle(query, key, value, params, (to, dst_dtype), mask, is_causal)
        assert_same(got, expected, (is_causal, None if mask is None else mask.shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dynamic_attention(isa: str, shape: tuple[int, ...]):
    length, keys, size, value_size = shape
    torch.manual_seed(0)
    query = torch.randn(2, length, 3, size).transpose(1, 2) * 3
    key = torch.randn(3, size, keys).mT * torch.rand(3, keys, 1).exp2()
    value = torch.randn(2, 1, keys, value_size)
    for mask, is_causal in masks(2, 3, length, keys):
        got = TF.dynamic_attention(query, key, value, mask, is_causal)
        scale = size**-0.5
        assert_same(got, dynamic_oracle(query, key, value, mask, is_causal, scale), is_causal)


def test_masked_keys_change_no_bit(isa: str):
    """One text alone and in a padded batch: what padding holds does not widen the range."""
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    junk = 50 * torch.randn(1, 2, 7, 8)
    mask = torch.tensor([True] * 5 + [False] * 7)
    alone = TF.dynamic_attention(query, key, value)
    padded = [torch.cat([x, junk], 2) for x in (key, value)]
    assert_same(TF.dynamic_attention(query, *padded, mask), alone)
    added = torch.zeros(12).masked_fill(~mask, -math.inf)
    assert_same(TF.dynamic_attention(query, *padded, added), alone)


def test_dynamic_attention_of_what_is_not_finite(isa: str):
    """It spoils what it does in float; zeros and the smallest numbers are no special case."""
    q, k, v = (torch.randn(1, 3, 20, 16) for _ in range(3))
    q[0, 0, 3, 5], q[0, 0, 4, 0], q[0, 0, 5] = math.nan, math.inf, 0
    q[0, 0, 6] = 1e-40
    k[0, 1, 7, 1] = math.nan
    v[0, 2, 0, 0] = -math.inf
    got = TF.dynamic_attention(q, k, v)
    spoilt = torch.zeros(1, 3, 20, dtype=torch.bool)
    spoilt[0, 0, 3:5] = spoilt[0, 1:] = True
    assert torch.equal(got.isnan().all(-1), spoilt) and torch.equal(got.isnan().any(-1), spoilt)
    causal = TF.dynamic_attention(q, k, v, is_causal=True)
    spoilt[0, 1, :7] = False
    assert torch.equal(causal.isnan().any(-1), spoilt)
    want = F.scaled_dot_product_attention(q, k, v)
    assert (got - want)[0, 0, 5:].abs().max() < 0.02


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_blocks_change_nothing(threads: int):
    """One head whose rows are shared, and several; longer than what a thread takes at once."""
    for n, heads, length, keys in [(1, 1, 300, 400), (1, 3, 100, 500)]:
        q, k, v = (random_heads(n, heads, x, 32, U8, x) for x in (length, keys, keys))
        for is_causal in (False, True):
            before = torch.get_num_threads()
            try:
                torch.set_num_threads(threads)
                got = TF.attention(q, k, v, None, is_causal)
            finally:
                torch.set_num_threads(before)
            one = [(1.0, 0)] * 3
            assert_same(got, oracle(q, k, v, one, ((1.0, 0), F32), None, is_causal))


def test_error_against_float64(isa: str):
    """Weights are off by one step of 254 at most, and none of their mass is lost."""
    torch.manual_seed(0)
    for keys in (16, 128, 1000):
        real = [torch.randn(2, 4, n, 32) * s for n, s in ((40, 2), (keys, 1), (keys, 1))]
        steps = [0.06, 0.04, 0.04]
        q = [(x / s).round().clamp(-128, 127).to(S8) for x, s in zip(real, steps, strict=True)]
        attr = attr_of(src0=(0.06, 0), src1=(0.04, 0), src2=(0.04, 0))
        got = TF.attention(*q, attr=attr).double()
        x = [a.double() * s for a, s in zip(q, steps, strict=True)]
        want = F.scaled_dot_product_attention(*x)
        sqnr = 10 * torch.log10(want.square().mean() / (got - want).square().mean())
        assert sqnr > 30, (keys, sqnr)


def test_many_small_weights_add_up(isa: str):
    """One key has half of the weight, 1000 others the other half: rounding each gives 0."""
    key = torch.zeros(1001, 4, dtype=S8)
    key[0, 0] = 127
    query = torch.tensor([[127, 0, 0, 0]], dtype=S8)
    scale = math.log(1000) / 127**2
    value = torch.zeros(1001, 1, dtype=S8)
    value[0] = 100
    got = TF.attention(query, key, value, scale=scale)
    assert abs(got.item() - 50) < 1.5


def test_bad_masks_make_their_rows_nan(isa: str):
    q, k, v = (random_heads(1, 2, 20, 16, S8, i) for i in range(3))
    mask = torch.zeros(20, 20)
    mask[3, 5], mask[4, 0], mask[5] = math.nan, math.inf, -math.inf
    mask[6], mask[6, 19] = -math.inf, math.nan
    got = TF.attention(q, k, v, mask)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[:, :, 5].eq(0).all()
    to = attr_of(dst=(0.5, 7))
    assert TF.attention(q, k, v, mask, attr=to, dst_dtype=U8)[:, :, 3:7].eq(7).all()


def test_results_are_laid_out_like_queries():
    for order in itertools.permutations(range(3)):
        sizes = [2, 3, 5]
        memory = torch.zeros([sizes[i] for i in order] + [16], dtype=U8)
        back = [order.index(i) for i in range(3)]
        q = memory.permute(*back, 3)
        assert list(q.shape) == [2, 3, 5, 16]
        with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
            fake = TF.attention(*(mode.from_tensor(q) for _ in range(3)))
        dst = TF.attention(q, q, q)
        assert fake.stride() == dst.stride()
        if order == (0, 2, 1):
            assert dst.transpose(1, 2).is_contiguous()


def test_nothing_to_attend_to():
    q, none = torch.zeros(2, 3, 4, dtype=U8), torch.zeros(2, 0, 4, dtype=U8)
    attr = attr_of(dst=(0.5, 9))
    assert TF.attention(q, none, none, attr=attr, dst_dtype=U8).eq(9).all()
    assert TF.attention(none, q, q).shape == (2, 0, 4)


@pytest.mark.parametrize("quantized", [False, True])
def test_module(quantized: bool):
    """Spec, state and script give the function's bits; grouped queries repeat keys and values."""
    srcs = [
        QParams.per_tensor(s, z, t) for s, z, t in ((0.02, 120, U8), (0.03, 0, S8), (0.04, 110, U8))
    ]
    dst = QParams.per_tensor(0.05, 3, S8) if quantized else None
    options = AttentionOptions(scale=0.3, enable_gqa=True)
    float_module = Attention(options)
    module = QAttention(srcs, dst, options)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 4)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    got = module(q, k, v, mask)
    restored = QAttention.from_spec(module.read_spec())
    restored.load_state_dict(module.state_dict())
    for again in (restored, torch.jit.script(module)):
        assert_same(again(q, k, v, mask), got)
    real = got if dst is None else 0.05 * (got.float() - 3)
    want = float_module(q, k, v, mask)
    assert (real - want).square().mean() < 0.003 * want.square().mean()


def refuse(error: type[Exception], match: str, *args: object, **kwargs: object) -> None:
    with pytest.raises(error, match=match):
        TF.attention(*args, **kwargs)


def test_errors():
    q, k, v = (torch.zeros(2, 3, n, 8, dtype=U8) for n in (4, 5, 5))
    refuse(TypeError, "attention: query must be torch.uint8 or torch.int8", q.float(), k, v)
    refuse(ValueError, "query, key and value must be", q[0, 0, 0], k, v)
    refuse(ValueError, "query, key and value must be", torch.zeros((), dtype=U8), k, v)
    refuse(ValueError, "query and key must have as many columns", q, k[..., :4], v)
    refuse(ValueError, "key and value as many rows", q, k, v[:, :, :4])
    refuse(ValueError, "batch dimensions of query, key and value must broadcast", q, k[:, :2], v)
    refuse(ValueError, "scale must be finite and greater than 0", q, k, v, scale=-1.0)
    refuse(ValueError, "scores must fit float32, got scale 1e[+]33", q, k, v, scale=1e33)
    refuse(ValueError, "mask must broadcast", q, k, v, torch.zeros(5, 4))
    refuse(TypeError, "mask must be bool", q, k, v, torch.zeros(4, 5, dtype=torch.int64))
    refuse(ValueError, "is_causal must be false with a mask", q, k, v, torch.zeros(4, 5), True)
    refuse(NotImplementedError, "dst_dtype must be 0", q, k, v, dst_dtype=torch.int32)
    long = torch.zeros(65794, 1, dtype=U8)
    refuse(ValueError, "S and E must be at most 65793", long[:1], long, long)
    chain = torchq.Attr()
    chain.post_ops.append_eltwise("relu", 0, 0)
    refuse(NotImplementedError, "must have no post-ops", q, k, v, attr=chain)
    with torch.enable_grad():
        refuse(RuntimeError, "mask requires grad", q, k, v, torch.zeros(4, 5, requires_grad=True))
    grouped = DynamicQAttention(AttentionOptions(enable_gqa=True))
    for heads in (1, 6):
        with pytest.raises(ValueError, match=f"a multiple of the heads .* got {heads} and 4"):
            grouped(torch.zeros(2, heads, 5, 8), *[torch.zeros(2, 4, 5, 8)] * 2)
    with pytest.raises(torch.jit.Error, match=r"a multiple of the heads .* got 4 and 0"):
        torch.jit.script(grouped)(torch.zeros(2, 4, 5, 8), *[torch.zeros(2, 0, 5, 8)] * 2)
