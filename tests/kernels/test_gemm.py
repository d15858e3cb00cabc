# SPDX-License-Identifier: Apache-2.0
"""torchq::gemm on every tier against the oracle, bit for bit."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import reference_matmul
import torch
from calls import S8, S32, U8, assert_same, check_fake
from test_matmul import operands
from torch.library import opcheck

import torchq.functional as TF


@pytest.mark.parametrize("trans", list(itertools.product((False, True), repeat=2)), ids=str)
def test_gemm(isa: str, trans: tuple[bool, bool]):
    generator = torch.Generator().manual_seed(3)
    for (m, k, n), dtype in itertools.product(((7, 33, 20), (6, 16, 32), (3, 0, 5)), (U8, S8)):
        a, b = operands((m, k, n), dtype)
        c = torch.randint(-(2**31), 2**31, (m, n), generator=generator).to(S32)
        call = TF.gemm_u8s8s32 if dtype == U8 else TF.gemm_s8s8s32
        left, right = a.t().contiguous() if trans[0] else a, b.t().contiguous() if trans[1] else b
        shapes = {"F": (1,), "C": (m, 1), "R": (n,)}
        for (alpha, beta), (mode, shape) in itertools.product(
            ((1.0, 0.0), (1.0, 1.0), (0.5, 0.0), (2.5, -0.75), (1.0, 2.0), (0.0, 1.0)),
            shapes.items(),
        ):
            co = torch.randint(-(2**31), 2**31, shape, generator=generator).to(S32)
            got = call(
                left, right, c, co.reshape(-1), trans_a=trans[0], trans_b=trans[1], offsetc=mode,
                alpha=alpha, beta=beta, ao=5, bo=-7,
            )  # fmt: skip
            expected = reference_matmul.gemm(a, b, c, co, alpha, beta, 5, -7)
            assert_same(got, expected, (m, k, n, alpha, beta, mode))


def test_saturates_instead_of_wrapping(isa: str):
    a, b = torch.full((2, 4), 255, dtype=U8), torch.full((4, 3), 127, dtype=S8)
    c = torch.full((2, 3), 2**31 - 1, dtype=S32)
    assert (TF.gemm_u8s8s32(a, b, c, beta=1.0) == 2**31 - 1).all()
    assert (TF.gemm_u8s8s32(a, -b, -c, beta=1.0, co=-5) == -(2**31)).all()
    assert (TF.gemm_u8s8s32(a, b, c, alpha=1e9, beta=-1.0) == 2**31 - 1).all()


def test_is_exact_above_2_to_24(isa: str):
    """A float32 on the way would lose the last bits."""
    a, b = torch.full((1, 5000), 255, dtype=U8), torch.full((5000, 1), 127, dtype=S8)
    assert TF.gemm_u8s8s32(a, b, co=1).item() == 255 * 127 * 5000 + 1


def test_without_k_is_that_of_blas(isa: str):
    a, b = torch.empty(2, 0, dtype=S8), torch.empty(0, 3, dtype=S8)
    c = torch.arange(6, dtype=S32).reshape(2, 3)
    assert_same(TF.gemm_s8s8s32(a, b, c, beta=3.0, co=1), 3 * c + 1)
    assert TF.gemm_s8s8s32(a[:0], b, None).shape == (0, 3)


def test_opcheck_and_fakes():
    gemm = torch.ops.torchq.gemm
    a, b = operands((5, 8, 10))
    c, co = torch.ones(5, 10, dtype=S32), torch.ones(1, dtype=S32)
    opcheck(gemm.default, (a, b, c, False, False, 0.5, 2.0, 1, 2, "F", co))
    check_fake(gemm, (a.t(), b.t(), None, True, True, 1.0, 0.0, 0, 0, "F", co))


A, B = torch.zeros(4, 8, dtype=U8), torch.zeros(8, 5, dtype=S8)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: TF.gemm_u8s8s32(A.to(S8), B), TypeError, "a must be torch.uint8"),
    (lambda: TF.gemm_s8s8s32(A, B), TypeError, "a must be torch.int8"),
    (lambda: TF.gemm_u8s8s32(A, B.to(U8)), TypeError, "b must be int8"),
    (lambda: TF.gemm_u8s8s32(A, B, trans_b=True), ValueError, "Check trans_a and trans_b"),
    (lambda: TF.gemm_u8s8s32(A, B, beta=1.0), ValueError, "beta must be 0 without c"),
    (lambda: TF.gemm_u8s8s32(A, B, A), TypeError, "c must be int32"),
    (lambda: TF.gemm_u8s8s32(A, B, torch.ones(1, 1, dtype=S32)), ValueError, "c must be [4, 5]"),
    (lambda: TF.gemm_u8s8s32(A, B, offsetc="X"), ValueError, "offsetc must be F"),
    (lambda: TF.gemm_u8s8s32(A, B, offsetc="C"), ValueError, "co must have 4 values"),
    (lambda: TF.gemm_u8s8s32(A, B, ao=256), ValueError, "ao must lie in [0, 255]"),
    (lambda: TF.gemm_u8s8s32(A, B, bo=128), ValueError, "bo must lie in [-128, 127]"),
    (lambda: TF.gemm_u8s8s32(A, B, alpha=float("nan")), ValueError, "must be finite"),
    (lambda: TF.gemm_u8s8s32(A, B, alpha=1e39), ValueError, "in float32's range, got 1e+39"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=r"torchq\.(.|\n)*" + re.escape(text)):
        call()
