# SPDX-License-Identifier: Apache-2.0
"""One int8 convolution, step by step, after oneDNN's example cnn_inference_int8.

AlexNet's third convolution with ReLU: 256 to 384 channels, 3x3, padding 1, on 13x13 images.
Reorders quantize the float source and weights, the convolution runs in int8 with its ReLU and
scales as attributes, and a reorder takes the result back to float.

    python examples/cnn_inference_int8.py [--batch 8] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import torchq
import torchq.functional as TF
from torchq.functional.packing import PackedWeight, pack_conv

U8, S8 = torch.uint8, torch.int8
PADDING = 1
PER_OUTPUT_CHANNEL = 1 << 0  # mask over the dims of the weight, (OC, IC, KH, KW)


def float_inference(src: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes the float result that the int8 convolution approximates."""
    return F.relu(F.conv2d(src, weight, bias, padding=PADDING))


def prepare_weight(weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """Quantizes each output channel to -127..127 and packs; done once."""
    scales = weight.abs().amax((1, 2, 3)) / 127  # real units per step
    attr = torchq.Attr().set_scales("dst", PER_OUTPUT_CHANNEL, scales)
    return pack_conv(TF.reorder(weight, S8, attr)), scales


def conv_attr(src_scale: Tensor, weight_scales: Tensor, dst_scale: Tensor) -> torchq.Attr:
    """``dst = relu(src_scale * weight_scales[oc] * sum + bias) / dst_scale``, rounded."""
    attr = torchq.Attr()
    attr.set_scales("src", 0, src_scale)
    attr.set_scales("weights", PER_OUTPUT_CHANNEL, weight_scales)
    attr.set_scales("dst", 0, dst_scale)
    attr.post_ops.append_eltwise("relu")
    return attr


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The fastest of `repeats` runs, after one to warm up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    # The user's float data, in channels-last memory. Sources of a ReLU are not negative.
    src = torch.rand(args.batch, 256, 13, 13).to(memory_format=torch.channels_last)
    weight = torch.randn(384, 256, 3, 3) / (256 * 9) ** 0.5
    bias = torch.randn(384) * 0.1
    expected = float_inference(src, weight, bias)

    # Calibration: the scale of a tensor is its largest magnitude over the largest integer.
    src_scale, dst_scale = src.max() / 255, expected.max() / 255
    packed, weight_scales = prepare_weight(weight)
    attr = conv_attr(src_scale, weight_scales, dst_scale)
    to_u8 = torchq.Attr().set_scales("dst", 0, src_scale)
    to_float = torchq.Attr().set_scales("src", 0, dst_scale)

    q_src = TF.reorder(src, U8, to_u8)
    q_dst = TF.conv2d(q_src, packed, bias, padding=PADDING, attr=attr, dst_dtype=U8)
    kernel = torchq.last_kernel()
    result = TF.reorder(q_dst, torch.float32, to_float)

    error = (result - expected).abs().max()
    print(f"attributes   {attr}")
    print(f"kernel       {kernel}")
    print(f"max error    {error:.4f} (values up to {expected.max():.2f}, step {dst_scale:.4f})")
    print(f"SQNR         {torchq.sqnr(expected, result):.1f} dB")

    float_weight = weight.to(memory_format=torch.channels_last)
    float_ms = milliseconds(lambda: float_inference(src, float_weight, bias))
    int8_ms = milliseconds(
        lambda: TF.conv2d(q_src, packed, bias, padding=PADDING, attr=attr, dst_dtype=U8)
    )
    print(f"float        {float_ms:.2f} ms")
    print(f"int8         {int8_ms:.2f} ms, {float_ms / int8_ms:.1f} times as fast")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
