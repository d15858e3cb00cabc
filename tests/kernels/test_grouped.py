# SPDX-License-Identifier: Apache-2.0
"""Rows in groups, each with a weight of its own: the bits of dynamic layers, group by group."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import reference_matmul
import torch
from calls import assert_same, check_fake
from cases import random_q
from torch import Tensor
from torch.library import opcheck

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq.functional.grouped import stacked
from torchq.packing import PackedInt4, pack_linear_int4

op = torch.ops.torchq.grouped_linear
op4 = torch.ops.torchq.grouped_linear_int4


class Case(NamedTuple):
    """Rows of each group, inputs and outputs, and rows behind the last group."""

    counts: tuple[int, ...]
    k: int
    n: int
    rest: int = 0

    @property
    def offsets(self) -> Tensor:
        return torch.tensor(self.counts).cumsum(0).int()

    def floats(self) -> tuple[Tensor, Tensor]:
        """Return a source, whose rows have ranges of their own, and a bias."""
        generator = torch.Generator().manual_seed(self.k + self.n)
        m = sum(self.counts) + self.rest
        src = torch.randn(m, self.k, generator=generator)
        src = src * torch.rand(m, 1, generator=generator) * 10
        return src, torch.randn(len(self.counts), self.n, generator=generator)

    def int8(self) -> tuple[Tensor, Tensor]:
        """Return weights and their scales."""
        generator = torch.Generator().manual_seed(self.k)
        scale = torch.rand(len(self.counts), self.n, generator=generator) * 0.01 + 0.001
        return random_q((len(self.counts), self.n, self.k), torch.int8), scale

    def int4(self, group_size: Any, affine: bool) -> list[PackedInt4]:
        """Return packed weights."""
        generator = torch.Generator().manual_seed(self.n)
        groups = -(-self.k // group_size)
        made = []
        for _ in self.counts:
            scale = torch.randn(self.n, groups, generator=generator)
            codes, zero = (
                torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
                for shape in ((self.n, self.k), (self.n, groups))
            )
            made.append(pack_linear_int4(codes, scale, zero if affine else None, group_size))
        return made


CASES = [
    Case((1, 0, 1), 64, 32),
    Case((0, 3, 0, 0, 4), 37, 21),
    Case((13, 1, 0, 40), 128, 70),
    Case((1, 2), 3, 1, rest=2),
    Case((0, 0), 16, 16, rest=3),
    Case((5,), 33, 48),
    Case((2, 200), 256, 64),
    Case((), 8, 5, rest=2),
]


def by_group(case: Case, src: Tensor, call: Any) -> Tensor:
    """Return what ``call(rows, group)`` gives for each group, and zeros behind them."""
    parts = src.split([*case.counts, case.rest])
    found = [call(rows, g) for g, rows in enumerate(parts[:-1])]
    return torch.cat([*found, torch.zeros(case.rest, case.n)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_int8_is_the_formula(isa: str, case: Case) -> None:
    (src, bias), (weight, scale) = case.floats(), case.int8()
    for narrow in (weight, weight.clamp(-63, 63)):
        for values in (src, src.relu(), torch.zeros_like(src), src * 1e-42, src * 1e30):
            expected = reference_matmul.grouped_linear(values, case.offsets, narrow, scale, bias)
            assert_same(TF.grouped_linear(values, case.offsets, narrow, scale, bias), expected)
        expected = reference_matmul.grouped_linear(src, case.offsets, narrow, scale, None)
        assert_same(TF.grouped_linear(src, case.offsets, narrow, scale), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_int8_is_a_dynamic_layer_of_each_group(isa: str, case: Case) -> None:
    (src, bias), (weight, scale) = case.floats(), case.int8()
    got = TF.grouped_linear(src, case.offsets, weight, scale, bias)
    expected = by_group(
        case, src, lambda rows, g: TF.dynamic_linear(rows, weight[g], scale[g], bias[g])
    )
    assert_same(got, expected)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_int4_is_a_dynamic_layer_of_each_group(
    isa: str, case: Case, group_size: Any, affine: bool
) -> None:
    (src, bias), weights = case.floats(), case.int4(group_size, affine)
    for given in (bias, None):
        got = TF.grouped_linear_int4(src, case.offsets, weights, given)
        expected = by_group(
            case,
            src,
            lambda rows, g, own=given: TF.dynamic_linear_int4(
                rows, weights[g], None if own is None else own[g]
            ),
        )
        assert_same(got, expected)


def test_threads_change_no_bit() -> None:
    case = Case((1, 0, 70, 129), 300, 520)
    (src, bias), (weight, scale) = case.floats(), case.int8()
    four = case.int4(64, False)
    for call in (
        lambda: TF.grouped_linear(src, case.offsets, weight, scale, bias),
        lambda: TF.grouped_linear_int4(src, case.offsets, four, bias),
    ):
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(call())
        for result in results[1:]:
            assert_same(result, results[0])


def test_what_no_group_has_is_not_read(isa: str) -> None:
    """NaN in rows behind the groups, and in the scales of a group without rows."""
    case = Case((2, 0, 1), 40, 20, rest=1)
    src, bias = case.floats()
    layer = tnn.DynamicQGroupedLinear.from_float(torch.randn(3, 20, 40), bias)
    expected = layer(src, case.offsets)
    src[-1], layer.weight_scale[32:64], layer.bias[32:64] = [torch.nan] * 3  # type: ignore[index]
    assert_same(layer(src, case.offsets), expected)
    assert_same(expected[-1], torch.zeros(20))
    layer4 = tnn.DynamicQGroupedLinearInt4.from_float(torch.randn(3, 20, 40), bias)
    assert layer4(src, case.offsets).isfinite().all()
    src[1] = torch.nan
    for each in (layer, layer4):
        with pytest.raises(ValueError, match="got NaN or inf in row 1"):
            each(src, case.offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_and_strides(isa: str, dtype: torch.dtype) -> None:
    case = Case((3, 4), 70, 40)
    (src, bias), (weight, scale) = case.floats(), case.int8()
    src, four = src.to(dtype), case.int4(32, False)
    for call in (
        lambda x: TF.grouped_linear(x, case.offsets, weight, scale, bias),
        lambda x: TF.grouped_linear_int4(x, case.offsets, four, bias),
    ):
        expected = call(src.float()).to(dtype)
        assert_same(call(src), expected)
        assert_same(call(src.t().contiguous().t()), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [8, 16, 37])
def test_layers_pack_what_dynamic_layers_do(n: int, bias: bool) -> None:
    case = Case((2, 0, 5), 64, n)
    src, values = case.floats()
    weight, own = torch.randn(3, n, 64), values if bias else None

    def linear(g: int) -> Any:
        made = torch.nn.Linear(64, n, bias=bias)
        made.weight.data = weight[g]
        if bias:
            made.bias.data = values[g]
        return made

    for grouped, alone in (
        (tnn.DynamicQGroupedLinear, tnn.DynamicQLinear),
        (tnn.DynamicQGroupedLinearInt4, tnn.DynamicQLinearInt4),
    ):
        layer: Any = grouped.from_float(weight, own)
        of_each: list[Any] = [alone.from_float(linear(g)) for g in range(3)]
        expected = by_group(case, src, lambda rows, g, each=of_each: each[g](rows))
        assert_same(layer(src, case.offsets), expected)
        again = grouped.from_spec(layer.read_spec())
        again.load_state_dict(layer.state_dict())
        assert_same(again(src, case.offsets), expected)
        assert f"3 groups of [{n}, 64]" in repr(layer)
        scripted = torch.jit.script(layer)
        assert_same(scripted(src, case.offsets), expected)


def test_stacked_weights_are_views_where_they_can_be() -> None:
    weight = torch.randn(3, 32, 5)
    assert stacked(weight).data_ptr() == weight.data_ptr()
    padded = stacked(weight[:, :30])
    assert padded.shape == (96, 5)
    assert torch.equal(padded.view(3, 32, 5)[:, :30], weight[:, :30])
    assert padded.view(3, 32, 5)[:, 30:].count_nonzero() == 0


def test_opcheck_and_fakes() -> None:
    case = Case((2, 0, 3), 40, 20)
    src, bias = case.floats()
    layer = tnn.DynamicQGroupedLinear.from_float(torch.randn(3, 20, 40), bias)
    args = (src, case.offsets, *layer.packed()[:3], layer.weight_scale, layer.bias, 40, 20)
    four = tnn.DynamicQGroupedLinearInt4.from_float(torch.randn(3, 20, 40))
    args4 = (src, case.offsets, four.weight, four.params, None, 40, 20, 32, True)
    for each, given in ((op, args), (op4, args4)):
        opcheck(each.default, given)
        check_fake(each, given)


def test_kernel(isa: str) -> None:
    case = Case((2, 3), 40, 20)
    src, _ = case.floats()
    TF.grouped_linear_int4(src, case.offsets, case.int4(32, False))
    assert torchq.last_kernel().startswith("gemm_int4:")
    TF.grouped_linear(src, case.offsets, *case.int8())
    assert torchq.last_kernel().startswith("gemm")


# Errors

X, ENDS = torch.zeros(3, 40), torch.tensor([1, 3], dtype=torch.int32)
W, S = torch.zeros(2, 20, 40, dtype=torch.int8), torch.ones(2, 20)
Q = tnn.DynamicQGroupedLinear.from_float(torch.zeros(2, 20, 40))
Q4 = tnn.DynamicQGroupedLinearInt4.from_float(torch.zeros(2, 20, 40))
C4 = pack_linear_int4(torch.zeros(20, 40, dtype=torch.uint8), torch.ones(20, 2))
L = tnn.DynamicQLinear.from_float(torch.nn.Linear(4, 20))
ARGS = (*Q.packed()[:3], Q.weight_scale, None, 40, 20)
ARGS4 = (Q4.weight, Q4.params, None, 40, 20, 32, True)


def of_spec(groups: Any, channels: int) -> Any:
    spec = {"groups": groups, "weight": [channels, 40], "bias": False}
    return tnn.DynamicQGroupedLinear.from_spec(spec)


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BOTH: list[tuple[Any, type[Exception], str]] = [
    (lambda f: f(X.to(torch.uint8), ENDS), TypeError, "src must be float32, got uint8"),
    (lambda f: f(X[0], ENDS), ValueError, "src must be (rows, K), got [40]"),
    (lambda f: f(X[:, :7], ENDS), ValueError, "src must be (*, 40), got [3, 7]"),
    (lambda f: f(X, ENDS.long()), TypeError, "offsets must be int32, got int64"),
    (lambda f: f(X, ENDS[:1]), ValueError, "and offsets [groups], got weight ["),
    (lambda f: f(X, ENDS[None]), ValueError, "and offsets [1, 2]. torchq.nn.DynamicQGrouped"),
    (lambda f: f(X, ends(2, 1)), ValueError, "the rows of src, got 1 behind 2 at index 1"),
    (lambda f: f(X, ends(-1, 3)), ValueError, "got -1 behind 0 at index 0"),
    (lambda f: f(X, ends(1, 4)), ValueError, "from 0 to at most 3, the rows of src, got 4"),
    (lambda f: f(X.log(), ENDS), ValueError, "src must be finite, got NaN or inf in row 0"),
]
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: op(X, ENDS, *ARGS[:6], 33), ValueError, "with N = 33 and offsets [groups]"),
    (lambda: op(X, ENDS, *ARGS[:6], -1), ValueError, "out_features must lie in [0, 21474835"),
    (lambda: op(X, ENDS, *ARGS[:1], ARGS[1][:, :33], *ARGS[2:]), ValueError, "weight must be ["),
    (
        lambda: op(X, ENDS, *ARGS[:1], ARGS[1][:, :50].contiguous(), *ARGS[2:]),
        ValueError,
        "compensation must have 64 values, got 50",
    ),
    (
        lambda: op(X, ENDS, *ARGS[:3], ARGS[3][:20].contiguous(), *ARGS[4:]),
        ValueError,
        "weight_scale must have 64 values, got 20",
    ),
    (lambda: op(X, ENDS, *ARGS[:4], S[0], 40, 20), ValueError, "bias must have 64 values, got 20"),
    (lambda: op4(X, ENDS, *ARGS4[:4], 33, 32, True), ValueError, "with N = 33 and offsets [gr"),
    (lambda: op4(X, ENDS, *ARGS4[:2], S[0], 40, 20, 32, True), ValueError, "bias must have 64 val"),
    (lambda: op4(X, ENDS, *ARGS4[:5], 48, True), ValueError, "group_size must be 32, 64 or 128"),
    (lambda: op4(X, ENDS, Q4.weight[0, 0, 0, 0], *ARGS4[1:]), ValueError, "got weight []"),
    (lambda: TF.grouped_linear(X, ENDS, W.float(), S), TypeError, "weight must be int8, got torch"),
    (lambda: TF.grouped_linear(X, ENDS, W[0], S), ValueError, "weight must be (groups, out_featu"),
    (lambda: TF.grouped_linear(X, ENDS, W, S[:, :3]), ValueError, "weight_scale must broadcast to"),
    (lambda: TF.grouped_linear(X, ENDS, W, -S), ValueError, "weight_scale must be finite and gre"),
    (lambda: TF.grouped_linear(X, ENDS, W, S, S[0, :3]), ValueError, "bias must broadcast to [2, "),
    (lambda: TF.grouped_linear_int4(X, ENDS, []), ValueError, "at least one, got []"),
    (lambda: TF.grouped_linear_int4(X, ENDS, [C4, W]), ValueError, "got ['PackedInt4', 'Tensor']"),  # type: ignore[list-item]
    (lambda: of_spec("x" * 9, 20), ValueError, "sizes in the file's specs must be up to 64 whole"),
    (lambda: of_spec(2, 1 << 70), ValueError, "sizes in the file's specs must be up to 64 whole"),
    (lambda: tnn.DynamicQGroupedLinear(L, 2, 20), ValueError, "stack must have 64 outputs, for 2"),
]  # fmt: skip


@pytest.mark.parametrize("layer", [Q, Q4], ids=["int8", "int4"])
@pytest.mark.parametrize(("call", "error", "text"), BOTH, ids=[e[2][:40] for e in BOTH])
def test_errors_of_both(layer: Any, call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"torchq\.grouped_linear(.|\n)*" + re.escape(text)):
        call(layer)


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=r"torchq\.(.|\n)*" + re.escape(text)):
        call()
