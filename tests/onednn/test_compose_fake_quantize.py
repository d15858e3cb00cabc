# SPDX-License-Identifier: Apache-2.0
"""FakeQuantize as a post-op: the rules F1 to F7 and T1 to T6, against the float64 chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_chain import F32, S8, U8, N, chain, check, convert, rules

import torchq
import torchq.functional as TF
from torchq.onednn.composition import Eltwise, FakeQuantize, Scale, Shift, Sum, bounds_behind_round

PER_OC = torch.linspace(2.0, 6.0, N)
CONVENTIONS = pytest.mark.parametrize("convention", ["v1", "v3"])
UNSIGNED = FakeQuantize(0.0, 6.0, 0.0, 255.0)
SIGNED = FakeQuantize(-128 / 20, 127 / 20, -128.0, 127.0)
AFFINE = FakeQuantize(-51 / 32, 204 / 32, 0.0, 255.0)
RESIDUAL = Sum(0.05, 3, S8)


@CONVENTIONS
@pytest.mark.parametrize("fq,dst", [(UNSIGNED, U8), (SIGNED, S8)], ids=["u8", "s8"])
def test_f1_as_the_only_post_op_its_scale_is_the_ops(
    convention: str, fq: FakeQuantize, dst: torch.dtype
) -> None:
    made = check([fq], convention=convention, dst_dtype=dst)
    assert str(made.post_ops) == "" and made.dst_zero_point == 0 and not made.rest
    plain = check([], convention=convention)
    factor = float(1 / fq.input_scale)
    if convention == "v1":
        torch.testing.assert_close(made.scales, plain.scales * factor)
        assert rules(made) == ["F3", "F4", "F1", "C1"]
    else:
        assert made.dst_scale == pytest.approx(1 / factor) and rules(made)[-1] == "C11"


@CONVENTIONS
def test_f1_what_remains_is_the_shift_and_clip_and_round(convention: str) -> None:
    made = check([AFFINE], convention=convention, dst_dtype=U8)
    if convention == "v1":
        assert str(made.post_ops) == "eltwise_linear:1:51" and rules(made)[-2:] == ["C1", "C7"]
    else:
        assert str(made.post_ops) == "" and made.dst_zero_point == 51
    made = check([FakeQuantize(0.0, 3.0)], convention=convention)
    assert str(made.post_ops).startswith("eltwise_round") and "F1" in rules(made)


@pytest.mark.parametrize("alg", ["tanh", "relu"])
def test_f2_behind_an_eltwise_its_scale_is_the_eltwises_in_v1(alg: str) -> None:
    fq = FakeQuantize(0.0, 1.5, 0.0, 255.0)
    for convention in ("v1", "v3"):
        steps = [Eltwise("abs"), Eltwise(alg), fq]
        made = check(steps, convention=convention, dst_dtype=U8, spread=1.0)
        if convention == "v1":
            assert str(made.post_ops) == f"eltwise_abs+eltwise_{alg}:0:0:170"
            assert rules(made)[-1] == "C5"
        else:
            assert str(made.post_ops) == f"eltwise_abs+eltwise_{alg}"
            assert made.dst_scale == pytest.approx(1.5 / 255)
    # alone, relu commutes with the scale: C2
    made = check([Eltwise("relu"), fq], convention="v1", dst_dtype=U8)
    assert str(made.post_ops) == "eltwise_relu" and rules(made)[-1] == "C2"


def test_f3_bounds_behind_the_rounding() -> None:
    x = torch.randn(N, 4000, dtype=torch.float64) * 4
    for scale in (torch.linspace(0.3, 40, N), -torch.linspace(0.3, 40, N)):
        scale = scale.double()
        shift = torch.linspace(-3, 3, N).double()
        low, high = -PER_OC.double(), PER_OC.double() / 2
        crop = torch.minimum(torch.maximum(x, low[:, None]), high[:, None])
        before = torch.round(crop * scale[:, None] + shift[:, None])
        low2, high2 = (b[:, None] for b in bounds_behind_round(low, high, scale, shift))
        behind = torch.round(x * scale[:, None] + shift[:, None])
        assert torch.equal(torch.minimum(torch.maximum(behind, low2), high2), before)
    # per channel in front, one in all behind
    fq = FakeQuantize(-PER_OC, PER_OC / 2, axis=1)
    low2, high2 = bounds_behind_round(
        fq.input_low, fq.input_high, 1 / fq.input_scale, fq.input_zero_point
    )
    assert low2.tolist() == [0] and high2.tolist() == [255]


@CONVENTIONS
def test_f3_a_clip_per_channel_becomes_one_in_all(convention: str) -> None:
    fq = FakeQuantize(torch.zeros(N), PER_OC, 0.0, PER_OC, axis=1)
    made = check([fq, Eltwise("relu")], convention=convention)
    assert str(made.post_ops) == "eltwise_round+eltwise_clip:0:255+binary_mul:2+eltwise_relu"
    assert "F3" in rules(made)


@CONVENTIONS
@pytest.mark.parametrize("fq", [UNSIGNED, SIGNED, AFFINE], ids=["unsigned", "signed", "affine"])
@pytest.mark.parametrize("dst", [U8, S8])
@pytest.mark.parametrize("first", [[], [Eltwise("tanh", scale=4.0)]], ids=["alone", "tanh"])
def test_f4_the_conversion_clips_and_rounds(
    convention: str, fq: FakeQuantize, dst: torch.dtype, first: list[Eltwise]
) -> None:
    made = check([*first, fq], convention=convention, dst_dtype=dst)
    assert "round" not in str(made.post_ops)
    matches = (dst == S8) == (fq is SIGNED)
    assert ("clip" not in str(made.post_ops)) == matches
    assert ("F4" in rules(made)) == matches


@CONVENTIONS
def test_f4_needs_the_last_step_an_8_bit_dst_and_scale_one(convention: str) -> None:
    made = check([UNSIGNED, Scale(0.75)], convention=convention, dst_dtype=U8, tolerance=-1.0)
    assert "eltwise_round+eltwise_clip:0:255" in str(made.post_ops)
    made = check([UNSIGNED], convention=convention, dst_dtype=F32)
    assert str(made.post_ops) == "eltwise_round+eltwise_clip:0:255"
    made = FakeQuantize(0.0, 6.0, 0.0, 127.5)  # has ties, which are exact
    made = check([made], convention=convention, dst_dtype=U8, tolerance=-1.0)
    assert "eltwise_round+eltwise_clip:0:255" in str(made.post_ops)
    # what was not integral behind the rounding stays behind it (F6)
    made = check([FakeQuantize(0.0, 6.0, 0.25, 255.25)], convention=convention, dst_dtype=U8)
    assert str(made.post_ops) == "eltwise_round+eltwise_clip:0:255+eltwise_linear:1:0.25"


@pytest.mark.parametrize("n", [1, 2, 7, 128])
def test_f4a_round_and_shift_commute_at_ties_for_even_shifts_only(n: int) -> None:
    """The folded form, round(x + n), is the contract; for odd n a tie may differ by one."""
    fq = FakeQuantize(0.0, 255.0, float(n), 255.0 + n)
    made = torchq.compose([fq], 1, dst_dtype=U8, weight_scale=0.5, convention="v1")
    assert str(made.post_ops) in (f"eltwise_linear:1:{n}+eltwise_clip:{n}:{255 + n}",)
    acc = torch.arange(1, 200, dtype=torch.float64)[:, None]
    x = acc * 0.5
    exact, folded = convert(chain(x, [fq]), U8), convert(x + n, U8)
    ours = convert(chain(acc * made.scales.double(), list(made.post_ops)), U8)
    assert torch.equal(ours, folded)
    ties = x % 1 == 0.5
    assert torch.equal(ours[~ties], exact[~ties])
    assert (ours - exact).abs().max() == n % 2


@CONVENTIONS
def test_f5_the_inner_rounding_is_dropped_on_request(convention: str) -> None:
    inner = FakeQuantize(0.0, 6.0)
    steps = [inner, RESIDUAL, SIGNED]
    kept = check(steps, convention=convention, dst_dtype=S8)
    assert "eltwise_round" in str(kept.post_ops) and "F5" not in rules(kept)
    error = 0.5 * float(inner.output_scale) / float(SIGNED.input_scale)
    made = torchq.compose(steps, N, convention=convention, dst_dtype=S8, drop_inner_round=True)
    assert "round" not in str(made.post_ops) and rules(made).count("F5") == 1
    last = ":20+sum:1:3:s8" if convention == "v1" else "+sum:0.05:3:s8"  # C4, or C11
    assert str(made.post_ops) == f"eltwise_clip:0:6{last}"
    x = torch.randn(2000, N, dtype=torch.float64) * 4
    scale = 20 if convention == "v1" else 1  # of the clip, by C4
    dropped = chain(x * made.scales.double(), [made.post_ops[0]]) / scale - chain(x, [inner])
    assert 0 < dropped.abs().max() <= 0.5 * inner.output_scale + 1e-12
    residual = torch.randint(0, 100, (2000, N), dtype=S8)
    ours = chain(x * made.scales.double(), list(made.post_ops), [residual]) / made.dst_scale
    exact = chain(x, steps, [residual])
    difference = (convert(ours, S8) - convert(exact, S8)).abs().max()
    assert 0 < difference <= 1 + error
    # not in front of a sum alone, nor as the last
    for other in ([inner, RESIDUAL], [RESIDUAL, inner]):
        assert "F5" not in rules(torchq.compose(other, N, drop_inner_round=True))


def test_f5_a_negligible_shift_is_dropped_too() -> None:
    def made(shift: float) -> Any:
        inner = FakeQuantize(-3.0, 3.0, -3.0 + shift, 3.0 + shift)
        return torchq.compose([inner, RESIDUAL, SIGNED], N, dst_dtype=S8, drop_inner_round=True)

    assert str(made(5e-5).post_ops).startswith("eltwise_clip:") and "F5" in rules(made(5e-5))
    assert rules(made(5e-5)).count("F5") == 2
    kept = made(7e-5)  # 1e-5 of the range of 6 is 6e-5
    assert str(kept.post_ops).startswith("eltwise_linear:1:") and rules(kept).count("F5") == 1


@CONVENTIONS
def test_f6_a_shift_behind_the_rounding_stays_there(convention: str) -> None:
    fq = FakeQuantize(0.0, 6.0, 10.5, 265.5)
    made = check([fq], convention=convention, dst_dtype=U8, tolerance=-1.0)
    assert str(made.post_ops) == "eltwise_round+eltwise_clip:0:255+eltwise_linear:1:10.5"
    made = check([fq, Eltwise("relu")], convention=convention)
    assert "eltwise_round+eltwise_clip:0:255+eltwise_linear:1:10.5" in str(made.post_ops)


@CONVENTIONS
@pytest.mark.parametrize("levels", [16, 128])
def test_f7_a_clip_narrower_than_the_integers_stays(convention: str, levels: int) -> None:
    fq = FakeQuantize(0.0, 3.0, 2.0, levels + 1.0, levels)
    made = check([fq], convention=convention, dst_dtype=U8)
    assert str(made.post_ops).endswith(f"eltwise_clip:2:{levels + 1}") and "F4, F7" in rules(made)
    made = check([SIGNED], convention=convention, dst_dtype=U8)  # -128..127 of 0..255
    assert "eltwise_clip:-128:127" in str(made.post_ops)


@CONVENTIONS
def test_t1_zero_points_that_are_not_integers_are_composed_exactly(convention: str) -> None:
    fq = FakeQuantize(-1.3, 2.9, 0.0, 255.0)
    assert "T1" in fq.why_float()
    made = check([fq], convention=convention, dst_dtype=U8)
    assert not made.rest and made.dst_zero_point == 0
    assert "eltwise_linear:" in str(made.post_ops)


@CONVENTIONS
def test_t2_symmetric_bounds_shift_by_half_a_step(convention: str) -> None:
    made = check([FakeQuantize(-4.0, 4.0, 0.0, 255.0)], convention=convention, dst_dtype=U8)
    assert str(made.post_ops).endswith(":127.5") and not made.rest
    tuned = FakeQuantize(-4.0 * 1.0078740157480315, 4.0, -128.0, 127.0)
    made = check([tuned], convention=convention, dst_dtype=S8)
    assert str(made.post_ops) == "" and made.dst_zero_point == 0


def test_t3_the_same_tensor_as_u8_and_as_s8() -> None:
    as_u8 = FakeQuantize(-128 / 20, 127 / 20, 0.0, 255.0)
    u8 = check([as_u8], dst_dtype=U8)
    s8 = check([SIGNED], dst_dtype=S8)
    assert u8.dst_scale == s8.dst_scale and torch.equal(u8.scales, s8.scales)
    assert u8.dst_zero_point == 128 and s8.dst_zero_point == 0


@pytest.mark.parametrize("first", [[], [Eltwise("tanh")]], ids=["alone", "tanh"])
def test_t4_a_quantize_only_output_is_dsts_scale_and_zero_point(first: Any) -> None:
    for fq, dst in ((UNSIGNED, U8), (SIGNED, S8), (AFFINE, U8)):
        made = check([*first, fq], dst_dtype=dst)
        quantize, _ = fq.qparams(dst)
        assert "linear" not in str(made.post_ops)
        assert made.dst_scale == pytest.approx(float(quantize.scale))
        assert made.dst_zero_point == int(quantize.zero_point)


@CONVENTIONS
@pytest.mark.parametrize("bounds", [(1.0, -1.0, -1.0, 1.0), (2.0, 2.0, 0.0, 1.0)], ids=str)
def test_t5_inverted_bounds_are_never_composed(convention: str, bounds: Any) -> None:
    made = torchq.compose([Eltwise("relu"), FakeQuantize(*bounds)], N, convention=convention)
    assert str(made.post_ops) == "eltwise_relu" and len(made.rest) == 1
    assert "(T5)" in made.refusal


@CONVENTIONS
def test_t6_a_range_without_zero_stays_float(convention: str) -> None:
    for fq in (FakeQuantize(1.0, 6.0), FakeQuantize(-6.0, -1.0)):
        made = check([Eltwise("relu"), fq, Scale(2.0)], convention=convention, dst_dtype=U8)
        assert made.rest[0] is fq and made.dst_dtype == F32 and "(T6)" in made.refusal
    made = check([UNSIGNED], convention=convention, dst_dtype=U8)
    assert made.dst_zero_point == 0 and not made.rest


@CONVENTIONS
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_with_what_was_composed(convention: str, groups: int) -> None:
    channels = 6
    src = torch.randint(0, 256, (2, 4, 6, 5), dtype=U8)
    weight = torch.randint(-127, 128, (channels, 4 // groups, 3, 3), dtype=S8)
    acc = TF.conv2d(src, weight, groups=groups, dst_dtype=torch.int32).double()
    scale = torch.linspace(0.5, 1.5, channels) / float(acc.std())
    steps = [
        Shift(torch.linspace(-1, 1, channels)),
        Eltwise("relu"),
        Scale(torch.linspace(1, 2, channels)),
        FakeQuantize(0.0, 4.0, 0.0, 255.0),
    ]
    made = torchq.compose(steps, channels, convention=convention, weight_scale=scale, dst_dtype=U8)
    attr, x = made.attr(groups), (acc.movedim(1, -1) * scale.double())
    dst = TF.conv2d(src, weight, made.bias, groups=groups, attr=attr, dst_dtype=U8)
    exact = chain(x, steps).movedim(-1, 1)
    clear = (chain(x, steps[:-1]).movedim(-1, 1) * 255 / 4 % 1 - 0.5).abs() > 1e-3
    assert (dst - exact)[clear].abs().max() == 0 and clear.float().mean() > 0.99
    mask = {"v1": "output_scales:2", "v3": "scales:src:0+weights:" + "13"[groups - 1] + "+dst:0"}
    assert str(attr).startswith(mask[convention])
