# SPDX-License-Identifier: Apache-2.0
"""Steps that the composer leaves over, with the reason, and arguments that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_chain import F32, U8, N

import torchq
from torchq.onednn.composition import (
    Clip,
    Eltwise,
    Scale,
    Shift,
)


def test_inverted_bounds_are_refused() -> None:
    made = torchq.compose([Clip(2.0, 1.0)], N)
    assert "low <= high" in made.refusal and len(made.rest) == 1


def test_a_constant_beyond_float32_is_refused_with_the_reason() -> None:
    made = torchq.compose([Eltwise("tanh"), Scale(1e30), Shift(1.0), Scale(1e30)], N)
    assert str(made.post_ops).endswith("+eltwise_linear:1e30:1e30") and not made.rest
    made = torchq.compose([Eltwise("tanh"), Scale(1e30), Scale(1e30)], N)
    assert len(made.rest) == 1 and "must be finite in float32" in made.refusal
    assert str(made.post_ops) == "eltwise_tanh+eltwise_linear:1e30"


def test_more_post_ops_than_an_op_takes_are_left_over() -> None:
    made = torchq.compose([Eltwise("tanh")] * 40, N, dst_dtype=U8)
    assert len(made.post_ops) == 32 and len(made.rest) == 8 and made.dst_dtype == F32
    assert "at most 32 post-ops" in made.refusal


@pytest.mark.parametrize(
    "steps,options,message",
    [
        ([Scale([1.0, 2.0])], {}, r"step 0 \(Scale\): values must be 1 or 5 finite values, got 2"),
        ([Shift(float("nan"))], {}, "finite values"),
        ([], {"weight_scale": [1.0, 2.0]}, "weight_scale must be 1 or 5"),
        ([], {"convention": "v2"}, "convention must be one of v1, v3, got 'v2'"),
        ([], {"bias": torch.zeros(3)}, r"bias must have shape \[5\]"),
        ([], {"bias": torch.zeros(5).half()}, "bias must be float32 or int32"),
        ([], {"int8": False, "src_scale": 0.5}, "must be 1 for a float op"),
    ],
)
def test_bad_arguments(steps: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torchq.compose: .*{message}"):
        torchq.compose(steps, N, **options)


def test_what_is_no_step() -> None:
    with pytest.raises(TypeError, match=r"step 0 \(str\) must be one of"):
        torchq.compose(["relu"], N)
