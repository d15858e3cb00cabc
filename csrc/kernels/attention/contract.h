// SPDX-License-Identifier: Apache-2.0
// Contracts of attention: rows quantized, softmax of scores, weighted sums of values; attention to
// compressed keys and values.
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

/// Rows of `size` bytes q, s8, with a float32 behind each: the scale of its real values scale * q.
struct CompressedRows {
  const int8_t* data;
  int64_t stride, size;  // bytes from row to row, values of a row
};

// clang-format off
/// Attention of queries to the keys and values of one head, in float32:
///
///   dot[j] = the sum of query[i] * q_key[j][i]: 16 lanes, lane l having i = l, l + 16, ..., each by
///            fma in order of i; then lanes are added as in SoftmaxRow
///   x[j]   = fma(dot[j], scale_key[j] * scale, mask[j])
///   w[j]   = softmax(x)[j] * scale_value[j], the softmax as in SoftmaxRow
///   dst[i] = the sum of w[j] * q_value[j][i], by fma in order of j
///
/// A query whose x are all -inf has a softmax of zeros.
// clang-format on
struct CompressedAttention {
  const float* queries;      // [rows][size of keys in whole panels], zeros behind a row
  const float* const* mask;  // [rows], of `length` values each; or null: 0
  float* const* dst;         // [rows]
  int64_t rows, length;      // length > 0
  float scale;
  CompressedRows keys, values;
  // Memory, each row in whole panels:
  float* scores;  // [rows][length]
  float* sums;    // [rows][size of values]
  float* block;   // [16][size of keys or values]
};

/// Entries of attention/attention.cpp.
struct AttentionKernels {
  void (*quantize_symmetric)(const SymmetricRows&);
  void (*attention_weights)(const AttentionRows&);
  void (*attention_means)(const AttentionMeans&);
  void (*compressed_attention)(const CompressedAttention&);
};

}  // namespace torchq
