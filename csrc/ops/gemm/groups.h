// SPDX-License-Identifier: Apache-2.0
// Grouped products: rows of a source lie group by group, and each group has a weight of its own, as
// the tokens of each expert have in a mixture.
//
// Packed weights of all groups are stacked to one of groups * ceil(N/16) panels: the channels of
// each group fill its panels up, and arrays of channels have values for those, too.
#pragma once

#include <algorithm>

#include "epilogue/post_ops.h"
#include "ops/gemm/packing.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"

namespace torchq {

/// Raises unless src is (rows, K), offsets is int32 [groups], and weight has the panels of that
/// many groups. The rest of weight is to be checked as that of one layer of all these panels.
inline void check_grouped(const char* op, const at::Tensor& src, const at::Tensor& offsets,
                          const at::Tensor& weight, int64_t out_features) {
  TORCH_CHECK_VALUE(src.dim() == 2, "torchq.", op, ": src must be (rows, K), got ", src.sizes(),
                    ". Flatten its leading dimensions, and sort its rows by group.");
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kInt, "torchq.", op,
                   ": offsets must be int32, got ", dtype_name(offsets.scalar_type()),
                   ". Convert it with .int().");
  check_param(op, "offsets", offsets, at::kInt);
  TORCH_CHECK_VALUE(out_features >= 0 && out_features <= kMaxChannels, "torchq.", op,
                    ": out_features must lie in [0, ", kMaxChannels, "], got ", out_features,
                    ". It is the number of channels of one group.");
  TORCH_CHECK_VALUE(
      offsets.dim() == 1 && weight.dim() > 0 &&
          weight.size(0) == offsets.numel() * panels_of(out_features),
      "torchq.", op, ": weight must have ceil(N/16) panels for each group, with N = ", out_features,
      " and offsets [groups], got weight ", weight.sizes(), " and offsets ", offsets.sizes(),
      ". torchq.nn.DynamicQGroupedLinear.from_float stacks the weights of all groups.");
}

/// The rows of each group: offsets[g] is the end of group g, and group 0 begins at row 0.
class RowGroups {
 public:
  /// Raises ValueError unless offsets ascend from 0 to at most `rows`.
  RowGroups(const char* op, const at::Tensor& offsets, int64_t rows)
      : ends_(offsets.const_data_ptr<int32_t>()), count_(offsets.numel()) {
    int64_t last = 0;
    for (int64_t g = 0; g < count_; ++g) {
      TORCH_CHECK_VALUE(ends_[g] >= last && ends_[g] <= rows, "torchq.", op,
                        ": offsets must ascend from 0 to at most ", rows, ", the rows of src, got ",
                        ends_[g], " behind ", last, " at index ", g,
                        ". They are where the rows of each group end.");
      last = ends_[g];
    }
  }

  /// Rows that groups have; those behind them belong to none.
  int64_t rows() const { return count_ == 0 ? 0 : ends_[count_ - 1]; }

  /// body(group, rows) for the groups that have rows.
  template <class Body>
  void for_each(const Body& body) const {
    for (int64_t g = 0, begin = 0; g < count_; begin = ends_[g++]) {
      if (ends_[g] > begin) body(g, Range{begin, ends_[g]});
    }
  }

 private:
  const int32_t* ends_;
  int64_t count_;
};

/// Makes the rows of dst that no group has zeros.
inline void zero_rest(const RowGroups& groups, const at::Tensor& dst) {
  float* values = dst.mutable_data_ptr<float>();
  std::fill(values + groups.rows() * dst.size(1), values + dst.numel(), 0.0f);
}

}  // namespace torchq
