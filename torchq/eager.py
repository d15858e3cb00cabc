# SPDX-License-Identifier: Apache-2.0
"""The eager flow: quantized leaves, float32 between them, the model's own code around them."""

from torchq.convert.swap.flow import calibrate, convert, prepare, quantize

__all__ = ["calibrate", "convert", "prepare", "quantize"]
