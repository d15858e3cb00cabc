// SPDX-License-Identifier: Apache-2.0
// Contracts of attention: rows quantized, softmax of scores, weighted sums of values.
#pragma once

#include "kernels/rows/contract.h"

namespace torchq {

/// dst[r][i] = rne(fma(src[r][i], 1 / scale, 128)), scale[r] = max(|src[r]|, 1e-30) / 127 of row r,
/// or `shared`, in scale[0], of all rows; NaN, and dst zeros, where a value is not finite.
struct SymmetricRows {
  const float* src;
  int64_t stride, rows, size;
  bool shared;
  uint8_t* dst;
  int64_t dst_stride;
  float* scale;
};

// clang-format off
/// Softmax of rows of scores as bytes, in float32 but for its result. Row r, of its first
/// n = min(keys, visible + r) scores x (plus the row's mask, where there is one):
///
///   t[j] = (x[j] - max x) * unit      e[j] = kFullWeight * 2^t[j], relative error below 1e-4
///   c[j] = e[j] + e[j - 16] + ..., in order of j: lane j % 16 of those up to j
///   dst[j] = rne(c[j]) - rne(c[j - 16])      total = the sum of dst
///
/// The rounding error of a weight thus passes to the next weights of its lane: many that are
/// smaller than half a step still add up. dst[j] is 0 from n to keys and the end of their panel. A
/// row whose scores are all -inf has total 0, one with NaN or inf NaN. Overwrites the scores.
// clang-format on
struct AttentionRows {
  float* scores;   // [rows][stride], -inf from `keys` on
  int64_t stride;  // values from row to row, of scores and of dst; whole panels
  int64_t rows, keys, visible;
  const float* mask;  // null, or rows of `keys` values, `mask_stride` apart
  int64_t mask_stride;
  float unit;  // log2(e) where scores are natural
  uint8_t* dst;
  float* total;  // [rows]
};
/// Even, so that no difference of roundings is 256.
constexpr float kFullWeight = 254.0f;

/// Weighted means of values: dst[r] = convert(fma(y, inverse_scale, zero_point)), or y,
///   y = fma(sums[r][i], scale / total[r], shift), or 0 where total[r] is 0
struct AttentionMeans {
  const float* sums;  // [rows][size]
  int64_t rows, size;
  const float* total;
  float scale, shift;
  RealRow dst;
  int64_t dst_stride;  // values
};

/// Entries of attention/attention.cpp.
struct AttentionKernels {
  void (*quantize_symmetric)(const SymmetricRows&);
  void (*attention_weights)(const AttentionRows&);
  void (*attention_means)(const AttentionMeans&);
};

}  // namespace torchq
