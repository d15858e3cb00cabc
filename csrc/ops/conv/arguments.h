// SPDX-License-Identifier: Apache-2.0
// The arguments of convolutions, from tensors to a `Conv`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/conv/geometry.h"
#include "ops/gemm/packed_weights.h"
#include "runtime/dispatch.h"

namespace torchq {

/// Arguments of conv; conv_transpose has no row_sums.
struct ConvArgs {
  const at::Tensor &src, &weight, &compensation, &pair_bound, &multiplier, &offset;
  const std::optional<at::Tensor>&acc_bias, &src_zero_point;
  c10::IntArrayRef geometry;
  int64_t dst_dtype;
  c10::string_view post_ops;
  const at::Tensor& post_op_params;
  std::optional<at::TensorList> post_op_srcs;
  const std::optional<at::Tensor>&weight_zero_point, &row_sums, &table;
};

/// Returns the groups of geometry [..., groups, in_channels], which src and compensation have.
int64_t checked_groups(const char* op, const ChannelsLast& src, c10::IntArrayRef geometry,
                       const at::Tensor& compensation);

/// Their checked shapes; `taps`: those that one destination meets at most.
struct ConvCall {
  const char* op;
  const ConvPacking& packing;
  const Window& window;
  ChannelsLast& src;
  int64_t taps;
  bool transposed;
  int64_t output[3]{};
};
at::Tensor run_conv(OpTrace& trace, const ConvCall& call, const ConvArgs& args);

/// The op of that name.
at::Tensor conv(const ConvArgs& args);

}  // namespace torchq
