// SPDX-License-Identifier: Apache-2.0
// The contract between the ops (tensors, checks, threads) and the kernels (lanes, tiles): plain
// structs and one table of function pointers per ISA. Kernels allocate nothing, start no thread,
// throw nothing and include no torch header. `reference.cpp` states what each entry computes; every
// other tier returns the same bits.
#pragma once

#include <cstdint>

namespace torchq {

/// Output channels of one packed panel: 16 int32 lanes, one zmm or two ymm.
constexpr int kPanel = 16;
/// Consecutive k that one 32-bit lane holds (what VPDPBUSD sums).
constexpr int kQuad = 4;
/// Destination rows of one gemm tile. 6 rows x 4 panels keep 24 accumulators, 4 weights and 1
/// broadcast in the 32 registers of AVX-512; 6 x 1 fits the 16 of AVX2. Measured: 99 % of peak on
/// Zen 4.
constexpr int kTileRows = 6;

enum class DType : int { u8, s8, s32, f32 };

/// One operation of the float chain, on x in real units (Note [Folded and float chains] in
/// ops/post_ops.h).
struct ChainOp {
  enum Kind : int { kSum, kRelu, kClip, kLinear, kAdd, kMul };
  Kind kind;
  float alpha, beta, scale;
  const float* values;  // kAdd, kMul: one per channel
  int sum_index;        // kSum: which of Epilogue::sums
};

struct SumSrc {
  const void* data;  // laid out like dst
  DType dtype;
  const float* scale;  // folded chains: S per channel
  float chain_scale;   // float chains
  int32_t zero_point;  // float chains
};

/// From int32 accumulators to the destination. Channel arrays have exactly as many values as dst
/// has channels; tails are read with masks.
///
///   raw     dst = acc
///   folded  y = fma(float(acc), multiplier, offset); per sum y = fma(float(old), S, y); clamp to
///   [lo, hi] chain   x = fma(float(acc), multiplier, offset); each op; for integer dst y = fma(x,
///   inv_scale, zero_point) then    dst = saturate(rne(y)) for integer destinations; NaN becomes
///   zero_point
struct Epilogue {
  enum Mode : int { kRaw, kFolded, kChain };
  Mode mode;
  DType dst_dtype;
  void* dst;
  const float* multiplier;
  const float* offset;
  float zero_point;
  // Folded: bounds. `lo`/`hi` per channel when not null, else the two scalars when `clamp`.
  bool clamp;
  float lo_scalar, hi_scalar;
  const float *lo, *hi;
  // False when |y| < 2^31 and y is a number for every input, so that the conversion alone saturates
  // correctly.
  bool guard;
  int num_sums;
  const SumSrc* sums;
  int num_ops;
  const ChainOp* ops;
  const float* inv_scale;  // chain with integer dst: 1 / dst_scale per channel
};

/// A run of `quads` * 4 source bytes and the packed weights they meet: one tap, or several that are
/// adjacent in the source as well as in the panel.
struct GemmRun {
  int64_t src_offset;     // bytes, relative to a row's first tap
  int64_t weight_offset;  // bytes inside a packed panel
  int64_t quads;
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
  int rows;                   // 1..kTileRows
  bool flip;
  const GemmRun* runs;
  int num_runs;
  const int8_t* weight;  // first panel
  int64_t panel_stride;  // bytes of a packed panel (before widening)
  int panels;
  int channel;              // first channel of the first panel, in dst and in the epilogue's arrays
  int channels;             // valid channels in these panels
  const int32_t* acc_init;  // [panels * 16], for `channel` onwards
};

/// A depthwise layer, as `prepare_depthwise` needs it: quad j of the packed taps
/// [ceil(C/16)][quads][16][4] meets taps 4 j .. 4 j + 3 of a row.
struct DepthwiseLayer {
  const int8_t* packed;
  int channels;
  int quads;
  /// Kernel width where the first `columns` quads are its columns, four rows each (ops/packing.h);
  /// else 0.
  int columns;
  int64_t src_step;         // bytes between the sources of neighboring destinations
  int64_t dst_step;         // elements between neighboring destinations
  int64_t row_pixels;       // destinations in a whole row
  const int32_t* acc_init;  // [channels rounded up to 64]
  bool flip;
};

/// `pixels` neighboring destinations of one row.
struct DepthwiseRow {
  const uint8_t* const*
      taps;  // [quads * 4]; unused taps point at any readable row (their weight is 0)
  /// Whether the sources of column j are those of column 0, j pixels on (not so where padding cuts
  /// a row).
  bool regular;
  int64_t pixels;
  int64_t dst_offset;  // elements, of the first pixel's channel 0
};

struct PoolRow {
  const uint8_t* const* taps;  // [num_taps] valid source pixels (channels contiguous)
  int num_taps;
  int64_t channels;
  void* dst;
  int32_t bias;   // average: added to the sum (padding counted as zero_point)
  float divisor;  // average
  bool is_signed;
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
struct BinaryRow {
  const void *src0, *src1;
  DType dtype0, dtype1;
  int64_t step0, step1;  // elements between values; 0: one value for the whole row
  void* dst;
  DType dst_dtype;
  int64_t size;
  float m0, m1, c, lo;
  int32_t z0, z1;
};

struct Kernels {
  const char* isa;
  /// Bytes a packed weight byte occupies for `gemm`: 1, or 2 where weights are widened to 16 bits
  /// first.
  int widening;
  void (*gemm)(const GemmTile&, const Epilogue&);
  /// Exact only for panels whose pair bound is at most 128; reads packed weights as they are. Null
  /// where `gemm` already does.
  void (*gemm_narrow)(const GemmTile&, const Epilogue&);
  /// Widens `bytes` packed weights for `gemm`. Null when `widening` is 1.
  void (*widen)(const int8_t* packed, int64_t bytes, int8_t* dst);
  /// acc_init[n] = bias[n] - zero_point * sum over taps of compensation[tap][n]; bias may be null.
  void (*compensate)(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                     const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init);
  /// Bytes that prepare_depthwise writes at most.
  int64_t (*depthwise_bytes)(const DepthwiseLayer&);
  void (*prepare_depthwise)(const DepthwiseLayer&, const Epilogue&, void* prepared);
  void (*depthwise)(const DepthwiseLayer&, const void* prepared, const DepthwiseRow&,
                    const Epilogue&);
  void (*max_pool)(const PoolRow&);
  void (*avg_pool)(const PoolRow&);
  void (*convert)(const ConvertRow&);
  void (*add)(const BinaryRow&);
  void (*mul)(const BinaryRow&);
  void (*lookup)(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size);
};

extern const Kernels kReferenceKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512VnniKernels;
#endif

}  // namespace torchq
