// SPDX-License-Identifier: Apache-2.0
// Contract of max and average pooling.
#pragma once

#include "kernels/types.h"

namespace torchq {

/// Adjacent windows of one shape; their destination pixels follow one another.
struct PoolRow {
  const uint8_t* const* taps;  // [num_taps] source pixels of the first (channels contiguous)
  int num_taps;
  int64_t windows, step;  // bytes from a window to the next in src
  int64_t channels;
  void* dst;
  int32_t bias;   // average: added to the sum (padding counted as zero_point)
  float divisor;  // average
  bool is_signed;
  DType dst_dtype;  // average: that of src, or f32, where nothing is rounded to an integer
};

/// Entries of pool/pool.cpp.
struct PoolKernels {
  void (*max_pool)(const PoolRow&);
  void (*avg_pool)(const PoolRow&);
};

}  // namespace torchq
