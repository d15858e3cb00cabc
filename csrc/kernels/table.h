// SPDX-License-Identifier: Apache-2.0
// The contract between the ops (tensors, checks, threads) and the kernels (lanes, tiles): plain
// structs and one table of function pointers per ISA. Kernels allocate nothing, start no thread,
// throw nothing and include no torch header. `reference.cpp` states what each entry computes; every
// other tier returns the same bits.
#pragma once

#include "rnn_table.h"
#include "types.h"

namespace torchq {

/// A run of `quads` * 4 source bytes and the packed weights they meet: one tap, or several that are
/// adjacent in the source as well as in the panel.
struct GemmRun {
  int64_t src_offset;     // bytes, relative to a row's first tap
  int64_t weight_offset;  // bytes inside a packed panel
  int64_t quads;
};

/// What the clipped weights of a panel lack (`Kernels::clip`), of the quads that lack something.
struct GemmExcess {
  struct Quad {
    int64_t src_offset;     // bytes, as in GemmRun
    int64_t weight_offset;  // bytes, in `weight`
  };
  const Quad* quads;
  int64_t num_quads;
  const int8_t* weight;
};

/// dst[row][n] = epilogue(n, acc_init[n] + sum over runs and k of src[row][run][k] *
/// weight[n][run][k])
///
/// src is u8, or s8 read as u8 by flipping the sign bit (`flip`, Note [Compensation] in
/// ops/gemm.h). Rows come as offsets because a convolution is a matmul with scattered rows. No byte
/// outside a run is read.
struct GemmTile {
  const uint8_t* src;
  const int64_t* row_offset;  // [rows] bytes
  const int64_t* dst_offset;  // [rows] elements, of channel 0
  int rows;                   // 1..kGemmRows
  bool flip;
  /// src is what `Kernels::widen_src` made: `flip` is done, all offsets in it count widened bytes.
  bool widened;
  const GemmRun* runs;
  int num_runs;
  const int8_t* weight;      // first panel
  int64_t panel_stride;      // bytes of a packed panel (before widening)
  const GemmExcess* excess;  // gemm_narrow: [panels], or null where the weights are not clipped
  int panels;
  int panels_behind;        // those that follow in `weight`, and are next; 0 where others are
  int channel;              // first channel of the first panel, in dst and in the epilogue's arrays
  int channels;             // valid channels in these panels
  const int32_t* acc_init;  // [panels * 16], for `channel` onwards
  /// Quads of a group where the panels are those of several, which have as many inputs as outputs,
  /// else 0. Then src is that of `channel`, and a run is one tap, or quads of one, of each group.
  ///   1, 2  small groups (Note [Conv packings] in ops/packing.h); the channels before `channel`
  ///         exist where `channels` is less than 16
  ///   4, 8  gemm_groups: groups of one or two whole panels
  int group_quads;
};

/// Up to 16 channels of a matrix of bytes, to be packed: one of the strides is 1.
struct PanelSource {
  const uint8_t* data;
  int64_t k_stride, channel_stride;  // bytes
  int64_t k;
  int channels;
  bool flip;  // u8 packed as value - 128
};

/// dst[row][x][c] = epilogue(c, acc_init[c] + sum over kernel rows r and columns j of
///   src[row][r][x * stride + j * dilation - pad_begin][c] * weight[c][r][j])
///
/// Pixels outside a row, and rows outside the source, are zero points. src is u8, or s8 read as u8
/// (`flip`).
struct DepthwiseLayer {
  const int8_t* packed;     // [ceil(C/16)][quads][16][4], see ops/packing.h
  const int32_t* taps;      // [quads * 4] the tap r * width + j that each packed byte meets, or -1
  const int32_t* acc_init;  // [channels rounded up to 16]
  int channels, quads;
  int kernel_rows;                             // of all dimensions but the last
  int64_t width, stride, dilation, pad_begin;  // along the row, in pixels
  int64_t src_pixels, dst_pixels;              // of a row; pixels have `channels` bytes or elements
  bool flip;
  uint8_t zero_point;
  const uint8_t* padding;  // a row of zero points, of at least one pixel
};

/// Destination rows of one layer.
struct DepthwiseRows {
  int count;
  const uint8_t* const* src;  // [count][kernel_rows] first pixels; `padding` for rows outside
  const int64_t* dst_offset;  // [count] elements
};

/// Adjacent windows of one shape; their destination pixels follow one another.
struct PoolRow {
  const uint8_t* const* taps;  // [num_taps] source pixels of the first (channels contiguous)
  int num_taps;
  int64_t windows, step;  // bytes from a window to the next in src
  int64_t channels;
  void* dst;
  int32_t bias;   // average: added to the sum (padding counted as zero_point)
  float divisor;  // average
  bool is_signed;
  DType dst_dtype;  // average: that of src, or f32, where nothing is rounded to an integer
};

/// dst = convert(fma(float(src - src_zero_point), factor, dst_zero_point)); parameters are per row
/// (`*_step` 0) or per element (`*_step` 1). quantize: factor = 1 / scale; dequantize: scale;
/// requantize: src_scale / dst_scale.
struct ConvertRow {
  const void* src;
  DType src_dtype;
  void* dst;
  DType dst_dtype;
  int64_t size;
  const float* factor;
  int64_t factor_step;
  const int32_t* src_zero_point;
  int64_t src_zero_point_step;
  const int32_t* dst_zero_point;
  int64_t dst_zero_point_step;
};

/// add: dst = convert(max(lo, fma(float(q0), m0, fma(float(q1), m1, c))))
/// mul: dst = convert(max(lo, fma(float((q0 - z0) * (q1 - z1)), m0, c)))
/// Row after row of src0 and dst lie side by side; src1 has one row for all of them.
struct BinaryRows {
  const void *src0, *src1;
  DType dtype0, dtype1;
  int64_t step0, step1;  // elements between values; 0: one value for the whole row
  void* dst;
  DType dst_dtype;
  int64_t size, rows;
  float m0, m1, c, lo;
  int32_t z0, z1;
};

/// Where a row y in real units goes: dst = convert(fma(y, inverse_scale, zero_point)) to 8 bits, or
/// y itself to f32.
struct RealRow {
  void* data;
  DType dtype;
  float inverse_scale, zero_point;
};

// clang-format off
/// One row of softmax, in float32, from q = src (as far as the largest q, the zero point drops out):
///
///   z[i] = scale * float(q[i] - max q)        e[i] = exp(z[i])
///   S    = the sum of e: 16 lanes, lane j having i = j, j + 16, ...; each lane adds blocks of
///          kSumBlock / 16 of its values, then the blocks' sums, all in order of i. Lanes j and
///          j + 8 are added, then j and j + 4, j + 2, j + 1.
///   dst  = e * (1 / S), or, logarithmic, z - log(S)
// clang-format on
struct SoftmaxRow {
  const uint8_t* src;
  bool is_signed;
  int64_t size;
  float scale;
  bool logarithmic;
  float* values;  // memory for e or z, with room for whole panels
  RealRow dst;
};
constexpr int kSumBlock = 512;

/// dst[r][i] = fma(fma(float(q[r][i] - center), factor, shift), weight[i], bias[i]), q = src. All
/// normalizations come to this. Rows lie side by side.
struct AffineRows {
  const uint8_t* src;
  bool is_signed;
  int64_t size, rows;
  bool per_value;  // whether these three are those of value i, else of row r
  const int32_t* center;
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

/// sums[i] and squares[i]: of q = src[r * stride + i] and of q * q, over at most 256 rows r; exact.
struct MomentsRows {
  const uint8_t* src;
  bool is_signed;
  int64_t rows, stride, size;
  int32_t *sums, *squares;
};

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
/// So what rounding takes from a weight goes to the next ones of its lane: many that are smaller
/// than half a step still add up. dst[j] is 0 from n to keys and the end of their panel. A row whose
/// scores are all -inf has total 0, one with NaN or inf NaN. Overwrites the scores.
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

/// What weights and values make: dst[r] = convert(fma(y, inverse_scale, zero_point)), or y,
///   y = fma(sums[r][i], scale / total[r], shift), or 0 where total[r] is 0
struct AttentionMeans {
  const float* sums;  // [rows][size]
  int64_t rows, size;
  const float* total;
  float scale, shift;
  RealRow dst;
  int64_t dst_stride;  // values
};

struct MatrixUnit;

struct Kernels {
  const char* isa;
  /// Bytes a packed weight byte occupies for `gemm`: 1, or 2 where weights are widened to 16 bits
  /// first.
  int widening;
  /// The same for `rnn_input` and `rnn_step`.
  int rnn_widening;
  /// What `gemm` leaves to a matrix unit (matrix_unit.h) where there are rows enough; null without.
  const MatrixUnit* matrix;
  void (*gemm)(const GemmTile&, const Epilogue&);
  /// Exact only for panels whose pair bound is at most 128, as clipped ones, to whose products it
  /// adds those of `excess`, where `clip` is not null; reads packed weights as they are. Null where
  /// `gemm` already does.
  void (*gemm_narrow)(const GemmTile&, const Epilogue&);
  /// `gemm` with packed weights as they are, widened in registers once for each tile of rows: for
  /// few rows. Null where `gemm` reads them, and on `avx512`.
  void (*gemm_split)(const GemmTile&, const Epilogue&);
  /// The same as `gemm` for the panels of several groups; null where `gemm` takes them one by one.
  void (*gemm_groups)(const GemmTile&, const Epilogue&);
  /// `gemm` and `gemm_narrow` for small groups: dst[row][n] sums over the inputs of n's group only.
  void (*small_groups)(const GemmTile&, const Epilogue&);
  void (*small_groups_narrow)(const GemmTile&, const Epilogue&);
  /// Widens `bytes` packed weights for `gemm`. Null when `widening` is 1.
  void (*widen)(const int8_t* packed, int64_t bytes, int8_t* dst);
  /// Packed weights as the sum of clipped ones, whose pairs fit 16-bit sums, and of their excess,
  /// which no odd byte has: that of the even bytes, as 16-bit values, is written for the quads that
  /// have any, `index` says for which. Returns how many; all three have room for `quads`, of which
  /// what is behind the last may be overwritten. Null where `gemm_narrow` knows no excess.
  int64_t (*clip)(const int8_t* packed, int64_t quads, int8_t* clipped, int8_t* excess,
                  int64_t* index);
  /// Widens the rows of a tile for `gemm`, their runs side by side; s8 become u8 (`flip`). Null
  /// where that does not pay.
  void (*widen_src)(const GemmTile&, uint8_t* dst);
  /// acc_init[n] = bias[n] - zero_point * sum over taps of compensation[tap][n]; bias may be null.
  void (*compensate)(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                     const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init);
  /// dst[ceil(k/4)][16][4], zeros where there is nothing; sums[16] over k.
  void (*pack_panel)(const PanelSource&, int8_t* dst, int32_t* sums);
  /// The sum of u8 values, or of s8 values + 128 (`flip`).
  int32_t (*sum_bytes)(const uint8_t* src, int64_t size, bool flip);
  /// Bytes of scratch that `depthwise` needs, aligned to 64.
  int64_t (*depthwise_bytes)(const DepthwiseLayer&);
  void (*depthwise)(const DepthwiseLayer&, const DepthwiseRows&, const Epilogue&, void* scratch);
  void (*max_pool)(const PoolRow&);
  void (*avg_pool)(const PoolRow&);
  void (*convert)(const ConvertRow&);
  void (*add)(const BinaryRows&);
  void (*mul)(const BinaryRows&);
  void (*lookup)(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size);
  void (*rnn_input)(const RnnInput&);
  void (*rnn_step)(const RnnStep&);
  /// How many pieces of RnnAhead a step does; null: none.
  int64_t (*rnn_pieces)(const RnnStep&);
  void (*quantize_row)(QuantizeRow&);
  /// dst[i] = what the operations of a float chain and its end make of x[i], in real units; their
  /// channel is i, dst and sources begin at e.dst and e.sums. Overwrites x, which has room for
  /// whole panels.
  void (*finish_row)(float* x, int64_t size, const Epilogue& e);
  /// The smallest and largest of the values and 0; false, and they are nothing, where not all
  /// values are finite.
  bool (*row_range)(const float* src, int64_t size, float* lo, float* hi);
  void (*softmax)(const SoftmaxRow&);
  void (*moments)(const MomentsRows&);
  /// The sums of adjacent values, and of their squares.
  void (*row_moments)(const uint8_t* src, int64_t size, bool is_signed, int64_t* sum,
                      int64_t* squares);
  void (*affine)(const AffineRows&);
  void (*blend)(const BlendRow&);
  void (*reduce)(const ReduceRows&);
  void (*quantize_symmetric)(const SymmetricRows&);
  void (*attention_weights)(const AttentionRows&);
  void (*attention_means)(const AttentionMeans&);
};

extern const Kernels kReferenceKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx2VnniKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512VnniKernels;
#endif

}  // namespace torchq
