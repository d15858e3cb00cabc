# SPDX-License-Identifier: Apache-2.0
"""Named shapes. `str(shape)` is the test id: 'resnet50.fc-8x2048x1000'.

Spatial sizes are reduced where the name says so; the oracle takes less than a second per shape.
"""

from __future__ import annotations

import itertools
import random

from geometries import ConvShape, LinearShape, conv, depthwise

# Largest taps * K whose sum of 255 * -128 products stays within int32.
MAX_TAPS_K = 65793

LINEAR_NETWORKS = [
    LinearShape(1, 1000, 2048, "resnet50.fc"),
    LinearShape(8, 1000, 2048, "resnet50.fc"),
    LinearShape(4, 1000, 1280, "mobilenet_v2.classifier"),
    LinearShape(1, 768, 768, "bert.attention"),
    LinearShape(16, 2304, 768, "bert.qkv_16_tokens"),
    LinearShape(128, 768, 768, "bert.attention"),
    LinearShape(32, 3072, 768, "bert.up_32_tokens"),
    LinearShape(32, 768, 3072, "bert.down_32_tokens"),
    LinearShape(128, 1536, 384, "minilm.up"),
]

# Around the sizes at which kernels change: 4 k to a lane, 6 rows, 16 channels to a panel, 4 panels.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70)
LINEAR_TAILS = [
    *(LinearShape(m, 33, 19, "tail_m") for m in SIZES),
    *(LinearShape(7, n, 19, "tail_n") for n in SIZES),
    *(LinearShape(7, 17, k, "tail_k") for k in SIZES),
    *(LinearShape(1, n, 5, "tail_row") for n in (1, 16, 17, 64, 65, 129)),
]
# Around 16 rows, 64 k and 4 panels, the tiles of a matrix unit: read in place, or gathered.
LINEAR_UNITS = [
    *(LinearShape(m, 64, 64, "unit_m") for m in (8, 15, 16, 17, 31, 32, 33, 48, 65)),
    *(LinearShape(37, n, 128, "unit_n") for n in (16, 31, 48, 64, 80, 113, 130)),
    *(LinearShape(33, 64, k, "unit_k") for k in (1, 4, 60, 61, 128, 192)),
    *(LinearShape(37, 300, k, "unit_tail_k") for k in (65, 68, 100, 124, 196)),
    LinearShape(150, 260, 2048, "unit_blocks"),
    LinearShape(9, 17, MAX_TAPS_K, "unit_longest_k"),
]
# Sums of few quads, which are written out: around tiles of 6, 8 and 12 rows and of 1 to 4 panels.
LINEAR_SHORT = [
    *(LinearShape(m, 112, 16, "short_m") for m in (17, 37, 48, 59, 97)),
    *(LinearShape(37, n, 24, "short_n") for n in (8, 16, 24, 32, 40, 48, 56, 64, 72, 128)),
    *(LinearShape(50, 80, k, "short_k") for k in (12, 13, 16, 20, 24, 28, 29, 32, 36, 40, 45, 52)),
    *(LinearShape(50, n, k, "short") for k in (61, 64, 95, 96) for n in (32, 48, 80)),
]
# Tiles of 2 to 4 panels whose ends overlap: around 8 and 12 quads, 24 and 128 KB of their weights,
# and 64 KB in all, where they ask for the next ones.
LINEAR_OVERLAPPED = [
    *(LinearShape(m, 80, 52, "overlapped_m") for m in (17, 18, 19, 22, 48, 49, 52, 97)),
    *(LinearShape(50, n, 64, "overlapped_n") for n in (32, 33, 48, 63, 64, 65, 96, 112, 144)),
    *(LinearShape(41, n, 40, "overlapped_n") for n in (48, 64, 65, 80, 96, 112, 128)),
    *(LinearShape(29, 70, k, "overlapped_k") for k in (44, 45, 96, 381, 384, 385)),
    *(LinearShape(30, 70, k, "overlapped_k") for k in (28, 29, 32, 56, 1025, 2045, 2049)),
    *(LinearShape(m, n, 100, "overlapped") for m in (18, 23, 24, 31) for n in (32, 48)),
    *(LinearShape(20, n, 1030, "overlapped_wide_k") for n in (32, 48)),
    *(LinearShape(m, 272, 257, "overlapped_asks") for m in (17, 51, 64)),
]
# Rows copied as 16-bit values, for AVX2: calls of up to 18 rows, and of 18 to 42, with weights that
# each tile widens, and, of more than 64 rows, with copies.
LINEAR_WIDENED = [
    *(LinearShape(m, 33, 5500, "widened") for m in (7, 11, 12, 17, 71)),
    *(LinearShape(m, 33, k, "widened") for m in (31, 43, 59, 103) for k in (3600, 2048, 1700)),
]
LINEAR_LIMITS = [
    LinearShape(0, 16, 8, "no_rows"),
    LinearShape(3, 0, 8, "no_channels"),
    LinearShape(3, 17, 0, "no_k"),
    LinearShape(2, 17, MAX_TAPS_K, "longest_k"),
    LinearShape(400, 20, 70, "many_rows"),
    LinearShape(3, 5000, 36, "many_channels"),
]
LINEAR = [
    *LINEAR_NETWORKS,
    *LINEAR_TAILS,
    *LINEAR_UNITS,
    *LINEAR_SHORT,
    *LINEAR_OVERLAPPED,
    *LINEAR_WIDENED,
    *LINEAR_LIMITS,
]

CONV_NETWORKS = [
    conv("resnet50.conv1", (3, 64), (224, 224), 7, 2, 3),
    conv("resnet50.conv1_small", (3, 64), (56, 61), 7, 2, 3),
    conv("resnet50.layer1_1x1", (64, 64), (56, 56), 1),
    conv("resnet50.layer1_3x3", (64, 64), (56, 56), 3, 1, 1),
    conv("resnet50.layer1_3x3_small", (64, 64), (28, 28), 3, 1, 1),
    conv("resnet50.layer1_expand_small", (64, 256), (28, 28), 1),
    conv("resnet50.layer2_3x3s2_small", (128, 128), (28, 28), 3, 2, 1),
    conv("resnet50.layer2_downsample_small", (256, 512), (28, 28), 1, 2),
    conv("resnet50.layer3_3x3", (256, 256), (14, 14), 3, 1, 1),
    conv("resnet50.layer4_3x3", (512, 512), (7, 7), 3, 1, 1),
    conv("resnet50.layer4_expand", (512, 2048), (7, 7), 1),
    conv("mobilenet_v2.stem_small", (3, 32), (64, 64), 3, 2, 1),
    conv("mobilenet_v2.project_small", (96, 24), (28, 28), 1),
    conv("mobilenet_v2.expand", (24, 144), (28, 28), 1),
    conv("mobilenet_v2.last", (320, 1280), (7, 7), 1),
]
CONV_BORDERS = [
    *(conv("short_stem", (3, n), (21, 23), 3, 2, 1) for n in (8, 16, 24, 40, 48, 64, 72)),
    conv("short_not_first_tap", (16, 32), (1, 60), (3, 1), 1, (1, 0)),
    conv("short_not_first_taps", (12, 32), (3, 60), (5, 1), 1, (2, 0)),
    conv("1x1_padded", (5, 7), (4, 5), 1, 1, 1),
    conv("asymmetric", (8, 17), (9, 10), 3, 1, (0, 1), (1, 2)),
    conv("asymmetric_stride", (16, 16), (10, 9), 3, 2, (0, 0), (1, 1)),
    conv("begin_only", (4, 16), (6, 6), 3, 1, 2, 0),
    conv("wide_padding", (4, 16), (5, 6), 3, 1, 4),
    conv("all_padding_rows", (4, 16), (2, 2), 2, 2, 4),
    conv("kernel_exceeds_src", (6, 9), (3, 2), 5, 1, 2),
    conv("kernel_exceeds_src_once", (6, 9), (2, 3), (5, 3), 1, (2, 0), (1, 0)),
    conv("one_pixel_dst", (7, 20), (5, 5), 5),
    conv("one_pixel_src", (16, 33), (1, 1), 3, 1, 1),
    conv("dilated", (8, 16), (13, 12), 3, 1, 2, dilation=2),
    conv("dilated_unevenly", (3, 18), (11, 17), (3, 2), (2, 1), (1, 2), dilation=(2, 3)),
    conv("dilated_past_src", (4, 8), (5, 5), 3, 1, 4, dilation=4),
    conv("stride_exceeds_kernel", (8, 16), (11, 11), 2, 3),
    conv("stride_1x2", (8, 16), (7, 12), 3, (1, 2), 1),
    conv("kernel_1x7", (12, 20), (9, 9), (1, 7), 1, (0, 3)),
    conv("kernel_7x1", (12, 20), (9, 9), (7, 1), 1, (3, 0)),
    conv("kernel_2x4", (9, 15), (8, 8), (2, 4), 1, 1),
    conv("batch", (5, 19), (6, 7), 3, 1, 1, batch=3),
    conv("no_batch", (4, 8), (6, 6), 3, 1, 1, batch=0),
    conv("longest_reduction", (3133, 5), (3, 7), (3, 7)),
]
# Four panels or more: a matrix unit reads along rows or whole planes, and gathers where that is
# less work.
CONV_UNITS = [
    conv("unit_along", (64, 64), (5, 16), 3, 1, 1, batch=2),
    conv("unit_along_overlap", (64, 80), (4, 21), 3, 1, 1),
    conv("unit_along_stride", (64, 64), (9, 37), 3, 2, 1),
    conv("unit_along_dilation", (128, 64), (7, 24), 3, 1, 2, dilation=2),
    conv("unit_along_groups", (128, 256), (6, 19), 3, 1, 1, groups=2),
    conv("unit_along_bare", (64, 64), (4, 20), 3),
    conv("unit_planes", (64, 70), (7, 7), 3, 1, 1, batch=2),
    conv("unit_planes_wide", (64, 64), (6, 31), 3, 1, 1, batch=2),
    conv("unit_planes_narrow", (64, 64), (21, 3), 3, 1, 1),
    conv("unit_planes_3d", (64, 64), (3, 6, 5), 3, 1, 1),
    conv("unit_planes_stride", (64, 70), (17, 17), 3, 2, 1),
    conv("unit_gathered", (64, 160), (17, 17), 3, 2, 1),
    conv("unit_gathered_tail", (36, 65), (3, 3), 3, 1, 1, batch=3),
    conv("unit_tail", (36, 65), (9, 8), 3, 1, 1),
    conv("unit_tail_pointwise", (70, 90), (5, 9), 1),
    conv("unit_tail_stride", (68, 64), (9, 37), (1, 7), (1, 2), (0, 3)),
    conv("unit_tail_groups", (136, 160), (6, 7), 3, 1, 1, groups=2),
    conv("unit_short", (12, 100), (6, 19), (5, 3), 1, 1),
    conv("unit_short_groups", (96, 160), (6, 7), 3, 1, 1, groups=2),
    conv("unit_groups_of_32", (96, 144), (7, 6), 3, 1, 1, groups=3, batch=2),
    conv("unit_apart", (48, 60), (7, 6), 3, 1, 1, groups=3, batch=2),
    conv("unit_apart_stride", (64, 128), (17, 35), 3, 2, 1, groups=2),
    conv("unit_apart_chunks", (80, 90), (6, 7), (2, 5), 1, (0, 2), groups=2),
    conv("unit_apart_tail", (64, 96), (8, 9), (2, 5), 1, (0, 2), groups=2, batch=2),
    conv("unit_apart_3d", (72, 40), (3, 5, 6), 3, 1, 1, groups=2),
    conv("unit_apart_bare", (64, 48), (8, 20), 3, dilation=(2, 1), groups=2),
]
CONV_1D = [
    conv("1d", (16, 32), (50,), 3, 1, 1),
    conv("1d_stem", (1, 17), (160,), 10, 5),
    conv("1d_causal", (20, 24), (33,), 3, 1, 4, 0, dilation=2),
    conv("1d_grouped", (32, 48), (29,), 5, 2, 2, groups=4, batch=2),
    conv("1d_pointwise", (70, 70), (11,), 1),
    depthwise("1d_depthwise", 40, (37,), kernel=15, padding=7),
    depthwise("1d_depthwise_s2", 40, (37,), kernel=15, stride=2, padding=7),
]
CONV_3D = [
    conv("3d", (8, 16), (5, 6, 7), 3, 1, 1),
    conv("3d_stem", (3, 20), (4, 16, 16), (1, 7, 7), (1, 2, 2), (0, 3, 3)),
    conv("3d_temporal", (12, 18), (6, 5, 5), (3, 1, 1), 1, (1, 0, 0)),
    conv("3d_dilated", (4, 9), (7, 8, 9), 3, (1, 2, 1), (0, 1, 2), (2, 1, 0), dilation=(1, 1, 2)),
    conv("3d_grouped", (12, 12), (4, 5, 6), 2, groups=3, batch=2),
    conv("3d_pointwise", (17, 33), (2, 3, 4), 1),
    depthwise("3d_depthwise", 24, (4, 5, 6), padding=1),
]
# One tap along the last dimension: runs follow the one before, in place or in a copy.
CONV_COLUMNS = [
    conv("column", (1, 17), (60, 1), (9, 1), (2, 1), (3, 0)),
    conv("column_of_width", (3, 20), (40, 5), (7, 1), (2, 3), (3, 0), batch=2),
    conv("column_dense", (16, 40), (30, 1), (5, 1), 1, (2, 0), batch=2),
    conv("column_padded_width", (6, 16), (9, 1), (3, 1), 1, (1, 1)),
    conv("column_dilated", (1, 18), (40, 1), (6, 1), 1, (4, 0), dilation=(3, 1)),
    conv("column_grouped", (32, 48), (29, 1), (5, 1), (2, 1), (2, 0), groups=4),
    conv("column_groups_of_4", (20, 20), (21, 1), (3, 1), 1, (1, 0), groups=5),
    conv("column_depthwise", (24, 24), (21, 1), (3, 1), 1, (1, 0), groups=24),
    conv("column_unit", (64, 70), (40, 1), (3, 1), 1, (1, 0), batch=2),
    conv("column_no_rows", (3, 8), (0, 4), (3, 1), 1, (2, 0)),
    conv("3d_column", (2, 18), (9, 4, 3), (5, 1, 1), (2, 1, 1), (2, 0, 0)),
    conv("3d_columns", (5, 20), (4, 7, 3), (2, 3, 1), 1, (0, 1, 0), batch=2),
]
# Input and output channels per group.
GROUP_WIDTHS = (
    (2, 2),
    (4, 4),
    (8, 8),
    (16, 16),
    (32, 32),
    (3, 5),
    (7, 1),
    (1, 3),
    (17, 9),
    (5, 33),
    (12, 16),
)
CONV_GROUPED = [
    *(
        conv(f"grouped_{i}to{o}", (3 * i, 3 * o), (9, 10), 3, stride, 1, groups=3)
        for (i, o), stride in itertools.product(GROUP_WIDTHS, (1, 2))
    ),
    conv("resnext50.32x4d_small", (128, 128), (14, 14), 3, 1, 1, groups=32),
    conv("regnet.8_per_group", (64, 64), (14, 13), 3, 2, 1, groups=8),
    conv("shufflenet.1x1", (60, 24), (14, 14), 1, groups=3),
    # Few channels per group: a multiple of 16 in all or not, merged groups, 1 to 17 rows in a tile.
    *(
        conv(
            f"groups_of_{width}",
            (width * groups, width * groups),
            (9, 8),
            3,
            stride,
            1,
            groups=groups,
        )
        for width, groups in ((4, 4), (4, 5), (4, 15), (8, 2), (8, 5), (2, 8), (2, 18), (2, 9))
        for stride in (1, 2)
    ),
    *(conv("groups_of_4", (20, 20), (1, w), (1, 3), groups=5) for w in (3, 4, 6, 9, 12, 19)),
    *(conv("groups_of_8", (24, 24), (1, w), (1, 3), groups=3) for w in (3, 4, 6, 9, 12, 19)),
    # Lines of pixels that share sources, along rows and columns; their sums pass through three sets
    # of registers, and wait in memory, 32 of a line, for some ends.
    *(
        conv(f"line_of_{width}s", (width * 5, width * 5), (2, w + 2), 3, 1, (1, 0), groups=5)
        for width in (4, 8)
        for w in (*range(3, 11), 32, 33, 37)
    ),
    *(
        conv(name, (24, 24), size, kernel, stride, padding, dilation=dilation, groups=groups)
        for groups in (3, 6)
        for name, size, kernel, stride, padding, dilation in (
            ("column", (11, 3), 3, 1, 1, 1),
            ("column_of_columns", (12, 1), (3, 1), 1, 0, 1),
            ("line_of_nothing", (9, 0), (1, 2), 1, (0, 1), 1),
            ("line_of_nine_taps", (2, 17), (1, 9), 1, (0, 2), 1),
            ("line_every_second", (7, 19), 3, 2, 2, 2),
            ("line_of_short_lines", (9, 5), 3, 1, 0, 1),
            ("lines_of_many_calls", (13, 43), 3, 1, 1, 1),  # 192 rows in each, less what is cut
            ("line_of_two_calls", (3, 221), 3, 1, 1, 1),
            ("line_5x5", (9, 12), 5, 1, 2, 1),  # lines in some classes only
            ("line_5x3", (9, 40), (5, 3), 1, 1, 1),  # two passes
            ("column_3x5", (40, 5), (3, 5), 1, 0, 1),  # two passes
            ("lines_3d", (4, 7, 36), 3, 1, 1, 1),  # one to three passes
        )
    ),
    # Groups of one or two whole panels, which share tiles of four; 1 to 7, 48 and 53 rows.
    *(
        conv("groups_of_16", (16 * g, 16 * g), (1, w), (1, 3), 1, (0, 1), groups=g)
        for g, w in ((2, 9), (3, 5), (4, 3), (4, 4), (4, 6), (4, 8), (4, 55), (5, 7), (7, 48))
    ),
    *(
        conv("groups_of_32", (32 * g, 32 * g), (1, w), (1, 3), 1, (0, 1), groups=g)
        for g, w in ((2, 3), (2, 4), (2, 5), (2, 7), (2, 9), (2, 53), (3, 6), (5, 4))
    ),
    conv("groups_of_4_1d", (36, 36), (29,), 5, 2, 2, groups=9, batch=2),
    conv("groups_of_8_3d", (40, 40), (4, 5, 6), (2, 3, 3), 1, (1, 0, 1), groups=5),
    conv("groups_of_4_1x1", (32, 32), (5, 7), 1, groups=8, batch=2),
    conv("groups_of_8_many_classes", (24, 24), (9, 10), 7, 1, 3, dilation=2, groups=3),
    conv("groups_of_4_wide_padding", (28, 28), (2, 3), 3, 2, 4, groups=7, batch=3),
    conv("grouped_dilated", (16, 16), (11, 11), 3, 1, 2, dilation=2, groups=4),
    conv("grouped_asymmetric", (10, 20), (8, 9), (3, 2), 1, (1, 0), (0, 1), groups=5, batch=2),
]
DEPTHWISE_CHANNELS = (1, 2, 3, 5, 8, 13, 16, 17, 24, 31, 32, 33, 64, 96, 144, 960)
CONV_DEPTHWISE = [
    *(depthwise("dw", c, (9, 10), padding=1) for c in DEPTHWISE_CHANNELS),
    *(depthwise("dw_s2", c, (9, 10), stride=2, padding=1) for c in DEPTHWISE_CHANNELS),
    *(
        depthwise("dw_5x5", c, (9, 10), kernel=5, stride=s, padding=2)
        for c in (33, 64)
        for s in (1, 2)
    ),
    *(depthwise("dw_7x7", c, (11, 9), kernel=7, padding=3) for c in (1, 48, 96)),
    depthwise("dw_1x3", 40, (6, 11), kernel=(1, 3), padding=(0, 1)),
    depthwise("dw_2x2", 19, (6, 7), kernel=2),
    depthwise("dw_dilated", 64, (12, 11), padding=2, dilation=2),
    depthwise("dw_dilated_5x5", 17, (12, 11), kernel=5, padding=4, dilation=2),
    depthwise("dw_multiplier", 24, (8, 7), multiplier=2, padding=1),
    depthwise("dw_multiplier_3", 11, (8, 7), multiplier=3, stride=2, padding=1),
    depthwise("dw_asymmetric", 32, (8, 9), stride=2, padding=0, padding_end=1),
    depthwise("dw_wide_padding", 16, (4, 4), padding=3),
    depthwise("dw_kernel_exceeds_src", 33, (2, 3), kernel=5, padding=2),
    depthwise("dw_batch", 20, (5, 6), padding=1, batch=3),
    # Chunks: one to three kinds in a row, masked or overlapping.
    *(
        depthwise("dw_chunks", c, (5, 8), kernel=k, stride=s, padding=k // 2)
        for c in (7, 15, 17, 31, 40, 50, 63, 80, 111, 113)
        for k, s in ((3, 1), (3, 2), (5, 1))
    ),
    # Rows: fewer than a chunk holds, odd numbers of them, of two images, of several stretches.
    *(depthwise("dw_rows", 83, (h, 3), padding=1) for h in (1, 2, 3, 6, 7)),
    depthwise("dw_images", 56, (3, 5), padding=1, batch=5),
    # Rows of all lengths modulo 3, with one border pixel, with several, with none.
    *(
        depthwise("dw_lengths", c, (5, w), kernel=(k, 3), padding=(1, p))
        for c, k in ((64, 3), (32, 2), (16, 3))
        for w, p in ((1, 1), (2, 1), (4, 1), (5, 2), (7, 1), (8, 3), (9, 0), (12, 1))
    ),
    # More rows than pass at a time; images that end between the rows of a pair.
    *(
        depthwise("dw_tall", 88, (37, 14), kernel=k, stride=s, padding=k // 2, batch=2)
        for k, s in ((3, 1), (3, 2), (5, 2))
    ),
    depthwise("dw_tall_images", 40, (5, 6), padding=1, batch=9),
    depthwise("dw_wide", 20, (3, 131), padding=1),
    depthwise("dw_wide_s2", 20, (4, 259), stride=2, padding=1),
    depthwise("dw_wide_5x5", 68, (3, 77), kernel=5, padding=2),
    # 5 x 5 in pairs of rows: which share theirs or not, at borders, with padding in whole quads.
    *(depthwise("dw_5x5_rows", 70, (h, 4), kernel=5, padding=2) for h in (1, 2, 3, 6)),
    depthwise("dw_5x5_images", 24, (3, 5), kernel=5, padding=2, batch=4),
    depthwise("dw_5x5_inside", 40, (9, 12), kernel=5),
    depthwise("dw_5x5_wide_padding", 72, (3, 4), kernel=5, padding=9),
    depthwise("dw_5x5_asymmetric", 16, (6, 9), kernel=5, padding=(0, 1), padding_end=(3, 4)),
    depthwise("dw_5x5_s2x1", 72, (9, 8), kernel=5, stride=(2, 1), padding=2),
    depthwise("dw_5x5_dilated_rows", 33, (9, 8), kernel=5, padding=(4, 2), dilation=(2, 1)),
    depthwise("dw_5x5_stretches", 34, (4, 140), kernel=5, padding=3),
    # Windows: strides and dilations with few shared columns, bands of kernel rows, odd padding.
    depthwise("dw_5x5_s2_stretches", 34, (4, 140), kernel=5, stride=2, padding=3),
    depthwise("dw_5x5_s2_wide_padding", 72, (3, 4), kernel=5, stride=2, padding=9),
    depthwise("dw_5x5_s1x2", 83, (6, 9), kernel=5, stride=(1, 2), padding=(2, 0)),
    depthwise("dw_2x3_s2", 100, (6, 9), kernel=(2, 3), stride=2, padding=(0, 4)),
    depthwise("dw_s3", 70, (10, 11), stride=3, padding=1),
    depthwise("dw_s4", 24, (11, 14), stride=4, padding=1),
    depthwise("dw_s1x2", 72, (6, 9), stride=(1, 2), padding=1),
    depthwise("dw_s2x1", 72, (7, 8), stride=(2, 1), padding=1),
    depthwise("dw_dilated_far", 40, (5, 40), padding=(1, 14), dilation=(1, 14)),
    depthwise("dw_dilated_s2", 40, (9, 20), stride=2, padding=4, dilation=4),
    depthwise("dw_2x3", 100, (6, 7), kernel=(2, 3), padding=(0, 1)),
    depthwise("dw_4x3", 100, (6, 7), kernel=(4, 3), padding=(1, 1)),
    depthwise("dw_9x3", 36, (9, 6), kernel=(9, 3), padding=(4, 1)),
    depthwise("dw_3x1", 66, (6, 7), kernel=(3, 1), padding=(1, 0)),
    depthwise("dw_5x9", 36, (6, 10), kernel=(5, 9), stride=2, padding=(2, 4)),
    depthwise("dw_uneven", 90, (5, 6), padding=(2, 0), padding_end=(0, 3)),
    depthwise("dw_only_padding", 33, (2, 1), padding=4, stride=2),
    depthwise("mobilenet_v2.dw", 32, (112, 112), padding=1),
    depthwise("mobilenet_v2.dw_small", 384, (14, 14), padding=1),
]
CONV = [
    *(CONV_NETWORKS + CONV_BORDERS + CONV_UNITS + CONV_1D + CONV_3D + CONV_COLUMNS + CONV_GROUPED),
    *CONV_DEPTHWISE,
]


def random_linear_shapes(count: int, seed: int = 0) -> list[LinearShape]:
    rng = random.Random(seed)
    return [LinearShape(*(rng.randint(1, 70) for _ in "mnk"), f"random{i}") for i in range(count)]


def random_conv_shapes(count: int, seed: int = 0, dims: int = 2) -> list[ConvShape]:
    """Any legal geometry: windows may lie wholly in the padding."""
    rng = random.Random(seed)
    shapes: list[ConvShape] = []
    while len(shapes) < count:

        def each(low: int, high: int) -> tuple[int, ...]:
            return tuple(rng.randint(low, high) for _ in range(dims))

        groups = rng.choice((1, 1, 1, 2, 3, 5))
        channels = (groups * rng.randint(1, 40 // groups), groups * rng.randint(1, 70 // groups))
        if rng.random() < 0.2:
            groups = rng.randint(1, 70)
            channels = (groups, groups)
        shape = conv(
            f"random{len(shapes)}",
            channels,
            each(1, 12),
            each(1, 5),
            each(1, 3),
            each(0, 3),
            each(0, 3),
            each(1, 3),
            groups,
            rng.randint(1, 2),
        )
        if min(shape.dst_size) > 0:
            shapes.append(shape)
    return shapes
