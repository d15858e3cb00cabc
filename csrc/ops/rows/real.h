// SPDX-License-Identifier: Apache-2.0
// Ops in real units: blocks of float32 that the tier's own conversions read and write.
//
// Note [Real units]
// An op that is no matmul reads x = scale * float(q - zero_point), computes in float32, applies its
// post-ops as the float chain of Note [Folded and float chains] does, and writes q =
// clamp(rne(fma(x, 1 / scale, zero_point))). Reading is the tier's `convert`, post-ops and writing
// its `epilogue_row`; kernels that write a `RealRow` round themselves where there are no post-ops.
// The computation in between is a kernel whose sums are of integers or run in an order that
// kernels/rows/contract.h states, or code that all tiers share. So every tier and every thread
// count gives the same bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "epilogue/post_ops.h"
#include "kernels/cpu_tuning.h"
#include "kernels/rows/contract.h"
#include "runtime/dispatch.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace torchq {

/// Values converted at a time: on the stack, in L1.
constexpr int kRealBlock = 512;

/// real = scale * (q - zero_point).
struct Real {
  DType dtype;
  float scale;
  int32_t zero_point;
};

/// A source of any dtype: dense, on the CPU, uint8, int8, int32 or float32.
DType check_source(const char* op, const char* arg, const at::Tensor& src);

/// The parameters of the sources and, last, of the destination, from scales and zero_points with
/// one value each. A scale is finite and greater than 0 (`any_sign`: a source's may be any finite
/// number), and 1 for a float32 destination; a zero point lies in the range of its tensor.
c10::SmallVector<Real, 4> read_params(const char* op, const at::Tensor& scales,
                                      const at::Tensor& zero_points, at::TensorList srcs,
                                      DType dst_dtype, bool any_sign = false);

/// x[i] = real value of the i-th of n <= kRealBlock values that are `stride` bytes apart, or of any
/// number of adjacent ones.
void load_real(const Kernels& tier, const Real& src, const void* data, int64_t stride, int64_t n,
               float* x);

/// The inverse, to n adjacent values: rounds and saturates. NaN becomes the zero point.
void store_real(const Kernels& tier, const Real& dst, const float* x, void* data, int64_t n);

/// Output of an op: its post-ops, and a dense destination in any order of its dimensions.
class RealOutput {
 public:
  struct Args {
    const char* op;
    const Kernels& tier;
    const Real& to;
    c10::string_view post_ops;
    /// In the order of the chain: the source of each sum, the operand of each binary and prelu, its
    /// shape 1 where the mask has no bit, and the condition of each select.
    const std::optional<at::TensorList>& srcs;
  };
  /// `first` is an operation in front of the chain, whose operands `store` takes.
  RealOutput(const Args& args, const at::Tensor& dst, std::optional<Binary> first = {});

  /// Returns true without post-ops: kernels that know `RealRow` may then write to `row`.
  bool is_plain() const { return ops_.empty() && to_.dtype != DType::s32; }
  RealRow row(int64_t first) const;

  /// Writes the n <= kRealBlock values x, which it overwrites, from element `first` of the
  /// destination's memory on. x has room for whole panels.
  void store(float* x, int64_t n, int64_t first, c10::ArrayRef<SumSrc> operands = {}) const;

  /// Returns true if equal values become equal ones everywhere; `tabulate` then computes them.
  bool is_map() const { return is_map_; }
  void tabulate(float* x, int64_t n, void* table) const { finish(x, n, table, 0, {}); }

 private:
  /// Operand that varies along the destination: element i takes element `i % period` of data, which
  /// is repeated for kRealBlock further values.
  struct Operand {
    at::Tensor data;
    int64_t period;
    SumSrc src;
  };
  void add_operand(const at::Tensor& src, const at::Tensor& dst, const PostOp& post_op);
  float inverse_scale() const { return static_cast<float>(1.0 / to_.scale); }
  void finish(float* x, int64_t n, void* dst, int64_t first, c10::ArrayRef<SumSrc> operands) const;

  const Kernels& tier_;
  Real to_;
  void* dst_;
  bool is_map_ = true;
  c10::SmallVector<ChainOp, 4> ops_;
  c10::SmallVector<Operand, 2> operands_;
  float inverse_[kRealBlock];  // unless is_plain: 1 / scale of the destination
};

/// compute(rows, dst) writes the n values of each row to dst, one row after the other: to the op's
/// results, of which they are rows range.begin and on, or to memory from which these are made.
template <class Compute>
void store_range(const RealOutput& out, const Range& range, int64_t n, const Compute& compute) {
  if (out.is_plain()) return compute(range, out.row(range.begin * n));
  const int64_t group = std::max<int64_t>(1, kRealBlock / n);  // rows that fill a block
  ScratchFrame frame;
  float* x = frame.take<float>(group * n + kPanel);
  for (int64_t r = range.begin; r < range.end; r += group) {
    const int64_t count = std::min(group, range.end - r);
    compute({r, r + count}, {x, DType::f32, 1, 0});
    for (int64_t i = 0; i < count * n; i += kRealBlock)
      out.store(x + i, std::min<int64_t>(kRealBlock, count * n - i), r * n + i);
  }
}

/// The same of all rows, shared among the threads.
template <class Compute>
void store_rows(const RealOutput& out, int64_t rows, int64_t n, const Compute& compute) {
  parallel_ranges(rows, threads_for(rows * n, tuning::kRealGrain),
                  [&](Range range) { store_range(out, range, n, compute); });
}

/// The one NaN of kernels/math.h for any other.
inline float with_one_nan(float value) {
  return value == value ? value : std::numeric_limits<float>::quiet_NaN();
}

/// In which results of a reduction of T are kept: sums of integers are exact.
template <class T>
using Reduced = std::conditional_t<std::is_floating_point_v<T>, double, int64_t>;

/// The sum, or the larger or smaller one; a NaN stays.
template <class T>
T combine(Reduce alg, T a, T b) {
  if (alg == Reduce::sum) return a + b;
  return (alg == Reduce::max ? b > a : b < a) || std::isnan(static_cast<double>(b)) ? b : a;
}

/// Returns the row without its first `values`.
inline RealRow behind(const RealRow& row, int64_t values) {
  const int64_t bytes = row.dtype == DType::f32 ? 4 : 1;
  return {static_cast<char*>(row.data) + values * bytes, row.dtype, row.inverse_scale,
          row.zero_point};
}

}  // namespace torchq
