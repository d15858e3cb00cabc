# SPDX-License-Identifier: Apache-2.0
"""torchq.functional under oneDNN's names, and what its docstring says about them."""

from __future__ import annotations

import pytest
import torch
from calls import S8, S32, U8, assert_same
from cases import random_q, random_s8
from torch import nn

import torchq
import torchq.functional as TF
from torchq.functional.packing import pack_conv, pack_conv_transpose, pack_linear


@pytest.mark.parametrize("sizes", [(), (4,), (4, 3), (2, 4, 3)])
def test_inner_products_sum_over_channels_and_sizes(sizes: tuple[int, ...]) -> None:
    src, weight = random_q((2, 3, *sizes), U8), random_s8((5, 3, *sizes))
    attr = torchq.Attr().set_scales("src", 0, 0.5).set_scales("weights", 1, [0.1, 1, 2, 3, 4])
    attr.post_ops.append_binary("mul", None, 3)
    factor = torch.rand(2, 5)
    expected = TF.linear(src.flatten(1), weight.flatten(1), attr=attr, post_op_srcs=[factor])
    assert_same(TF.inner_product(src, weight, attr=attr, post_op_srcs=[factor]), expected)
    if len(sizes) == 2:
        nhwc = src.contiguous(memory_format=torch.channels_last)
        assert_same(TF.inner_product(nhwc, weight, attr=attr, post_op_srcs=[factor]), expected)


def test_inner_products_are_refused_by_their_own_name() -> None:
    src, weight = random_q((2, 3, 4, 4), U8), random_s8((5, 3, 4, 4))
    for given, by in ((src[..., 1:], weight), (src, weight[:, 1:]), (src.flatten(1), weight)):
        with pytest.raises(ValueError, match=r"torchq\.inner_product: src and weight must be \(N"):
            TF.inner_product(given, by)
    with pytest.raises(ValueError, match=r"torchq\.inner_product: src must be \(\*, 48\)"):
        TF.inner_product(src, pack_linear(weight.flatten(1)))
    with pytest.raises(TypeError, match=r"torchq\.inner_product: src must be torch\.uint8"):
        TF.inner_product(src.float(), weight)


@pytest.mark.parametrize("dims", (1, 2, 3))
def test_convolutions_take_the_dims_of_src(dims: int) -> None:
    src = random_q((2, 6, *[5] * dims), U8)
    weight = random_s8((4, 3, *[3] * dims))
    conv = (TF.conv1d, TF.conv2d, TF.conv3d)[dims - 1]
    options = {"stride": 2, "padding": 1, "groups": 2, "dst_dtype": S32}
    assert_same(TF.convolution(src, weight, **options), conv(src, weight, **options))
    weight = random_s8((6, 2, *[3] * dims))
    conv = (TF.conv_transpose1d, TF.conv_transpose2d, TF.conv_transpose3d)[dims - 1]
    options["output_padding"] = 1
    assert_same(TF.deconvolution(src, weight, **options), conv(src, weight, **options))


def test_convolutions_name_what_they_cannot_read() -> None:
    for op in (TF.convolution, TF.deconvolution):
        with pytest.raises(ValueError, match=f"torchq.{op.__name__}: src must be \\(N, C, spatial"):
            op(random_q((2, 6), U8), random_s8((6, 6)))


def test_grouped_weights_of_onednn() -> None:
    """(G, OC/G, C/G, k...) is refused with the remedy, which works."""
    src, grouped = random_q((2, 6, 5, 5), U8), random_s8((3, 4, 2, 3, 3))
    with pytest.raises(ValueError, match=r"weight\.flatten\(0, 1\) here, with groups=G"):
        TF.conv2d(src, grouped, groups=3)
    with pytest.raises(ValueError, match=r"weight\.flatten\(0, 1\) here, with groups=G"):
        TF.conv2d(src, pack_conv(grouped, 3), groups=3)
    expected = nn.functional.conv2d(src.double(), grouped.flatten(0, 1).double(), groups=3)
    got = TF.conv2d(src, grouped.flatten(0, 1), groups=3, dst_dtype=S32)
    assert torch.equal(got, expected.int())
    with pytest.raises(ValueError, match=r"weight\.transpose\(1, 2\)\.flatten\(0, 1\) here"):
        TF.conv_transpose2d(src, grouped, groups=3)
    torchs = grouped.transpose(1, 2).flatten(0, 1)  # (C, OC/G, k...)
    expected = nn.functional.conv_transpose2d(src.double(), torchs.double(), groups=3)
    got = TF.conv_transpose2d(src, torchs, groups=3, dst_dtype=S32)
    assert torch.equal(got, expected.int())


@pytest.mark.parametrize(
    ("weight", "groups", "rows"),
    [
        ((9, 16), 1, 1),
        ((16, 8, 3, 3), 1, 9),
        ((16, 3, 3, 3), 1, 3),  # a stem
        ((16, 3, 2, 3, 3), 1, 6),
        ((20, 1, 3, 3), 20, 1),  # depthwise
        ((24, 3, 3, 3), 8, 9),
    ],
)
def test_compensation_has_the_documented_rows(
    weight: tuple[int, ...], groups: int, rows: int
) -> None:
    q = random_s8(weight)
    packed = pack_linear(q) if q.dim() == 2 else pack_conv(q, groups)
    assert packed.compensation.shape == (rows, weight[0])
    assert torch.equal(packed.compensation.sum(0), q.flatten(1).sum(1))
    if q.dim() == 4:
        transposed = pack_conv_transpose(q, groups)
        split = q.reshape(groups, -1, *q.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)
        assert torch.equal(transposed.compensation.sum(0), split.sum(1))


def test_a_layer_of_onednns_lstm() -> None:
    """The recipe in the docstring of torchq.functional, beside a float LSTM of the same weights."""
    torch.manual_seed(0)
    inputs, hidden, gates, d, scale, shift = 5, 16, 4, 2, 127.0, 128.0
    weights_layer = torch.randint(-127, 128, (1, d, inputs, gates, hidden), dtype=S8)
    weights_iter = torch.randint(-127, 128, (1, d, hidden, gates, hidden), dtype=S8)
    scales = 200 + 100 * torch.rand(gates, hidden)
    bias = torch.randn(1, d, gates, hidden)
    src = torch.randint(0, 256, (7, 3, inputs), dtype=U8)
    src_iter, src_iter_c = torch.rand(1, d, 3, hidden) - 0.5, torch.randn(1, d, 3, hidden)

    attr = torchq.Attr().set_rnn_data_qparams(scale, shift).set_rnn_weights_qparams(24, scales)
    lstm = torchq.nn.QLSTM.from_onednn(weights_layer, weights_iter, bias, attr)
    result, (ends, cells) = lstm(src, (src_iter.flatten(0, 1), src_iter_c.flatten(0, 1)))
    got = result, ends, cells
    real = nn.LSTM(inputs, hidden, bidirectional=True)
    with torch.no_grad():
        for i, end in enumerate(("", "_reverse")):
            for name, q in (("ih", weights_layer), ("hh", weights_iter)):
                values = (q[0, i].float() / scales).permute(1, 2, 0).flatten(0, 1)
                getattr(real, f"weight_{name}_l0{end}").copy_(values)
            getattr(real, f"bias_ih_l0{end}").copy_(bias[0, i].flatten())
            getattr(real, f"bias_hh_l0{end}").zero_()
        dst, (h_n, c_n) = real((src.float() - shift) / scale, (src_iter[0], src_iter_c[0]))
    for q, value in zip(got, (dst, h_n, c_n), strict=True):
        torch.testing.assert_close(q, value, atol=0.05, rtol=0.05)
