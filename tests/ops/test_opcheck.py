# SPDX-License-Identifier: Apache-2.0
"""The ops under torch.compile and torch.export: fakes state exactly what the kernels return."""

from __future__ import annotations

import itertools
import random
from typing import Any

import cases
import pytest
import torch
from calls import F32, S8, S32, U8, assert_same, check_fake, sampled
from cases import BROADCASTS, LinearShape, random_q
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import torchq
from torchq.runtime.library import dtype_code

ops = torch.ops.torchq
LAST = torch.channels_last


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=S32)


def elementwise(src: Tensor, other: Tensor) -> dict[str, tuple[Any, ...]]:
    """Each op on quantized activations (N, C, H, W), with arguments."""
    one, half = torch.ones(()), torch.tensor(0.5)
    zero = torch.zeros((), dtype=S32)
    per_channel = torch.rand(1, src.shape[1], 1, 1) + 0.5
    scales, zeros = torch.tensor([0.5, 0.25, 1.0]), i32(1, 2, 3)
    window = [3, 2, 2, 1, 1, 1, 1, 0, 1, 1]
    return {
        "quantize": (src.float(), per_channel, zero, 0),
        "dequantize": (src, per_channel, i32(3)),
        "requantize": (src, half, zero, per_channel, zero, 1),
        "reorder": (src, one, 3),
        "lookup": (src, random_q((256,), S8)),
        "add": (src, other, scales, zeros, 0, True),
        "mul": (src, other, scales, zeros, 1, False),
        "concat": ([src, other], scales, zeros, 1, 0),
        "max_pool": (src, window, True),
        "avg_pool": (src, i32(7), window, False, True, None),
        "adaptive_avg_pool": (src, [2, 3]),
        "eltwise": (src, scales[1:], zeros[1:], 1, "eltwise_tanh"),
        "binary": (src, other, None, "sub", scales, zeros, 0, "eltwise_relu"),
        "sum": ([src, other], scales, zeros, 1),
        "reorder_rounded": (src, scales[1:], zeros[1:], 0, "stochastic", 7),
        "softmax": (src, 1, False, scales[1:], zeros[1:], 0, ""),
        "layer_norm": (src, 2, torch.rand(42), None, 1e-5, scales[1:], zeros[1:], 1, ""),
        "rms_norm": (src, 2, torch.rand(42), 1e-5, scales[1:], zeros[1:], 1, ""),
        "group_norm": (src, 5, None, torch.rand(5), 1e-5, scales[1:], zeros[1:], 1, ""),
        "batch_norm": (
            src,
            torch.rand(5),
            torch.rand(5),
            None,
            None,
            1e-5,
            scales[1:],
            zeros[1:],
            1,
            "eltwise_relu",
        ),
        "reduction": (src, "mean", [1, -1], True, scales[1:], zeros[1:], 3, ""),
        "attention": (
            *(src.transpose(1, 2), src.transpose(1, 2), src.transpose(1, 2)),
            *(torch.rand(src.shape[2], 1, 1), False, 0.3, torch.ones(4), i32(1, 2, 3, 4), 0),
        ),
        "dynamic_attention": (
            *(src.float(), src.float(), src.float().transpose(0, 1).contiguous().transpose(0, 1)),
            *(None, True, 0.001),
        ),
        "compress_rows": (src.float(),),
        "compressed_attention": (
            src.float().transpose(1, 2),
            *[torch.ops.torchq.compress_rows(src.float())[:, :1]] * 2,
            *(torch.rand(src.shape[1], 1), 0.3),
        ),
        "resampling": (src, "linear", [9, 4], scales[1:], zeros[1:], 0, ""),
    }


NAMES = list(elementwise(torch.zeros(1, 1, 1, 1, dtype=U8), torch.zeros(1, dtype=U8)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "layout"), [(U8, torch.contiguous_format), (S8, LAST)], ids=["u8-nchw", "s8-nhwc"]
)
def test_opcheck(name: str, dtype: torch.dtype, layout: torch.memory_format):
    """Schema, autograd registration, fakes, and AOT dispatch with dynamic shapes."""
    src = random_q((2, 5, 7, 6), dtype, 1).contiguous(memory_format=layout)
    other = random_q((2, 5, 7, 6), dtype, 2).contiguous(memory_format=layout)
    opcheck(getattr(ops, name).default, elementwise(src, other)[name])


@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "adaptive_avg_pool", "reduction"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_opcheck_of_wide_sources(name: str, dtype: torch.dtype):
    src = random_q((2, 5, 7, 6), dtype, 1)
    args = elementwise(random_q((2, 5, 7, 6), U8, 1), src)[name][1:]
    none = [x * 0 if isinstance(x, torch.Tensor) and x.dtype == S32 else x for x in args]
    opcheck(getattr(ops, name).default, (src, *none))


REAL = [*NAMES[NAMES.index("max_pool") :]]
NO_CHAIN = (
    *("sum", "reorder_rounded", "attention", "dynamic_attention"),
    *("compress_rows", "compressed_attention"),
)
CHAIN = "binary_mul:2+eltwise_swish:1+sum:0.5:7:s8"


@pytest.mark.parametrize("name", [n for n in REAL if n not in NO_CHAIN])
def test_opcheck_of_post_ops_in_real_units(name: str):
    src, other = random_q((2, 5, 7, 6), U8, 1), random_q((2, 5, 7, 6), U8, 2)
    args = elementwise(src, other)[name]
    op = getattr(ops, name)
    shape = op(*args).shape
    head = args if "pool" in name else args[:-2]
    head += (torch.ones(2), i32(0, 0)) if "pool" in name else ()
    text = "eltwise_abs+" * (name == "eltwise") + CHAIN
    operands = [torch.rand(1, shape[1], *[1] * (len(shape) - 2)), random_q(tuple(shape), S8, 3)]
    opcheck(op.default, (*head, 1, text, operands))


@pytest.mark.parametrize("post_ops", ["", "sum:0.5+eltwise_relu", "eltwise_swish:1+prelu:2"])
@pytest.mark.parametrize("src", [U8, S8], ids=["u8", "s8"])
def test_opcheck_linear_and_conv(post_ops: str, src: torch.dtype):
    opcheck(ops.linear.default, arguments(LinearShape(4, 20, 10), src, post_ops))
    for shape in (
        cases.conv("2d", (5, 7), (6, 8), 3, 2, 1, batch=2),
        cases.conv("1d", (4, 18), (9,), 3, 1, 1),
    ):
        opcheck(ops.conv.default, arguments(shape, src, post_ops))


def arguments(shape, src: torch.dtype, post_ops: str) -> tuple[Any, ...]:
    call = sampled(shape, src, U8, post_ops)
    return tuple(call.args.values())


@pytest.mark.parametrize(
    "post_ops",
    [
        "",
        "sum+eltwise_clip:0:6",
        "sum:1:0:f32+sum:1:0:u8",
        "eltwise_relu:0.5+binary_mul:2",
        "prelu:2+binary_add:3+prelu:1",
    ],
)
def test_opcheck_fold(post_ops: str):
    values = [torch.rand(6)] if ":2" in post_ops else []
    per_channel, one, zero = torch.rand(6) + 0.1, torch.ones(1), i32(3)
    for code in (0, 3, 6):
        dst = (None, None) if code == 6 else (one, zero)
        opcheck(ops.fold.default, (one, per_channel, per_channel, *dst, 6, code, post_ops, values))
        opcheck(ops.fold_output_scales.default, (one, None, 6, code, post_ops, values, dst[1]))


@pytest.mark.parametrize(
    ("shape", "groups"), [((9, 6), 0), ((5, 7, 3), 1), ((6, 1, 3, 3), 6), ((8, 2, 1, 2), 4)]
)
def test_opcheck_packing(shape: tuple[int, ...], groups: int):
    weight = random_q(shape, S8)
    if not groups:
        opcheck(ops.pack_linear.default, (weight,))
        opcheck(ops.unpack_linear.default, (ops.pack_linear(weight)[0], *shape))
        return
    dilation = [1] * (len(shape) - 2)
    opcheck(ops.pack_conv.default, (weight, groups, dilation))
    packed = ops.pack_conv(weight, groups, dilation)[0]
    opcheck(ops.unpack_conv.default, (packed, list(shape), groups, dilation))


def significant_strides(x: Tensor) -> list[int]:
    """Without those nobody can observe, where torch's own fake empty_like differs from eager."""
    return [
        stride if size > 1 and x.numel() else 0
        for size, stride in zip(x.shape, x.stride(), strict=True)
    ]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_fakes_of_conv(dims: int):
    """Random geometries, size-1 dimensions included; dst is channels-last whatever src is."""
    for i, shape in enumerate(cases.random_conv_shapes(16, dims=dims)):
        call = sampled(shape, U8, (U8, S8, S32, F32)[i % 4])
        check_fake(ops.conv, tuple(call.args.values()))
        source = call.args["src"].transpose(0, -1).contiguous().transpose(0, -1)
        check_fake(ops.conv, tuple((call.args | {"src": source}).values()))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_fakes_of_pools(dims: int):
    rng, zero = random.Random(dims), i32(3)
    done = 0
    while done < 60:
        size = [rng.randint(1, 8) for _ in range(dims)]
        src = random_q((rng.randint(0, 2), rng.randint(0, 5), *size), U8, done)
        if rng.random() < 0.5:
            src = src.transpose(0, -1).contiguous().transpose(0, -1)
        window = [rng.randint(1, 3) for _ in range(2 * dims)]
        window += [rng.randint(0, 1) for _ in range(2 * dims)]
        window += [rng.randint(1, 2) for _ in range(dims)]
        ceil_mode = rng.random() < 0.5
        try:
            ops.max_pool(src, window, ceil_mode)
        except ValueError:
            continue
        check_fake(ops.max_pool, (src, window, ceil_mode))
        check_fake(ops.avg_pool, (src, zero, window, ceil_mode, True, None))
        check_fake(ops.adaptive_avg_pool, (src, [rng.randint(1, 4) for _ in range(dims)]))
        done += 1


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of one shape with all kinds of strides."""
    x = random_q(shape, dtype, 1)
    found = [x]
    for order in list(itertools.permutations(range(x.ndim)))[1:12:3]:
        back = [order.index(d) for d in range(x.ndim)]
        found.append(x.permute(order).contiguous().permute(back))
    if x.ndim:
        found.append(torch.cat([x, x], -1)[..., ::2][..., : shape[-1]])
        found.append(x[:1].expand(shape) if shape[0] else x)
    return found


SHAPES = [(), (0,), (7,), (1, 1), (3, 1, 4), (1, 5, 1), (2, 3, 4, 5), (2, 1, 4, 1), (1, 3, 1, 1, 2)]


@pytest.mark.parametrize("shape", [*SHAPES, (2, 0, 3), (2, 3, 0, 5)], ids=str)
def test_fakes_of_reorders(shape: tuple[int, ...]):
    one, zero = torch.ones(()), torch.zeros((), dtype=S32)
    for q in layouts(shape, U8):
        x = torch.empty_strided(q.shape, q.stride()).zero_() if q.stride() else q.float()
        for code in (0, 1, 3):
            check_fake(ops.quantize, (x, one, zero, code), significant_strides)
            check_fake(ops.requantize, (q, one, zero, one, zero, code), significant_strides)
            check_fake(ops.reorder, (q, one, code), significant_strides)
            check_fake(ops.reorder, (q, one, code, zero, zero), significant_strides)
        check_fake(ops.reorder, (q, torch.empty(0), 0), significant_strides)
        check_fake(ops.dequantize, (q, one, zero), significant_strides)
        check_fake(ops.lookup, (q, random_q((256,), S8)), significant_strides)


@pytest.mark.parametrize(("shape0", "shape1"), [*BROADCASTS, *((s, s) for s in SHAPES)], ids=str)
def test_fakes_of_binary(shape0: tuple[int, ...], shape1: tuple[int, ...]):
    scales, zeros = torch.ones(3), torch.zeros(3, dtype=S32)
    for a, b in itertools.product(layouts(shape0, U8), layouts(shape1, S8)):
        check_fake(ops.add, (a, b, scales, zeros, 0, False), significant_strides)
        check_fake(ops.mul, (b, a, scales, zeros, 6, True), significant_strides)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s] + [(2, 0, 3)], ids=str)
def test_fakes_of_concat(shape: tuple[int, ...]):
    scales, zeros = torch.tensor([1.0, 2.0, 1.0]), torch.zeros(3, dtype=S32)
    for a, b in itertools.product(layouts(shape, U8), repeat=2):
        for dim in range(-len(shape), len(shape)):
            check_fake(ops.concat, ([a, b], scales, zeros, dim, dtype_code(S8)))


def test_fakes_of_packing_and_linear():
    for shape in cases.random_linear_shapes(40):
        weight = random_q(shape.weight, S8)
        check_fake(ops.pack_linear, (weight,))
        check_fake(ops.unpack_linear, (ops.pack_linear(weight)[0], *weight.shape))
        call = sampled(shape, S8, F32)
        check_fake(ops.linear, tuple(call.args.values()))
    for dims in (1, 2, 3):
        for conv in cases.random_conv_shapes(40, dims=dims):
            weight = random_q(conv.weight, S8)
            check_fake(ops.pack_conv, (weight, conv.groups, conv.dilation))


class Chain(torch.nn.Module):
    """A residual block's worth of ops, packed weights as buffers."""

    def __init__(self) -> None:
        super().__init__()
        shape = cases.conv("conv", (8, 8), (10, 9), 3, 1, 1, batch=2)
        call = sampled(shape, U8, U8, "eltwise_relu")
        self.conv_args = [*call.args.values()][1:]
        fc = sampled(LinearShape(2, 5, 8), U8, F32)
        self.fc_args = [*fc.args.values()][1:]
        self.scales, self.zeros = torch.tensor([0.5, 0.25, 0.6]), i32(3, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        q = ops.quantize(x, self.scales[0], self.zeros[0], 0)
        y = ops.conv(q, *self.conv_args)
        y = ops.add(q, y, self.scales, self.zeros, 0, True)
        y = ops.concat([q, y], self.scales, self.zeros, 1, 1)
        y = ops.max_pool(y, [2, 2, 2, 2, 0, 0, 0, 0, 1, 1], False)
        y = ops.lookup(y[:, 4:12], torch.arange(255, -1, -1).to(torch.uint8))
        y = ops.adaptive_avg_pool(y, [1, 1]).flatten(1)
        return ops.linear(y, *self.fc_args)


def test_compile_returns_eager_bits(isa: str):
    """AOT functionalizes and re-traces the ops; the numbers come from the same kernels."""
    model, x = Chain().eval(), torch.randn(2, 8, 10, 9) * 30
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for source in (x, x.contiguous(memory_format=LAST), x[:1]):
            assert_same(compiled(source), model(source))


@pytest.mark.parametrize("dynamic", [False, True])
def test_export_runs_with_eager_bits(dynamic: bool, tmp_path):
    model, x = Chain().eval(), torch.randn(2, 8, 10, 9) * 30
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}} if dynamic else None
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
        targets = [str(node.target) for node in program.graph.nodes]
        assert sum(target.startswith("torchq.") for target in targets) == 8, "leaf calls"
        torch.export.save(program, tmp_path / "chain.pt2")
        loaded = torch.export.load(tmp_path / "chain.pt2").module()
        for source in (x, *([torch.randn(5, 8, 10, 9) * 30] if dynamic else [])):
            assert_same(loaded(source), model(source))


def test_ops_trace_without_data():
    """A fake call neither reads values nor needs a supported tier."""
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 5)
        q = ops.quantize(x, torch.empty(()), torch.empty((), dtype=S32), 0)
        assert q.dtype == U8 and q.shape == x.shape
    meta = ops.lookup(torch.empty(3, dtype=U8, device="meta"), random_q((256,), S8).to("meta"))
    assert meta.is_meta and meta.dtype == S8
    assert torchq.isa() in torchq.supported_isas()
