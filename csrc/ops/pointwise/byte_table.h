// SPDX-License-Identifier: Apache-2.0
// Tables of 256 bytes: functions of one 8-bit value. As the last step of a matmul-like op, a table
// is applied to some rows at a time, as soon as all of their results are stored. These are still in
// cache, and no intermediate tensor is made.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/gemm/gemm_problem.h"

namespace torchq {

class ByteTable {
 public:
  /// `table` is nullopt, or 256 contiguous values for those of a tensor of dtype `src`, the lowest
  /// first: else TypeError or ValueError.
  ByteTable(const char* op, const std::optional<at::Tensor>& table, DType src);

  LastStep last_step(const Kernels& tier) const { return {bytes(), tier.lookup}; }
  /// By byte; null without a table.
  const uint8_t* bytes() const { return is_given_ ? bytes_ : nullptr; }
  /// dtype of what comes out.
  at::ScalarType dst_type() const { return dst_type_; }
  /// A destination of that dtype as what goes in: the same memory.
  at::Tensor before(const at::Tensor& dst) const;

 private:
  const bool is_given_;
  const at::ScalarType src_type_, dst_type_;
  alignas(64) uint8_t bytes_[256];
};

}  // namespace torchq
