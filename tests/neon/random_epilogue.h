// SPDX-License-Identifier: Apache-2.0
// Epilogues of every form: raw, folded, float chains of all operations.
#pragma once

#include <deque>

#include "check.h"

namespace torchq {

/// An epilogue with parameters of `channels` channels, for a dst of `size` values.
class RandomEpilogue {
 public:
  enum Forms { kAll, kChains };
  RandomEpilogue(int channels, int64_t size, Forms forms = kAll);
  /// Adds the products of two zero points, scales of rows, or both: dst has `rows` rows of all
  /// channels side by side.
  void add_row_terms(int64_t rows);

  /// The same but for its destination, which has the bytes of dst().
  Epilogue with(void* dst) const;
  /// Memory for dst, the same bytes each time.
  Buffer<uint8_t> dst() const { return dst_; }
  std::string text() const;

 private:
  const float* floats(int64_t size, float bound, float least = 0);
  void add_source(DType dtype);
  void fold();
  void add_chain_op();
  int element_bytes() const;

  int channels_;
  int64_t size_;
  Epilogue e_{};
  Buffer<uint8_t> dst_;
  std::deque<Buffer<float>> floats_;
  std::deque<Buffer<int32_t>> ints_;
  std::deque<Buffer<uint8_t>> sources_;
  std::vector<SumSrc> sums_;
  std::vector<ChainOp> ops_;
};

}  // namespace torchq
