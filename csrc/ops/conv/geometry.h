// SPDX-License-Identifier: Apache-2.0
// Tensors of convolution and pooling: 1 to 3 spatial dimensions, handled as 3 (depth, height,
// width).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/conv/window.h"

namespace torchq {

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
