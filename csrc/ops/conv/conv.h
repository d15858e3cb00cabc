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

/// A convolution packed as ConvPacking::kDepthwise.
void run_depthwise(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace);

}  // namespace torchq
