# SPDX-License-Identifier: Apache-2.0
"""Dynamic quantization: requantize_dynamic, dynamic_linear and the modules, against the oracle."""

from __future__ import annotations

import re
from typing import Any

import pytest
import reference
import reference_matmul
import torch
from calls import F32, S8, S32, U8, assert_same, assert_same_deployed, check_fake
from cases import random_q
from torch import Tensor, nn
from torch.library import opcheck

import torchq
import torchq.functional as TF
import torchq.nn as tnn
from torchq import PostOps, QParams
from torchq.functional.packing import pack_conv, pack_linear

ops = torch.ops.torchq

# Requantization by the result's own range: the three steps of the source document.


@pytest.mark.parametrize("dst", (U8, S8), ids=str)
def test_requantize_dynamic(isa: str, dst: torch.dtype):
    for i, (low, high) in enumerate(((-500, 900), (0, 10**6), (-(10**9), -5), (-7, 7), (0, 1))):
        acc = torch.randint(low, high, (5, 33), generator=torch.Generator().manual_seed(i)).to(S32)
        for scale in (0.003, 1.0, 1e-12):
            for got, expected in zip(
                TF.requantize_dynamic(acc, scale, dst),
                reference_matmul.requantize_dynamic(acc, scale, dst),
                strict=True,
            ):
                assert_same(got, expected, (low, high, scale))
        per_channel = torch.rand(33) + 0.1
        for got, expected in zip(
            TF.requantize_dynamic(acc, per_channel, dst),
            reference_matmul.requantize_dynamic(acc, per_channel, dst),
            strict=True,
        ):
            assert_same(got, expected, "per channel")


def test_three_steps_by_hand():
    """1. an s32 result; 2. its range gives the scale; 3. requantize."""
    acc = torch.tensor([-100, 0, 155], dtype=S32)
    q, scale, zero_point = TF.requantize_dynamic(acc, 2.0)
    assert (scale.item(), zero_point.item()) == (2.0, 100)
    assert q.tolist() == [0, 100, 255]
    q, scale, zero_point = TF.requantize_dynamic(torch.zeros(3, dtype=S32), 2.0)
    assert (scale.item(), zero_point.item(), q.tolist()) == (1.0, 0, [0, 0, 0])
    q, scale, _ = TF.requantize_dynamic(torch.empty(0, 4, dtype=S32), 2.0, S8)
    assert (scale.item(), q.shape, q.dtype) == (1.0, (0, 4), S8)


def test_what_a_dynamic_workflow_computes():
    """linear to int32, requantized by its own range, is close to the float layer."""
    src, weight = random_q((16, 40), U8), random_q((24, 40), S8)
    acc = TF.linear(src, weight, dst_dtype=S32)
    q, scale, zero_point = TF.requantize_dynamic(acc, 0.01)
    real = 0.01 * (src.double() @ weight.double().t())
    assert ((scale * (q.float() - zero_point) - real).abs() <= scale * 0.5001).all()


# Linear

SHAPES = [(7, 37, 21), (6, 64, 64), (1, 128, 70), (13, 3, 1), (40, 1, 33)]


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    src = torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator) * 10
    scale = torch.rand(n, generator=generator) * 0.01 + 0.001
    return src, random_q((n, k), S8), scale, torch.randn(n, generator=generator)


@pytest.mark.parametrize("src_range", ("per_tensor", "per_row"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dynamic_linear(isa: str, shape: tuple[int, int, int], src_range: str):
    src, weight, scale, bias = operands(*shape)
    per_row = src_range == "per_row"
    for narrow in (weight, weight.clamp(-63, 63)):
        for values in (src, src.relu(), -src.abs(), torch.zeros_like(src), src * 1e-42, src * 1e30):
            expected = reference_matmul.dynamic_linear(values, narrow, scale, bias, per_row)
            assert_same(TF.dynamic_linear(values, narrow, scale, bias, src_range), expected)
        expected = reference_matmul.dynamic_linear(src, narrow, scale, None, per_row)
        assert_same(TF.dynamic_linear(src, narrow, scale, None, src_range), expected)


def test_layouts_and_leading_dimensions(isa: str):
    src, weight, scale, bias = operands(12, 32, 20)
    expected = reference_matmul.dynamic_linear(src, weight, scale, bias, True)
    assert_same(TF.dynamic_linear(src.t().contiguous().t(), weight, scale, bias), expected)
    got = TF.dynamic_linear(src.reshape(3, 2, 2, 32), weight, scale, bias)
    assert_same(got, expected.reshape(3, 2, 2, 20))
    assert_same(TF.dynamic_linear(src[0], weight, scale, bias), expected[0])


def test_a_row_does_not_depend_on_its_batch(isa: str):
    src, weight, scale, bias = operands(17, 48, 33)
    whole = TF.dynamic_linear(src, weight, scale, bias, "per_row")
    for r in range(17):
        assert_same(
            TF.dynamic_linear(src[r : r + 1], weight, scale, bias, "per_row"), whole[r : r + 1]
        )
    changed = src.clone()
    changed[1:] *= 100
    again = TF.dynamic_linear(changed, weight, scale, bias, "per_row")
    assert_same(again[:1], whole[:1])
    tensor = TF.dynamic_linear(changed, weight, scale, bias, "per_tensor")
    assert not torch.equal(
        tensor[:1], TF.dynamic_linear(src, weight, scale, bias, "per_tensor")[:1]
    )


def test_parameters_are_those_of_choose_qparams():
    """One weight of 1 per output shows the quantized source."""
    src = torch.tensor([[-1.0, 0.3, 2.7, 0.0]])
    params = torchq.quantization.qparams.choose_qparams(-1.0, float(src.max()))
    got = TF.dynamic_linear(src, torch.eye(4, dtype=torch.int8), 1.0, src_range="per_tensor")
    q = reference.quantize(src, params.scale, params.zero_point, U8)
    assert_same(got, reference.dequantize(q, params.scale, params.zero_point))


def test_threads_change_no_bit():
    src, weight, scale, bias = operands(300, 600, 130)
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results += [
            TF.dynamic_linear(src, weight, scale, bias, r) for r in ("per_row", "per_tensor")
        ]
    for i, result in enumerate(results):
        assert_same(result, results[i % 2])


def test_empty_sources(isa: str):
    weight, bias = torch.zeros(5, 8, dtype=S8), torch.arange(5.0)
    assert TF.dynamic_linear(torch.empty(0, 8), weight, 1.0).shape == (0, 5)
    assert TF.dynamic_linear(torch.ones(3, 8), weight[:0], torch.empty(0)).shape == (3, 0)
    for src_range in ("per_row", "per_tensor"):
        got = TF.dynamic_linear(torch.empty(3, 0), weight[:, :0], 1.0, bias, src_range)
        assert_same(got, bias.expand(3, 5))


CHAINS = {
    "gelu": PostOps().append_eltwise("gelu_erf"),
    "swish, sum": PostOps().append_eltwise("swish", 1.0).append_sum(1.0, 0, "f32"),
    "sum": PostOps().append_sum(0.5, 0, "f32"),
    "sum, relu": PostOps().append_sum(1.0, 0, "f32").append_eltwise("relu"),
    "clip": PostOps().append_eltwise("clip", -0.5, 1.25),
    "max by row": PostOps().append_binary("max", None, 1, "f32"),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_post_ops_are_those_of_the_result(isa: str, shape: tuple[int, ...], chain: str):
    src, weight, scale, bias = operands(*shape)
    post_ops = CHAINS[chain]
    rows = 1 if "row" in chain else shape[2]
    other = [torch.randn(shape[0], rows)] if "sum" in chain or "max" in chain else []
    attr = torchq.Attr().set_post_ops(post_ops)
    for offset in (bias, None):
        result = TF.dynamic_linear(src, weight, scale, offset)
        expected = TF.eltwise(result, "linear", 1.0, 0.0, attr, F32, other)
        got = TF.dynamic_linear(src, weight, scale, offset, "per_row", post_ops, other)
        assert_same(got, expected)


def test_post_ops_that_change_the_scales_are_refused():
    src, weight, scale, bias = operands(5, 12, 20)
    for post_ops in (
        PostOps().append_eltwise("linear", 2.0, 0.0),
        PostOps().append_binary("add", bias, 2),
    ):
        with pytest.raises(NotImplementedError, match="post_ops must have sums"):
            TF.dynamic_linear(src, weight, scale, bias, "per_row", post_ops)
    with pytest.raises(ValueError, match="needs 1 sources, got 0"):
        TF.dynamic_linear(src, weight, scale, bias, "per_row", CHAINS["sum"])


def test_opcheck_and_fakes():
    src, weight, scale, bias = operands(5, 12, 20)
    packed = ops.pack_linear(weight)
    for per_row in (False, True):
        opcheck(ops.dynamic_linear.default, (src, *packed, scale, bias, 12, per_row))
    chain = ("eltwise_gelu_erf+sum:1:0:f32", [torch.randn(5, 20)])
    opcheck(ops.dynamic_linear.default, (src, *packed, scale, bias, 12, True, *chain))
    check_fake(ops.dynamic_linear, (src.expand(2, 5, 12), *packed, scale, None, 12, True))


def test_kernel(isa: str):
    src, weight, scale, bias = operands(5, 12, 20)
    TF.dynamic_linear(src, weight.clamp(-63, 63), scale, bias)
    narrow = isa in ("avx2", "avx512")
    assert torchq.last_kernel() == ("gemm_narrow:" if narrow else "gemm:") + isa


# Modules


@pytest.mark.parametrize("src_range", ("per_tensor", "per_row"))
def test_dynamic_module(src_range: str):
    linear = nn.Linear(40, 24)
    module = tnn.DynamicQLinear.from_float(linear, src_range=src_range, granularity="per_tensor")
    src = torch.randn(3, 7, 40)
    expected = reference_matmul.dynamic_linear(
        src, module.packed().unpack(), module.weight_scale, module.bias, src_range == "per_row"
    )
    assert_same(module(src), expected)
    restored = tnn.DynamicQLinear.from_spec(module.read_spec())
    restored.load_state_dict(module.state_dict())
    assert_same(restored(src), expected)


@pytest.mark.parametrize("dst", (None, QParams.per_tensor(0.4, 128)), ids=("f32", "u8"))
def test_matmul_module(dst: QParams | None):
    first, second = QParams.per_tensor(0.02, 120), QParams.per_tensor(0.03, -4, S8)
    chain = "eltwise_linear:0.25:0+eltwise_clip:-20:20"
    module = tnn.QMatMul([first, second], dst, PostOps.parse(chain))
    query, key = random_q((2, 3, 9, 16), U8), random_q((2, 3, 11, 16), S8)
    expected = reference_matmul.matmul(
        query, key.mT, None, 120, -4, src_scale=first.scale, weight_scale=second.scale,
        dst_scale=None if dst is None else dst.scale,
        dst_zero_point=0 if dst is None else dst.zero_point,
        dst_dtype=F32 if dst is None else U8, post_ops=chain,
    )  # fmt: skip
    assert_same(module(query, key.mT), expected)
    real = (reference.dequantize(query, 0.02, 120), reference.dequantize(key, 0.03, -4))
    assert_same(module(real[0], real[1].mT), expected)
    assert_same(torch.jit.script(module)(query, key.mT), expected)
    with torch.no_grad():
        exported = torch.export.export(module, (query, key.mT)).module()
        assert_same(exported(query, key.mT), expected)
    restored = tnn.QMatMul.from_spec(module.read_spec())
    restored.load_state_dict(module.state_dict())
    assert_same(restored(query, key.mT), expected)


def test_modules_under_compile_script_and_export():
    module = tnn.DynamicQLinear.from_float(nn.Linear(20, 12)).eval()
    src = torch.randn(4, 20)
    expected = module(src)
    assert_same(torch.jit.trace(module, src)(src), expected)
    assert_same_deployed(module, (src,), expected)


# Errors

X, W = torch.zeros(3, 8), torch.zeros(5, 8, dtype=S8)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: TF.requantize_dynamic(X, 1.0), TypeError, "acc must be torch.int32"),
    (lambda: TF.requantize_dynamic(X.int(), 0.0), ValueError, "greater than 0"),
    (lambda: TF.requantize_dynamic(X.int(), 1.0, F32), ValueError, "torch.uint8 or torch.int8"),
    (lambda: TF.dynamic_linear(X.to(U8), W, 1.0), TypeError, "src must be float32, got uint8"),
    (lambda: TF.dynamic_linear(X[:, :7], W, 1.0), ValueError, "src must be (*, 8), got [3, 7]"),
    (lambda: TF.dynamic_linear(X.log(), W, 1.0), ValueError, "src must be finite, got NaN or inf"),
    (lambda: TF.dynamic_linear(X + torch.nan, W, 1.0), ValueError, "in row 0"),
    (lambda: TF.dynamic_linear(X, W, torch.ones(4)), ValueError, "weight_scale must have 5 values"),
    (lambda: TF.dynamic_linear(X, W.float(), 1.0), TypeError, "weight must be int8"),
    (
        lambda: TF.dynamic_linear(X, W.to(U8), 1.0),
        TypeError,
        "weight must be int8, got torch.uint8",
    ),
    (
        lambda: torchq.nn.DynamicQLinear(pack_linear(W.to(U8)), torch.ones(1), None),
        TypeError,
        "weight must be int8, got torch.uint8",
    ),
    (
        lambda: torchq.nn.DynamicQLinear(pack_conv(W[..., None]), torch.ones(1), None),
        ValueError,
        "weight must be packed by pack_linear",
    ),
    (lambda: TF.dynamic_linear(X, W, 1.0, torch.ones(5, dtype=S32)), TypeError, "bias must be"),
    (lambda: TF.dynamic_linear(X, W, 1.0, src_range="per_column"), ValueError, "src_range must be"),
    (
        lambda: TF.dynamic_linear(X, pack_linear(W)._replace(weight=X), 1.0),
        TypeError,
        "weight must be int8",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:40] for e in ERRORS])
def test_errors(call: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=r"torchq\.(.|\n)*" + re.escape(text)):
        call()


def test_a_source_that_requires_grad_is_refused():
    with pytest.raises(RuntimeError, match="requires grad"):
        TF.dynamic_linear(X.clone().requires_grad_(), W, 1.0)
