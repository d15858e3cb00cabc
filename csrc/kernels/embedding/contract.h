// SPDX-License-Identifier: Apache-2.0
// Contract of embeddings: rows of a table by their indices, and bags of them.
#pragma once

#include <stdint.h>

namespace torchq {

/// A row is its codes q, unsigned, of 8 bits or 4 (the first of two is in a byte's low half), its
/// scale and its offset, both float32 or both float16.
///
///   real(r)[d] = float(q[r][d]) * scale[r] + offset[r], rounded twice
struct RowTable {
  const uint8_t* data;
  int64_t rows, row_bytes, code_bytes, dim;
  int bits;
  bool is_half;
};

/// Indices of rows, int64 (`is_wide`) or int32. The row `prefetch_distance` places later is
/// prefetched; 0: none.
struct RowIndices {
  const void* values;
  bool is_wide;
  int64_t count, prefetch_distance;
};

/// Rows first, ..., end - 1 of the indices: dst[i - first] = real(index i).
struct EmbeddingRows {
  RowTable table;
  RowIndices indices;
  int64_t first, end;
  float* dst;
};

enum class BagMode : int { sum, mean, max };

/// Bags first, ..., end - 1: dst[b - first] over the n indices from begin[b] to begin[b + 1] that
/// are not `padding`, with scales and offsets times `factors`, in their order.
///
///   sum   s = 0, then s = fma(float(q), scale, s) for each;  o = 0, then o += offset;
///         dst = s + o
///   mean  dst = (s + o) / n
///   max   the largest real(index)
///
/// dst is 0 if n = 0.
struct EmbeddingBags {
  RowTable table;
  RowIndices indices;
  const int64_t* begin;
  int64_t first, end;
  BagMode mode;
  int64_t padding;       // kNoPadding: none
  const float* factors;  // one for each index; null: 1
  float* partial;        // memory for s, of dim rounded up to 32 values
  float* dst;
};
constexpr int64_t kNoPadding = INT64_MIN;

/// Entries of embedding/embedding.cpp.
struct EmbeddingKernels {
  /// Each returns the position of an index that is no row, or -1
  /// (embedding/contract.h).
  int64_t (*embedding)(const EmbeddingRows&);
  int64_t (*embedding_bag)(const EmbeddingBags&);
};

}  // namespace torchq
