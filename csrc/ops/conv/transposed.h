// SPDX-License-Identifier: Apache-2.0
// Transposed convolution as ordinary ones.
//
// Note [Transposed convolution]
// dst[o] = sum over taps k and positions i with  o + padding = i * stride + k * dilation  of
// src[i] * weight[k]. The remainder r = (o + padding) mod stride selects the taps: those with
// k * dilation mod stride == r. The destinations of one remainder, its *phase*, are every
// stride-th pixel, and with j = (o + padding - r) / stride they read src[j - (k * dilation - r) /
// stride]: an ordinary convolution of stride 1 with the taps of that phase. So stride^dims small
// convolutions, whose destinations interleave, replace one over a source with zeros inserted.
// Weights are packed with the taps of each phase together, in order of rising source position.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>

namespace torchq {

/// The taps along one dimension in packed order: by phase, then by descending index.
c10::SmallVector<int64_t, 8> transposed_taps(int64_t kernel, int64_t stride, int64_t dilation);

/// The most taps that one destination meets along a dimension.
int64_t taps_per_phase(int64_t kernel, int64_t stride, int64_t dilation);

}  // namespace torchq
