# SPDX-License-Identifier: Apache-2.0
import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchq.quantization.qparams import (
    QParams,
    activation_range,
    choose_qparams,
    output_channel_rows,
    weight_qparams,
    weight_range,
)

TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
float32s = st.floats(allow_nan=False, allow_infinity=False, width=32)


def test_integer_ranges():
    assert activation_range(torch.uint8, 8) == (0, 255)
    assert activation_range(torch.uint8, 7) == (0, 127)
    assert activation_range(torch.int8, 8) == (-128, 127)
    assert activation_range(torch.int8, 7) == (-64, 63)
    assert weight_range(8) == (-127, 127)
    assert weight_range(7) == (-63, 63)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "bits", "symmetric", "scale", "zero_point"),
    [
        (0.0, 255.0, torch.uint8, 8, False, 1.0, 0),
        (5.0, 255.0, torch.uint8, 8, False, 1.0, 0),  # zero is always included
        (-255.0, -5.0, torch.uint8, 8, False, 1.0, 255),
        (-1.0, 1.0, torch.uint8, 8, False, 2 / 255, 128),  # 127.5 rounds to even
        (-128.0, 127.0, torch.int8, 8, False, 1.0, 0),
        (0.0, 255.0, torch.int8, 8, False, 1.0, -128),
        (0.0, 127.0, torch.uint8, 7, False, 1.0, 0),
        (0.0, 127.0, torch.int8, 7, False, 1.0, -64),
        (-3.0, 127.0, torch.uint8, 8, True, 1.0, 128),
        (-127.0, 3.0, torch.int8, 8, True, 1.0, 0),
        (-3.0, 63.0, torch.uint8, 7, True, 1.0, 64),
        (-3.0, 63.0, torch.int8, 7, True, 1.0, 0),
        (0.0, 0.0, torch.uint8, 8, False, 1.0, 0),
        (0.0, 0.0, torch.int8, 8, False, 1.0, -128),
        (0.0, 0.0, torch.uint8, 8, True, 1.0, 128),
        (0.0, 1e-44, torch.uint8, 8, False, TINY, 0),
        (-1e-38, 1e-38, torch.int8, 8, True, TINY, 0),
        (-LARGEST, LARGEST, torch.uint8, 8, False, 2 * LARGEST / 255, 128),
    ],
)
def test_choose_qparams(low, high, dtype, bits, symmetric, scale, zero_point):
    qparams = choose_qparams(low, high, dtype, bits, symmetric)
    assert qparams == dataclasses.replace(QParams.per_tensor(scale, zero_point, dtype), bits=bits)
    assert qparams.scale.shape == qparams.zero_point.shape == ()


def test_choose_qparams_rounds_half_to_even():
    # scale is exactly 1, so the zero points are 0.5 and 1.5 before rounding.
    assert choose_qparams(-0.5, 254.5).zero_point.item() == 0
    assert choose_qparams(-1.5, 253.5).zero_point.item() == 2


def test_choose_qparams_per_channel():
    low, high = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([1.0, 0.0, 4.0])
    qparams = choose_qparams(low, high, torch.int8, axis=1)
    assert qparams.axis == 1 and qparams.is_per_channel
    for channel in range(3):
        alone = choose_qparams(low[channel], high[channel], torch.int8)
        assert qparams.scale[channel] == alone.scale
        assert qparams.zero_point[channel] == alone.zero_point
    scale, zero_point = qparams.broadcast(4)
    assert scale.shape == zero_point.shape == (1, 3, 1, 1)


@given(
    bounds=st.tuples(float32s, float32s),
    dtype=st.sampled_from([torch.uint8, torch.int8]),
    bits=st.sampled_from([8, 7]),
    symmetric=st.booleans(),
)
def test_choose_qparams_properties(bounds, dtype, bits, symmetric):
    """Valid parameters, an exact zero, and every value of the range within half a step."""
    low, high = min(bounds), max(bounds)
    qparams = choose_qparams(low, high, dtype, bits, symmetric)  # QParams validates itself
    smallest, largest = activation_range(dtype, bits)
    zero_point, scale = qparams.zero_point.item(), qparams.scale.item()
    assert smallest <= zero_point <= largest
    assert scale >= TINY and math.isfinite(scale)
    if not symmetric and dtype == torch.uint8 and low >= 0:
        assert zero_point == 0
    for value in (min(low, 0.0), low, 0.0, high):
        q = min(max(round(value / scale) + zero_point, smallest), largest)
        real = scale * (q - zero_point)
        assert abs(real - value) <= scale * (0.5 + 1e-4)
        assert value != 0.0 or real == 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((math.nan, 1.0), r"torchq.choose_qparams: min_value must be finite, got nan\. Remove"),
        ((0.0, math.inf), "max_value must be finite, got inf"),
        ((2.0, 1.0), r"min_value must be <= max_value, got 2.0 > 1.0\. Swap them"),
        ((torch.zeros(2), torch.zeros(3)), r"shape of min_value, \[2\], got \[3\]"),
        ((torch.zeros(2), torch.zeros(2)), r"axis must be an int for scales \[C\]"),
        ((0.0, 1.0, torch.quint8), "dtype must be torch.uint8 or torch.int8, got torch.quint8"),
        ((0.0, 1.0, torch.uint8, 4), "bits must be 8 or 7, got 4"),
        ((0.0, 1.0, torch.uint8, True), "bits must be 8 or 7, got True"),
    ],
)
def test_choose_qparams_errors(args, message):
    with pytest.raises(ValueError, match=message):
        choose_qparams(*args)


def test_dtype_must_be_a_dtype():
    with pytest.raises(TypeError, match=r"dtype must be torch.uint8 or torch.int8, got 'uint8'"):
        choose_qparams(0.0, 1.0, "uint8")


def scales(*values):
    return torch.tensor(values, dtype=torch.float32)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((1.0, 0, torch.uint8), TypeError, "scale must be a torch.float32 tensor, got float"),
        ((scales(1).double()[0], zeros(), torch.uint8), TypeError, "got torch.float64"),
        (
            (scales(1)[0], torch.tensor(0), torch.uint8),
            TypeError,
            "zero_point must be a torch.int3",
        ),
        ((scales(0)[0], zeros(), torch.uint8), ValueError, r"finite and > 0, got 0.0"),
        ((scales(-1)[0], zeros(), torch.uint8), ValueError, r"finite and > 0, got -1.0"),
        ((scales(1, math.nan), zeros(2), torch.int8, 0), ValueError, r"finite and > 0, got nan"),
        ((scales(math.inf)[0], zeros(), torch.uint8), ValueError, r"finite and > 0, got inf"),
        ((scales(1)[0], zeros() - 1, torch.uint8), ValueError, r"in \[0, 255\].*got -1"),
        ((scales(1)[0], zeros() + 128, torch.int8), ValueError, r"in \[-128, 127\].*got 128"),
        ((scales(1, 1), zeros(), torch.uint8, 0), ValueError, r"shape of scale, \[2\], got \[\]"),
        ((scales(1, 1), zeros(2), torch.uint8), ValueError, "got axis=None with scale"),
        ((scales(1)[0], zeros(), torch.uint8, 0), ValueError, "got axis=0 with scale"),
        ((scales(1), zeros(1), torch.uint8, "0"), TypeError, "axis must be int or None, got str"),
        (
            (torch.ones(2, 2), zeros(2, 2), torch.uint8, 0),
            ValueError,
            r"\[\] or \[C\], got \[2, 2\]",
        ),
        ((scales(1)[0], zeros(), torch.int32), ValueError, "got torch.int32"),
    ],
)
def test_qparams_validation(args, error, message):
    with pytest.raises(error, match=message):
        QParams(*args)


def test_qparams_is_a_value():
    qparams = choose_qparams(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 3.0]), axis=0)
    assert copy.deepcopy(qparams) == qparams
    assert pickle.loads(pickle.dumps(qparams)) == qparams
    assert qparams != choose_qparams(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 2.0]), axis=0)
    assert qparams != QParams.per_tensor(1.0)
    assert qparams != "qparams"
    with pytest.raises(AttributeError):
        qparams.axis = 1
    with pytest.raises(ValueError, match="axis must be a dimension of a 0-d tensor, got 0"):
        qparams.broadcast(0)
    assert str(QParams.per_tensor(0.5, 3)) == "u8 scale=0.5 zero_point=3"
    assert str(qparams).startswith("u8 axis=0 channels=2 scale=")


def test_weight_qparams_per_channel():
    weight = torch.tensor([[1.0, -127.0], [0.0, 0.0], [6.35, 1.0]])
    qparams = weight_qparams(weight)
    expected = QParams(scales(1.0, 1.0, 6.35 / 127), zeros(3), torch.int8, 0)
    assert qparams == expected
    assert weight_qparams(weight, "per_tensor") == QParams.per_tensor(1.0, 0, torch.int8)
    assert weight_qparams(weight, bits=7).scale[0] == np.float32(127 / 63)
    assert weight_qparams(weight.bfloat16()).scale[0] == 1.0


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_weight_qparams_of_transposed_convolution(groups):
    weight = torch.randn(8, 3, 2, 2)  # (IC, OC / groups, kh, kw)
    qparams = weight_qparams(weight, channel_axis=1, groups=groups)
    parts = weight.chunk(groups, 0)
    expected = torch.cat([part.abs().amax((0, 2, 3)) for part in parts]).double() / 127
    assert torch.equal(qparams.scale, expected.float())
    rows = output_channel_rows(weight, 1, groups)
    assert torch.equal(rows[3 * (groups - 1)], parts[-1][:, 0].flatten())


def test_weight_qparams_accepts_empty_weights():
    assert torch.equal(weight_qparams(torch.zeros(3, 0)).scale, torch.ones(3))
    assert weight_qparams(torch.zeros(0, 3)).scale.shape == (0,)
    assert weight_qparams(torch.zeros(3, 0), "per_tensor").scale == 1.0
    assert "channels=0" in str(weight_qparams(torch.zeros(0, 3)))


def test_weight_qparams_errors():
    weight = torch.randn(4, 2)
    broken = torch.tensor([[math.nan, 1.0], [0.0, -math.inf]])
    with pytest.raises(ValueError, match="weight must be finite, got 2 NaN or inf values of 4"):
        weight_qparams(broken)
    with pytest.raises(ValueError, match="granularity must be 'per_channel' or 'per_tensor', got"):
        weight_qparams(weight, "channel")
    with pytest.raises(ValueError, match=r"dimension of weight \[4, 2\], got 2"):
        weight_qparams(weight, channel_axis=2)
    with pytest.raises(
        ValueError, match=r"groups must divide dimension 0 of weight \[4, 2\], got 3"
    ):
        weight_qparams(weight, channel_axis=1, groups=3)
    with pytest.raises(TypeError, match=r"floating-point tensor, got torch.int8"):
        weight_qparams(weight.to(torch.int8))
    with pytest.raises(ValueError, match="bits must be 8 or 7, got 6"):
        weight_qparams(weight, bits=6)


@pytest.mark.parametrize(
    ("scale", "zero_point", "named"),
    [
        (None, 0, "scale must be a number, got None"),
        ("0.1", 0, "scale must be a number, got '0.1'"),
        (0.1, 1.5, "zero_point must be an integer, got 1.5"),
        (0.1, None, "zero_point must be an integer, got None"),
        (0.1, True, "zero_point must be an integer, got True"),
    ],
)
def test_per_tensor_takes_numbers_as_they_are(scale, zero_point, named):
    with pytest.raises(TypeError, match=rf"torchq.QParams.per_tensor: {named}\. Pass a"):
        QParams.per_tensor(scale, zero_point)
