# SPDX-License-Identifier: Apache-2.0
"""Errors of linear and conv: each has the op, the argument, the value and a remedy."""

from __future__ import annotations

import re
from typing import Any

import cases
import pytest
import torch
from calls import F32, S8, S32, U8, Call, sampled
from cases import LinearShape

ops = torch.ops.torchq
SHAPE = LinearShape(4, 20, 10)
CONV = cases.conv("conv", (8, 20), (6, 7), 3, 1, 1)
DEPTHWISE = cases.depthwise("dw", 20, (6, 7), padding=1)
OP = {"linear": SHAPE, "conv": CONV}


def refuse(call: Call, error: type[Exception], *parts: str, **changes: Any) -> None:
    """The call with `changes` raises `error`, whose message has these parts in this order."""
    with pytest.raises(error) as caught:
        call.run(**changes)
    message = str(caught.value).split("\nException raised from")[0]
    pattern = ".*".join(map(re.escape, (f"torchq.{call.op}: ", *parts)))
    assert re.search(pattern, message, re.DOTALL), (pattern, message)
    assert message.endswith("."), message


@pytest.fixture(params=OP)
def call(request: pytest.FixtureRequest) -> Call:
    return sampled(OP[request.param], U8, U8, "sum:0.5:3+binary_mul:2", bias=S32)


def test_src(call: Call):
    src = call.args["src"]
    for dtype, name in ((F32, "float32"), (S32, "int32"), (torch.bool, "bool")):
        parts = ("src must be uint8 or int8", f"got {name}", "Quantize it first")
        refuse(call, TypeError, *parts, src=src.to(dtype))


@pytest.mark.parametrize("name", ["weight", "compensation", "pair_bound", "multiplier", "offset"])
def test_parameters(call: Call, name: str):
    good = call.args[name]
    for dtype in (torch.int64, torch.float64):
        changes = {name: good.to(dtype)}
        refuse(call, TypeError, f"{name} must be ", "got ", ". Pass what", **changes)
    strided = torch.stack((good, good), -1)[..., 0]
    changes = {name: strided}
    refuse(call, ValueError, f"{name} must be contiguous", "got strides", ".cont", **changes)
    if name != "weight":
        longer = torch.cat((good, good), -1)
        refuse(call, ValueError, "got ", **{name: longer})


@pytest.mark.parametrize("name", ["multiplier", "offset", "post_op_params"])
def test_parameters_have_no_gradients(call: Call, name: str):
    changes = {name: call.args[name].clone().requires_grad_()}
    refuse(call, RuntimeError, f"{name} requires grad", "no backward", **changes)


def test_scales_have_no_gradients():
    src, scale = torch.zeros(3, 4, dtype=U8), torch.ones((), requires_grad=True)
    zero = torch.zeros((), dtype=S32)
    with pytest.raises(RuntimeError, match=r"torchq.dequantize: \w*scale requires grad"):
        ops.dequantize(src, scale, zero)
    with pytest.raises(RuntimeError, match=r"torchq.requantize: dst_scale requires grad"):
        ops.requantize(src, torch.ones(()), zero, scale, zero, 1)
    two, zeros = torch.ones(2, requires_grad=True), torch.zeros(2, dtype=S32)
    with pytest.raises(RuntimeError, match=r"torchq.eltwise: scales requires grad"):
        ops.eltwise(src, two, zeros, 1, "eltwise_tanh")
    with pytest.raises(RuntimeError, match=r"torchq.fold: weight_scale requires grad"):
        ops.fold(torch.ones(1), two, None, None, None, 2, 6, "", [])


@pytest.mark.parametrize("name", ["acc_bias", "post_op_params"])
def test_optional_parameters(call: Call, name: str):
    good = call.args[name]
    refuse(call, TypeError, f"{name} must be ", "got float64", ".", **{name: good.double()})
    parts = (f"{name} must have {good.numel()} values", f"got {good.numel() - 1}", "another layer")
    refuse(call, ValueError, *parts, **{name: good[:-1]})


def test_source_zero_point(call: Call):
    for src, bad in ((U8, (-1, 256)), (S8, (-129, 128))):
        for value in bad:
            zero_point = torch.tensor(value, dtype=S32)
            parts = ("src_zero_point must lie in [", f"got {value}.")
            source = call.args["src"].view(src)
            refuse(call, ValueError, *parts, src=source, src_zero_point=zero_point)
    refuse(
        call, ValueError, "src_zero_point must have 1 value", src_zero_point=torch.zeros(2).int()
    )
    refuse(
        call, TypeError, "src_zero_point must be int32, got int64", src_zero_point=torch.tensor(3)
    )


def test_destination(call: Call):
    for code in (23, 7, 4, -1, 99):
        parts = ("dst_dtype must be 0 (uint8)", f"got {code}.", "nearest supported")
        refuse(call, NotImplementedError, *parts, dst_dtype=code)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eltwise_clip:1:0", "the bounds of 'eltwise_clip:1:0' must be in order, lower:upper"),
        ("eltwise_clip:nan:nan", "expected a number in 'eltwise_clip:nan:nan', got 'nan'"),
        ("eltwise_linear:inf", "expected a number in 'eltwise_linear:inf', got 'inf'"),
        ("eltwise_soft_relu:0", "alpha of 'eltwise_soft_relu:0', which divides, must not be 0"),
    ],
)
def test_numbers_in_post_ops(call: Call, text: str, expected: str):
    """As PostOps.parse has them, so that meta and the op refuse the same text."""
    refuse(call, ValueError, expected, post_ops=text)


def test_post_ops(call: Call):
    refuse(
        call, ValueError, "the algorithm in 'eltwise_sin' must be one of", post_ops="eltwise_sin"
    )
    refuse(call, ValueError, "expected a number in 'sum:x', got 'x'", post_ops="sum:x")
    [old] = call.args["post_op_srcs"]
    for srcs in ([], [old, old]):
        parts = ("needs 1 sources", f"got {len(srcs)}", "Pass one")
        refuse(call, ValueError, *parts, post_op_srcs=srcs)
    parts = ("post_op_srcs[0] must have shape", "got", "A sum has the shape of dst")
    refuse(call, ValueError, *parts, post_op_srcs=[old[:1, :1]])
    refuse(call, TypeError, "post_op_srcs must be uint8", "got Short", post_op_srcs=[old.short()])
    changes = {"post_ops": "sum:1:-2147483648:u8+eltwise_relu:0.1"}
    changes |= {"post_op_params": torch.ones(1 + call.args["compensation"].shape[1])}
    refuse(call, ValueError, "sum has zero point -2147483648", "allows 0 to 255", **changes)
    parts = ("sum has zero point 3", "float32 source")
    refuse(call, ValueError, *parts, post_op_srcs=[old.float()])


def test_a_sum_source_that_requires_grad(call: Call):
    source = call.args["post_op_srcs"][0].float().requires_grad_()
    changes = {"post_ops": "sum:0.5+binary_mul:2", "post_op_srcs": [source]}
    refuse(call, RuntimeError, "requires grad", "torch.no_grad()", **changes)
    with torch.no_grad():
        call.run(**changes)


def test_raw_accumulators_are_int32(call: Call):
    raw = {"multiplier": torch.empty(0), "post_ops": "", "post_op_srcs": []}
    parts = ("empty multiplier", "int32 destination", "got uint8", "Pass the multiplier")
    refuse(call, ValueError, *parts, **raw)
    parts = ("empty multiplier", "no post-ops", "got int32 and post_ops 'eltwise_relu'")
    refuse(call, ValueError, *parts, **raw | {"dst_dtype": 3, "post_ops": "eltwise_relu"})


def test_foreign_weights(call: Call):
    """Packed for another op, for other sizes, or not packed."""
    linear, conv, depthwise = (sampled(shape).args["weight"] for shape in (SHAPE, CONV, DEPTHWISE))
    for weight in (linear, conv, depthwise, linear[..., :2].contiguous(), linear[0], conv[:1]):
        if weight.shape != call.args["weight"].shape:
            refuse(call, ValueError, "weight", "got ", "Pack it with", weight=weight)


def test_foreign_weights_of_convolutions():
    for shape, weight in ((CONV, DEPTHWISE), (DEPTHWISE, CONV)):
        call, channels = sampled(shape), shape.in_channels
        parts = (
            f"src has {channels} channels, groups={shape.groups} and a kernel of 3x3 with",
            "Pack",
        )
        refuse(call, ValueError, *parts, weight=sampled(weight).args["weight"])


def test_linear_src_shape():
    call = sampled(SHAPE)
    parts = ("src must have 10 features, got 13", "in src [2, 13]", "Check")
    refuse(call, ValueError, *parts, src=torch.zeros(2, 13, dtype=U8))
    parts = ("src must have at least one dimension", "Pass")
    refuse(call, ValueError, *parts, src=torch.zeros((), dtype=U8))


def test_conv_src_shape():
    call = sampled(CONV)
    for shape in ((6, 7), (1, 2, 8, 6, 6, 7)):
        parts = ("src must be (N, C, spatial...)", f"got {list(shape)}", "unsqueeze")
        refuse(call, ValueError, *parts, src=torch.zeros(shape, dtype=U8))
    parts = ("src must have 8 channels", "got 3 in src [1, 3, 6, 7]", "Check")
    refuse(call, ValueError, *parts, src=torch.zeros(1, 3, 6, 7, dtype=U8))
    call = sampled(cases.conv("valid", (8, 20), (6, 7), 3))
    parts = ("src [1, 8, 2, 7] is smaller than the kernel", "kernel 3x3, stride 1x1", "Enlarge")
    refuse(call, ValueError, *parts, src=torch.zeros(1, 8, 2, 7, dtype=U8))


@pytest.mark.parametrize(
    "geometry",
    [
        [],
        [3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
        [3, 3, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [3, 3, 1, 1, -1, 1, 1, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 1],
        [0, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1, 1, 2**24, 1, 1, 1],
    ],
    ids=str,
)
def test_geometry(geometry: list[int]):
    refuse(sampled(CONV), ValueError, " must be ", "got", geometry=geometry)


@pytest.mark.parametrize("groups", [0, -1, 3])
def test_groups(groups: int):
    geometry = [*CONV.geometry[:-2], groups, 8]
    refuse(sampled(CONV), ValueError, "groups must divide", f"groups={groups}", geometry=geometry)


def test_int32_sum_source_with_a_zero_point():
    """old - zero_point leaves int32: refused, or computed exactly, but never wrapped."""
    shape = LinearShape(2, 17, 4)
    call = sampled(shape, U8, F32, "eltwise_relu+sum:1:7", old=S32)
    old = torch.full(shape.dst, -(2**31), dtype=S32)
    try:
        dst = call.run(post_op_srcs=[old])
    except ValueError:
        return
    assert (dst < 0).all()


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is a prototype or goes
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(4).to_sparse(), r"dense CPU tensor, got a Sparse .*\.to_dense\(\)"),
        (lambda: torch.eye(4).to_sparse_csr(), r"dense CPU tensor, got a SparseCsr .*\.to_dense"),
        (lambda: torch.eye(4).to_mkldnn(), r"dense CPU tensor, got a Mkldnn .*\.to_dense\(\)"),
        (_nested, "dense CPU tensor, got a nested one"),
        (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 3, torch.quint8),
         r"plain tensor, got QUInt8.*\.int_repr\(\)"),
    ],
)  # fmt: skip
def test_other_kinds_of_tensors(make: Any, message: str):
    """The dispatcher would say that there is no kernel; of every op, wherever the tensor is."""
    given, scale, zero = make(), torch.ones(()), torch.zeros((), dtype=S32)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), pytest.raises((TypeError, ValueError), match=f"dequantize: src .*{message}"):
            ops.dequantize(given, scale, zero)
    with pytest.raises((TypeError, ValueError), match=rf"torchq\.concat: srcs must be .*{message}"):
        ops.concat([torch.zeros(4, 4), given], torch.ones(3), torch.zeros(3, dtype=S32), 0, 6)
    with pytest.raises((TypeError, ValueError), match=rf"torchq\.pack_linear: weight .*{message}"):
        ops.pack_linear(given)


@pytest.mark.parametrize(
    "make", [torch._efficientzerotensor, lambda shape: torch._neg_view(torch.ones(shape))]
)
def test_tensors_that_are_computed_when_read(make: Any) -> None:
    """torch resolves them in arguments of all kinds but lists that may be None."""
    window, zeros = [3, 3, 2, 2, 1, 1, 1, 1, 1, 1], torch.zeros(2, dtype=S32)
    args = [
        torch.zeros(2, 4, 5, 5, dtype=U8),
        zeros[:1],
        window,
        False,
        True,
        None,
        torch.ones(2),
        zeros,
    ]
    message = r"avg_pool: post_op_srcs must hold its values.*\.clone\(\)"
    with pytest.raises(ValueError, match=message):
        ops.avg_pool(*args, 0, "binary_mul:0", [make((1, 1, 1, 1))])


def test_one_value_of_any_rank():
    """Scales and zero points may have any rank, also for sources without dims: modules have [1]."""
    scale, zero = torch.tensor([[0.5]]), torch.tensor([3], dtype=S32)
    for src in (torch.tensor(2.0), torch.full((2,), 2.0)):
        result = ops.quantize(src, scale, zero, 0)
        assert result.shape == src.shape and (result == 7).all()
        back = ops.dequantize(result, scale, zero)
        assert torch.equal(back, src)
