// SPDX-License-Identifier: Apache-2.0
// Linear and dense convolution as one problem: rows gathered by offsets, times packed panels.
//
// Note [Compensation]
// The kernels multiply u8 by s8. An s8 source is read as u8 by flipping its sign bit, which adds
// 128; a source zero point z means that (q - z) is to be summed. Both are undone by one term per
// output channel:
//   sum over k of (q - z) * w  =  sum of q' * w  -  z' * sum of w,    z' = z, or z + 128 for s8,
// where the sum of w runs over the taps that meet the source. The sums per tap are packed with the
// weights (`compensation`); rows are grouped by their set of valid taps, so padding costs nothing
// and stays exact.
//
// Note [Weight zero points]
// Weights with a zero point z_w, or u8 ones, which are packed as w - 128 and z_w - 128, need the
// sums over the source as well:
//   sum of (q' - z') * (w - z_w)  =  sum of q' * w  -  z' * sum of w  -  sum of (q' - z') * z_w
// over the products of a row: one term per row (and group) times one per channel, which the
// epilogue subtracts. A product by sums: dynamic quantization of rows, each with its own z', has
// the sums of w as channel terms.
#pragma once

#include "ops/gemm/gemm_problem.h"
#include "runtime/dispatch.h"
#include "runtime/scratch.h"

namespace torchq {

/// 255 * 128 * 65793 < 2^31: the longest sum that cannot overflow.
constexpr int64_t kMaxReduction = 65793;
/// 255 * 255 * 33025 < 2^31: the same where weights have a zero point.
constexpr int64_t kMaxReductionWithZeroPoint = 33025;

constexpr int64_t max_reduction(bool weight_zero_point) {
  return weight_zero_point ? kMaxReductionWithZeroPoint : kMaxReduction;
}

/// Runs what `choose` takes, and notes it in `trace`, if any.
void run_gemm(const GemmProblem& problem, const Epilogue& epilogue, const Kernels& tier,
              OpTrace* trace = nullptr);

/// acc_init for one region: [groups][panels_per_group * 16], tails zero. `compensation` has the
/// channels of all groups for each tap, and so has `bias`, unless it is null.
const int32_t* make_acc_init(ScratchFrame& scratch, const Kernels& tier,
                             const int32_t* compensation, c10::ArrayRef<int32_t> taps,
                             const int32_t* bias, int32_t zero_point, int groups,
                             int group_channels, int panels_per_group);

}  // namespace torchq
