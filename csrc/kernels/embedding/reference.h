// SPDX-License-Identifier: Apache-2.0
// Embeddings in plain loops. Each returns the position of an index that is no
// row, or -1.
#pragma once

#include "kernels/embedding/rows.h"
#include "kernels/epilogue/reference.h"

namespace {

float code_at(const RowTable& t, const TableRow& row, int64_t d) {
  return static_cast<float>(t.bits == 8 ? row.codes[d] : row.codes[d / 2] >> (d % 2 * 4) & 15);
}

int64_t embedding(const EmbeddingRows& e) {
  for (int64_t i = e.first; i < e.end; ++i) {
    const int64_t index = index_at(e.indices, i);
    if (!is_row(e.table, index)) return i;
    const TableRow row = row_at(e.table, index);
    for (int64_t d = 0; d < e.table.dim; ++d) {
      e.dst[(i - e.first) * e.table.dim + d] = code_at(e.table, row, d) * row.scale + row.offset;
    }
  }
  return -1;
}

int64_t embedding_bag(const EmbeddingBags& e) {
  for (int64_t b = e.first; b < e.end; ++b) {
    float* dst = e.dst + (b - e.first) * e.table.dim;
    for (int64_t d = 0; d < e.table.dim; ++d) dst[d] = 0;
    float offsets = 0;
    int64_t n = 0;
    for (int64_t i = e.begin[b]; i < e.begin[b + 1]; ++i) {
      const int64_t index = index_at(e.indices, i);
      if (index == e.padding) continue;
      if (!is_row(e.table, index)) return i;
      const TableRow row = row_at(e.table, index);
      const float factor = e.factors != nullptr ? e.factors[i] : 1;
      const float scale = row.scale * factor, offset = row.offset * factor;
      for (int64_t d = 0; d < e.table.dim; ++d) {
        const float q = code_at(e.table, row, d), real = q * scale + offset;
        dst[d] = e.mode != BagMode::max ? fmaf(q, scale, dst[d])
                 : n == 0               ? real
                                        : max_float(dst[d], real);
      }
      offsets += offset;
      ++n;
    }
    if (n == 0 || e.mode == BagMode::max) continue;
    const float divisor = e.mode == BagMode::mean ? static_cast<float>(n) : 1;
    for (int64_t d = 0; d < e.table.dim; ++d) dst[d] = (dst[d] + offsets) / divisor;
  }
  return -1;
}

}  // namespace
