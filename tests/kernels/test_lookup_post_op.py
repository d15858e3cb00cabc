# SPDX-License-Identifier: Apache-2.0
"""A table as the last step of linear, conv and conv_transpose: the op, then lookup, bit for bit."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import reference
import test_conv
import torch
from calls import F32, S8, S32, U8, Call, assert_same, sampled
from cases import ConvShape, LinearShape
from conv_transpose_shapes import CONV_TRANSPOSE
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torchq
import torchq.nn as tnn
from torchq import PostOps, QParams

PAIRS = [(U8, U8), (U8, S8), (S8, S8), (S8, U8)]
TABLES = {dtype: cases.random_q((256,), dtype, 11) for dtype in (U8, S8)}
LINEARS = [
    *cases.LINEAR_TAILS,
    *cases.LINEAR_UNITS,
    LinearShape(1, 200, 37, "one_row"),
    LinearShape(16, 300, 64, "few_rows_many_panels"),
    LinearShape(70, 1100, 1024, "large_weights"),
    LinearShape(200, 257, 256, "two_threads"),
]
# The panel that is left over is a block of its own, and has 12 channels of the one before.
OVERLAPPING = cases.conv("overlapping_blocks", (68, 68), (9, 8), 3, 1, 1, groups=17)
CHAINS = ["eltwise_clip:-1.5:2.5", "sum:0.04:3+binary_mul:2", "eltwise_relu:0.1"]


def check(call: Call, table: Tensor, label: object = "") -> None:
    more = {"weight_zero_point": None, "row_sums": None}
    if call.op == "conv_transpose":
        del more["row_sums"]
    got = call.run(**more, table=table)
    assert_same(got, reference.lookup(call.expected, table), label)
    assert got.stride() == call.run().stride(), label


@pytest.mark.parametrize("shape", LINEARS, ids=str)
def test_linear(isa: str, shape: LinearShape):
    for src, dst in ((U8, U8), (S8, S8)):
        check(sampled(shape, src, dst), TABLES[dst], (src, dst))


@pytest.mark.parametrize(
    "shape",
    [
        *(*test_conv.SMALL[::5], *test_conv.FORMS, test_conv.MANY_CLASSES, OVERLAPPING),
        *cases.CONV_NETWORKS[::3],
    ],
    ids=str,
)
def test_conv_shapes(isa: str, shape: ConvShape):
    for src, dst in ((U8, U8), (S8, S8)):
        check(sampled(shape, src, dst), TABLES[dst], (src, dst))


@pytest.mark.parametrize("shape", cases.CONV_DEPTHWISE[::2], ids=str)
def test_depthwise(isa: str, shape: ConvShape):
    check(sampled(shape, U8, U8), TABLES[S8])


@pytest.mark.parametrize("shape", CONV_TRANSPOSE[::3], ids=str)
def test_conv_transpose(isa: str, shape: Any):
    check(sampled(shape, U8, S8), TABLES[U8])


@pytest.mark.parametrize(("dst", "entries"), PAIRS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("chain", CHAINS)
def test_dtypes_and_post_ops(isa: str, chain: str, dst: torch.dtype, entries: torch.dtype):
    for shape in test_conv.FORMS:
        check(sampled(shape, U8, dst, chain), TABLES[entries], shape)
        check(sampled(shape, S8, dst, chain, narrow=True), TABLES[entries], shape)


def test_two_threads_return_the_same_bits(isa: str):
    shapes = [LINEARS[-1], LINEARS[-2], OVERLAPPING, *cases.CONV_NETWORKS[::3]]
    torch.set_num_threads(2)
    for shape in shapes:
        check(sampled(shape), TABLES[U8], shape)


def test_identity_changes_nothing(isa: str):
    every = torch.arange(256)
    for dst, table in ((U8, every.to(U8)), (S8, (every - 128).to(S8))):
        call = sampled(test_conv.FORMS[1], U8, dst)
        got = call.run(weight_zero_point=None, row_sums=None, table=table)
        assert_same(got, call.expected)


def test_weight_zero_points(isa: str):
    """Sums over the source, which are a convolution with weights of 1, have no table."""
    for shape in (test_conv.FORMS[1], test_conv.FORMS[6]):
        call = sampled(shape)
        zero = torch.full((shape.channels,), 3, dtype=S32)
        plain = call.run(weight_zero_point=zero)
        got = call.run(weight_zero_point=zero, row_sums=None, table=TABLES[U8])
        assert_same(got, reference.lookup(plain, TABLES[U8]))


def test_no_rows(isa: str):
    call = sampled(LinearShape(0, 5, 8, "none"))
    assert call.run(weight_zero_point=None, row_sums=None, table=TABLES[S8]).dtype == S8


@pytest.mark.parametrize("op", ("linear", "conv", "conv_transpose"))
def test_errors(op: str):
    def run(dst: torch.dtype, table: Tensor) -> Tensor:
        more = {} if op == "conv_transpose" else {"row_sums": None}
        call = {
            "linear": lambda: sampled(cases.LINEAR_TAILS[0], U8, dst),
            "conv": lambda: sampled(test_conv.FORMS[0], U8, dst),
            "conv_transpose": lambda: sampled(CONV_TRANSPOSE[0], U8, dst),
        }[op]()
        return call.run(weight_zero_point=None, **more, table=table)

    table = TABLES[U8]
    for bad in (table[:255], table.reshape(16, 16), torch.zeros(512, dtype=U8)[::2]):
        with pytest.raises(ValueError, match=rf"torchq.{op}: table must be 256 contiguous values"):
            run(U8, bad)
    with pytest.raises(TypeError, match=rf"torchq.{op}: table must be uint8 or int8, got float32"):
        run(U8, table.float())
    for dst, got in ((F32, "float32"), (S32, "int32")):
        message = rf"torchq.{op}: dst_dtype must be 0 \(uint8\) or 1 \(int8\) with a table .*{got}"
        with pytest.raises(ValueError, match=message):
            run(dst, table)
    with FakeTensorMode(allow_non_fake_inputs=True):  # or it fails at its first call
        for bad in (table[:255], torch.zeros(512, dtype=U8)[::2]):
            with pytest.raises(ValueError, match=rf"torchq.{op}: table must be 256 contiguous"):
                run(U8, bad)
        with pytest.raises(TypeError, match=rf"torchq.{op}: table must be uint8 or int8"):
            run(U8, table.float())
        with pytest.raises(ValueError, match=rf"torchq.{op}: dst_dtype must be 0 .* with a table"):
            run(F32, table)


# Modules

SRC, MIDDLE = QParams.per_tensor(0.02, 117), QParams.per_tensor(0.05, 90)
DST = QParams.per_tensor(0.03, -20, torch.int8)


def layers() -> list[tuple[tnn.QLinear | tnn.QConv2d | tnn.QConvTranspose2d, Tensor]]:
    image = cases.random_q((2, 8, 6, 5), U8, 1).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(0)
    return [
        (
            tnn.QLinear.from_float(torch.nn.Linear(8, 20), SRC, MIDDLE, bits=7),
            cases.random_q((3, 8), U8),
        ),
        (tnn.QConv2d.from_float(torch.nn.Conv2d(8, 20, 3, padding=1), SRC, MIDDLE, bits=7), image),
        (
            tnn.QConvTranspose2d.from_float(
                torch.nn.ConvTranspose2d(8, 20, 2, 2), SRC, MIDDLE, bits=7
            ),
            image,
        ),
    ]


@pytest.mark.parametrize("i", range(3))
def test_module(isa: str, i: int, tmp_path: Any):
    """Eager, scripted, frozen, compiled, exported and loaded again."""
    layer, src = layers()[i]
    lookup = tnn.QLookup(torch.nn.functional.silu, MIDDLE, DST)
    expected = lookup(layer(src))
    assert expected.unique().numel() > 20
    assert layer.with_lookup(lookup) is layer
    assert "QLookup(silu, u8 -> s8, src_scale=" in str(layer)
    layer.eval()
    assert_same(layer(src), expected)
    scripted = torch.jit.script(layer)
    exported = torch.export.export(layer, (src,)).module()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for way in (scripted, torch.jit.freeze(scripted), exported, compiled):
        assert_same(way(src), expected)
    torchq.save(torch.nn.Sequential(layer), tmp_path / "one.tq")
    float_model = torch.nn.Sequential(torch.nn.Identity())
    assert_same(torchq.load(tmp_path / "one.tq", float_model)(src), expected)
    emulated = torchq.saturation.emulate_module(layer, src)
    assert emulated.dtype == S8 and (emulated == expected).float().mean() > 0.99


def test_module_errors():
    layer, _ = layers()[1]
    with pytest.raises(ValueError, match=r"lookup must take what this module gives, torch.uint8 w"):
        layer.with_lookup(tnn.QLookup(torch.tanh, DST, DST))
    layer.with_lookup(tnn.QLookup(torch.tanh, MIDDLE, DST))
    with pytest.raises(NotImplementedError, match="neither a table nor dw"):
        layer.with_lookup(tnn.QLookup(torch.tanh, MIDDLE, DST))
    without_dst = tnn.QLinear.from_float(torch.nn.Linear(8, 20), SRC)
    with pytest.raises(ValueError, match=r"gives, torch.float32"):
        without_dst.with_lookup(tnn.QLookup(torch.tanh, MIDDLE, DST))
    assert PostOps.parse(layer.post_ops) == PostOps()
