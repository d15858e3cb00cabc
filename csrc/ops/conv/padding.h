// SPDX-License-Identifier: Apache-2.0
// The source of a convolution as the kernels see it, and its copy with padding in memory.
#pragma once

#include <algorithm>

#include "ops/conv/border.h"
#include "runtime/scratch.h"

namespace torchq {

/// Bytes of channels-last pixels; of a copy with groups apart, those of the first group.
struct Source {
  const uint8_t* data;
  int64_t batch, channels, size[3];

  /// Bytes between pixels along dimension d.
  int64_t pitch(int d) const {
    int64_t bytes = channels;
    for (int i = 2; i > d; --i) bytes *= size[i];
    return bytes;
  }
  int64_t image_bytes() const { return channels * size[0] * size[1] * size[2]; }
};

/// Dimension d of three goes behind the others.
template <class T>
void move_last(T (&values)[3], int d) {
  std::rotate(values + d, values + d + 1, values + 3);
}

/// Options of a copy with padding.
struct PadOptions {
  uint8_t zero_point;  // as it is stored in the copy
  bool flip;           // s8 becomes u8
  int64_t groups;      // images of each group's channels one after the other
};

/// A copy with the zero point around it, as far as `axes`, which are `padded`, reach.
Source pad(const char* op, ScratchFrame& scratch, const Source& s, const TapAxis (&axes)[3],
           const PadOptions& options);

/// The same pixels with dimension d as the last one: a copy, unless those behind it have size 1.
Source move_last(ScratchFrame& scratch, const Source& s, int d);

/// A copy behind which may be read: for runs whose last quad is read in full.
Source copy_for_overread(ScratchFrame& scratch, const Source& s);

}  // namespace torchq
