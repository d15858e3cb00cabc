# SPDX-License-Identifier: Apache-2.0
"""Float attention that leaves out the mask where the mask hides nothing, or only later keys."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from torchq.functional import compress_rows, decompress_rows
from torchq.nn import CachedAttention, CompressedAttention


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def hidden(mask: Tensor, *where: int) -> Tensor:
    mask = mask.clone()
    mask[where] = False
    return mask


MASKS = {
    "one query": (torch.ones(2, 1, 1, 9, dtype=torch.bool), "nothing"),
    "a prompt": (causal(9, 9).expand(2, 1, 9, 9), "causal"),
    "a prompt without a batch": (causal(9, 9), "causal"),
    "one token": (torch.ones(1, 1, dtype=torch.bool), "nothing"),
    "all see all": (torch.ones(9, 9, dtype=torch.bool), "nothing"),
    "a chunk": (causal(3, 9), "mask"),
    "a padded prompt": (hidden(causal(9, 9).expand(2, 1, 9, 9), 1, 0, 4, 0), "mask"),
    "a padded step": (hidden(torch.ones(2, 1, 1, 9, dtype=torch.bool), 0, 0, 0, 2), "mask"),
    "a later key": (causal(9, 9).logical_or(torch.eye(9).bool().roll(1, 1)), "mask"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MASKS)
def test_the_mask_is_left_out_where_it_says_nothing_more(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mask, used = MASKS[kind]
    queries, keys = mask.shape[-2:]
    query = torch.randn(2, 6, queries, 16, dtype=dtype)
    key, value = torch.randn(2, 2, 2, keys, 16, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention = CachedAttention(0.3, enable_gqa=True)
    with mock.patch("torchq.nn.attention.F.scaled_dot_product_attention", wraps=attend) as called:
        found = attention(query, key, value, mask)
    given, is_causal = called.call_args.args[3], called.call_args.args[5]
    assert (given is not None, is_causal) == (used == "mask", used == "causal")
    wide = [t.double().repeat_interleave(3, 1) for t in (key, value)]
    scores = (query.double() @ wide[0].mT * 0.3).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ wide[1]
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol=1e-6 if dtype is torch.float32 else 2e-2
    )
    assert torch.equal(torch.jit.script(attention)(query, key, value, mask), found)


def test_errors() -> None:
    x, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    attention = CachedAttention()
    with pytest.raises(TypeError, match=r"mask must be torch\.bool \(true: seen\), got torch\.fl"):
        attention(x, x, x, mask.float())
    with pytest.raises(ValueError, match="for 4 queries, 4 keys and 3 values"):
        attention(x, x, x[..., :3, :], mask)
    with pytest.raises(ValueError, match=r"got \[4, 3\] for 4 queries, 4 keys"):
        attention(x, x, x, mask[:, :3])
    with pytest.raises(ValueError, match=r"key must have heads .*, got \[1, 0, 4, 8\]"):
        CachedAttention(enable_gqa=True)(x, x[:, :0], x, mask)  # ended the process


@pytest.mark.parametrize("kind", [None, *MASKS])
def test_compressed_rows_are_read_where_some_are_cached(kind: str | None) -> None:
    torch.manual_seed(0)
    mask = torch.ones(3, 9, dtype=torch.bool) if kind is None else MASKS[kind][0]
    queries, keys = mask.shape[-2:]
    query, given = torch.randn(2, 6, queries, 16), None if kind is None else mask
    pair = [torch.randn(2, 2, keys, size) for size in (16, 24)]
    rows = [compress_rows(x) for x in pair]
    attention = CompressedAttention(0.3, enable_gqa=True)
    for new, real in ((keys, pair), (min(2, keys - 1), list(map(decompress_rows, rows)))):
        last = [x[:, :, keys - new :] for x in pair]
        found = attention(query, *rows, *last, given)
        wide = [t.double().repeat_interleave(3, 1) for t in real]
        scores = (query.double() @ wide[0].mT * 0.3).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(found.double(), scores.softmax(-1) @ wide[1], rtol=0, atol=1e-4)
        if given is not None:
            added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            torch.testing.assert_close(attention(query, *rows, *last, added), found)
        assert torch.equal(torch.jit.script(attention)(query, *rows, *last, given), found)


def test_errors_of_compressed_rows() -> None:
    x = torch.randn(1, 2, 4, 8)
    rows, attention = compress_rows(x), CompressedAttention(enable_gqa=True)
    for key, value in ((x, x[:, :, :3]), (x[0], x[0]), (x[:, :0], x[:, :0])):
        with pytest.raises(ValueError, match=r"new_key and new_value must be .* with heads, got"):
            attention(x, rows, rows, key, value)  # torch reads on, or divides by the heads
    with pytest.raises(TypeError, match="key must be int8"):
        attention(x, x, x, x[:, :, :1], x[:, :, :1])
