// SPDX-License-Identifier: Apache-2.0
// How the two ways to run a gemm walk its rows and keep its weights.
#pragma once

#include "gemm.h"

namespace torchq {

/// Weights up to half a core's L2 stay there while tiles stream past.
constexpr int64_t kResidentWeightBytes = 512 * 1024;

/// Why `run_gemm` does not take the tier's matrix unit; null where it does.
const char* why_not_matrix_unit(const GemmProblem& problem, const Kernels& tier);

/// Steps through a class's rows in order, yielding source and destination offsets.
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
  int64_t src() const { return src_; }
  int64_t dst() const { return dst_; }
  void next() {
    for (int d = 3; d >= 0; --d) {
      src_ += class_.src_stride[d];
      dst_ += class_.dst_stride[d];
      if (++index_[d] < class_.size[d]) return;
      src_ -= class_.size[d] * class_.src_stride[d];
      dst_ -= class_.size[d] * class_.dst_stride[d];
      index_[d] = 0;
    }
  }

 private:
  const GemmClass& class_;
  int64_t index_[4];
  int64_t src_ = 0, dst_ = 0;
};

}  // namespace torchq
