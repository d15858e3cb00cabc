# SPDX-License-Identifier: Apache-2.0
"""From the oracle's readable arguments to op calls: `call.run()` is what torchq answers to them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cases
import reference
import torch
from geometries import ConvTransposeShape
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchq.runtime.library import dtype_code

ops = torch.ops.torchq

U8, S8, S32, F32 = torch.uint8, torch.int8, torch.int32, torch.float32
NARROW = 63  # the magnitude of 7-bit weights, whose pairs always fit

# The position of each op argument in Call.args; "geometry" is linear's in_features.
NAMES = [
    *("src", "weight", "compensation", "pair_bound", "multiplier", "offset", "acc_bias"),
    *("src_zero_point", "geometry", "dst_dtype", "post_ops", "post_op_params", "post_op_srcs"),
]


@dataclass(frozen=True)
class Call:
    """One op call and the oracle's answer."""

    op: str
    args: dict[str, Any]
    expected: Tensor

    def run(self, **changes: Any) -> Tensor:
        dst: Tensor = getattr(ops, self.op)(*(self.args | changes).values())
        return dst

    def check(self, label: object = "", **changes: Any) -> None:
        assert_same(self.run(**changes), self.expected, label)


def gemm_kernel(isa: str, rows: int) -> str:
    """The kernel of a matrix product whose weights have their full range."""
    by_rows = {"amx": ("gemm", "gemm_matrix", 8), "avx2": ("gemm_split", "gemm", 65)}
    few, many, least = by_rows.get(isa, ("gemm", "gemm", 0))
    return f"{many if rows >= least else few}:{isa}"


def with_few_pairs(weight: Tensor) -> Tensor:
    """7-bit weights (outputs, inputs, ...), but for one quad of inputs in eight, not the same for
    each tap: avx2 clips these."""
    index = torch.zeros(weight.shape[1:], dtype=torch.int64)
    for d, size in enumerate(weight.shape[1:]):
        steps = torch.arange(size) // 4 if d == 0 else torch.arange(size)
        index += steps.view(-1, *[1] * (weight.dim() - 2 - d))
    return torch.where(index % 8 == 5, weight, weight.clamp(-NARROW, NARROW))


def assert_same(got: Tensor, expected: Tensor, label: object = "") -> None:
    """Bits, -0.0 and 0.0 apart; all NaN are one."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), label
    if got.dtype == F32:
        same = (got.view(S32) == expected.view(S32)) | (got.isnan() & expected.isnan())
    else:
        same = got == expected
    if not same.all():
        where = (~same).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{label}: {len(where)} of {got.numel()} differ, first at {first}: "
            f"got {got[first].item()!r}, expected {expected[first].item()!r}"
        )


def assert_same_deployed(module: nn.Module, args: tuple[Any, ...], expected: Tensor) -> None:
    """Scripted, exported and compiled, a module gives the bits that it gives as it is."""
    assert_same(torch.jit.script(module)(*args), expected)
    with torch.no_grad():
        assert_same(torch.export.export(module, args).module()(*args), expected)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(compiled(*args), expected)


def check_fake(op: Any, args: Sequence[Any], strides: Any = Tensor.stride) -> None:
    """Shape, strides, dtype and storage offset of the fake are those of the kernel's result."""
    real = op(*args)
    with FakeTensorMode() as mode:

        def fake(x: Any) -> Any:
            return torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, x)

        got = op(*map(fake, args))
    for a, b in zip(*([x] if isinstance(x, Tensor) else x for x in (got, real)), strict=True):
        assert (a.shape, strides(a), a.dtype) == (b.shape, strides(b), b.dtype), (
            op,
            [tuple(x.shape) if isinstance(x, Tensor) else x for x in args],
        )
        assert a.storage_offset() == b.storage_offset() == 0


def fold(args: dict[str, Any], channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """multiplier, offset and post_op_params of readable arguments; no multiplier: raw sums."""
    bias = args.get("bias")
    bias = bias if bias is not None and bias.is_floating_point() else None
    code, post_ops = dtype_code(args["dst_dtype"]), args.get("post_ops", "")
    values = args.get("post_op_values", [])
    if "output_scales" in args:
        scales = args["output_scales"]
        zero = args.get("dst_zero_point")
        return ops.fold_output_scales(scales, bias, channels, code, post_ops, values, zero)
    names = ("src_scale", "weight_scale", "dst_scale")
    scales = [args.get(name) for name in names]
    if args["dst_dtype"] == S32 and scales == [None] * 3 and not post_ops and bias is None:
        return (torch.empty(0),) * 3
    src_scale, weight_scale, dst_scale = scales
    one = torch.ones(())
    return ops.fold(
        one if src_scale is None else src_scale,
        one if weight_scale is None else weight_scale,
        bias,
        dst_scale,
        args.get("dst_zero_point"),
        channels,
        code,
        post_ops,
        values,
    )


def make_call(
    args: dict[str, Any], shape: cases.LinearShape | cases.ConvShape | None = None
) -> Call:
    """`args` as for reference.linear, or with the shape of a convolution for its oracle."""
    weight, oracle = args["weight"], {}
    if not isinstance(shape, cases.ConvShape):
        op, packed, geometry = "linear", ops.pack_linear(weight), weight.shape[1]
    else:
        oracle, geometry = shape.oracle, shape.geometry
        if isinstance(shape, ConvTransposeShape):
            window = (shape.groups, shape.stride, shape.dilation)
            op, packed = "conv_transpose", ops.pack_conv_transpose(weight, *window)
        else:
            op, packed = "conv", ops.pack_conv(weight, shape.groups, shape.dilation)
    bias, code = args.get("bias"), dtype_code(args["dst_dtype"])
    multiplier, offset, params = fold(args, packed[1].shape[1])
    acc_bias = bias if bias is not None and bias.dtype == S32 else None
    tail = [code, args.get("post_ops", ""), params, args.get("post_op_srcs", [])]
    values = [args["src"], *packed, multiplier, offset, acc_bias, args.get("src_zero_point")]
    named = dict(zip(NAMES, [*values, geometry, *tail], strict=True))
    return Call(op, named, getattr(reference, op)(**args, **oracle))


@functools.lru_cache(maxsize=256)
def sampled(
    shape: cases.LinearShape | cases.ConvShape,
    src: torch.dtype = U8,
    dst: torch.dtype = U8,
    post_ops: str = "",
    narrow: bool = False,
    few_pairs: bool = False,
    old: torch.dtype | None = None,
    **options: Any,
) -> Call:
    """cases.sample as a call. `old` is the dtype of the sums' sources, by default that of dst."""
    args = cases.sample(shape, src, dst, post_ops, **options)
    if old is None and dst == F32 and "sum" in post_ops:
        old = S8  # a float32 source has no zero point
    if old is not None:
        srcs = args["post_op_srcs"]
        args["post_op_srcs"] = [cases.random_dst(shape.dst, old, i) for i in range(len(srcs))]
    if narrow:
        args["weight"] = args["weight"].clamp(-NARROW, NARROW)
    if few_pairs:
        transposed = isinstance(shape, ConvTransposeShape)  # (inputs, outputs, ...)
        weight = args["weight"].transpose(0, 1) if transposed else args["weight"]
        few = with_few_pairs(weight)
        args["weight"] = few.transpose(0, 1).contiguous() if transposed else few
    return make_call(args, shape)


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """The names of Python functions that run meanwhile."""
    called: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda f, event, _: called.append(f.f_code.co_name) if event == "call" else None)
    try:
        yield called
    finally:
        sys.setprofile(before)
