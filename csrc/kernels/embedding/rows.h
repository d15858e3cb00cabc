// SPDX-License-Identifier: Apache-2.0
// A row of a table by the position of its index: for the loops and for all
// tiers.
#pragma once

#include "kernels/common.h"
#include "kernels/embedding/contract.h"

namespace {

struct TableRow {
  const uint8_t* codes;
  float scale, offset;
};

/// Exact, of any float16: a multiplication by 2^112 gives its exponent the bias
/// of float32.
TORCHQ_INLINE float half_at(const uint8_t* p) {
  uint16_t half;
  memcpy(&half, p, sizeof half);
  uint32_t bits = (half & 0x7fffu) << 13;
  float value;
  memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;
  memcpy(&bits, &value, sizeof bits);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;  // inf, NaN
  bits |= (half & 0x8000u) << 16;
  memcpy(&value, &bits, sizeof value);
  return value;
}

TORCHQ_INLINE int64_t index_at(const RowIndices& x, int64_t i) {
  return x.is_wide ? static_cast<const int64_t*>(x.values)[i]
                   : static_cast<const int32_t*>(x.values)[i];
}

TORCHQ_INLINE bool is_row(const RowTable& t, int64_t index) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(t.rows);
}

TORCHQ_INLINE TableRow row_at(const RowTable& t, int64_t index) {
  TableRow row;
  row.codes = t.data + index * t.row_bytes;
  const uint8_t* params = row.codes + t.code_bytes;
  if (t.is_half) {
    row.scale = half_at(params);
    row.offset = half_at(params + 2);
  } else {
    memcpy(&row.scale, params, sizeof row.scale);
    memcpy(&row.offset, params + 4, sizeof row.offset);
  }
  return row;
}

/// Prefetches the row of the index `prefetch_distance` places behind the i-th.
TORCHQ_INLINE void prefetch_row(const RowTable& t, const RowIndices& x, int64_t i) {
  if (x.prefetch_distance == 0 || i + x.prefetch_distance >= x.count) return;
  const int64_t index = index_at(x, i + x.prefetch_distance);
  if (!is_row(t, index)) return;
  const uint8_t* row = t.data + index * t.row_bytes;
  for (int64_t b = 0; b < t.row_bytes; b += 64) __builtin_prefetch(row + b);
}

}  // namespace
