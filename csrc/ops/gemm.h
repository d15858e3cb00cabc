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

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../dispatch.h"
#include "../kernels/table.h"
#include "../scratch.h"

namespace torchq {

/// 255 * 128 * 65793 < 2^31: the longest sum that cannot overflow.
constexpr int64_t kMaxReduction = 65793;
/// 255 * 255 * 33025 < 2^31: the same where weights have a zero point.
constexpr int64_t kMaxReductionWithZeroPoint = 33025;

constexpr int64_t max_reduction(bool weight_zero_point) {
  return weight_zero_point ? kMaxReductionWithZeroPoint : kMaxReduction;
}

/// Rows that share their valid taps: a rectangle (n, d, h, w) of destination pixels.
struct GemmClass {
  int64_t size[4];
  int64_t src_stride[4];  // bytes
  int64_t dst_stride[4];  // elements
  int64_t src_base, dst_base;
  c10::ArrayRef<GemmRun> runs;
  const int32_t* acc_init;  // [groups][panels_per_group * 16]

  int64_t rows() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t tiles() const { return (rows() + kTileRows - 1) / kTileRows; }
  int64_t quads() const {
    int64_t sum = 0;
    for (const GemmRun& run : runs) sum += run.quads;
    return sum;
  }
};

struct GemmProblem {
  const uint8_t* src;
  bool flip;
  const int8_t* weight;
  int64_t panel_bytes;
  int groups;
  int64_t src_group_stride;  // bytes
  int group_channels;
  int panels_per_group;
  /// Every pair of adjacent weights keeps 16-bit sums exact.
  bool narrow;
  /// Of groups that share tiles (GemmTile), and are one group here; else 0.
  int group_quads;
  c10::SmallVector<GemmClass, 9> classes;

  int64_t rows() const {
    int64_t sum = 0;
    for (const GemmClass& c : classes) sum += c.rows();
    return sum;
  }
};

/// Whether `run_gemm` takes the tier's matrix unit.
bool uses_matrix_unit(const GemmProblem& problem, const Kernels& tier);
/// Whether it would rather have one class than many: what padding adds to the work is less than
/// what small classes leave empty in a matrix unit's tiles. `group_quads` are those of all panels
/// of a group.
bool prefers_one_class(const Kernels& tier, int64_t rows, int64_t group_quads);

void run_gemm(const GemmProblem& problem, const Epilogue& epilogue, const Kernels& tier);
/// The same, and notes which kernel it runs.
void run_gemm(const GemmProblem& problem, const Epilogue& epilogue, const Kernels& tier,
              OpTrace& trace);

/// run_gemm where `uses_matrix_unit` says so.
void run_on_matrix_unit(const GemmProblem& problem, const Epilogue& epilogue,
                        const MatrixUnit& unit);

/// acc_init for one class: [groups][panels_per_group * 16], tails zero.
const int32_t* make_acc_init(ScratchFrame& scratch, const Kernels& tier,
                             const at::Tensor& compensation, c10::ArrayRef<int32_t> taps,
                             const std::optional<at::Tensor>& acc_bias, int32_t zero_point,
                             int groups, int group_channels, int panels_per_group);

/// An int32 bias, if there is one, has a value per channel.
void check_acc_bias(const char* op, const std::optional<at::Tensor>& acc_bias, int64_t channels);

/// Bound on |accumulator| over `reduction` products.
double max_accumulator(int64_t reduction, const std::optional<at::Tensor>& acc_bias);

/// Whether the pair bounds of all panels allow 16-bit pair sums: 255 * 128 <= 32767.
bool pairs_fit(const char* op, const at::Tensor& pair_bound, int64_t panels);

}  // namespace torchq
