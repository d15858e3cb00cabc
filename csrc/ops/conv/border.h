// SPDX-License-Identifier: Apache-2.0
// Kernel taps and the source positions that they meet, along one dimension: the only such
// arithmetic for convolutions, transposed ones, pools and sums over windows. The depthwise kernel
// checks the columns of a row itself.
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

#include <algorithm>
#include <cstdint>

#include "ops/conv/window.h"

namespace torchq {

/// The numbers [begin, end).
struct TapRange {
  int64_t begin, end;
};

/// Destinations along one dimension with the same valid taps: dst, dst + dst_step, ..., `count` of
/// them. The first one meets position src with the first tap, src + tap_step with the next one, and
/// so on; the second destination those src_step further.
struct TapInterval {
  int64_t dst, dst_step, count;
  int64_t src, src_step, tap_step;
  TapRange taps;  // in packed order

  int64_t num_taps() const { return taps.end - taps.begin; }
};
using TapIntervals = c10::SmallVector<TapInterval, 8>;

/// One dimension of a window. Tap t of destination o meets source position
///   o * stride + t * dilation - padding,
/// or, transposed, (o + padding - t * dilation) / stride where that is an integer.
struct TapAxis {
  int64_t kernel, stride, dilation, padding, pad_end, src_size, dst_size;
  bool transposed = false;
  int64_t in_front = 0;  // positions in memory before the source's first one

  TapAxis() = default;
  TapAxis(const Window& w, int d, int64_t src, int64_t dst, bool is_transposed = false)
      : kernel(w.kernel[d]),
        stride(w.stride[d]),
        dilation(w.dilation[d]),
        padding(w.pad_begin[d]),
        pad_end(w.pad_end[d]),
        src_size(src),
        dst_size(dst),
        transposed(is_transposed) {}

  /// Returns the position that a tap meets, -1 if that is outside.
  int64_t source(int64_t dst, int64_t tap) const {
    int64_t position = dst * stride + tap * dilation - padding;
    if (transposed) {
      position = dst + padding - tap * dilation;
      if (position % stride != 0) return -1;
      position /= stride;
    }
    return position < src_size ? std::max<int64_t>(position, -1) : -1;
  }

  /// Returns the taps that meet the source, {0, 0} if there are none; not for transposed axes.
  TapRange valid_taps(int64_t dst) const;

  /// Returns all destinations, by valid taps.
  TapIntervals intervals() const;

  /// Returns the fewest intervals that there can be: 1, or the phases of a transposed axis.
  int64_t phases() const { return transposed ? std::min(stride, dst_size) : 1; }

  /// Returns the same windows over a copy of the source with its padding in memory, or with all
  /// that transposed taps reach.
  TapAxis padded() const;

 private:
  TapIntervals with_all_taps() const;
};

/// The taps of a transposed axis in packed order: by phase, then by descending index.
c10::SmallVector<int64_t, 8> transposed_taps(int64_t kernel, int64_t stride, int64_t dilation);

/// The most taps that one destination of a transposed axis meets.
int64_t taps_per_phase(int64_t kernel, int64_t stride, int64_t dilation);

}  // namespace torchq
