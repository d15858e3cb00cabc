# SPDX-License-Identifier: Apache-2.0
"""The text grammar, validation and folding rule of post-ops."""

import copy
import pickle
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
from torchq.attributes.post_ops import MAX_POST_OPS, PostOps, foldable

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


@pytest.mark.parametrize(
    ("zero_point", "dtype", "expected"),
    [
        (5, torch.float32, "zero_point must be 0 for a torch.float32 source, got 5"),
        (256, torch.uint8, r"must be in \[0, 255\], got 256"),
        (-129, "s8", r"must be in \[-128, 127\], got -129"),
        (2**31, None, r"zero_point must be in \[-2147483648, 2147483647\]"),
    ],
)
def test_sum_zero_point(zero_point: int, dtype: object, expected: str) -> None:
    with pytest.raises(ValueError, match=r"torchq\.PostOps\.append_sum: .*" + expected):
        PostOps().append_sum(1.0, zero_point, dtype)  # type: ignore[arg-type]


def test_sum_zero_point_without_dtype_is_checked_against_dst() -> None:
    chain = PostOps().append_sum(1.0, 128)
    assert foldable(chain, torch.uint8)
    chain.check_supported("linear", torch.uint8)
    with pytest.raises(ValueError, match=r"must be in \[-128, 127\], got 128"):
        chain.check_supported("linear", torch.int8)
    with pytest.raises(ValueError, match=r"zero_point must be 0 for a torch.float32 source"):
        foldable(chain, torch.float32)


def test_sum_dtypes_agree() -> None:
    chain = PostOps().append_sum(dtype="u8").append_sum(dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"dtype must be torch.uint8 as in the earlier sum, got to"
    ):
        chain.append_sum(dtype=torch.int8)
    with pytest.raises(ValueError, match="got None"):
        chain.append_sum()
    with pytest.raises(ValueError, match=r"append_sum: dtype must be one of torch.uint8"):
        PostOps().append_sum(dtype=torch.float64)
    assert chain.num_srcs == 2


def test_at_most_32_post_ops() -> None:
    chain = PostOps()
    for _ in range(MAX_POST_OPS):
        chain.append_eltwise("relu")
    with pytest.raises(ValueError, match="at most 32 post-ops, got sum as number 33"):
        chain.append_sum()


def test_values_in_order_and_copied() -> None:
    src1 = torch.tensor([1.0, 2.0, 3.0])
    chain = PostOps().append_binary("add", src1, 2).append_sum().append_prelu([0.25, 0.5, 1], 2)
    chain.append_binary("mul", 2, 0).append_binary("add", torch.ones(1, 3, 1, dtype=torch.int8), 2)
    src1.zero_()
    assert [values.tolist() for values in chain.values] == [
        [1.0, 2.0, 3.0],
        [0.25, 0.5, 1.0],
        [2.0],
        [1, 1, 1],
    ]
    assert str(chain) == "binary_add:2+sum+prelu:2+binary_mul:0+binary_add:2:s8"
    chain.check((8, 3, 5, 5))


def test_values_ignore_default_dtype_and_device() -> None:
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            chain = PostOps().append_binary("add", [0.1], 0)
    finally:
        torch.set_default_dtype(old)
    assert chain.values[0].equal(torch.tensor([0.1], dtype=torch.float32))
    assert chain.values[0].device.type == "cpu"


def test_missing_values_raise_and_name_the_post_op() -> None:
    chain = PostOps.parse("sum+binary_add:2+prelu:0", None)
    with pytest.raises(ValueError, match=r"got none for binary_add:2\. Supply them"):
        _ = chain.values
    supplied = chain.with_values([[1.0, 2.0], 0.25])
    assert [values.tolist() for values in supplied.values] == [[1.0, 2.0], [0.25]]
    with pytest.raises(ValueError, match=r"values must be 2 tensors for 'sum.*', got 1"):
        chain.with_values([[1.0]])
    with pytest.raises(ValueError, match="values must be 0 tensors"):
        PostOps.parse("sum", [torch.ones(1)])


def test_value_errors() -> None:
    with pytest.raises(ValueError, match="src1 must be 1 value for mask 0, got 3"):
        PostOps().append_binary("add", torch.ones(3), 0)
    with pytest.raises(ValueError, match="src1 must be finite float32 values, got nan at index 1"):
        PostOps().append_binary("add", [1.0, float("nan")], 2)
    with pytest.raises(ValueError, match=r"src1 must be torch.uint8, got torch.float32"):
        PostOps.parse("binary_add:2:u8", [torch.ones(3)])
    with pytest.raises(TypeError, match="weight must be numbers, got 'x'"):
        PostOps().append_prelu("x", 2)
    with pytest.raises(TypeError, match="src1 must be numbers"):
        PostOps().append_binary("add", torch.ones(3, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="mask must be in"):
        PostOps().append_prelu(1.0, 4096)
    with pytest.raises(TypeError, match="mask must be an integer"):
        PostOps().append_prelu(1.0, 2.0)  # type: ignore[arg-type]


def test_check_prints_both_numbers() -> None:
    chain = PostOps().append_binary("add", torch.ones(3), 2)
    with pytest.raises(ValueError) as error:
        chain.check((8, 4))
    assert str(error.value) == (
        "torchq.PostOps.check: values of binary_add:2 must be 4 values (mask 2 of dims [8, 4] "
        "selects [1, 4]), got 3. Supply 4 values or change the mask."
    )
    with pytest.raises(ValueError, match=r"must use a mask below 2 for dims \[3\], got mask 2"):
        chain.check((3,))


@pytest.mark.parametrize("text", [f"eltwise_{alg}:1:1" for alg in ELTWISE_ALGS])
def test_every_eltwise_is_supported(text: str) -> None:
    PostOps.parse(text).check_supported("linear")


def test_sources_come_in_the_order_of_the_chain() -> None:
    rows, full = torch.arange(3.0), torch.rand(2, 3)
    chain = PostOps().append_sum().append_binary("mul", rows, 8).append_binary("add", None, 3)
    chain.append_binary("select", [1.0, 2.0], 2).append_binary("sub", [1.0, 2.0], 2)
    assert chain.num_srcs == 3  # the sum, the operand of mask 3, the condition
    old, condition = torch.rand(4), torch.ones(4, dtype=torch.int8)
    got = chain.sources("conv2d", lambda: (1, 2, 5, 3), [old, full, condition])
    assert [source.shape for source in got] == [(4,), (1, 1, 1, 3), (2, 3), (4,)]
    assert torch.equal(got[1].reshape(-1), rows)
    assert [str(owner) for owner in chain.source_owners] == [
        *("sum", "binary_mul:8", "binary_add:3", "binary_select:2")
    ]
    assert [values.numel() for values in chain.channel_values] == [2, 2]
    with pytest.raises(ValueError, match=r"post_op_srcs must be 3 tensors for .*, got 1\. Pass"):
        chain.sources("conv2d", lambda: (1, 2, 5, 3), [old])
    with pytest.raises(ValueError, match="must be 4 values"):
        chain.sources("conv2d", lambda: (1, 2, 5, 4), [old, full, condition])


def test_number_of_sums() -> None:
    PostOps.parse("+".join(["sum"] * 32)).check_supported("linear")


@pytest.mark.parametrize("dst_dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("sum", True),
        ("sum:0.5+eltwise_relu", True),
        ("sum+sum", True),
        ("eltwise_linear:2:1:3+binary_mul:2+binary_add:2+sum+eltwise_clip:0:6", True),
        ("binary_add:0+eltwise_relu", True),
        ("eltwise_linear:-2", True),
        ("eltwise_relu+sum", False),
        ("eltwise_relu+eltwise_relu", False),
        ("eltwise_clip:0:6+eltwise_linear:2", False),
        ("eltwise_relu:0.1", False),
        ("eltwise_relu:0:0:2", False),
        ("eltwise_relu:0:0:-1", False),
        ("eltwise_clip:0:6:2", False),
        ("binary_add:3", False),
        ("binary_sub:2", False),
        ("prelu:0", False),
        ("eltwise_tanh", False),
    ],
)
def test_foldable(text: str, expected: bool, dst_dtype: torch.dtype) -> None:
    assert foldable(PostOps.parse(text), dst_dtype) is expected


def test_foldable_refuses_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match=r"torchq\.foldable: dst_dtype must be one of"):
        foldable(PostOps(), torch.float64)


def test_equality_is_by_content() -> None:
    chain = PostOps().append_binary("add", [1.0, 2.0], 2)
    assert chain == PostOps().append_binary("add", torch.tensor([1.0, 2.0]), 2)
    assert chain != PostOps().append_binary("add", [1.0, 3.0], 2)
    assert chain != PostOps.parse("binary_add:2")
    assert PostOps().append_sum(0.0) != PostOps().append_sum(-0.0)
    assert chain != "binary_add:2"
    assert repr(chain) == "PostOps('binary_add:2')"


def test_copies() -> None:
    chain = PostOps().append_sum(0.5).append_binary("add", [1.0, 2.0], 2)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert other == chain
        other.append_eltwise("relu")
        assert len(chain) == 2
