// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/row_sums.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace torchq {
namespace {

/// Below this many channels the loop is faster than a call of the kernel.
constexpr int64_t kMinKernelBytes = 16;

/// Adds the positions of a source row that each destination meets; all have `inner` values.
void add_taps(const TapIntervals& intervals, int64_t inner, const int32_t* row, int32_t* dst) {
  for (const TapInterval& at : intervals) {
    const bool adjacent = at.src_step == 1 && at.dst_step == 1;
    const int64_t count = adjacent ? 1 : at.count, width = adjacent ? at.count * inner : inner;
    for (int64_t tap = 0; tap < at.num_taps(); ++tap) {
      const int32_t* from = row + (at.src + tap * at.tap_step) * inner;
      int32_t* to = dst + at.dst * inner;
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t i = 0; i < width; ++i) to[i] += from[i];
        to += at.dst_step * inner;
        from += at.src_step * inner;
      }
    }
  }
}

}  // namespace

void sum_groups(const Kernels& tier, const RowSource& src, int64_t pixels, int32_t* sums) {
  const int64_t count = pixels * src.groups, inputs = src.group_inputs;
  const int32_t flip = src.is_signed ? 0x80 : 0;
  const int32_t shift = static_cast<int32_t>(inputs) * (src.zero_point + flip);
  parallel_ranges(count, threads_for(count * std::max<int64_t>(inputs, 1)), [&](Range range) {
    const uint8_t* q = src.data + range.begin * inputs;
    for (int64_t i = range.begin; i < range.end; ++i, q += inputs) {
      int32_t sum = -shift;
      if (inputs >= kMinKernelBytes) {
        sum += tier.sum_bytes(q, inputs, src.is_signed);
      } else {
        for (int64_t c = 0; c < inputs; ++c) sum += q[c] ^ flip;
      }
      sums[i] = sum;
    }
  });
}

at::Tensor sum_windows(const Kernels& tier, const RowSource& src, const ChannelsLast& shape,
                       const TapAxis (&axes)[3]) {
  const int64_t sizes[3] = {axes[0].dst_size, axes[1].dst_size, axes[2].dst_size};
  const at::Tensor result = empty_channels_last(shape, src.groups, sizes, at::kInt);
  ScratchFrame scratch;
  const bool depthwise = src.group_inputs == 1;  // each channel is its own sum
  int32_t* sums = depthwise ? nullptr : scratch.take<int32_t>(shape.pixels(), src.groups);
  if (!depthwise) sum_groups(tier, src, shape.pixels(), sums);
  const int32_t flip = src.is_signed ? 0x80 : 0, shift = src.zero_point + flip;
  const int64_t src_row = shape.size[2] * src.groups, dst_row = sizes[2] * src.groups;
  const int64_t rows = shape.batch * sizes[0] * sizes[1];
  const TapIntervals along_row = axes[2].intervals();
  // A window's sum is separable: source rows into one, then along it.
  const int64_t taps = axes[0].kernel * axes[1].kernel;
  const int threads = threads_for(rows * (src_row * taps + dst_row * axes[2].kernel));
  parallel_ranges(rows, threads, [&](Range range) {
    ScratchFrame frame;
    int32_t* row = frame.take<int32_t>(src_row);
    for (int64_t r = range.begin; r < range.end; ++r) {
      const int64_t n = r / (sizes[0] * sizes[1]);
      std::fill(row, row + src_row, 0);
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t d = axes[0].source(r / sizes[1] % sizes[0], tap / axes[1].kernel);
        const int64_t h = axes[1].source(r % sizes[1], tap % axes[1].kernel);
        if (d < 0 || h < 0) continue;
        const int64_t at = ((n * shape.size[0] + d) * shape.size[1] + h) * src_row;
        if (depthwise) {
          for (int64_t i = 0; i < src_row; ++i) row[i] += (src.data[at + i] ^ flip) - shift;
        } else {
          for (int64_t i = 0; i < src_row; ++i) row[i] += sums[at + i];
        }
      }
      int32_t* dst = result.mutable_data_ptr<int32_t>() + r * dst_row;
      std::fill(dst, dst + dst_row, 0);
      add_taps(along_row, src.groups, row, dst);
    }
  });
  return result;
}

}  // namespace torchq
