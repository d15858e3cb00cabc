# SPDX-License-Identifier: Apache-2.0
"""The composer's rules C0 to C16, each against the float64 chain and, where they run, kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_chain import F32, S8, S32, U8, N, check, rules
from torch import Tensor

import torchq
from torchq.onednn.composition import (
    Binary,
    Clip,
    Eltwise,
    FakeQuantize,
    Linear,
    PReLU,
    Round,
    Scale,
    Shift,
    Sum,
)

PER_OC = torch.linspace(0.5, 2.5, N)
SIGNED = torch.tensor([-1.0, 0.5, 2.0, -0.25, 3.0])
FLT_MAX = 3.4028235e38
CONVENTIONS = pytest.mark.parametrize("convention", ["v1", "v3"])


def sum_s8(scale: float = 0.5, zero_point: int = 0) -> Sum:
    return Sum(scale, zero_point, S8)


def ratio(made: Any, other: Any) -> Tensor:
    """By how much the scales differ from those without the step under test."""
    return (made.scales / other.scales).expand(N)


@CONVENTIONS
@pytest.mark.parametrize("ones", [1.0, torch.ones(N)], ids=["scalar", "vector"])
def test_c0_a_scale_of_one_does_nothing(convention: str, ones: Any) -> None:
    made = check([Scale(ones)], convention=convention)
    assert str(made.post_ops) == "" and made.dst_scale == 1 and rules(made) == ["C0"]
    assert torch.equal(made.scales, check([], convention=convention).scales)


@CONVENTIONS
@pytest.mark.parametrize("scale", [0.5, PER_OC], ids=["tensor", "channel"])
def test_c1_the_first_scale_goes_into_the_output_scales(convention: str, scale: Any) -> None:
    made, plain = (check(s, convention=convention) for s in ([Scale(scale)], []))
    assert str(made.post_ops) == "" and rules(made) == ["C1"]
    torch.testing.assert_close(ratio(made, plain), torch.as_tensor(scale).expand(N))
    attr = str(made.attr())
    assert attr == ("output_scales:2" if convention == "v1" else "scales:src:0+weights:1")


def test_c1_masks_of_the_output_scales() -> None:
    """Per tensor 0, per channel 1 << 1 of dst; grouped weights 3."""
    made = torchq.compose([Scale(2.0)], N, convention="v1", weight_scale=0.5)
    assert str(made.attr()) == "output_scales:0" and made.scales.tolist() == [1.0]
    made = torchq.compose([Scale(PER_OC)], N)
    assert str(made.attr()) == "scales:src:0+weights:1"
    assert str(made.attr(groups=5)) == "scales:src:0+weights:3"


def test_c1_only_int8_ops_have_output_scales() -> None:
    made = check([Scale(0.5)], int8=False)
    assert str(made.post_ops) == "eltwise_linear:0.5" and made.scales.tolist() == [1]
    assert str(made.attr()) == "post_ops:eltwise_linear:0.5"


def test_c1_a_weight_scale_is_positive_but_an_output_scale_any_number() -> None:
    made = check([Scale(SIGNED)], convention="v1")
    assert str(made.post_ops) == "" and (made.scales < 0).any()
    made = check([Scale(SIGNED)])
    assert str(made.post_ops) == "binary_mul:2" and "must be > 0" in made.reasons[-1]


@CONVENTIONS
@pytest.mark.parametrize("scale", [0.5, PER_OC], ids=["tensor", "channel"])
@pytest.mark.parametrize("first", [Eltwise("relu"), Eltwise("relu", 0.1), PReLU(2, SIGNED)])
def test_c2_a_positive_scale_commutes_with_relu_and_prelu(
    convention: str, scale: Any, first: Any
) -> None:
    bias = torch.randn(N)
    made = check([first, Scale(scale)], convention=convention, bias=bias)
    plain = check([first], convention=convention, bias=bias)
    assert made.post_ops == plain.post_ops and rules(made)[-1] == "C2"
    torch.testing.assert_close(ratio(made, plain), torch.as_tensor(scale).expand(N))


@CONVENTIONS
@pytest.mark.parametrize("first", [Eltwise("relu"), PReLU(2, SIGNED)])
def test_c2_a_scale_with_a_negative_channel_does_not(convention: str, first: Any) -> None:
    made = check([first, Scale(SIGNED)], convention=convention)
    assert str(made.post_ops) == f"{first}+binary_mul:2" and rules(made)[-1] == "C6"
    zero = check([Eltwise("relu"), Scale(torch.tensor([0.0, 1, 2, 3, 4]))], convention=convention)
    assert str(zero.post_ops) == "eltwise_relu+binary_mul:2"


@CONVENTIONS
def test_c3_a_scale_after_a_sum_goes_into_both(convention: str) -> None:
    made = check([sum_s8(0.5, 3), Scale(3.0)], convention=convention)
    plain = check([sum_s8(0.5, 3)], convention=convention)
    assert str(made.post_ops) == "sum:1.5:3:s8" and rules(made)[-1] == "C3"
    torch.testing.assert_close(ratio(made, plain), torch.full((N,), 3.0))
    per_channel = check([sum_s8(), Scale(PER_OC)], convention=convention)
    assert str(per_channel.post_ops) == "sum:0.5:0:s8+binary_mul:2"


def test_c4_eltwise_then_sum_take_the_scale_in_v1() -> None:
    steps = [Eltwise("tanh"), sum_s8(), Scale(3.0)]
    made = check(steps, convention="v1")
    assert str(made.post_ops) == "eltwise_tanh:0:0:3+sum:1.5:0:s8" and rules(made)[-1] == "C4"
    made = check(steps, convention="v3")
    assert str(made.post_ops) == "eltwise_tanh+sum:0.5:0:s8+eltwise_linear:3"
    steps[-1] = Scale(PER_OC)
    made = check(steps, convention="v1")
    assert str(made.post_ops) == "eltwise_tanh+sum:0.5:0:s8+binary_mul:2"


def test_c5_the_last_eltwise_takes_the_scale_in_v1() -> None:
    steps = [Eltwise("tanh"), Eltwise("abs", scale=2.0), Scale(-3.0)]
    made = check(steps, convention="v1")
    assert str(made.post_ops) == "eltwise_tanh+eltwise_abs:0:0:-6" and rules(made)[-1] == "C5"
    made = check([Eltwise("tanh"), Scale(PER_OC)], convention="v1")
    assert str(made.post_ops) == "eltwise_tanh+binary_mul:2" and rules(made)[-1] == "C6"


@CONVENTIONS
def test_c6_otherwise_a_linear_or_a_binary_mul(convention: str) -> None:
    first = [Eltwise("tanh"), sum_s8(), sum_s8()]
    made = check([*first, Scale(3.0)], convention=convention)
    assert str(made.post_ops[3]) == "eltwise_linear:3" and rules(made)[-1] == "C6"
    made = check([*first, Scale(PER_OC)], convention=convention)
    assert str(made.post_ops[3]) == "binary_mul:2"
    assert torch.equal(made.post_ops.values[0], PER_OC)


@CONVENTIONS
@pytest.mark.parametrize(
    "refused",
    [
        Scale(PER_OC),
        Linear(2.0, PER_OC),
        Linear(PER_OC, 1.0),
        Clip(-1.0, PER_OC),
        FakeQuantize(-PER_OC, PER_OC * 1.1, axis=1),
        Binary("max", 2, values=PER_OC),
    ],
    ids=lambda step: type(step).__name__,
)
def test_c6_a_refused_step_commits_nothing(convention: str, refused: Any) -> None:
    first = [Scale(PER_OC), Eltwise("tanh")]
    options = {"convention": convention, "allow_binary": False, "dst_dtype": S8, "spread": 2.0}
    bias = torch.randn(N)
    made = check([*first, refused, Scale(20.0)], bias=bias, **options)
    alone = check(first, bias=bias, **options | {"dst_dtype": F32})
    assert made.post_ops == alone.post_ops and torch.equal(made.scales, alone.scales)
    assert torch.equal(made.bias, alone.bias) and made.dst_scale == 1
    assert len(made.rest) == 2 and made.rest[0] is refused
    assert made.dst_dtype == F32 and "binary post-ops are not allowed" in made.refusal
    assert made.reasons[-1].startswith("step 2") and "stay float" in made.reasons[-1]
    allowed = check([*first, refused, Scale(20.0)], **options | {"allow_binary": True})
    assert not allowed.rest and not allowed.refusal and allowed.dst_dtype == S8


@CONVENTIONS
def test_c7_shifts(convention: str) -> None:
    first = Eltwise("tanh")
    for shift, text in ((0.0, ""), (torch.zeros(N), ""), (0.5, "+eltwise_linear:1:0.5")):
        made = check([first, Shift(shift)], convention=convention)
        assert str(made.post_ops) == f"eltwise_tanh{text}" and rules(made)[-1] == "C7"
    made = check([first, Shift(SIGNED)], convention=convention)
    assert str(made.post_ops) == "eltwise_tanh+binary_add:2" and rules(made)[-1] == "C7"
    made = check([first, Shift(torch.full((N,), 2.0))], convention=convention)
    assert str(made.post_ops) == "eltwise_tanh+eltwise_linear:1:2"  # all channels agree


@CONVENTIONS
def test_c8_linear(convention: str) -> None:
    first = Eltwise("tanh")
    texts = []
    for scale, shift in ((2.0, 0.5), (PER_OC, 0.5), (2.0, PER_OC), (PER_OC, PER_OC), (2.0, 0.0)):
        made = check([first, Linear(scale, shift)], convention=convention)
        texts.append(str(made.post_ops).removeprefix("eltwise_tanh"))
    one = ":0:0:2" if convention == "v1" else "+eltwise_linear:2"
    assert texts == [
        "+eltwise_linear:2:0.5",
        "+binary_mul:2+eltwise_linear:1:0.5",
        f"{one}+binary_add:2",
        "+binary_mul:2+binary_add:2",
        one,
    ]
    made = check([Linear(2.0, 0.5)], convention=convention)
    assert str(made.post_ops) == "eltwise_linear:2:0.5"  # literally one, also as the first


@CONVENTIONS
@pytest.mark.parametrize(
    "low,high,text",
    [
        (-1.0, 2.0, "eltwise_clip:-1:2"),
        (-1.0, PER_OC, f"eltwise_clip:-1:{FLT_MAX:.7e}+binary_min:2".replace("e+", "e")),
        (-PER_OC, 2.0, f"eltwise_clip:-{FLT_MAX:.7e}:2+binary_max:2".replace("e+", "e")),
        (-PER_OC, PER_OC, "binary_max:2+binary_min:2"),
        (torch.full((N,), -1.0), torch.full((N,), 1.0), "eltwise_clip:-1:1"),
    ],
)
def test_c9_clip(convention: str, low: Any, high: Any, text: str) -> None:
    made = check([Clip(low, high)], convention=convention)
    assert str(made.post_ops) == text and rules(made) == ["C9"]


@CONVENTIONS
def test_c10_round_is_half_to_even(convention: str) -> None:
    made = check([Scale(2.0), Round(), Scale(0.5)], convention=convention)
    assert str(made.post_ops).startswith("eltwise_round") and "C10" in rules(made)
    exact = torchq.compose([Round()], 1, weight_scale=0.5)
    assert str(exact.post_ops) == "eltwise_round"


@pytest.mark.parametrize("dst_dtype", [U8, S8, S32])
def test_c11_the_last_scale_is_dsts_in_v3(dst_dtype: torch.dtype) -> None:
    for first in ([], [Eltwise("tanh")], [sum_s8(), Eltwise("relu")], [Scale(PER_OC)]):
        made = check([*first, Scale(20.0)], dst_dtype=dst_dtype)
        assert made.dst_scale == 1 / 20 and rules(made)[-1] == "C11"
        assert "linear" not in str(made.post_ops)
        assert "dst:0" in str(made.attr())


def test_c11_needs_v3_an_integer_dst_and_one_positive_value() -> None:
    first = Eltwise("tanh")
    for options in ({"convention": "v1", "dst_dtype": U8}, {}, {"int8": False, "dst_dtype": U8}):
        assert check([first, Scale(20.0)], **options).dst_scale == 1
    for scale in (-20.0, 20 * PER_OC):
        assert check([first, Scale(scale)], dst_dtype=S8).dst_scale == 1
    assert check([Scale(20.0), Eltwise("relu")], dst_dtype=U8).dst_scale == 1


def test_c11_an_integral_shift_behind_it_is_dsts_zero_point() -> None:
    made = check([Eltwise("tanh"), Linear(100.0, 128.0)], dst_dtype=U8)
    assert str(made.post_ops) == "eltwise_tanh"
    assert made.dst_scale == 1 / 100 and made.dst_zero_point == 128
    made = check([Scale(PER_OC * 10), Shift(7.0)], dst_dtype=U8)
    assert made.dst_zero_point == 7 and made.dst_scale == 1 and not len(made.post_ops)
    for shift in (127.5, 300.0, -1.0):
        made = check([Eltwise("tanh"), Linear(90.25, shift)], dst_dtype=U8)
        assert made.dst_zero_point == 0 and made.dst_scale == 1
        assert str(made.post_ops) == f"eltwise_tanh+eltwise_linear:90.25:{shift:g}"


def test_c12_a_bias_that_is_not_constant_keeps_scales_out_of_the_weights() -> None:
    bias = torch.randn(N)
    for first in ([], [Eltwise("relu")], [sum_s8()]):
        steps = [*first, Scale(2.0), Eltwise("tanh")]
        made = check(steps, bias=bias, bias_is_constant=False)
        assert torch.equal(made.scales, check([], bias=bias).scales)
        assert made.bias is bias and "eltwise_linear:2" in str(made.post_ops)
        assert any("C12" in reason for reason in made.reasons)
        assert "linear" not in str(check(steps, bias_is_constant=False).post_ops)
        # v1: the bias comes before the output scales
        v1 = check(steps, bias=bias, bias_is_constant=False, convention="v1")
        assert "linear" not in str(v1.post_ops) and v1.bias is bias
    # in accumulator units it comes before them in v3 too
    integers = torch.randint(-999, 999, (N,), dtype=S32)
    made = check([Scale(2.0), Eltwise("tanh")], bias=integers, bias_is_constant=False)
    assert str(made.post_ops) == "eltwise_tanh" and made.bias is integers


@CONVENTIONS
def test_c13_dequantization_scales_come_first(convention: str) -> None:
    made = torchq.compose(
        [Scale(PER_OC), Eltwise("relu")],
        N,
        convention=convention,
        src_scale=0.25,
        weight_scale=SIGNED.abs(),
    )
    assert made.reasons[0].startswith("C13")
    source = 0.25 if convention == "v1" else 1.0
    assert torch.equal(made.scales, source * SIGNED.abs() * PER_OC)
    untouched = torchq.compose([Eltwise("relu")], N, src_scale=0.25, weight_scale=SIGNED.abs())
    assert torch.equal(untouched.scales, SIGNED.abs()) and untouched.src_scale == 0.25
    check([Scale(PER_OC), Eltwise("relu")], convention=convention)


def test_c14_v3_has_no_eltwise_scale() -> None:
    steps = [Eltwise("tanh"), Scale(2.0), Eltwise("abs", scale=3.0), Eltwise("relu")]
    v1, v3 = (check(steps, convention=convention) for convention in ("v1", "v3"))
    assert str(v1.post_ops) == "eltwise_tanh:0:0:2+eltwise_abs:0:0:3+eltwise_relu"
    expected = "eltwise_tanh+eltwise_linear:2+eltwise_abs+eltwise_linear:3+eltwise_relu"
    assert str(v3.post_ops) == expected
    last = check([Eltwise("tanh", scale=50.0)], dst_dtype=S8)
    assert str(last.post_ops) == "eltwise_tanh" and last.dst_scale == 1 / 50


@CONVENTIONS
@pytest.mark.parametrize("bias", [None, SIGNED * 30], ids=["none", "bias"])
def test_c15_a_constant_add_becomes_the_bias(convention: str, bias: Any) -> None:
    made = check([Shift(SIGNED), Eltwise("relu")], convention=convention, bias=bias)
    assert str(made.post_ops) == "eltwise_relu" and rules(made)[0] == "C15"
    assert made.bias is not None and made.bias.dtype == F32
    if convention == "v3":
        torch.testing.assert_close(made.bias, SIGNED if bias is None else SIGNED + bias)
    behind = check([Scale(PER_OC), Shift(SIGNED)], convention=convention, bias=bias)
    assert str(behind.post_ops) == "" and rules(behind) == ["C1", "C15"]


@CONVENTIONS
def test_c15_deconvolution_add_and_fake_quantize_per_channel_is_one_op(convention: str) -> None:
    fq = FakeQuantize(torch.zeros(N), 3 * PER_OC, 0.0, 255.0, axis=1)
    made = check([Shift(SIGNED), fq], convention=convention, dst_dtype=U8)
    assert str(made.post_ops) == "" and not made.rest and made.bias is not None
    signed = FakeQuantize(-128 * PER_OC / 40, 127 * PER_OC / 40, -128.0, 127.0, axis=1)
    made = check([Shift(SIGNED), signed], convention=convention, dst_dtype=S8)
    assert str(made.post_ops) == "" and not made.rest


def test_c15_needs_a_bias_that_can_change() -> None:
    integers = torch.randint(-999, 999, (N,), dtype=S32)
    for options in (
        {"takes_bias": False},
        {"bias": torch.randn(N), "bias_is_constant": False},
        {"bias": integers},
    ):
        made = check([Shift(SIGNED)], **options)
        assert str(made.post_ops) == "binary_add:2" and made.bias is options.get("bias")
    assert str(check([Eltwise("tanh"), Shift(SIGNED)]).post_ops) == "eltwise_tanh+binary_add:2"


@CONVENTIONS
def test_c16_a_scale_folds_into_the_constants_before_it(convention: str) -> None:
    first = Eltwise("tanh")
    cases = [
        ([Linear(2.0, 0.5), Scale(3.0)], "eltwise_linear:6:1.5"),
        ([Scale(PER_OC), Scale(3.0)], "binary_mul:2"),
        ([Scale(PER_OC), Scale(SIGNED)], "binary_mul:2"),
        ([Linear(PER_OC, SIGNED), Scale(3.0)], "binary_mul:2+binary_add:2"),
        ([Linear(PER_OC, SIGNED), Scale(PER_OC)], "binary_mul:2+binary_add:2"),
        ([Binary("add", 2, values=SIGNED), Scale(3.0)], None),
    ]
    for steps, text in cases:
        made = check([first, *steps], convention=convention)
        if text is not None:
            assert str(made.post_ops) == f"eltwise_tanh+{text}"
            assert rules(made)[-1] == "C16"
    made = check([first, Linear(PER_OC, SIGNED), Scale(3.0)], convention=convention)
    torch.testing.assert_close(made.post_ops.values[0], 3 * PER_OC)
    torch.testing.assert_close(made.post_ops.values[1], 3 * SIGNED)


def test_c16_the_bias_scales_along_in_v3() -> None:
    bias = torch.randn(N)
    for first in ([], [Eltwise("relu")], [sum_s8()]):
        scale = 3.0 if first and isinstance(first[0], Sum) else PER_OC
        made = check([*first, Scale(scale)], bias=bias)
        torch.testing.assert_close(made.bias, bias * scale)
        v1 = check([*first, Scale(scale)], bias=bias, convention="v1")
        assert v1.bias is bias
    made = check([Shift(SIGNED), Scale(PER_OC)], bias=bias, takes_bias=False)
    assert str(made.post_ops) == "binary_add:2" and rules(made)[-1] == "C16"
    torch.testing.assert_close(made.post_ops.values[0], SIGNED * PER_OC)
    torch.testing.assert_close(made.bias, bias * PER_OC)


def test_binaries_that_are_not_affine_stay() -> None:
    made = check([Binary("max", 2, values=SIGNED), Binary("mul", 0, values=torch.tensor([2.0]))])
    assert str(made.post_ops) == "binary_max:2+eltwise_linear:2"
