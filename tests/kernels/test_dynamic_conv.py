# SPDX-License-Identifier: Apache-2.0
"""Dynamic convolutions against a float64 definition, sample by sample, and everywhere they run."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from calls import assert_same, assert_same_deployed
from reference_arithmetic import fma32
from torch import Tensor, nn
from torch.library import opcheck

import torchq
import torchq.nn as tnn
from torchq.functional.packing import pack_conv
from torchq.quantization.qparams import choose_qparams

CASES = {
    "1d": (nn.Conv1d(20, 32, 3, padding=1), (3, 20, 25)),
    "2d": (nn.Conv2d(6, 9, 3, stride=2, padding=(1, 2)), (2, 6, 11, 9)),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (3, 8, 7, 6)),
    "groups, same, no bias": (
        nn.Conv2d(6, 9, 2, padding="same", dilation=2, groups=3, bias=False),
        (2, 6, 8, 9),
    ),
    "stem": (nn.Conv2d(3, 16, 7, stride=2, padding=3), (2, 3, 17, 19)),
    "3d": (nn.Conv3d(3, 5, 2), (2, 3, 4, 5, 4)),
}
FORMS = {
    nn.Conv1d: tnn.DynamicQConv1d,
    nn.Conv2d: tnn.DynamicQConv2d,
    nn.Conv3d: tnn.DynamicQConv3d,
}


def source(shape: tuple[int, ...]) -> Tensor:
    """Samples of different ranges, one of which has no negative value."""
    src = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    spread = torch.tensor([1.0, 7.0, 0.01])[: shape[0]]
    return torch.cat([src[:1].abs(), src[1:]]) * spread.reshape(-1, *[1] * (len(shape) - 1))


def expected(module: nn.Module, layer: tnn.DynamicQConv2d, sample: Tensor) -> Tensor:
    """By the definition, for one sample."""
    params = choose_qparams(sample.min(), sample.max())
    q = torchq.functional.quantize(sample, params.scale, params.zero_point).double()
    weight = layer.packed().unpack().double()
    function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
    acc = function(
        (q - float(params.zero_point))[None],
        weight,
        None,
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
    )[0]
    scale = (params.scale.double() * layer.weight_scale.double()).float()
    shift = torch.zeros_like(scale) if module.bias is None else module.bias.detach()
    channels = (-1, *[1] * (acc.dim() - 1))
    return fma32(acc.float(), scale.reshape(channels), shift.reshape(channels))


@pytest.mark.parametrize("name", CASES)
def test_each_sample_by_itself(isa: str, name: str):
    module, shape = CASES[name]
    layer, src = FORMS[type(module)].from_float(module), source(shape)
    dst = layer(src)
    assert dst.is_contiguous()
    for sample, result in zip(src, dst, strict=True):
        assert_same(result, expected(module, layer, sample), name)
        assert_same(layer(sample[None])[0], result, "alone")
        assert_same(layer(sample), result, "without a batch dimension")
    assert torchq.sqnr(module(src), dst) > 30


@pytest.mark.parametrize("name", CASES)
def test_deployed(name: str):
    module, shape = CASES[name]
    layer, src = FORMS[type(module)].from_float(module), source(shape)
    assert_same_deployed(layer, (src,), layer(src))


def test_any_memory_format_and_empty_batches():
    module, shape = CASES["2d"]
    layer, src = tnn.DynamicQConv2d.from_float(module), source(shape)
    dst = layer(src.contiguous(memory_format=torch.channels_last))
    assert dst.is_contiguous(memory_format=torch.channels_last)
    assert_same(dst, layer(src))
    strided = src.repeat_interleave(2, dim=3)[..., ::2]
    assert not strided.is_contiguous()
    assert_same(layer(strided), layer(src))
    assert layer(src[:0]).shape == module(src[:0]).shape


def test_state_and_spec():
    module, shape = CASES["groups, same, no bias"]
    layer = tnn.DynamicQConv2d.from_float(module, granularity="per_tensor", bits=7)
    assert layer.weight_scale.unique().numel() == 1 and layer.packed().unpack().abs().max() <= 63
    again = tnn.DynamicQConv2d.from_spec(layer.read_spec())
    again.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    for other in (again, loaded):
        assert_same(other(source(shape)), layer(source(shape)))


def test_known_scales_are_kept():
    module = nn.Conv1d(4, 3, 2)
    scale = torch.tensor([0.01, 0.02, 0.04])
    layer = tnn.DynamicQConv1d.from_float(module, weight_scale=scale)
    assert_same(layer.weight_scale, scale)
    steps = (module.weight.detach() / scale.reshape(-1, 1, 1)).round()
    assert_same(layer.packed().unpack(), steps.to(torch.int8))


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str):
    module, shape = CASES[name]
    layer, src = FORMS[type(module)].from_float(module), source(shape)
    state = (layer.weight, layer.compensation, layer.pair_bound, layer.weight_scale, layer.bias)
    for values in (src, src.movedim(1, -1).contiguous().movedim(-1, 1)):
        opcheck(torch.ops.torchq.dynamic_conv.default, (values, *state, layer.geometry))


def test_errors():
    layer = tnn.DynamicQConv1d.from_float(nn.Conv1d(4, 3, 2))
    with pytest.raises(ValueError, match="finite"):
        layer(torch.full((1, 4, 5), float("nan")))
    with pytest.raises(TypeError, match="float32"):
        layer(torch.zeros(1, 4, 5, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="padding_mode"):
        tnn.DynamicQConv1d.from_float(nn.Conv1d(4, 3, 2, padding_mode="reflect"))
    packed = pack_conv(torch.ones(3, 4, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match="int8"):
        tnn.DynamicQConv1d(packed, torch.ones(1), None, stride=[1], padding=[0], padding_end=[0])
