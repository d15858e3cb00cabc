// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/conv/geometry.h"
#include "ops/conv/padding.h"
#include "ops/gemm/packing.h"
#include "ops/pointwise/byte_table.h"
#include "runtime/dispatch.h"

namespace torchq {

/// One checked call of the op.
struct Conv {
  const Kernels& tier;
  const ConvPacking& packing;
  const Window& window;
  const at::Tensor &weight, &compensation;
  const std::optional<at::Tensor>& acc_bias;
  int32_t zero_point;  // of src as it is stored
  bool is_signed;
  bool narrow;
  const int32_t* weight_zero_point;  // of depthwise weights, to be taken off; or null
  int64_t output[3], dst_pitch[3];   // elements of dst
  LastStep last_step;

  /// The term of Note [Compensation].
  int32_t effective_zero_point() const { return zero_point + (is_signed ? 128 : 0); }
};

/// The op of that name.
at::Tensor conv(const at::Tensor& src, const at::Tensor& weight, const at::Tensor& compensation,
                const at::Tensor& pair_bound, const at::Tensor& multiplier,
                const at::Tensor& offset, const std::optional<at::Tensor>& acc_bias,
                const std::optional<at::Tensor>& src_zero_point, c10::IntArrayRef geometry,
                int64_t dst_dtype, c10::string_view post_ops, const at::Tensor& post_op_params,
                std::optional<at::TensorList> post_op_srcs,
                const std::optional<at::Tensor>& weight_zero_point,
                const std::optional<at::Tensor>& row_sums, const std::optional<at::Tensor>& table);

/// A convolution packed as ConvPacking::kDepthwise.
void run_depthwise(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace);

}  // namespace torchq
