# SPDX-License-Identifier: Apache-2.0
"""embedding and embedding_bag on every tier against loops in numpy: bits for the formula, float64
for its meaning."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import check_fake
from memory import before_guard_page, flushing_denormals, rounding_upward
from reference_arithmetic import fma32
from torch import Tensor
from torch.library import opcheck

import torchq
import torchq.functional as TF
from torchq.packing import PackedEmbedding, pack_embedding

ops = torch.ops.torchq
DIMS = (1, 3, 16, 17, 64, 100, 768)
BITS = (8, 4)
SCALES = (torch.float32, torch.float16)
MODES = ("sum", "mean", "max")
FORMATS = list(itertools.product(BITS, SCALES))
PART = 32  # rows that a kernel collects at a time


def table(rows: int, dim: int, bits: int = 8, scale_dtype: torch.dtype = torch.float32):
    """Codes of the whole range, scales of many magnitudes, offsets of both signs."""
    codes = torch.randint(0, 2**bits, (rows, dim), dtype=torch.uint8)
    codes[0], codes[-1] = 0, 2**bits - 1
    scale = (torch.rand(rows) + 0.1) * 10.0 ** torch.randint(-3, 2, (rows,))
    offset = torch.randn(rows) * 10.0 ** torch.randint(-3, 2, (rows,))
    return codes, scale.to(scale_dtype), offset.to(scale_dtype)


def loops(parts, bags, mode: str, factors=None) -> Tensor:
    """The formula of kernels/embedding/contract.h, row by row."""
    codes, scale, offset = (t.float() for t in parts)
    out = torch.zeros(len(bags), codes.shape[1])
    for b, bag in enumerate(bags):
        s, offsets = torch.zeros(codes.shape[1]), torch.zeros(())
        for n, (i, r) in enumerate(bag):
            factor = 1 if factors is None else factors[i]
            own_scale, own_offset = scale[r] * factor, offset[r] * factor
            offsets = offsets + own_offset
            if mode != "max":
                s = fma32(codes[r], own_scale, s)
                continue
            real = codes[r] * own_scale + own_offset
            s = real if n == 0 else torch.where(s > real, s, real)
        if bag and mode != "max":
            s = (s + offsets) / (len(bag) if mode == "mean" else 1)
        out[b] = s
    return out


def bags_of(indices: list[int], offsets: list[int], padding: int | None = None):
    """(position, row) of each bag, without padding."""
    ends = [*offsets[1:], len(indices)]
    return [
        [(i, indices[i]) for i in range(begin, end) if indices[i] != padding]
        for begin, end in zip(offsets, ends, strict=True)
    ]


def same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float32
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def float64(parts, bag, mode: str, factors=None) -> np.ndarray:
    codes, scale, offset = (t.double().numpy() for t in parts)
    rows = [(codes[r] * scale[r] + offset[r]) * (1 if factors is None else factors[i])
            for i, r in bag]  # fmt: skip
    reduce: Any = {"sum": np.sum, "mean": np.mean, "max": np.max}[mode]
    return reduce(np.stack(rows), axis=0)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
def test_embedding(isa: str, bits: int, scale_dtype: torch.dtype, dim: int) -> None:
    parts = table(70, dim, bits, scale_dtype)
    packed = pack_embedding(*parts, bits)
    indices = torch.randint(0, 70, (3, 5, 7))
    indices[0, 0, :2] = torch.tensor([0, 69])
    codes, scale, offset = (t.float() for t in parts)
    rows = indices.flatten()
    expected = codes[rows] * scale[rows, None] + offset[rows, None]
    for given in (indices, indices.int(), indices.transpose(0, 2).contiguous().transpose(0, 2)):
        got = TF.embedding(given, packed)
        same_bits(got, expected.view(3, 5, 7, dim))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
def test_embedding_bag(isa: str, bits: int, scale_dtype: torch.dtype, dim: int, mode: str) -> None:
    """Bags of none, one, a few rows, exactly a part and several parts."""
    parts = table(50, dim, bits, scale_dtype)
    packed = pack_embedding(*parts, bits)
    sizes = [0, 1, 2, 0, 5, PART, PART + 1, 3 * PART + 7, 0]
    offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
    indices = torch.randint(0, 50, (sum(sizes),))
    bags = bags_of(indices.tolist(), offsets)
    expected = loops(parts, bags, mode)
    for index in (torch.int64, torch.int32):
        got = TF.embedding_bag(indices.to(index), packed, torch.tensor(offsets, dtype=index), mode)
        same_bits(got, expected)
    for bag, row in zip(bags, expected.numpy(), strict=True):
        if bag:
            exact = float64(parts, bag, mode)
            size = float64((parts[0], parts[1], parts[2].abs()), bag, mode)
            assert np.all(np.abs(row - exact) <= 1e-5 * np.maximum(size, 1e-3) + 2e-5)


@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_padding_and_last_offset(isa: str, bits: int, scale_dtype: torch.dtype, mode: str) -> None:
    """The row of padding counts for nothing; a bag of padding alone is empty."""
    parts = table(20, 40, bits, scale_dtype)
    packed = pack_embedding(*parts, bits)
    indices = torch.randint(0, 20, (90,))
    indices[::3] = 7
    indices[40:45] = 7
    offsets = [0, 4, 40, 45]
    expected = loops(parts, bags_of(indices.tolist(), offsets, 7), mode)
    assert not expected[2].any()
    starts = torch.tensor(offsets)
    for padding in (7, 7 - 20):
        same_bits(TF.embedding_bag(indices, packed, starts, mode, padding_idx=padding), expected)
    ends = torch.tensor([*offsets, 80])
    got = TF.embedding_bag(indices, packed, ends, mode, None, True, 7)
    same_bits(got, loops(parts, bags_of(indices[:80].tolist(), offsets, 7), mode))


@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
def test_per_sample_weights(isa: str, bits: int, scale_dtype: torch.dtype) -> None:
    parts = table(30, 33, bits, scale_dtype)
    packed = pack_embedding(*parts, bits)
    indices, factors = torch.randint(0, 30, (100,)), torch.randn(100)
    factors[:3] = torch.tensor([0.0, 1.0, -1.0])
    offsets = [0, 3, 3, 60]
    bags = bags_of(indices.tolist(), offsets, 4)
    expected = loops(parts, bags, "sum", factors)
    got = TF.embedding_bag(indices, packed, torch.tensor(offsets), "sum", factors, padding_idx=4)
    same_bits(got, expected)
    exact = float64(parts, bags[3], "sum", factors.double().numpy())
    assert np.allclose(expected[3].numpy(), exact, 1e-4, 1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_rows_as_bags(isa: str, mode: str) -> None:
    """2-D indices: as torch does with the float rows, and as 1-D with offsets."""
    parts = table(30, 20)
    packed = pack_embedding(*parts)
    indices = torch.randint(0, 30, (6, 4))
    got = TF.embedding_bag(indices, packed, mode=mode)
    same_bits(got, TF.embedding_bag(indices.flatten(), packed, torch.arange(0, 24, 4), mode))
    reals = packed.dequantize()
    torch.testing.assert_close(
        got, F.embedding_bag(indices, reals, mode=mode), rtol=1e-5, atol=1e-3
    )
    assert not TF.embedding_bag(indices[:, :0], packed, mode=mode).any()
    assert TF.embedding_bag(indices[:0], packed, mode=mode).shape == (0, 20)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", (1, 16, 17, 31, 64, 100, 129))
def test_no_byte_outside_is_touched(isa: str, bits: int, dim: int) -> None:
    """The last row of a table that ends where its page does, and destinations beside others."""
    for scale_dtype in SCALES:
        packed = pack_embedding(*table(9, dim, bits, scale_dtype), bits)
        guarded = packed._replace(weight=before_guard_page(packed.weight))
        indices = before_guard_page(torch.tensor([8, 0, 8, 8]))
        offsets = before_guard_page(torch.tensor([0, 1, 2]))
        same_bits(TF.embedding(indices, guarded), TF.embedding(indices, packed))
        for mode in MODES:
            same_bits(
                TF.embedding_bag(indices, guarded, offsets, mode),
                TF.embedding_bag(indices, packed, offsets, mode),
            )


@pytest.mark.parametrize("bits", BITS)
def test_same_bits_for_any_number_of_threads(isa: str, bits: int) -> None:
    rng = random.Random(bits)
    packed = pack_embedding(*table(500, 96, bits), bits)
    sizes = [rng.choice((0, 1, 3, 200)) for _ in range(100)]
    offsets = torch.tensor(list(itertools.accumulate(sizes, initial=0))[:-1])
    indices = torch.randint(0, 500, (sum(sizes),))
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append([TF.embedding_bag(indices, packed, offsets, mode) for mode in MODES])
        found[-1].append(TF.embedding(indices, packed))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            same_bits(a, b)


def test_float_modes_of_the_caller_count_for_nothing(isa: str) -> None:
    packed = pack_embedding(*table(40, 50))
    indices, offsets = torch.randint(0, 40, (80,)), torch.tensor([0, 3, 50])
    expected = TF.embedding_bag(indices, packed, offsets)
    with rounding_upward():
        got = TF.embedding_bag(indices, packed, offsets)
    same_bits(got, expected)
    tiny = pack_embedding(packed.unpack()[0], torch.full((40,), 1e-41), torch.zeros(40))
    with flushing_denormals():
        got = TF.embedding(indices, tiny)
    assert got.any()


# Packing


@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
@pytest.mark.parametrize("dim", DIMS)
def test_packing_round_trip(bits: int, scale_dtype: torch.dtype, dim: int) -> None:
    parts = table(11, dim, bits, scale_dtype)
    packed = pack_embedding(*parts, bits)
    assert packed.weight.shape == (11, (dim * bits + 7) // 8 + 2 * scale_dtype.itemsize)
    assert (packed.num_embeddings, packed.scale_dtype) == (11, scale_dtype)
    for a, b in zip(packed.unpack(), parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_those_of_torch_ao(bits: int) -> None:
    """The packed bytes are what FBGEMM makes of the same float rows."""
    weight = torch.randn(20, 32)
    weight[3] = 0.25
    codes, scale, offset = TF.quantize_embedding(weight, bits)
    prepack = getattr(ops_quantized(), f"embedding_bag_{'byte' if bits == 8 else '4bit'}_prepack")
    theirs = PackedEmbedding(prepack(weight), 32, bits)  # type: ignore[arg-type]
    for mine, other in zip((codes, scale, offset), theirs.unpack(), strict=True):
        differs = (mine.double() - other.double()).abs()
        assert float(differs[torch.arange(20) != 3].max()) <= (1 if mine is codes else 1e-6)
    same_bits(pack_embedding(*theirs.unpack(), bits).dequantize(), theirs.dequantize())


def ops_quantized() -> Any:
    return torch.ops.quantized


@pytest.mark.parametrize("bits", BITS)
def test_sums_are_those_of_torch_ao(bits: int) -> None:
    weight = torch.randn(100, 64)
    name = "byte" if bits == 8 else "4bit"
    theirs = getattr(ops_quantized(), f"embedding_bag_{name}_prepack")(weight)
    indices, offsets, factors = (
        torch.randint(0, 100, (90,)),
        torch.tensor([0, 9, 9]),
        torch.rand(90),
    )
    expected = getattr(ops_quantized(), f"embedding_bag_{name}_rowwise_offsets")(
        theirs, indices, offsets, False, 0, False, factors, None, False
    )
    packed = PackedEmbedding(theirs, 64, bits)  # type: ignore[arg-type]
    got = TF.embedding_bag(indices, packed, offsets, "sum", factors)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("bits", "scale_dtype"), FORMATS)
def test_quantize_embedding(bits: int, scale_dtype: torch.dtype) -> None:
    """Within half a step of each row, plus the rounding of its scale and offset."""
    weight = torch.randn(50, 40) * 10.0 ** torch.randint(-2, 3, (50, 1))
    weight[4], weight[5] = 0.0, -3.0
    packed = pack_embedding(*TF.quantize_embedding(weight, bits, scale_dtype), bits)
    span = (weight.amax(1) - weight.amin(1)).double()
    loose = 2.0**-10 if scale_dtype == torch.float16 else 1e-6
    allowed = span / (2**bits - 1) * 0.5 + loose * (span + weight.abs().amax(1))
    wrong = (packed.dequantize().double() - weight).abs().amax(1)
    assert bool((wrong <= allowed + 1e-30).all())
    assert torch.equal(packed.dequantize()[4:6], weight[4:6])  # constant rows are exact


# Fakes, graphs and errors


def arguments() -> dict[str, tuple[Any, ...]]:
    packed = pack_embedding(*table(20, 30, 4), 4)
    head = (packed.weight, torch.randint(0, 20, (12,)))
    offsets = torch.tensor([0, 3, 3, 12])
    return {
        "embedding": (packed.weight, torch.randint(0, 20, (2, 3)), 30, 4),
        "bag": (*head, offsets, None, 30, 4, "mean", False, None),
        "last": (*head, offsets, torch.rand(12), 30, 4, "sum", True, 3),
        "rows": (packed.weight, torch.randint(0, 20, (2, 3)), None, None, 30, 4, "max", False, 1),
    }


@pytest.mark.parametrize("name", ["embedding", "bag", "last", "rows"])
def test_opcheck(name: str) -> None:
    op = ops.embedding if name == "embedding" else ops.embedding_bag
    opcheck(op.default, arguments()[name])
    check_fake(op, arguments()[name])


PACKED = pack_embedding(*table(10, 6))
LONG = torch.tensor([1, 2, 3])
ERRORS = {
    "index": (IndexError, r"indices must lie in \[0, 9\], the rows of weight, got 10 at position 1",
              lambda: TF.embedding(torch.tensor([0, 10]), PACKED)),
    "negative": (IndexError, r"torchq.embedding: indices .* got -1 at position 0",
                 lambda: TF.embedding(torch.tensor([-1], dtype=torch.int32), PACKED)),
    "index in a bag": (IndexError, r"torchq.embedding_bag: indices .* got 99 at position 2",
                       lambda: TF.embedding_bag(torch.tensor([[0, 1], [99, 1]]), PACKED)),
    "float indices": (TypeError, "indices must be int64 or int32, got float32",
                      lambda: TF.embedding(torch.rand(2), PACKED)),
    "float offsets": (TypeError, "offsets must be int64 or int32, got float32",
                      lambda: TF.embedding_bag(LONG, PACKED, torch.rand(2))),
    "no offsets": (ValueError, "indices must be 1-D with offsets, or 2-D without",
                   lambda: TF.embedding_bag(LONG, PACKED)),
    "both": (ValueError, "indices must be 1-D with offsets, or 2-D without",
             lambda: TF.embedding_bag(LONG.view(1, 3), PACKED, torch.tensor([0]))),
    "first": (ValueError, r"offsets must ascend from 0 to at most 3, .* got 1 at position 0",
              lambda: TF.embedding_bag(LONG, PACKED, torch.tensor([1]))),
    "descending": (ValueError, r"offsets must ascend .* got 1 at position 2",
                   lambda: TF.embedding_bag(LONG, PACKED, torch.tensor([0, 2, 1]))),
    "beyond": (ValueError, r"offsets must ascend .* got 4 at position 1",
               lambda: TF.embedding_bag(LONG, PACKED, torch.tensor([0, 4]))),
    "last without": (ValueError, "include_last_offset must be False without offsets",
                     lambda: TF.embedding_bag(LONG.view(1, 3), PACKED, include_last_offset=True)),
    "no last": (ValueError, "offsets must be 1-D, with at least one value",
                lambda: TF.embedding_bag(LONG, PACKED, LONG[:0], include_last_offset=True)),
    "mode": (ValueError, "mode must be 'sum', 'mean' or 'max', got 'min'",
             lambda: TF.embedding_bag(LONG, PACKED, LONG[:0], "min")),  # type: ignore[arg-type]
    "padding": (ValueError, r"padding_idx must lie in \[-10, 9\], got 10",
                lambda: TF.embedding_bag(LONG, PACKED, LONG[:0], padding_idx=10)),
    "factors of a mean": (NotImplementedError, "per_sample_weights must be None unless mode",
                          lambda: TF.embedding_bag(LONG.view(1, 3), PACKED,
                                                   per_sample_weights=torch.rand(1, 3))),
    "factors' shape": (ValueError, r"per_sample_weights must have the shape of indices, \[1, 3\]",
                       lambda: TF.embedding_bag(LONG.view(1, 3), PACKED, None, "sum",
                                                torch.rand(3))),
    "factors' dtype": (TypeError, "per_sample_weights must be float32, got float64",
                       lambda: TF.embedding_bag(LONG.view(1, 3), PACKED, None, "sum",
                                                torch.rand(1, 3).double())),
    "weight": (TypeError, "weight must be of type PackedEmbedding, got Tensor",
               lambda: TF.embedding(LONG, torch.rand(3, 3))),  # type: ignore[arg-type]
    "row size": (ValueError, r"weight must be \[num_embeddings, 5 \+ 8 or \+ 4\] for rows",
                 lambda: TF.embedding(LONG, PACKED._replace(embedding_dim=5))),
    "bits": (ValueError, "bits must be 8 or 4, got 2",
             lambda: TF.embedding(LONG, PACKED._replace(bits=2))),  # type: ignore[arg-type]
    "packed bits": (ValueError, "bits must be 8 or 4, got 7",
                    lambda: pack_embedding(*table(3, 3), 7)),  # type: ignore[arg-type]
    "packed codes": (TypeError, "codes must be uint8, got torch.int8",
                     lambda: pack_embedding(table(3, 3)[0].char(), *table(3, 3)[1:])),
    "packed scales": (TypeError, "both float32 or both float16, got torch.float32",
                      lambda: pack_embedding(*table(3, 3)[:2], torch.zeros(3).half())),
    "packed shapes": (ValueError, r"got \[3, 3\], \[3\] and \[2\]",
                      lambda: pack_embedding(*table(3, 3)[:2], torch.zeros(2))),
    "packed range": (ValueError, "codes must be below 16 for 4 bits, got 255",
                     lambda: pack_embedding(*table(3, 3), 4)),
    "not float": (TypeError, "weight must be float32, got torch.int64",
                  lambda: TF.quantize_embedding(LONG.view(1, 3))),
    "not 2-D": (ValueError, r"weight must be \(num_embeddings, embedding_dim\), got \[3\]",
                lambda: TF.quantize_embedding(torch.rand(3))),
    "nan": (ValueError, "weight must be finite in torch.float32, got nan to nan in row 1",
            lambda: TF.quantize_embedding(torch.tensor([[1.0], [float("nan")]]))),
    "beyond float16": (ValueError, "finite in torch.float16, .* Take float32 scales",
                       lambda: TF.quantize_embedding(torch.tensor([[1e6]]), 4)),
    "scale dtype": (ValueError, "scale_dtype must be torch.float32 or torch.float16",
                    lambda: TF.quantize_embedding(torch.rand(2, 2), 8, torch.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, message, call = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()


def test_empty_calls(isa: str) -> None:
    assert TF.embedding(torch.empty(0, 3, dtype=torch.int64), PACKED).shape == (0, 3, 6)
    empty = torch.empty(0, dtype=torch.int64)
    assert not TF.embedding_bag(empty, PACKED, torch.tensor([0, 0])).any()
    assert TF.embedding_bag(empty, PACKED, empty).shape == (0, 6)
    assert torchq.last_kernel() == f"embedding_bag:{isa}"
