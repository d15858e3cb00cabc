// SPDX-License-Identifier: Apache-2.0
// Matmul of two run-time operands, for the ops that are one.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/dispatch.h"

namespace torchq {

/// torchq::matmul inside an op that has its own trace: src (..., M, K), weight (..., K, N). An
/// empty multiplier gives the exact int32 accumulators.
at::Tensor run_matmul(OpTrace& trace, const at::Tensor& src, const at::Tensor& weight,
                      const at::Tensor& multiplier, const at::Tensor& offset,
                      const std::optional<at::Tensor>& acc_bias,
                      const std::optional<at::Tensor>& src_zero_point,
                      const std::optional<at::Tensor>& weight_zero_point, int64_t dst_dtype,
                      c10::string_view post_ops, const at::Tensor& post_op_params,
                      at::TensorList post_op_srcs);

}  // namespace torchq
