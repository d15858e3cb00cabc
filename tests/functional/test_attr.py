# SPDX-License-Identifier: Apache-2.0
"""Attr: masks and numbers of values as the source documents define them, errors, and text."""

import copy
import pickle
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchq.attributes.attr import Attr
from torchq.attributes.options import Rounding
from torchq.attributes.post_ops import PostOps

ARGS = ["src", "weights", "dst", "dw_weights", "dw_dst", "src0", "src1", "src12"]
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
SCALES = st.floats(min_value=2.0**-126, max_value=2.0**126, width=32)
G, O, I, H, W = 4, 6, 3, 5, 7  # noqa: E741


def values_for(mask: int, elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=1, max_size=1 if mask == 0 else 4)


@st.composite
def attrs(draw: st.DrawFn) -> tuple[Attr, dict[str, object]]:
    """Any valid Attr with values, and the values as `with_values` takes them."""
    attr = Attr()
    values: dict[str, object] = {}
    masks = st.integers(0, 4095)
    v1 = draw(st.booleans())
    if v1:
        mask = draw(masks)
        output_scales = draw(values_for(mask, FLOATS))
        attr.set_output_scales(mask, output_scales)
        values["output_scales"] = output_scales
    scales, zero_points = {}, {}
    for arg in [] if v1 else draw(st.lists(st.sampled_from(ARGS), unique=True)):
        mask = draw(masks)
        scales[arg] = draw(values_for(mask, SCALES))
        groups = draw(st.none() | st.tuples(st.integers(1, 128), st.integers(1, 128)))
        attr.set_scales(arg, mask, scales[arg], groups if mask else None)
    for arg in draw(st.lists(st.sampled_from(ARGS), unique=True)):
        mask = draw(masks)
        zero_points[arg] = draw(values_for(mask, st.integers(-(2**31), 2**31 - 1)))
        attr.set_zero_points(arg, mask, zero_points[arg])
    for arg in draw(st.lists(st.sampled_from(ARGS), unique=True)):
        attr.set_rounding(arg, draw(st.sampled_from(get_args(Rounding))))
    if draw(st.booleans()):
        attr.set_rnn_data_qparams(draw(SCALES), draw(FLOATS))
        attr.set_rnn_weights_qparams(24, [0.5, 2.0])
        attr.set_rnn_weights_projection_qparams(8, [0.25, 3.0])
        values |= {"rnn_weights": [0.5, 2.0], "rnn_weights_projection": [0.25, 3.0]}
    if draw(st.booleans()):
        attr.post_ops.append_sum(draw(FLOATS)).append_binary("mul", [1.0, 2.0], 2)
        values["post_ops"] = [[1.0, 2.0]]
    return attr, values | {"scales": scales, "zero_points": zero_points}


@given(attrs())
def test_text_round_trip(case: tuple[Attr, dict[str, object]]) -> None:
    attr, values = case
    again = Attr.parse(str(attr), **values)
    assert again == attr
    assert hash(again) == hash(attr)
    assert str(again) == str(attr)
    assert str(Attr.parse(str(attr))) == str(attr)  # structure alone


def test_default_is_empty() -> None:
    assert str(Attr()) == repr(Attr()) == ""
    assert Attr.parse("") == Attr()


def test_text_example() -> None:
    text = "scales:src:0+weights:1+dst:0 zero_points:src:0 post_ops:sum:0.5+eltwise_relu"
    attr = Attr().set_scales("dst", 0, 0.1).set_scales("weights", 1, [1, 2]).set_scales("src", 0, 1)
    attr.set_zero_points("src", 0, 128).post_ops.append_sum(0.5).append_eltwise("relu")
    assert str(attr) == repr(attr) == text
    values = {"src": 1, "weights": [1, 2], "dst": 0.1}
    assert Attr.parse(text, scales=values, zero_points={"src": 128}) == attr


def test_text_has_every_section_in_order() -> None:
    attr = Attr().set_post_ops(PostOps().append_eltwise("relu")).set_rounding("dst", "stochastic")
    attr.set_rnn_weights_projection_qparams(8).set_rnn_weights_qparams(24)
    attr.set_rnn_data_qparams(127, 128).set_zero_points("src1", 0).set_zero_points("src", 0)
    attr.set_scales("weights", 3, groups=(32, 1)).set_scales("src10", 0).set_scales("src2", 0)
    assert str(attr) == (
        "scales:weights:3:32x1+src2:0+src10:0 zero_points:src:0+src1:0 rounding:dst:stochastic "
        "rnn_data:127:128 rnn_weights:24 rnn_weights_projection:8 post_ops:eltwise_relu"
    )
    assert Attr.parse(str(attr)) == attr
    assert str(Attr().set_output_scales(2, [1.0, 2.0])) == "output_scales:2"


# Source 1 (attributes, quantization).


def test_example_1_weights_per_group_and_output_channel() -> None:
    """Mask (1 << 0) | (1 << 1) on {G, OC/G, IC/G, KH, KW}; the layout hwigo does not matter."""
    dims = (2, 3, 4, 1, 5)
    scales = torch.arange(1.0, 2 * 3 + 1)
    attr = Attr().set_output_scales((1 << 0) | (1 << 1), 1 / scales)
    assert Attr.expected_values((1 << 0) | (1 << 1), dims) == 2 * 3
    attr.check("dst", dims)
    factors = attr.resolve("dst", dims, "output_scales")
    assert factors.shape == (2, 3, 1, 1, 1)
    hwigo = torch.randn(1, 5, 4, 2, 3).permute(3, 4, 2, 0, 1)  # logical goihw, strides of hwigo
    assert not hwigo.is_contiguous()
    for g in range(2):
        for oc in range(3):
            expected = hwigo[g, oc] * (1 / scales)[g * 3 + oc]
            assert torch.equal((hwigo * factors)[g, oc], expected)


def test_example_2_output_scales_per_output_channel() -> None:
    """Mask 1 << 1 on dst (BATCH, OC, OH, OW): G * OC/G values."""
    groups, channels = 2, 3
    wei_scales = torch.arange(1.0, groups * channels + 1)
    attr = Attr().set_output_scales(1 << 1, 0.5 * wei_scales / 0.25)
    dst = (8, groups * channels, 10, 10)
    attr.check("dst", dst)
    assert Attr.expected_values(1 << 1, dst) == groups * channels
    assert attr.resolve("dst", dst, "output_scales").shape == (1, groups * channels, 1, 1)
    with pytest.raises(ValueError, match=r"output_scales of dst must be 7 values .* got 6"):
        attr.check("dst", (8, 7, 10, 10))


# Source 2 (int8 inference): T[G, O, I, H, W].


@pytest.mark.parametrize(
    ("mask", "count", "shape"),
    [
        (0, 1, (1, 1, 1, 1, 1)),
        (1, G, (G, 1, 1, 1, 1)),
        (2, O, (1, O, 1, 1, 1)),
        (3, G * O, (G, O, 1, 1, 1)),
        (0b101, G * I, (G, 1, I, 1, 1)),
        (0b11111, G * O * I * H * W, (G, O, I, H, W)),
    ],
)
def test_masks_of_goihw(mask: int, count: int, shape: tuple[int, ...]) -> None:
    dims = (G, O, I, H, W)
    assert Attr.expected_values(mask, dims) == count
    attr = Attr().set_scales("weights", mask, torch.arange(1.0, count + 1))
    attr.set_zero_points("weights", mask, torch.arange(count))
    attr.check("weights", dims)
    scales = attr.resolve("weights", dims)
    assert scales.shape == shape
    assert scales.expand(dims).shape == dims
    assert attr.resolve("weights", dims, "zero_points").dtype == torch.int32
    assert scales.flatten().tolist() == list(range(1, count + 1))  # row-major


def test_rnn_masks() -> None:
    """Ldigo mask 24 is gates * channels, ldio mask 8 is channels."""
    attr = Attr().set_rnn_weights_qparams(24, torch.ones(4 * 5))
    attr.set_rnn_weights_projection_qparams(8, torch.ones(6)).set_rnn_data_qparams(127, 128)
    attr.check("weights", (1, 1, 3, 4, 5))
    attr.check("weights_projection", (1, 1, 5, 6))
    assert attr.resolve("weights", (1, 1, 3, 4, 5), "rnn_weights").shape == (1, 1, 1, 4, 5)
    assert attr.rnn_data_qparams == (127.0, 128.0)
    with pytest.raises(ValueError, match="rnn_weights of weights must be 24 values"):
        attr.check("weights", (1, 1, 3, 4, 6))


# Source 3 (v3): masks at creation, values at execution.


def test_values_at_execution() -> None:
    attr = Attr().set_scales("src", 0).set_scales("weights", 1).set_zero_points("src", 0)
    attr.check("weights", (3, 4))  # masks alone
    with pytest.raises(ValueError) as error:
        attr.resolve("weights", (3, 4))
    assert str(error.value) == (
        "torchq.Attr.resolve: scales of weights must be supplied, got only a mask. "
        "Use attr.with_values(...) before the call."
    )
    ready = attr.with_values(scales={"src": 0.5, "weights": [1, 2, 3]}, zero_points={"src": 7})
    assert ready.resolve("weights", (3, 4)).tolist() == [[1], [2], [3]]
    assert ready.values("src", "zero_points").tolist() == [7]  # type: ignore[union-attr]
    assert str(ready) == str(attr) and ready != attr
    with pytest.raises(ValueError, match=r"torchq.Attr.values: scales of src must be supplied"):
        attr.values("src")


def test_with_values_errors() -> None:
    with pytest.raises(ValueError, match="zero_points of dst must be declared with a mask first"):
        Attr().with_values(zero_points={"dst": 1})
    with pytest.raises(ValueError, match=r"with_values: scales of src must be 1 value for mask 0"):
        Attr().set_scales("src", 0).with_values(scales={"src": [1, 2]})
    with pytest.raises(ValueError, match=r"torchq.PostOps.with_values: values must be 1 tensors"):
        Attr.parse("post_ops:prelu:2", post_ops=[])


def test_unset_values_are_neutral() -> None:
    attr = Attr()
    assert attr.values("src") is None and attr.mask("src") is None
    assert attr.resolve("src", (2, 3)).tolist() == [[1.0]]
    assert attr.resolve("src", (2, 3), "zero_points").tolist() == [[0]]
    assert attr.resolve("src", ()).shape == ()
    assert attr.rounding("dst") == "nearest" and attr.rnn_data_qparams is None
    assert Attr().set_scales("src", 4).mask("src") == 4


def test_groups() -> None:
    """Weight scales of a matmul (K, N) in blocks of 32 along K."""
    attr = Attr().set_scales("weights", 3, torch.arange(1.0, 2 * 5 + 1), groups=(32, 1))
    attr.check("weights", (64, 5))
    resolved = attr.resolve("weights", (64, 5))
    assert resolved.shape == (64, 5)
    assert resolved[0].tolist() == resolved[31].tolist() == [1, 2, 3, 4, 5]
    assert resolved[32].tolist() == [6, 7, 8, 9, 10]
    with pytest.raises(ValueError, match=r"must be 15 values .* selects \[3, 5\]\), got 10"):
        attr.check("weights", (96, 5))
    with pytest.raises(ValueError, match=r"groups that divide the last two dims .* \[33, 5\]"):
        attr.check("weights", (33, 5))
    with pytest.raises(ValueError, match="must have two group sizes and mask > 0, got groups"):
        Attr().set_scales("weights", 0, 1.0, groups=(32, 1))
    with pytest.raises(ValueError, match=r"groups must be in \[1, "):
        Attr().set_scales("weights", 3, groups=(0, 1))
    with pytest.raises(ValueError, match="are 1 outside the mask"):
        Attr().set_scales("weights", 2, groups=(2, 1)).check("weights", (4, 4))


# Errors.


def test_mixing_conventions_is_refused_in_either_order() -> None:
    with pytest.raises(ValueError) as error:
        Attr().set_scales("src", 0, 1.0).set_output_scales(0, 1.0)
    assert str(error.value) == (
        "torchq.Attr.set_output_scales: scales must be either scales (v3) or output_scales (v1), "
        "got both: scales are set already. With output_scales, fold src_scale * weight_scale / "
        "dst_scale into them."
    )
    with pytest.raises(ValueError, match=r"torchq.Attr.set_scales: .* output_scales are set alrea"):
        Attr().set_output_scales(0, 1.0).set_scales("src", 0, 1.0)
    Attr().set_output_scales(0, 1.0).set_zero_points("src", 0, 3)  # zero points go with both


def test_check_names_op_argument_expected_got_and_remedy() -> None:
    attr = Attr().set_scales("weights", 2, torch.ones(O))
    with pytest.raises(ValueError) as error:
        attr.check("weights", (G, O + 1, I))
    assert str(error.value) == (
        "torchq.Attr.check: scales of weights must be 7 values (mask 2 of dims [4, 7, 3] selects "
        "[1, 7, 1]), got 6. Supply 7 values or change the mask."
    )
    with pytest.raises(ValueError, match=r"zero_points of src must be 3 values .*, got 2"):
        Attr().set_zero_points("src", 1, [1, 2]).resolve("src", (3, 4), "zero_points")


def test_mask_bits_beyond_the_dims() -> None:
    with pytest.raises(ValueError) as error:
        Attr().set_scales("weights", 4, [1.0]).check("weights", (8, 8))
    assert str(error.value) == (
        "torchq.Attr.check: scales of weights must use a mask below 4 for dims [8, 8], got mask 4 "
        "(0b100). Bit d selects dim d."
    )
    with pytest.raises(ValueError, match=r"torchq.expected_values: mask must use a mask below 4"):
        Attr.expected_values(4, (8, 8))


def test_check_covers_post_ops_with_dst() -> None:
    attr = Attr()
    attr.post_ops.append_binary("add", torch.ones(3), 2)
    attr.check("dst", (1, 3, 2, 2))
    attr.check("src", (1, 9))
    with pytest.raises(ValueError, match="values of binary_add:2 must be 4 values"):
        attr.check("dst", (1, 4, 2, 2))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e39])
def test_scales_are_finite_and_positive(value: float) -> None:
    with pytest.raises(ValueError) as error:
        Attr().set_scales("src", 2, [1.0, value])
    assert str(error.value).startswith(
        "torchq.Attr.set_scales: scales of src must be finite float32 values > 0, got "
    )
    assert "at index 1" in str(error.value)


def test_output_scales_are_any_finite_number() -> None:
    assert Attr().set_output_scales(2, [0.0, -1.0]).values("dst", "output_scales") is not None
    with pytest.raises(ValueError, match="output_scales of dst must be finite float32 values, got"):
        Attr().set_output_scales(0, float("inf"))


def test_zero_points_are_int32() -> None:
    values = Attr().set_zero_points("src", 1, [-5, 2**31 - 1]).values("src", "zero_points")
    assert values is not None and values.dtype == torch.int32
    with pytest.raises(TypeError, match=r"zero_points of src must be integers, got 1.5"):
        Attr().set_zero_points("src", 0, 1.5)
    with pytest.raises(ValueError, match=r"zero_points of src\[1\] must be in .*, got 2147483648"):
        Attr().set_zero_points("src", 1, [0, 2**31])


def test_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"one of src, weights, dst, .* 'weight'. Did you mean 'we"
    ):
        Attr().set_scales("weight", 0, 1.0)
    with pytest.raises(ValueError, match=r"got 'bias'. A float bias is in real units, an int32"):
        Attr().set_scales("bias", 0, 1.0)
    with pytest.raises(ValueError, match=r"arg must be one of .* got 'src01'"):
        Attr().set_zero_points("src01", 0, 1)
    with pytest.raises(ValueError, match=r"mode must be one of nearest, environment, stochastic"):
        Attr().set_rounding("dst", "down")
    with pytest.raises(ValueError, match=r"set_scales: mask must be in \[0, 4095\], got -1"):
        Attr().set_scales("src", -1, 1.0)
    with pytest.raises(TypeError, match="mask must be an integer, got '1'"):
        Attr().set_scales("src", "1", 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="post_ops must be a PostOps, got 'eltwise_relu'"):
        Attr().post_ops = "eltwise_relu"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"scale must be > 0, got 0.0"):
        Attr().set_rnn_data_qparams(0, 128)
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'scale'"):
        Attr().resolve("src", (1,), "scale")
    with pytest.raises(ValueError, match="arg of output_scales must be one of dst, got 'src'"):
        Attr().resolve("src", (1,), "output_scales")
    with pytest.raises(TypeError, match="scales of src must be numbers, got"):
        Attr().set_scales("src", 1, [[1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("text", "position", "expectation"),
    [
        ("scale:src:0", 0, "Did you mean 'scales'?"),
        (" scales:src:0", 0, "section must be one of output_scales, scales"),
        ("scales:src:0  post_ops:sum", 13, "section must be one of"),
        ("scales", 0, "must have scales:<text> once"),
        ("scales:src:0 scales:dst:0", 13, "must have scales:<text> once"),
        ("scales:src:0+src:0", 13, "scales must have src once"),
        ("scales:src", 7, "must have the form src:<mask>[:<groups>]"),
        ("scales:src:x", 11, "mask must be an integer like 0 or 128"),
        ("scales:wieghts:1", 7, "Did you mean 'weights'?"),
        ("scales:weights:3:32", 7, "two group sizes"),
        ("zero_points:src:0:1x1", 12, "must have two group sizes and mask > 0"),
        ("zero_points:src:1:1x1:2", 12, "must have the form src:<mask>"),
        ("scales:src:0 output_scales:2", 13, "scales (v3) or output_scales (v1)"),
        ("rounding:dst:up", 9, "mode must be one of nearest"),
        ("rnn_data:127", 0, "must have the form rnn_data:<scale>:<shift>"),
        ("rnn_weights:24:1", 0, "must have the form rnn_weights:<mask>"),
        ("post_ops:", 0, "must have post_ops:<text> once"),
        ("scales:src:0 post_ops:sum+eltwise_rleu", 26, "Did you mean 'eltwise_relu'?"),
        ("post_ops:sum:1e+5", 13, "(without '+')"),
    ],
)
def test_parsing_is_strict(text: str, position: int, expectation: str) -> None:
    with pytest.raises(ValueError) as error:
        Attr.parse(text)
    assert f"torchq.Attr.parse: at position {position}, got " in str(error.value)
    assert expectation in str(error.value)


# Identity.


def test_equality_is_by_content() -> None:
    attr = Attr().set_scales("src", 0, 0.5).set_zero_points("src", 0, 3)
    same = Attr().set_zero_points("src", 0, torch.tensor(3)).set_scales("src", 0, torch.tensor(0.5))
    assert attr == same and hash(attr) == hash(same)
    assert attr != Attr().set_scales("src", 0, 0.25).set_zero_points("src", 0, 3)
    assert attr != Attr.parse(str(attr))
    assert attr != str(attr)
    assert Attr().set_rounding("dst", "stochastic").set_rounding("dst", "nearest") == Attr()


def test_copies() -> None:
    attr = Attr().set_scales("weights", 1, [1.0, 2.0]).set_rounding("dst", "environment")
    attr.post_ops.append_prelu([0.5, 0.25], 2)
    for other in (copy.deepcopy(attr), pickle.loads(pickle.dumps(attr))):
        assert other == attr
        other.post_ops.append_sum()
        other.set_scales("src", 0, 1.0)
        assert len(attr.post_ops) == 1 and attr.mask("src") is None


def test_values_are_copies() -> None:
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    attr = Attr().set_scales("weights", 1, scales)
    with torch.no_grad():
        scales.zero_()
    values = attr.values("weights")
    assert values is not None
    assert values.tolist() == [1.0, 2.0] and values.dtype == torch.float32
    assert not values.requires_grad
