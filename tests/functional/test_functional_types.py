# SPDX-License-Identifier: Apache-2.0
"""Arguments of another type or device than the API takes: none crashes, none is read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from calls import F32, S8, S32, U8
from test_functional_errors import IMAGE, KERNEL, SRC, WEIGHT, conv, lin, refuse

import torchq.functional as TF
from torchq import Attr, PostOps, compose, saturation
from torchq.functional.packing import pack_conv


@pytest.mark.parametrize("wrong", [None, 3, "src", [1, 2], SRC.to_sparse()])
def test_what_is_no_tensor(wrong: object) -> None:
    got, s32 = f"got {type(wrong).__name__}", torch.zeros(2, 4, dtype=S32)
    if isinstance(wrong, torch.Tensor):
        got = "got torch.sparse_coo. Call .to_dense()"
    calls = {
        "linear: src": lambda: TF.linear(wrong, WEIGHT),
        "linear: post_op_srcs[0]": lin(post_op_srcs=[wrong]),
        "pack_linear: weight": lin(weight=wrong),
        "conv2d: src": conv(src=wrong),
        "conv2d: weight": conv(weight=wrong),
        "conv_transpose2d: weight": lambda: TF.conv_transpose2d(IMAGE, wrong),
        "pack_conv: weight": lambda: pack_conv(wrong),
        "matmul: weight": lambda: TF.matmul(SRC, wrong),
        "gemm_u8s8s32: a": lambda: TF.gemm_u8s8s32(wrong, WEIGHT.T),
        "reorder: src": lambda: TF.reorder(wrong, S8),
        "requantize_dynamic: acc": lambda: TF.requantize_dynamic(wrong, 1.0),
        "eltwise: src": lambda: TF.eltwise(wrong, "relu"),
        "binary: src1": lambda: TF.binary(s32, wrong, "add"),
        "prelu: weight": lambda: TF.prelu(s32, wrong),
        "attention: value": lambda: TF.attention(SRC, SRC, wrong),
        "dynamic_attention: key": lambda: TF.dynamic_attention(SRC.float(), wrong, SRC.float()),
        "compress_rows: src": lambda: TF.compress_rows(wrong),
        "decompress_rows: src": lambda: TF.decompress_rows(wrong),
        "compressed_attention: key": lambda: TF.compressed_attention(SRC.float(), wrong, SRC),
        "softmax: src": lambda: TF.softmax(wrong),
        "max_pool: src": lambda: TF.max_pool(wrong, 2),
        "concat: srcs[1]": lambda: TF.concat([SRC, wrong]),
        "sum: srcs[0]": lambda: TF.sum([wrong]),
    }
    if wrong is not None:
        calls["linear: bias"] = lin(bias=wrong)
        calls["matmul: bias"] = lambda: TF.matmul(SRC, WEIGHT.T, wrong)
    for named, call in calls.items():
        refuse(TypeError, call, f"torchq.{named} must be ", got)


@pytest.mark.parametrize("wrong", [3, "scales:src:0", PostOps(), SRC])
def test_what_is_no_attr(wrong: object) -> None:
    calls = {
        "linear": lin(wrong),
        "conv2d": conv(attr=wrong),
        "matmul": lambda: TF.matmul(SRC, WEIGHT.T, attr=wrong),
        "add": lambda: TF.add(SRC, SRC, wrong),
        "sum": lambda: TF.sum([SRC], attr=wrong),
        "reorder": lambda: TF.reorder(SRC, S8, wrong),
        "attention": lambda: TF.attention(SRC, SRC, SRC, attr=wrong),
        "eltwise": lambda: TF.eltwise(SRC, "relu", attr=wrong),
        "max_pool": lambda: TF.max_pool(IMAGE, 2, attr=wrong),
    }
    for op, call in calls.items():
        got = f"got {type(wrong).__name__}"
        refuse(TypeError, call, f"torchq.{op}: attr must be of type Attr", got, "Attr.parse")


def test_sources_are_lists() -> None:
    """A tensor of one row is no list of one tensor: its first row would be taken."""
    attr = Attr().set_post_ops(PostOps().append_sum(dtype=F32))
    old = torch.zeros(1, 4)
    refuse(
        TypeError,
        lin(attr, post_op_srcs=old),
        "linear: post_op_srcs must be a list of tensors, got Tensor",
        "[x]",
    )
    refuse(TypeError, lambda: TF.concat(SRC), "concat: srcs must be a list", "got Tensor", "[x]")
    refuse(TypeError, lambda: TF.sum(SRC), "sum: srcs must be a list of tensors", "got Tensor")
    unused = lambda: TF.matmul(SRC.float(), WEIGHT.T, post_op_srcs=[old])  # noqa: E731
    refuse(ValueError, unused, "matmul: post_op_srcs must be 0 tensors", "got 1", "Pass")


@pytest.mark.parametrize("wrong", [0, "", [], {}])
def test_a_destination_that_only_looks_like_none(wrong: object) -> None:
    for call in (
        lambda: TF.eltwise(SRC, "relu", dst_dtype=wrong),
        lambda: TF.binary(SRC, SRC, "add", dst_dtype=wrong),
        lambda: TF.sum([SRC], dst_dtype=wrong),
        lambda: TF.max_pool(IMAGE, 2, dst_dtype=wrong),
        lambda: TF.resampling(IMAGE, 3, dst_dtype=wrong),
        lin(dst=wrong),
    ):
        refuse(NotImplementedError, call, "dst_dtype must be one of", f"got {wrong}", "nearest")


def test_numbers_that_would_be_rounded() -> None:
    for wrong in (1.5, True, "1"):
        co = lambda co=wrong: TF.gemm_u8s8s32(SRC, WEIGHT.T, co=co)  # noqa: E731
        refuse(TypeError, co, "gemm_u8s8s32: co must be an integer", f"got {wrong!r}", "int")
        seed = lambda seed=wrong: TF.reorder(SRC, S8, seed=seed)  # noqa: E731
        refuse(TypeError, seed, "reorder: seed must be an integer", f"got {wrong!r}", "int")
    refuse(ValueError, lambda: TF.gemm_u8s8s32(SRC, WEIGHT.T, co=2**31), "co must be in", "got 21")


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.tensor([1.0, float("nan"), 1.0, 1.0])])
def test_scales_of_dynamic_weights(wrong: float | torch.Tensor) -> None:
    call = lambda: TF.dynamic_linear(SRC.float(), WEIGHT, wrong)  # noqa: E731
    parts = ("dynamic_linear: weight_scale must be finite and greater than 0, got", "Check")
    refuse(ValueError, call, *parts)


def test_slopes_that_do_not_broadcast() -> None:
    x = torch.zeros(2, 3, 4)
    for shape in ((2,), (4,), (3, 2), (1, 2, 3, 4)):
        call = lambda shape=shape: TF.prelu(x, torch.ones(shape))  # noqa: E731
        refuse(ValueError, call, "prelu: weight must broadcast to src [2, 3, 4], got", "one per")


def test_arguments_of_attr_are_names() -> None:
    with pytest.raises(ValueError, match=r"arg must be one of src, .*, got 1\. Did you"):
        Attr().set_scales(1, 0, 0.5)  # DNNL_ARG_SRC
    one_group = lambda: Attr().set_scales("src", 1, groups=2)  # noqa: E731
    refuse(ValueError, one_group, "must have two group sizes", "got groups 2", "Groups")


def test_meta_tensors_do_not_mix_with_others() -> None:
    """Meta wins in torch's dispatch: the fake kernel would give a dst that nothing has written."""
    zero, meta = torch.zeros(8, dtype=S32), "meta"
    for call, named in (
        (lambda: TF.dequantize(SRC, 0.5, zero.to(meta)), "zero_point on meta and src, scale"),
        (lambda: TF.concat([SRC, SRC.to(meta)]), "srcs on meta and srcs, scales"),
        (lin(weight=WEIGHT.to(meta)), "weight, compensation, pair_bound on meta and src"),
    ):
        refuse(ValueError, call, "must be on one device, got", named, "on the CPU", "Load")
    assert TF.quantize(SRC.float().to(meta), 0.5).shape == SRC.shape, "scales of our own"
    assert TF.eltwise(SRC.to(meta), "relu").is_meta


def test_what_attributes_are_read_from() -> None:
    for wrong in (None, 0, [], SRC):
        for parse in (Attr.parse, PostOps.parse):
            call = lambda parse=parse, wrong=wrong: parse(wrong)  # noqa: E731
            refuse(TypeError, call, "parse: text must be of type str, got ", "Pass what str(")
    for wrong in ("source", None, 1):
        with pytest.raises(ValueError, match=r"Attr.check: arg must be one of src, weights, dst"):
            Attr().check(wrong, (2, 3))
    Attr().set_rnn_weights_projection_qparams(0, 1.0).check("weights_projection", (1, 1, 4, 4))
    for name in ("weight", "bias"):
        given = {"weight": None} | {name: 3}
        call = lambda given=given: PostOps().append_dw_conv(**given)  # noqa: E731
        refuse(TypeError, call, f"append_dw_conv: {name} must be of type Tensor, got int", "Pass")


@pytest.mark.parametrize("wrong", [0.5, float("nan"), None, 256, -1])
def test_zero_points_of_the_emulation(wrong: object) -> None:
    image, kernel = torch.zeros(1, 8, 5, 5, dtype=SRC.dtype), torch.ones(4, 8, 3, 3, dtype=S8)
    transposed = torch.ones(8, 4, 3, 3, dtype=S8)
    error = ValueError if isinstance(wrong, int) else TypeError
    for call in (
        lambda: saturation.emulate_linear(SRC, WEIGHT, wrong),
        lambda: saturation.emulate_conv(image, kernel, src_zero_point=wrong),
        lambda: saturation.emulate_conv_transpose(image, transposed, src_zero_point=wrong),
    ):
        refuse(error, call, "src_zero_point of torch.uint8 must be ", f"got {wrong}", "Pass")


def test_weights_of_the_emulation() -> None:
    refuse(TypeError, lambda: saturation.emulate_linear(SRC, None), "weight must be of type Tensor")
    for dtype in (torch.uint8, torch.int64, torch.bool):
        call = lambda dtype=dtype: saturation.halve(WEIGHT.to(dtype))  # noqa: E731
        refuse(TypeError, call, "halve: weight must be int8 or floating point", f"got {dtype}")


def test_numbers_of_compose() -> None:
    for wrong in (-1, 1.5, None):
        call = lambda wrong=wrong: compose([], wrong)  # noqa: E731
        refuse((TypeError, ValueError), call, "compose: channels must be", f"got {wrong}", "Pass")
    for wrong in (0.0, -1.0, float("nan"), None):
        call = lambda wrong=wrong: compose([], 4, src_scale=wrong)  # noqa: E731
        refuse((TypeError, ValueError), call, "compose: src_scale must be", f"got {wrong}")
    call = lambda: compose([], 4, bias=0.5)  # noqa: E731
    refuse(TypeError, call, "compose: bias must be of type Tensor, got float", "Pass")


@pytest.mark.parametrize("value", [1.5, "1", None, torch.tensor(1.5), torch.uint8], ids=repr)
def test_integers(value: object) -> None:
    """The dispatcher takes the integer part of a tensor, and the number of a dtype."""
    a, b = SRC, WEIGHT.T.contiguous()
    calls: dict[str, Callable[..., object]] = {
        "gemm_u8s8s32: ao": lambda v: TF.gemm_u8s8s32(a, b, ao=v),
        "gemm_s8s8s32: bo": lambda v: TF.gemm_s8s8s32(a.to(S8), b, bo=v),
        "softmax: dim": lambda v: TF.softmax(SRC, v),
        "log_softmax: dim": lambda v: TF.log_softmax(SRC, v),
        "concat: dim": lambda v: TF.concat([SRC, SRC], dim=v),
        "reduction: dims": lambda v: TF.reduction(SRC, "sum", [v]),
        "group_norm: num_groups": lambda v: TF.group_norm(SRC, v),
        "conv2d: groups": lambda v: conv(groups=v)(),
        "conv_transpose2d: groups": lambda v: TF.conv_transpose2d(IMAGE, KERNEL, groups=v),
    }
    if value is not None:
        calls["avg_pool: divisor_override"] = lambda v: TF.avg_pool(IMAGE, 2, divisor_override=v)
    for name, call in calls.items():
        parts = f"torchq.{name} must be an integer", "got", "Pass an int"
        refuse(TypeError, lambda c=call: c(value), *parts)


def test_sizes_are_integers() -> None:
    """Sizes of a traced tensor and numpy's integers are integers, too."""
    depthwise = torch.ones(8, 1, 3, 3, dtype=S8)

    def call(src: torch.Tensor) -> torch.Tensor:
        return TF.conv2d(TF.group_norm(src, src.shape[1] // 2, dst_dtype=U8), depthwise,
                         groups=src.shape[1])  # fmt: skip

    image = torch.randint(0, 256, IMAGE.shape, dtype=U8)
    assert torch.equal(torch.jit.trace(call, image)(image), call(image))
    assert torch.equal(TF.softmax(image, np.int64(1)), TF.softmax(image, torch.tensor(1)))
