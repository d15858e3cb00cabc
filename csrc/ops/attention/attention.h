// SPDX-License-Identifier: Apache-2.0
// Attention of quantized and of float32 operands: heads, cut into blocks of queries.
//
// Note [Attention]
// Row i of dst is the mean of the rows of v that the bytes p[i] weigh (AttentionRows in
// kernels/attention/contract.h):
//   x[i][j] = float(sum over d of (q[i][d] - q_zero_point) * k[j][d]) * q_scale k_scale scale
//             + mask[i][j],     j <= i if causal
//   dst[i]  = v_scale * (sum over j of p[i][j] * v[j] / sum of p[i] - v_zero_point)
// Both products are exact integers, by the gemm of linear. The zero point of k adds the same to all
// of a row, which softmax does not see. The sum of p is that of the bytes themselves: rounding them
// moves weight from one key to another, never the mean out of the range of the values.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/gemm/gemm.h"
#include "ops/gemm/packing.h"
#include "ops/rows/real.h"

namespace torchq {

/// Keys or values of one head: columns as panels, and what they add to their products.
struct PackedColumns {
  int64_t panel_bytes;
  int8_t* weight;
  int32_t* compensation;  // [panels * 16]
  int32_t* init;
};

/// Keys and values of one head. Scores are sums of products times score_scale[key], and means are
/// mean_scale * (mean of the packed values) + mean_shift.
struct Head {
  PackedColumns keys, values;
  float* score_scale;  // [padded keys]
  float mean_scale, mean_shift;
};

/// Rows of bytes, `stride` apart, of which s8 are read as u8 (`flip`); their own scales, or null.
struct QueryRows {
  const uint8_t* data;
  int64_t stride;
  bool flip;
  const float* scale;
};

/// Source of an op's queries, keys and values. Heads are numbered as in dst.
class Heads {
 public:
  virtual ~Heads() = default;
  /// Packs keys and values of a head into its memory, and sets its scales.
  virtual void load(size_t h, Head& head) const = 0;
  virtual QueryRows queries(ScratchFrame& scratch, size_t h, int64_t first,
                            int64_t count) const = 0;
};

struct Attention {
  const Kernels& tier;
  int64_t queries, keys, size, value_size;  // of one head
  bool causal;
  std::vector<int64_t> dst_offset, mask_offset;  // of every head, in values
  int64_t dst_stride;                            // from row to row
  at::Tensor mask;                               // float32, or undefined
  RealRow dst;
};

/// Columns of scores in memory: four panels at a time are what products finish in registers. Up to
/// two are less work as they are: avx2 takes 0.8 of the time, avx512_vnni 0.9 to 1.
inline int64_t padded_keys(int64_t keys) {
  return keys <= 2 * kPanel ? panels_of(keys) * kPanel : (keys + 63) / 64 * 64;
}

/// n columns of `columns.k` values, and columns of zeros up to whole panels in `padded`;
/// `zero_point` is that of the rows they will meet.
void pack_columns(const Kernels& tier, const PanelSource& columns, int64_t n, int64_t padded,
                  int32_t zero_point, const PackedColumns& packed);

void run_attention(const Attention& attention, const Heads& heads);

/// Queries outside the heads where they are for q, so that what turned both around for q turns them
/// back for dst without a copy.
at::Tensor empty_like_queries(const at::Tensor& q, c10::IntArrayRef sizes, at::ScalarType dtype);

/// float32, with unit stride along keys; true of a bool mask becomes 0, false -inf. `sizes` are
/// those of the scores.
at::Tensor read_mask(const char* op, const at::Tensor& given, c10::IntArrayRef sizes);

/// Queries, or other sources that ops read as float32.
void check_float(const char* op, const char* arg, const at::Tensor& t, const char* remedy);

void check_scale(const char* op, double scale);

}  // namespace torchq
