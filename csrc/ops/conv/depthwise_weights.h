// SPDX-License-Identifier: Apache-2.0
// Depthwise weights that have zero points: taken off here, since each channel has sums of its own
// over the source (Note [Weight zero points] in gemm.h), which would take as long as the layer.
#pragma once

#include "ops/gemm/packing.h"
#include "runtime/scratch.h"

namespace torchq {

/// w - z_w needs up to 9 bits: the sum of `parts` s8 values. A layer has its kernel rows as often,
/// one set behind the other; 1 where all differences fit 8 bits, 3 where one is 255.
struct DepthwiseWeights {
  const int8_t* packed;                // [ceil(C/16)][quads][16][4]
  c10::SmallVector<int32_t, 64> taps;  // depthwise_taps of all those rows
  int64_t parts;
};

/// `zero_points` may be null.
DepthwiseWeights depthwise_weights(ScratchFrame& scratch, const int8_t* packed, int64_t channels,
                                   c10::IntArrayRef kernel, const int32_t* zero_points);

}  // namespace torchq
