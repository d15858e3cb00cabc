// SPDX-License-Identifier: Apache-2.0
// Window geometry of convolution and pooling: 1 to 3 spatial dimensions, handled as 3 (depth,
// height, width).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

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

/// (N, C, spatial...) in channels-last memory; missing spatial dimensions are 1.
struct ChannelsLast {
  at::Tensor tensor;  // keeps the data alive; strides are those of channels-last
  int64_t batch, channels, size[3];
  int64_t spatial_dims;

  int64_t pixels() const { return batch * size[0] * size[1] * size[2]; }
};

/// The tensor itself where its memory is channels-last already, else a copy.
ChannelsLast to_channels_last(const char* op, const at::Tensor& src);

/// A new (N, C, spatial...) tensor with channels-last strides: (L C, 1, C) for one spatial
/// dimension, and so on.
at::Tensor empty_channels_last(int64_t batch, int64_t channels, c10::IntArrayRef spatial,
                               at::ScalarType dtype);

/// The same with the batch and as many spatial dimensions as `src` has.
at::Tensor empty_channels_last(const ChannelsLast& src, int64_t channels,
                               const int64_t (&spatial)[3], at::ScalarType dtype);

}  // namespace torchq
