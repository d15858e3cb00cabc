# SPDX-License-Identifier: Apache-2.0
"""The native oneDNN peer agrees with torch in int64 and float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from peers import LARGE, exact_weight, start_onednn
from torch import Tensor

import torchq.functional as TF
from benchmarks.onednn import Peer, RefusedError, Timing

CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def random_q(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any value of the dtype but -128, which quantizers avoid."""
    low, high = (0, 256) if dtype == torch.uint8 else (-127, 128)
    return torch.randint(low, high, shape, dtype=dtype)


def random_weight(*shape: int) -> Tensor:
    return exact_weight(random_q(torch.int8, *shape))


def quantized(x: Tensor, scale: float, zero_point: int = 0) -> Tensor:
    return (x / scale + zero_point).round().clamp(0, 255)


def assert_off_by_one(got: Tensor, expected: Tensor) -> None:
    """At most one step apart, and almost everywhere none: only rounding ties may differ."""
    difference = (got.double() - expected).abs()
    assert difference.max() <= 1
    assert (difference > 0).double().mean() < 0.01


@pytest.mark.parametrize("src_dtype", [torch.uint8, torch.int8], ids=["u8", "s8"])
@pytest.mark.parametrize(
    ("size", "kernel", "options"),
    [
        ((9, 11), (1, 1), {}),
        ((9, 11), (3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
        ((9, 11), (3, 3), {"padding": 1, "groups": 4}),
        ((9, 11), (3, 3), {"padding": 1, "groups": 32}),
        ((13,), (3,), {"padding": 1}),
        ((4, 5, 6), (3, 3, 3), {"padding": 1, "stride": 2}),
    ],
    ids=["1x1", "strided-dilated", "grouped", "depthwise", "1d", "3d"],
)
def test_convolution_without_scales_is_exact(
    peer: Peer,
    src_dtype: torch.dtype,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    options: dict,
) -> None:
    src = random_q(src_dtype, 2, 32, *size)
    weight = random_weight(64, 32 // options.get("groups", 1), *kernel)
    dst = peer.convolution(src, weight, dst_dtype=torch.int32, **options)
    expected = CONV[len(size)](src.long(), weight.long(), **options)
    assert dst.dtype == torch.int32
    assert torch.equal(dst.long(), expected)
    assert dst.stride(1) == 1  # channels-last


def test_convolution_pads_asymmetrically(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 1, 16, 7, 8), random_weight(16, 16, 3, 3)
    dst = peer.convolution(src, weight, padding=(0, 1), padding_end=(2, 0), dst_dtype=torch.int32)
    assert torch.equal(dst.long(), F.conv2d(F.pad(src.long(), (1, 0, 0, 2)), weight.long()))


@pytest.mark.parametrize("groups", [1, 4])
def test_convolution_with_attributes(peer: Peer, groups: int) -> None:
    src, weight = random_q(torch.uint8, 2, 32, 10, 10), random_weight(48, 32 // groups, 3, 3)
    weight_scale, bias = torch.rand(48) * 0.01 + 0.001, torch.randn(48)
    dst = peer.convolution(
        src, weight, bias, padding=1, groups=groups,
        src_scale=0.02, weight_scale=weight_scale, dst_scale=0.25,
        src_zero_point=117, dst_zero_point=3, post_ops="eltwise_relu",
    )  # fmt: skip
    acc = F.conv2d(src.double() - 117, weight.double(), padding=1, groups=groups)
    real = acc * (0.02 * weight_scale.double()[:, None, None]) + bias.double()[:, None, None]
    assert dst.dtype == torch.uint8
    assert_off_by_one(dst, quantized(real.relu(), 0.25, 3))


def test_post_ops_apply_in_order(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 1, 32, 6, 6), random_weight(16, 32, 1, 1)
    old, slope, full = random_q(torch.uint8, 1, 16, 6, 6), torch.rand(16), torch.rand(1, 16, 6, 6)
    dst = peer.convolution(
        src, weight, src_scale=0.02, weight_scale=0.01, dst=old, dst_dtype=torch.uint8,
        post_ops="sum:0.5:7+eltwise_relu:0.125:0:2+binary_mul:2+binary_add:15",
        post_op_tensors=[slope, full],
    )  # fmt: skip
    real = F.conv2d(src.double(), weight.double()) * 0.0002 + 0.5 * (old.double() - 7)
    real = 2 * F.leaky_relu(real, 0.125) * slope.double()[:, None, None] + full
    assert_off_by_one(dst, quantized(real, 1))


def test_prelu_post_op(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 1, 32, 6, 6), random_weight(16, 32, 1, 1)
    slope = torch.rand(16)
    dst = peer.convolution(
        src, weight, dst_dtype=torch.float32, post_ops="prelu:2", post_op_tensors=[slope]
    )
    expected = F.prelu(F.conv2d(src.float(), weight.float()), slope)
    torch.testing.assert_close(dst, expected)


def test_inner_product(peer: Peer) -> None:
    src, weight = random_q(torch.int8, 5, 70), random_weight(33, 70)
    weight_scale, bias = torch.rand(33) * 0.01, torch.randn(33)
    assert torch.equal(
        peer.inner_product(src, weight, dst_dtype=torch.int32).long(), src.long() @ weight.long().T
    )
    dst = peer.inner_product(
        src, weight, bias, src_scale=0.02, weight_scale=weight_scale, dst_dtype=torch.float32
    )
    expected = (src.double() @ weight.double().T) * (0.02 * weight_scale.double()) + bias
    torch.testing.assert_close(dst.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["2d", "batched"])
def test_matmul(peer: Peer, batch: tuple[int, ...], prepack: bool) -> None:
    src, weight = random_q(torch.uint8, *batch, 5, 70), random_weight(*batch, 70, 33)
    weight_scale, bias = torch.rand(33) * 0.01 + 0.001, torch.randn(33)
    exact = peer.matmul(src, weight, dst_dtype=torch.int32, prepack=prepack)
    assert torch.equal(exact.long(), src.long() @ weight.long())
    dst = peer.matmul(
        src, weight, bias, src_scale=0.02, weight_scale=weight_scale, dst_scale=0.1,
        src_zero_point=100, dst_zero_point=128, prepack=prepack,
    )  # fmt: skip
    real = ((src.double() - 100) @ weight.double()) * (0.02 * weight_scale.double()) + bias
    assert_off_by_one(dst, quantized(real, 0.1, 128))


def test_matmul_broadcasts_weights_over_the_batch(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 3, 5, 70), random_weight(70, 33)
    dst = peer.matmul(src, weight, dst_dtype=torch.int32)
    assert torch.equal(dst.long(), src.long() @ weight.long())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=["u8", "s8"])
def test_pooling(peer: Peer, dtype: torch.dtype) -> None:
    src = random_q(dtype, 2, 32, 9, 9)
    window = {"stride": 2, "padding": 1}
    dst = peer.pooling(src, "max", 3, **window)
    assert torch.equal(dst.double(), F.max_pool2d(src.double(), 3, **window))
    for counts in (True, False):
        dst = peer.pooling(src, f"avg_{'include' if counts else 'exclude'}_padding", 3, **window)
        expected = F.avg_pool2d(src.double(), 3, **window, count_include_pad=counts)
        assert_off_by_one(dst, expected.round())


def test_eltwise_binary_reorder(peer: Peer) -> None:
    src = torch.randn(2, 8, 5, 5)
    assert torch.equal(peer.eltwise(src, "clip", -0.5, 0.5), src.clamp(-0.5, 0.5))
    q0, q1 = random_q(torch.uint8, 2, 8, 5, 5), random_q(torch.uint8, 2, 8, 5, 5)
    dst = peer.binary(q0, q1, "add", src0_scale=0.5, src1_scale=0.25)
    assert_off_by_one(dst, quantized(q0.double() * 0.5 + q1.double() * 0.25, 1))
    dst = peer.reorder(src, dst_scale=0.02, dst_zero_point=128, dst_dtype=torch.uint8)
    assert_off_by_one(dst, quantized(src.double(), 0.02, 128))
    dst = peer.reorder(q0, src_scale=0.02, src_zero_point=128, dst_dtype=torch.float32)
    torch.testing.assert_close(dst, (q0.float() - 128) * 0.02)
    scale = torch.rand(8) + 0.5
    dst = peer.reorder(q0, src_scale=scale, dst_dtype=torch.float32)
    torch.testing.assert_close(dst, q0.float() * scale[:, None, None])


@pytest.mark.parametrize("groups", [1, 2])
def test_deconvolution(peer: Peer, groups: int) -> None:
    src, weight = random_q(torch.uint8, 2, 16, 5, 6), random_weight(16, 8, 3, 2)
    window = {"stride": (2, 1), "padding": (1, 0), "output_padding": (1, 0), "groups": groups}
    dst = peer.deconvolution(src, weight, dst_dtype=torch.int32, **window)
    assert torch.equal(dst.double(), F.conv_transpose2d(src.double(), weight.double(), **window))


def test_sum_and_concat(peer: Peer) -> None:
    q0, q1 = random_q(torch.uint8, 2, 8, 5, 5), random_q(torch.uint8, 2, 3, 5, 5)
    dst = peer.sum([q0, q0], [0.5, 0.25], dst_dtype=torch.float32)
    assert torch.equal(dst, q0 * 0.75)
    dst = peer.concat([q0, q1], 1, [0.5, 2.0], dst_dtype=torch.float32)
    assert torch.equal(dst, torch.cat([q0 * 0.5, q1 * 2.0], 1))


def test_softmax_multiplies_its_result_by_the_scale(peer: Peer) -> None:
    src = random_q(torch.int8, 4, 10)
    dst = peer.softmax(src, 1, dst_dtype=torch.float32, src_scale=0.5)
    torch.testing.assert_close(dst, 0.5 * src.float().softmax(1))
    dst = peer.softmax(src, 1, logarithmic=True, dst_dtype=torch.float32)
    torch.testing.assert_close(dst, src.float().log_softmax(1))


def test_normalization_reduction_resampling(peer: Peer) -> None:
    src, gamma, beta = random_q(torch.int8, 4, 10), torch.rand(10), torch.randn(10)
    dst = peer.layer_normalization(src, gamma, beta, dst_dtype=torch.float32)
    torch.testing.assert_close(dst, F.layer_norm(src.float(), (10,), gamma, beta))
    image = random_q(torch.uint8, 2, 8, 5, 6)
    dst = peer.reduction(image, "sum", (2, 3), dst_dtype=torch.int32)
    assert torch.equal(dst.long(), image.long().sum((2, 3), keepdim=True))
    for alg in ("norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum"):
        for p, eps in ((1.0, 0.0), (2.0, 0.5), (3.0, 9e9)):
            ours = TF.reduction(image.float(), alg, (2, 3), True, p=p, eps=eps)
            dst = peer.reduction(image.float(), alg, (2, 3), p, eps)
            torch.testing.assert_close(dst, ours, rtol=1e-5, atol=0)
    dst = peer.resampling(image, "nearest", (10, 12))
    assert torch.equal(dst, F.interpolate(image, (10, 12)))


def test_version_2_has_output_scales_and_scaled_eltwise() -> None:
    src, weight = random_q(torch.uint8, 1, 16, 5, 6), random_weight(8, 16, 3, 3)
    scale = torch.rand(8) * 1e-4
    with Peer(version="2.6") as peer:
        dst = peer.convolution(
            src, weight, output_scale=scale, post_ops="eltwise_tanh:0:0:100", dst_dtype=torch.int8
        )
        with pytest.raises(RefusedError, match="output scales, not scales of an argument"):
            peer.convolution(src, weight, src_scale=0.5)
    acc = F.conv2d(src.double(), weight.double()) * scale.double()[:, None, None]
    assert_off_by_one(dst, (100 * acc.tanh()).round())


def test_the_newest_version_runs_on_the_cpu() -> None:
    """It knows the CPU as a device of SYCL."""
    src, weight = random_q(torch.uint8, 2, 8, 5, 6), random_weight(4, 8, 3, 3)
    with start_onednn(version=LARGE) as peer:
        dst = peer.convolution(src, weight, padding=1, dst_dtype=torch.int32)
        assert "jit" in peer.implementation or "brg" in peer.implementation
    assert torch.equal(dst.long(), F.conv2d(src.long(), weight.long(), padding=1))


def test_the_newest_version_has_norms_that_the_others_lack(peer: Peer) -> None:
    src, gamma, beta = random_q(torch.int8, 2, 6, 5, 4), torch.rand(6), torch.randn(6)
    rows, scale = src.flatten(1), torch.rand(120)
    with start_onednn(version=LARGE) as new:
        dst = new.group_normalization(src, 3, gamma, beta, dst_dtype=torch.float32)
        torch.testing.assert_close(dst, F.group_norm(src.float(), 3, gamma, beta))
        dst = new.rms_normalization(rows, scale, dst_dtype=torch.float32)
        torch.testing.assert_close(dst, F.rms_norm(rows.float(), [120], scale, 1e-5))
    with pytest.raises(RefusedError, match="unknown primitive 'rms_normalization'"):
        peer.rms_normalization(rows, scale)


def test_refusal_names_the_reason_and_the_peer_lives_on(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 1, 8, 4, 4), random_weight(8, 8, 1, 1)
    with pytest.raises(RefusedError, match=r"refuses convolution: .*\(unimplemented\)"):
        peer.convolution(src, weight, dst_scale=torch.rand(8))
    with pytest.raises(RefusedError, match="this oneDNN knows no 'eltwise_nonsense'"):
        peer.convolution(src, weight, post_ops="eltwise_nonsense")
    with pytest.raises(RefusedError, match="this oneDNN has no groups of scales"):
        peer.matmul(src[0, 0], src[0, 0].mT, src_scale=1, groups={"src_scale": (1, 2)})
    with pytest.raises(ValueError, match="post_op_tensors must be 1 tensors"):
        peer.convolution(src, weight, post_ops="binary_add:2")
    with pytest.raises(TypeError, match="unexpected keyword"):
        peer.convolution(src, weight, source_scale=1.0)
    exact = peer.convolution(src, weight, dst_dtype=torch.int32)
    assert torch.equal(exact.long(), F.conv2d(src.long(), weight.long()))


def test_timing(peer: Peer) -> None:
    src, weight = random_q(torch.uint8, 1, 64, 14, 14), random_weight(64, 64, 1, 1)
    for iterations in (0, 3):
        timing = peer.convolution(
            src, weight, dst_dtype=torch.int32, samples=4, iterations=iterations
        )
        assert isinstance(timing, Timing)
        assert len(timing.seconds) == 4
        assert all(figure > 0 for figure in timing.seconds)
        assert timing.median > 0
        assert "conv" in timing.implementation or "1x1" in timing.implementation


def test_a_dead_process_is_reported() -> None:
    peer = start_onednn()
    peer._process.kill()
    with pytest.raises(RuntimeError, match="ended with status -9 on: reorder"):
        peer.reorder(torch.zeros(4, 4))
    peer.close()


def test_unknown_version() -> None:
    with pytest.raises(
        ValueError, match=r"version must be one of \['3.13', '3.2', '2.6'\], got '1.0'"
    ):
        Peer(version="1.0")
