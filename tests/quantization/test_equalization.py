# SPDX-License-Identifier: Apache-2.0
"""Cross-layer equalization: factors of the channels between two layers."""

import pytest
import torch
from torch import nn

from torchq.quantization.recipes.equalization import (
    by_channels,
    equalizing_factors,
    expected_largest,
    with_source_factors,
)

LAYERS = {
    "linear": (lambda: nn.Linear(8, 5), (3, 8), (1, 8)),
    "flattened": (lambda: nn.Linear(32, 5), (3, 32), None),
    "conv": (lambda: nn.Conv2d(8, 6, 3), (2, 8, 5, 5), (1, 8, 1, 1)),
    "grouped": (lambda: nn.Conv1d(8, 6, 3, groups=2), (2, 8, 7), (1, 8, 1)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 5, 5), (1, 8, 1, 1)),
}


def factors_for(largest, weight):
    return equalizing_factors(
        largest, weight, float(largest.max()) / 255, lambda f: float((largest / f).max()) / 255
    )


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_from_a_source_divided_by_powers_of_two(name):
    make, shape, channels = LAYERS[name]
    layer, src = make(), torch.randn(shape)
    factors = torch.exp2(torch.arange(8) - 4.0)
    each = factors.repeat_interleave(4) if channels is None else factors.view(channels)
    scaled = with_source_factors(layer, factors)
    torch.testing.assert_close(scaled(src / each), layer(src))
    assert torch.equal(by_channels(scaled, 8).abs().amax((1, 3)).flatten()[:1] * 16,
                       by_channels(layer, 8).abs().amax((1, 3)).flatten()[:1])  # fmt: skip


def test_channels_of_different_sizes_become_alike_for_a_depthwise_convolution():
    largest = torch.tensor([0.25, 1.0, 16.0, 128.0])
    factors = factors_for(largest, torch.randn(4, 1, 1, 9))
    assert factors is not None
    assert len(set((largest / factors).tolist())) == 1


def test_factors_are_shared_out_between_source_and_weight():
    """Large channels meet small columns, and each belongs to one scale."""
    largest = torch.tensor([1.0, 256.0]).repeat(8)
    weight = torch.ones(1, 4, 16, 1) / largest.view(1, 1, 16, 1)
    factors = factors_for(largest, weight)
    assert factors is not None
    assert factors[1] / factors[0] == 256


@pytest.mark.parametrize("spread", [1.0, 1.3])
def test_channels_that_are_alike_keep_one_scale(spread):
    largest = torch.linspace(1.0, spread, 16)
    assert factors_for(largest, torch.randn(1, 8, 16, 9)) is None


def test_channels_without_values_or_weights_are_no_trouble():
    largest = torch.tensor([0.0, 1.0, 100.0, 1.0])
    weight = torch.randn(1, 3, 4, 1)
    weight[:, :, 3] = 0
    weight[:, 2] = 0
    factors = factors_for(largest, weight)
    assert factors is None or bool((factors.isfinite() & (factors > 0)).all())


def test_a_channel_that_calibration_missed_counts_by_its_weights():
    seen = torch.tensor([0.0, 0.01, *[1.0] * 30, 2.0])
    rows = torch.tensor([*[1.0] * 32, 0.01])  # the last one is large by its bias
    assert torch.equal(expected_largest(seen, rows), torch.tensor([*[1.0] * 32, 2.0]))


def test_channels_that_are_small_by_their_weights_stay_small():
    seen = torch.tensor([0.01, 1.0, 100.0])
    torch.testing.assert_close(expected_largest(seen, seen * 3), seen)
