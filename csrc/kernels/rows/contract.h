// SPDX-License-Identifier: Apache-2.0
// Contracts of ops in real units, row by row: softmax, normalizations, resampling, reductions.
#pragma once

#include "kernels/epilogue/contract.h"
#include "kernels/types.h"

namespace torchq {

/// Destination of a row y in real units: dst = convert(fma(y, inverse_scale, zero_point)) to 8
/// bits, or y itself to f32.
struct RealRow {
  void* data;
  DType dtype;
  float inverse_scale, zero_point;
};

// clang-format off
/// One row of softmax, in float32, from x = src (less the largest, so that zero points drop out):
///
///   z[i] = scale * (x[i] - max x)             e[i] = exp(z[i])
///   S    = the sum of e: 16 lanes, lane j having i = j, j + 16, ...; each lane adds blocks of
///          kSumBlock / 16 of its values, then the blocks' sums, all in order of i. Lanes j and
///          j + 8 are added, then j and j + 4, j + 2, j + 1.
///   dst  = e * (1 / S), or, logarithmic, z - log(S)
// clang-format on
struct SoftmaxRow {
  const void* src;
  DType src_dtype;  // u8, s8 or f32
  int64_t size;
  float scale;
  bool logarithmic;
  float* values;  // memory for e or z, with room for whole panels
  RealRow dst;
};
constexpr int kSumBlock = 512;

/// dst[r][i] = fma(fma(x[r][i] - center, factor, shift), weight[i], bias[i]), x = src. All
/// normalizations come to this. Rows lie side by side.
struct AffineRows {
  const void* src;
  DType src_dtype;  // u8, s8 or f32
  int64_t size, rows;
  bool per_value;       // whether these three are those of value i, else of row r
  const float* center;  // an integer where src is
  const float* factor;
  const float* shift;
  const float* weight;  // null: 1
  const float* bias;    // null: 0
  RealRow dst;
};

/// dst[p][c] = scale * s, s = weight[p][0] * tap(0), then s = fma(weight[p][k], tap(k), s) for each
/// further k < 2 num_lines, where tap(2 l + side) = lines[l][offset[p][side] + c].
struct BlendRow {
  const float* const* lines;  // [num_lines] source lines
  int num_lines;              // 1, 2 or 4
  const int64_t* offset;      // [pixels][2]
  const float* weight;        // [pixels][2 num_lines]
  float scale;
  int64_t channels, pixels;
  RealRow dst;
};

enum class Reduce : int { sum, max, min };

/// dst[i] = the sum (less than 2^23 rows), largest or smallest of src[r * stride + i] over rows r.
struct ReduceRows {
  const uint8_t* src;
  bool is_signed;
  Reduce alg;
  int64_t rows, stride, size;
  int32_t* dst;
};

/// sums[i] and squares[i] of x = src[r * stride + i]. Of integers: int32, of x and of x * x, over
/// at most 256 rows r; exact. Of floats: float32, of d = x - src[i] and of d * d, over rows r > 0
/// in their order, by additions and fma(d, d, square).
struct MomentsRows {
  const void* src;
  DType src_dtype;  // u8, s8 or f32
  int64_t rows, stride, size;
  void *sums, *squares;
};

/// Entries of rows/rows.cpp.
struct RowKernels {
  /// dst[i] = what the operations of a float chain and its end make of x[i], in
  /// real units; their channel is i, dst and sources begin at e.dst and e.sums.
  /// Overwrites x, which has room for whole panels.
  void (*epilogue_row)(float* x, int64_t size, const Epilogue& e);
  /// The smallest and largest of the values and 0; false, and they are nothing,
  /// where not all values are finite.
  bool (*row_range)(const float* src, int64_t size, float* lo, float* hi);
  void (*softmax)(const SoftmaxRow&);
  /// The mean m = float(S(src) / double(size)) of a row, or 0 unless `centered`, and S(d * d) of d
  /// = src - m. S adds float32 in the order of SoftmaxRow's sum.
  void (*row_deviations)(const float* src, int64_t size, bool centered, float* mean,
                         float* squares);
  void (*moments)(const MomentsRows&);
  /// The sums of adjacent values, and of their squares.
  void (*row_moments)(const uint8_t* src, int64_t size, bool is_signed, int64_t* sum,
                      int64_t* squares);
  void (*affine)(const AffineRows&);
  void (*blend)(const BlendRow&);
  void (*reduce)(const ReduceRows&);
};

}  // namespace torchq
