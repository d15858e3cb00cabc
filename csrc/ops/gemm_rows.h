// SPDX-License-Identifier: Apache-2.0
// How the two ways to run a gemm walk its rows and keep its weights.
#pragma once

#include <algorithm>

#include "gemm.h"

namespace torchq {

/// Weights up to half a core's L2 stay there while tiles stream past.
constexpr int64_t kResidentWeightBytes = 512 * 1024;

/// Why `run_gemm` does not take the tier's matrix unit; null where it does.
const char* why_not_matrix_unit(const GemmProblem& problem, const Kernels& tier);

/// Steps through a class's rows in order.
class RowCursor {
 public:
  RowCursor(const GemmClass& c, int64_t row) : class_(c) {
    for (int d = 3; d >= 0; --d) {
      index_[d] = row % c.size[d];
      row /= c.size[d];
      src_ += index_[d] * c.src_stride[d];
      dst_ += index_[d] * c.dst_stride[d];
    }
  }
  /// The next `rows` rows: where each starts, and where its result goes. A run of rows along the
  /// last dimension at a time, since small layers would wait for a step that looks at them all.
  void next(int64_t rows, int64_t* src_offset, int64_t* dst_offset) {
    while (rows > 0) {
      const int64_t count = std::min(rows, class_.size[3] - index_[3]);
      fill(src_offset, count, src_, class_.src_stride[3]);
      fill(dst_offset, count, class_.dst_base + dst_, class_.dst_stride[3]);
      advance(count);
      src_offset += count;
      dst_offset += count;
      rows -= count;
    }
  }

 private:
  /// first, first + step, ...
  static void fill(int64_t* values, int64_t count, int64_t first, int64_t step) {
    for (int64_t i = 0; i < count; ++i, first += step) values[i] = first;
  }
  /// `count` steps along the last dimension, which end there or before.
  void advance(int64_t count) {
    for (int d = 3; d >= 0; --d, count = 1) {
      src_ += count * class_.src_stride[d];
      dst_ += count * class_.dst_stride[d];
      index_[d] += count;
      if (index_[d] < class_.size[d]) return;
      src_ -= class_.size[d] * class_.src_stride[d];
      dst_ -= class_.size[d] * class_.dst_stride[d];
      index_[d] = 0;
    }
  }

  const GemmClass& class_;
  int64_t index_[4];
  int64_t src_ = 0, dst_ = 0;
};

}  // namespace torchq
