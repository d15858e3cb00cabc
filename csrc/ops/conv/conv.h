// SPDX-License-Identifier: Apache-2.0
// A convolution that has been checked, and how it runs.
#pragma once

#include "ops/conv/border.h"
#include "ops/conv/padding.h"
#include "ops/gemm/gemm_problem.h"
#include "ops/gemm/packing.h"
#include "runtime/dispatch.h"
#include "runtime/verbose.h"

namespace torchq {

/// One checked call of conv or conv_transpose.
struct Conv {
  const char* op;
  const Kernels& tier;
  const ConvPacking& packing;
  const int8_t* weight;
  const int32_t *compensation, *acc_bias;  // make_acc_init
  int32_t zero_point;                      // of src as it is stored
  bool is_signed, narrow;
  LastStep last_step;
  TapAxis axes[3]{};
  int64_t dst_pitch[3]{};                      // elements of dst
  const int32_t* weight_zero_point = nullptr;  // of depthwise weights, to be taken off; or null

  bool is_transposed() const { return axes[0].transposed; }
  int64_t output(int d) const { return axes[d].dst_size; }
  /// The term of Note [Compensation].
  int32_t effective_zero_point() const { return zero_point + (is_signed ? 128 : 0); }
};

/// How a convolution as a gemm reads its source: in place, or from a copy as it is (the last quad
/// of a row may be read in full), with padding, or with the channels of each group side by side,
/// too.
struct ConvChoice {
  enum Copy { kInPlace, kAsItIs, kPadded, kGroupsApart };
  Copy copy;
  Reasons reasons;
};
ConvChoice choose(const Conv& c, const Source& s, const TapIntervals (&axes)[3]);

/// How a depthwise convolution runs: destination rows that pass through the kernel at a time, and
/// whether windows slide along a row or meet its stashed columns. `parts`: see DepthwiseWeights.
struct DepthwiseChoice {
  int64_t block_rows;
  int threads;
  bool slides;
  Reasons reasons;

  /// Prints "torchq,choice,..." and the reasons if they are logged.
  void log() const;
};
DepthwiseChoice choose(const Conv& c, const Source& s, const DepthwiseLayer& layer, int64_t parts,
                       const Epilogue& epilogue);

/// A dense, grouped or transposed convolution, as a gemm over gathered rows.
void run_dense(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace);

/// A convolution packed as ConvPacking::kDepthwise.
void run_depthwise(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace);

}  // namespace torchq
