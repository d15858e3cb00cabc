# SPDX-License-Identifier: Apache-2.0
"""The emulation against oneDNN itself, told to use no VNNI: the same bits, saturation included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peers import start_onednn
from test_saturation import random
from torch import Tensor

from benchmarks.onednn import Peer
from torchq.onednn.saturation import Sums, emulate_conv, emulate_conv_transpose, emulate_linear

U8, S8, S32 = torch.uint8, torch.int8, torch.int32
DTYPES = pytest.mark.parametrize("dtype", [U8, S8], ids=["u8", "s8"])


@pytest.fixture(scope="module", params=["AVX512_CORE", "AVX2"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A oneDNN without VNNI (on a CPU without AVX-512 both are AVX2)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", request.param)
        started = start_onednn()
    with started:
        yield started


def check(peer: Peer, got: Tensor, sums: Sums) -> None:
    """Equal where its vector kernels ran; its reference loops, for odd cases, are exact."""
    exact = peer.implementation.startswith("ref")
    assert torch.equal(got.long(), sums.exact if exact else sums.saturated), peer.implementation


CONVOLUTIONS = [
    # C, OC, spatial, kernel, zero point of u8, window
    (32, 32, (9, 9), (3, 3), 0, {"padding": 1}),
    (32, 32, (9, 9), (3, 3), 200, {"padding": 1}),
    (32, 32, (7, 9), (1, 1), 0, {}),
    (64, 64, (6, 9), (3, 3), 0, {"padding": 1, "groups": 2}),
    (16, 16, (9, 9), (3, 3), 0, {"padding": 1, "groups": 16}),
    (3, 16, (9, 9), (3, 3), 0, {}),
    (33, 17, (7, 9), (3, 3), 0, {"padding": 2, "stride": 2, "dilation": 2}),
    (24, 40, (11,), (3,), 77, {"padding": 1}),
    (18, 16, (4, 5, 6), (2, 3, 2), 0, {}),
]


@DTYPES
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(peer: Peer, case: Any, dtype: torch.dtype) -> None:
    channels, outputs, size, kernel, zero, window = case
    zero = zero - 128 if zero and dtype == S8 else zero
    src = random((2, channels, *size), dtype)
    weight = random((outputs, channels // window.get("groups", 1), *kernel), S8)
    attributes = {"src_zero_point": zero} if zero else {}
    got = peer.convolution(src, weight, dst_dtype=S32, **window, **attributes)
    sums = emulate_conv(src, weight, **window, src_zero_point=zero)
    check(peer, got, sums)
    depthwise = weight.shape[1] == 1
    assert sums.saturating.any() == (dtype == U8 and not depthwise)
    assert torch.equal(sums.exact, sums.saturated) == (dtype == U8 and depthwise)


TRANSPOSED = [
    (16, 16, (5, 6), (3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    (32, 16, (5, 6), (2, 2), {"stride": 2}),
    (7, 5, (5,), (4,), {"stride": 3}),
]


@DTYPES
@pytest.mark.parametrize("case", TRANSPOSED, ids=str)
def test_deconvolution(peer: Peer, case: Any, dtype: torch.dtype) -> None:
    channels, outputs, size, kernel, window = case
    src, weight = random((2, channels, *size), dtype), random((channels, outputs, *kernel), S8)
    got = peer.deconvolution(src, weight, dst_dtype=S32, **window)
    sums = emulate_conv_transpose(src, weight, **window)
    check(peer, got, sums)
    assert not torch.equal(sums.exact, sums.saturated)


@DTYPES
@pytest.mark.parametrize("features", [(64, 32), (63, 5), (130, 70)], ids=str)
def test_inner_product_and_matmul(
    peer: Peer, features: tuple[int, int], dtype: torch.dtype
) -> None:
    src, weight = random((6, features[0]), dtype), random((features[1], features[0]), S8)
    sums = emulate_linear(src, weight)
    check(peer, peer.inner_product(src, weight, dst_dtype=S32), sums)
    check(peer, peer.matmul(src, weight.t().contiguous(), dst_dtype=S32), sums)
    assert sums.saturating.any()


def test_the_documented_examples(peer: Peer) -> None:
    """32767 instead of 64770, and 255 instead of 32258."""
    values = torch.tensor([[127, 127, 0, 0]], dtype=S8)
    unsigned = torch.tensor([[255, 255, 0, 0]], dtype=U8)
    assert peer.inner_product(unsigned, values, dst_dtype=S32).item() == 32767
    assert peer.inner_product(values, values, dst_dtype=S32).item() == 255
