# SPDX-License-Identifier: Apache-2.0
"""Named shapes of transposed convolutions, and random ones."""

from __future__ import annotations

import random

from geometries import ConvTransposeShape, conv_transpose

CONV_TRANSPOSE = [
    conv_transpose("unet_up", (64, 32), (7, 9), 2, 2),
    conv_transpose("gan", (32, 48), (8, 8), 4, 2, 1, batch=2),
    conv_transpose("odd", (24, 20), (6, 7), 3, 2, 1, 1),
    conv_transpose("stride1", (16, 24), (9, 8), 3, 1, 1),
    conv_transpose("stride1_wide", (16, 24), (9, 8), 5),
    conv_transpose("tail_channels", (13, 19), (5, 6), 3, 2, 1, batch=3),
    conv_transpose("three_channels", (3, 16), (9, 8), 4, 2, 1),
    conv_transpose("stride_over_kernel", (8, 8), (4, 5), 2, 3, 0, 1),
    conv_transpose("stride_over_kernel_cut", (8, 18), (4, 5), 1, 4, 2, 0),
    conv_transpose("dilated", (8, 12), (6, 7), 3, 2, 2, 1, dilation=2),
    conv_transpose("dilated_coprime", (8, 12), (6, 7), 3, 2, 3, 1, dilation=3),
    conv_transpose("dilated_over_stride", (8, 12), (6, 7), 3, 2, 0, 3, dilation=4),
    conv_transpose(
        "asymmetric", (12, 16), (5, 6), (3, 4), (2, 3), (1, 0), (0, 2), padding_end=(0, 2)
    ),
    conv_transpose("grouped", (24, 40), (5, 6), 3, 2, 1, groups=4),
    conv_transpose("grouped_wide", (32, 64), (4, 5), 4, 2, 1, groups=2),
    conv_transpose("depthwise", (24, 24), (5, 6), 4, 2, 1, groups=24),
    conv_transpose("depthwise_many", (40, 80), (4, 3), 3, 2, 1, groups=40),
    conv_transpose("one_pixel", (16, 32), (1, 1), 4, 2, 1),
    conv_transpose("padding_wider_than_kernel", (8, 8), (9, 9), 3, 1, 5),
    conv_transpose("many_classes", (5, 6), (7, 8), 9, 1, 2),
    conv_transpose("few_rows_per_class", (8, 6), (3, 4), 7, 2, 0),
    conv_transpose("fcn", (6, 6), (3, 4), 16, 8, 4, groups=1),
    conv_transpose("pointwise", (24, 40), (5, 7), 1, batch=2),
    conv_transpose("1d", (12, 20), (15,), 5, 3, 2, 1, batch=2),
    conv_transpose("1d_vocoder", (32, 16), (20,), 16, 8, 4),
    conv_transpose("3d", (8, 12), (3, 4, 5), 3, 2, 1, 1),
    conv_transpose("3d_up", (16, 16), (2, 3, 4), 2, 2, batch=2),
]


def random_conv_transpose_shapes(count: int, dims: int) -> list[ConvTransposeShape]:
    rng = random.Random(dims)
    shapes: list[ConvTransposeShape] = []

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(dims))

    while len(shapes) < count:
        groups = rng.choice([1, 1, 2, 3, 6])
        stride, dilation = each(1, 4), each(1, 3)
        extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True))
        shape = conv_transpose(
            f"random{len(shapes)}",
            (groups * rng.randint(1, 9), groups * rng.randint(1, 20)),
            each(1, 7 - dims),
            each(1, 5),
            stride,
            each(0, 4),
            extra,
            dilation=dilation,
            padding_end=each(0, 4),
            groups=groups,
            batch=rng.randint(1, 2),
        )
        if min(shape.dst) > 0:
            shapes.append(shape)
    return shapes
