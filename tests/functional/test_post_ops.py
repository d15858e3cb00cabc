# SPDX-License-Identifier: Apache-2.0
"""The text grammar, validation and folding rule of post-ops."""

import re
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchq.functional as TF
from torchq import Attr
from torchq.attributes.post_op import BINARY_ALGS, ELTWISE_ALGS, Eltwise, Sum
from torchq.attributes.post_ops import MAX_POST_OPS, PostOps

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
MASKS = st.integers(0, 4095)
DTYPES = {"u8": torch.uint8, "s8": torch.int8, "s32": torch.int32, "f32": torch.float32}

INTEGERS = [torch.uint8, torch.int8]


def bits(value: float) -> bytes:
    return struct.pack("<f", value)


@st.composite
def chains(draw: st.DrawFn) -> PostOps:
    """Any valid chain, with values."""
    sum_dtype = draw(st.sampled_from([None, torch.uint8, torch.int8, torch.int32, torch.float32]))
    limits = (0, 0) if sum_dtype is torch.float32 else (-(2**31), 2**31 - 1)
    if sum_dtype in (torch.uint8, torch.int8):
        limits = (torch.iinfo(sum_dtype).min, torch.iinfo(sum_dtype).max)
    chain = PostOps()
    kinds = ["sum", "eltwise", "binary", "prelu", "dw_conv"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=6)):
        mask = draw(MASKS)
        values = torch.tensor(draw(st.lists(FLOATS, min_size=1, max_size=1 if mask == 0 else 5)))
        if kind == "sum":
            chain.append_sum(draw(FLOATS), draw(st.integers(*limits)), sum_dtype)
        elif kind == "binary":
            dtype = draw(st.sampled_from(list(DTYPES.values())))
            values = values.clamp(0, 100).to(dtype)
            chain.append_binary(draw(st.sampled_from(BINARY_ALGS)), values, mask)
        elif kind == "prelu":
            chain.append_prelu(values, mask)
        elif kind == "dw_conv":
            kernel = draw(st.integers(1, 4))
            filters = torch.ones(5, 1, kernel, kernel, dtype=draw(st.sampled_from(INTEGERS)))
            bias = draw(st.sampled_from([None, torch.zeros(5), torch.ones(5, dtype=torch.int32)]))
            padding = draw(st.integers(0, kernel - 1))
            stride, dtype = draw(st.integers(1, 9)), draw(st.sampled_from(INTEGERS))
            chain.append_dw_conv(filters, bias, stride=stride, padding=padding, dtype=dtype)
        else:
            alg = draw(st.sampled_from(ELTWISE_ALGS))
            alpha, beta = sorted(draw(st.tuples(FLOATS, FLOATS)))
            alpha = 1.0 if alg == "soft_relu" and alpha == 0 else alpha
            chain.append_eltwise(alg, alpha, beta, draw(FLOATS))
    return chain


@given(chains())
def test_text_round_trip(chain: PostOps) -> None:
    text = str(chain)
    again = PostOps.parse(text, chain.values)
    assert again == chain
    assert hash(again) == hash(chain)
    assert str(again) == text
    assert str(PostOps.parse(text)) == text  # structure alone


@given(FLOATS)
def test_scalar_round_trip_is_bitwise(value: float) -> None:
    (op,) = PostOps.parse(str(PostOps().append_sum(scale=value)))
    assert isinstance(op, Sum)
    assert bits(op.scale) == bits(value)


@given(FLOATS)
def test_scalar_text_reads_the_same_as_float32_and_float64(value: float) -> None:
    text = str(PostOps().append_eltwise("linear", value, 1.0)).split(":")[1]
    assert "+" not in text
    assert bits(float(text)) == bits(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "sum:0.5"),
        (1.0, "sum"),
        (6, "sum:6"),
        (0.0, "sum:0"),
        (-0.0, "sum:-0"),
        (0.1, "sum:0.1"),
        (1 / 3, "sum:0.33333334"),
        (1e-45, "sum:1e-45"),
        (1e-5, "sum:1e-5"),
        (3.4e38, "sum:3.4e38"),
        (-3.4028235e38, "sum:-3.4028235e38"),
        (16777216.0, "sum:16777216"),
        (1e16, "sum:1e16"),
        # Its shortest float32 text, 7.038531e-26, rounds to the next float32 by way of float64.
        (struct.unpack("<f", b"\xfd\x43\xae\x15")[0], "sum:7.038530691851209e-26"),
    ],
)
def test_scalar_text(value: float, text: str) -> None:
    chain = PostOps().append_sum(value)
    assert str(chain) == text
    assert bits(PostOps.parse(text)[0].scale) == bits(value)  # type: ignore[union-attr]


def test_scalar_text_ignores_numpy_print_options() -> None:
    with np.printoptions(precision=2, legacy="1.13"):
        assert str(PostOps().append_sum(1 / 3)) == "sum:0.33333334"


def test_defaults_are_omitted_from_the_end_only() -> None:
    assert str(PostOps().append_sum(dtype=torch.uint8)) == "sum:1:0:u8"
    assert str(PostOps().append_sum(zero_point=3)) == "sum:1:3"
    assert str(PostOps().append_eltwise("clip", 0, 6)) == "eltwise_clip:0:6"
    assert str(PostOps().append_eltwise("tanh", scale=2)) == "eltwise_tanh:0:0:2"
    assert str(PostOps()) == ""
    assert len(PostOps.parse("")) == 0


def test_explicit_defaults_are_read_and_not_printed() -> None:
    assert str(PostOps.parse("sum:1:0+eltwise_relu:0:0:1+binary_add:2:f32")) == (
        "sum+eltwise_relu+binary_add:2"
    )


def test_tanh_example_of_the_output_scale_documentation() -> None:
    """dst = 1/scale_dst * tanh(...): the scale of an eltwise multiplies its result."""
    assert PostOps.parse("eltwise_tanh:0:0:4")[0] == Eltwise("tanh", scale=4.0)


@pytest.mark.parametrize(
    ("text", "position", "expectation"),
    [
        ("eltwise_tnah", 0, "Did you mean 'eltwise_tanh'?"),
        ("relu", 0, "Did you mean 'eltwise_relu'?"),
        ("sum+eltwise_foo", 4, "post-op must be one of sum, eltwise_relu"),
        ("sum+", 4, "post-op must be one of"),
        ("+sum", 0, "post-op must be one of"),
        (" sum", 0, "post-op must be one of"),
        ("sum:", 4, "scale must be a number like 6, 0.5, 1e-5 or 1e20 (without '+')"),
        ("sum::3", 4, "scale must be a number"),
        ("sum:1e+5", 4, "(without '+')"),
        ("sum:inf", 4, "scale must be a number"),
        ("sum:nan", 4, "scale must be a number"),
        ("sum:0x10", 4, "scale must be a number"),
        ("sum:1,5", 4, "scale must be a number"),
        ("sum:\u0661", 4, "scale must be a number"),  # an Arabic digit
        ("sum:3.5e38", 4, "scale must be finite in float32"),
        ("sum:1:1.5", 6, "zero_point must be an integer like 0 or 128"),
        ("sum:1:300:u8", 0, "must be in [0, 255], got 300"),
        ("sum:1:0:u9", 8, "dtype must be one of torch.uint8 (u8)"),
        ("sum:1:0:u8:1", 0, "must have the form sum[:<scale>][:<zero_point>][:<dtype>]"),
        ("sum+binary_add", 4, "must have the form binary_add:<mask>[:<dtype>]"),
        ("binary_add:-1", 0, "mask must be in [0, 4095], got -1"),
        ("sum+eltwise_clip:6:0", 4, "beta must be >= alpha for clip"),
        ("prelu", 0, "must have the form prelu:<mask>"),
    ],
)
def test_parsing_is_strict(text: str, position: int, expectation: str) -> None:
    with pytest.raises(ValueError) as error:
        PostOps.parse(text)
    assert f"torchq.PostOps.parse: at position {position}, got " in str(error.value)
    assert expectation in str(error.value)


def test_unknown_algorithm_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError) as error:
        PostOps().append_eltwise("gelu")
    message = str(error.value)
    assert message.startswith("torchq.PostOps.append_eltwise: alg must be one of relu, linear, ")
    assert "got 'gelu'. Did you mean 'gelu_" in message
    with pytest.raises(ValueError, match="Did you mean 'mul'"):
        PostOps().append_binary("mult", 1.0, 0)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.5e38, 1e300])
def test_scalars_must_be_finite_float32(value: float) -> None:
    with pytest.raises(ValueError, match="append_eltwise: alpha must be finite in float32, got"):
        PostOps().append_eltwise("relu", value)


@pytest.mark.parametrize("value", ["1", None, True, [1.0], torch.ones(2)])
def test_scalars_must_be_numbers(value: object) -> None:
    with pytest.raises(TypeError, match="append_sum: scale must be a number, got"):
        PostOps().append_sum(value)  # type: ignore[arg-type]


def test_clip_needs_ordered_bounds() -> None:
    PostOps().append_eltwise("clip", 2, 2)
    with pytest.raises(ValueError, match=r"beta must be >= alpha for clip, got alpha 6.0, beta 0"):
        PostOps().append_eltwise("clip", 6, 0)


def test_soft_relu_needs_alpha() -> None:
    with pytest.raises(ValueError, match="Use alpha=1 for oneDNN v2's soft_relu"):
        PostOps().append_eltwise("soft_relu", 0)


X = torch.linspace(-4, 4, 33)


@pytest.mark.parametrize(
    ("alg", "alpha", "beta", "expected"),
    [
        ("relu", None, None, F.relu(X)),
        ("elu", None, None, F.elu(X)),
        ("swish", None, None, F.silu(X)),
        ("soft_relu", None, None, F.softplus(X)),
        ("hardsigmoid", None, None, F.hardsigmoid(X)),
        ("hardswish", None, None, F.hardswish(X)),
        ("linear", 2, None, 2 * X),
        ("pow", None, 3, X**3),
        ("swish", 0, None, X / 2),
        ("hardsigmoid", 0.2, None, (0.2 * X + 0.5).clamp(0, 1)),
        ("hardsigmoid", None, 0, (X / 6).clamp(0, 1)),
    ],
)
def test_parameters_that_are_left_out_are_those_of_the_field(
    alg: str, alpha: float | None, beta: float | None, expected: Tensor
) -> None:
    """Not 0, with which swish is x / 2, hardswish 0 and elu relu; the text says them all."""
    torch.testing.assert_close(TF.eltwise(X, alg, alpha, beta), expected, rtol=1e-5, atol=1e-6)
    chain = PostOps().append_eltwise(alg, alpha, beta)
    again = TF.binary(X, torch.zeros(1), "add", Attr().set_post_ops(PostOps.parse(str(chain))))
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("alg", "given", "name"),
    [
        ("clip", {}, "alpha"),
        ("clip", {"alpha": 0}, "beta"),
        ("linear", {}, "alpha"),
        ("pow", {}, "beta"),
    ],
)
def test_parameters_without_a_default_must_be_given(
    alg: str, given: dict[str, float], name: str
) -> None:
    needed = rf"append_eltwise: {name} must be given for {alg}, .*Pass a number"
    with pytest.raises(ValueError, match=needed):
        PostOps().append_eltwise(alg, **given)
    with pytest.raises(ValueError, match=needed):
        TF.eltwise(X, alg, **given)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("eltwise_swish", "eltwise_swish:<alpha>[:<beta>][:<scale>]"),
        ("eltwise_linear", "eltwise_linear:<alpha>[:<beta>][:<scale>]"),
        ("eltwise_hardswish:0.2", "eltwise_hardswish:<alpha>:<beta>[:<scale>]"),
        ("eltwise_pow:2", "eltwise_pow:<alpha>:<beta>[:<scale>]"),
    ],
)
def test_text_has_the_parameters_whose_default_is_not_zero(text: str, form: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"must have the form {form}")):
        PostOps.parse(text)
    zeros = str(PostOps().append_eltwise(text.partition(":")[0].removeprefix("eltwise_"), 0, 0))
    assert PostOps.parse(zeros)[0].alpha == PostOps.parse(zeros)[0].beta == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("alg", "nearest"),
    [
        ("eltwise_relu", "relu"),
        ("eltwise_soft_relu", "soft_relu"),
        ("bounded_relu", "clip"),
        ("relu6", "clip"),
        ("silu", "swish"),
        ("sigmoid", "logistic"),
        ("clip_v2", "clip"),
        ("tanh_use_dst_for_bwd", "tanh"),
    ],
)
def test_names_of_others_get_the_right_hint(alg: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'"):
        PostOps().append_eltwise(alg, 1.0)
    if not alg.startswith("eltwise_"):
        with pytest.raises(ValueError, match=f"Did you mean 'eltwise_{nearest}'"):
            PostOps.parse(f"eltwise_{alg}:1")


def test_at_most_32_post_ops() -> None:
    chain = PostOps()
    for _ in range(MAX_POST_OPS):
        chain.append_eltwise("relu")
    with pytest.raises(ValueError, match="at most 32 post-ops, got sum as number 33"):
        chain.append_sum()


@pytest.mark.parametrize("text", [f"eltwise_{alg}:1:1" for alg in ELTWISE_ALGS])
def test_every_eltwise_is_supported(text: str) -> None:
    PostOps.parse(text).check_supported("linear")
