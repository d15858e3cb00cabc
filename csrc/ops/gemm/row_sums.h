// SPDX-License-Identifier: Apache-2.0
// Sums over the source, one per destination and group, for weights with zero points (Note [Weight
// zero points] in gemm.h).
#pragma once

#include "ops/conv/border.h"
#include "ops/conv/geometry.h"
#include "runtime/dispatch.h"

namespace torchq {

/// A u8 or s8 source of pixels, `groups` times `group_inputs` bytes each.
struct RowSource {
  const uint8_t* data;
  int64_t groups, group_inputs;
  bool is_signed;
  int32_t zero_point;
};

/// sums[pixel][group] = sum of (q - zero_point) over the group's channels.
void sum_groups(const Kernels& tier, const RowSource& src, int64_t pixels, int32_t* sums);

/// sum of (q - zero_point) over the taps and channels that meet each destination: int32 (N, groups,
/// spatial...), channels-last.
at::Tensor sum_windows(const Kernels& tier, const RowSource& src, const ChannelsLast& shape,
                       const TapAxis (&axes)[3]);

}  // namespace torchq
