// SPDX-License-Identifier: Apache-2.0
// Windows of convolution and pooling: 1 to 3 spatial dimensions, handled as 3 (depth, height,
// width).
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

namespace torchq {

/// 255 * 2^23 < 2^31: the sum of an average pool fits int32.
constexpr int64_t kMaxTaps = 1 << 23;

/// The list [kernel..., stride..., padding_begin..., padding_end..., dilation...], and for
/// convolutions [..., groups, in_channels]; leading dimensions are filled with 1 (padding 0).
struct Window {
  int64_t kernel[3], stride[3], pad_begin[3], pad_end[3], dilation[3];

  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  /// Destination size along dimension d.
  int64_t output(int d, int64_t input, bool ceil_mode = false) const;
  /// For messages: "kernel 3x3, stride 2x2, padding 1x1 before and 0x1 after, dilation 1x1".
  std::string words(int64_t spatial_dims) const;
};

/// Checks the list's length and values; `extra` is how many entries follow the window.
Window parse_window(const char* op, c10::IntArrayRef geometry, int64_t spatial_dims, int64_t extra);

}  // namespace torchq
