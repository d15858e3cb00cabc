# SPDX-License-Identifier: Apache-2.0
"""256-entry tables: any function of one byte, exactly."""

from __future__ import annotations

import pytest
import reference
import torch
from calls import S8, U8, assert_same
from cases import random_q
from memory import before_guard_page, misaligned

ops = torch.ops.torchq
PAIRS = [(U8, U8), (U8, S8), (S8, S8), (S8, U8)]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda dtype: str(dtype)[6:])
def test_every_byte(isa: str, src: torch.dtype, dst: torch.dtype):
    table = random_q((256,), dst, 1)
    q = torch.arange(256).add(reference.RANGE[src][0]).to(src)
    assert_same(ops.lookup(q, table), table, "ascending order, the lowest value first")
    assert_same(ops.lookup(q.flip(0), table), table.flip(0))
    same = torch.arange(256).add(reference.RANGE[src][0]).to(src)
    assert_same(ops.lookup(q, same), q, "the identity")


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda dtype: str(dtype)[6:])
def test_sizes(isa: str, src: torch.dtype, dst: torch.dtype):
    table = random_q((256,), dst, 2)
    for size in (*range(70), 127, 128, 129, 191, 1000):
        q = random_q((size,), src, size)
        expected = reference.lookup(q, table)
        assert_same(ops.lookup(q, table), expected, size)
        assert_same(ops.lookup(before_guard_page(q), table), expected, size)
    for by in (1, 31, 63):
        got = ops.lookup(misaligned(q, by), misaligned(table, by))
        assert_same(got, expected, by)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 1), (2, 3, 4, 5, 6)], ids=str)
def test_shapes(isa: str, shape: tuple[int, ...]):
    table = random_q((256,), S8, 3)
    q = random_q(shape, U8, 4)
    assert_same(ops.lookup(q, table), reference.lookup(q, table))


def test_layouts(isa: str):
    table = random_q((256,), S8, 5)
    q = random_q((2, 6, 5, 8), U8, 6)
    layouts = [
        q.contiguous(memory_format=torch.channels_last),
        q.transpose(0, 3),
        q[:, ::2, :, ::3],
        q[:, :1].expand(2, 6, 5, 8),
        q[..., 0],
        q[:, 1:4],
    ]
    for i, x in enumerate(layouts):
        got = ops.lookup(x, table)
        assert_same(got, reference.lookup(x, table), i)
        assert got.stride() == torch.empty_like(x, dtype=S8).stride(), i


def test_two_threads_return_the_same_bits(isa: str):
    table, q = random_q((256,), U8, 7), random_q((3, 71, 1031), S8, 8)
    torch.set_num_threads(2)
    assert_same(ops.lookup(q, table), reference.lookup(q, table))


def test_errors():
    q, table = torch.zeros(3, dtype=U8), torch.zeros(256, dtype=U8)
    for bad in (table[:255], table.reshape(16, 16), torch.zeros(512, dtype=U8)[::2]):
        with pytest.raises(ValueError, match=r"torchq.lookup: table must be 256 contiguous values"):
            ops.lookup(q, bad)
    with pytest.raises(TypeError, match=r"torchq.lookup: table must be uint8 or int8, got float32"):
        ops.lookup(q, table.float())
    with pytest.raises(TypeError, match=r"torchq.lookup: src must be uint8 or int8, got int32"):
        ops.lookup(q.int(), table)
