// SPDX-License-Identifier: Apache-2.0
// Contract of the epilogue, from int32 sums to dst, and of the post-ops inside it.
#pragma once

#include "kernels/types.h"

namespace torchq {

// clang-format off
/// dst = scale * alg(x), in float32:
///
///   relu         x > 0 ? x : alpha x      (alpha 0: max(x, 0))
///   linear       alpha x + beta           (one fused multiply-add, scale multiplied in)
///   clip         min(max(x, alpha), beta)
///   abs          |x|
///   elu          x > 0 ? x : alpha (e^x - 1)
///   exp, log, sqrt, tanh
///   gelu_erf     x (1 + erf(x / sqrt(2))) / 2
///   gelu_tanh    x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
///   hardsigmoid  max(0, min(1, alpha x + beta))
///   hardswish    x hardsigmoid(x)
///   logistic     1 / (1 + e^-x)
///   mish         x tanh(log(1 + e^x))
///   pow          alpha x^beta
///   round        to the nearest integer, half to even
///   soft_relu    log(1 + e^(alpha x)) / alpha
///   square       x x
///   swish        x / (1 + e^(-alpha x))
// clang-format on
struct Eltwise {
  enum Alg : int {
    kRelu,
    kLinear,
    kClip,
    kAbs,
    kElu,
    kExp,
    kGeluErf,
    kGeluTanh,
    kHardsigmoid,
    kHardswish,
    kLog,
    kLogistic,
    kMish,
    kPow,
    kRound,
    kSoftRelu,
    kSqrt,
    kSquare,
    kSwish,
    kTanh,
  };
  Alg alg = kLinear;
  float alpha = 0, beta = 0, scale = 1;
};

/// alg(x, v) on float32; comparisons give 1 or 0, and a NaN in x stays for max and min. select:
/// condition ? x : v. prelu: x >= 0 ? x : x v.
enum class Binary : int { add, sub, mul, div, max, min, ge, gt, le, lt, eq, ne, select, prelu };

/// One operation of the float chain, on x in real units (Note [Folded and float chains] in
/// post_ops.h).
struct ChainOp {
  enum Kind : int { kSum, kEltwise, kBinary };
  Kind kind;
  Eltwise eltwise;
  Binary binary;
  const float* values;  // binary: v per channel; null: v is sums[src]
  int src;              // sum; binary without values: which of Epilogue::sums
  int condition;        // select: which of Epilogue::sums, true where not 0
};

/// A tensor laid out like dst: the old values of a sum, or the operand of a binary.
struct SumSrc {
  const void* data;
  DType dtype;
  const float* scale;  // folded chains: S per channel
  float chain_scale;   // float chains: x = fma(chain_scale, float(old - zero_point), x)
  int32_t zero_point;  // float chains
};

// clang-format off
/// From int32 accumulators to the destination. Channel arrays have exactly as many values as dst
/// has channels; tails are read with masks.
///
///   raw     dst = acc
///   folded  y = scaled(acc); per sum y = fma(float(old), S, y); clamp y to [lo, hi]
///   chain   x = scaled(acc); each op on x; y = x, or for integer dst y = fma(x, inv_scale, zero_point)
///   scaled  s = fma(float(acc), multiplier, offset); where there is a row_scale,
///           s = s * row_scale + row_bias, rounded twice
///   then    dst = saturate(rne(y)) for integer destinations, where NaN becomes zero_point;
///           dst = y for f32
// clang-format on
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
  // If both operands have a zero point (Note [Weight zero points] in ops/gemm/gemm.h), acc first
  // loses row_terms[row][n / group_channels] * channel_terms[n]; null: nothing. Such an epilogue
  // never finishes in registers: it is raw, to 32 bits, or has `guard`.
  const int32_t* row_terms;
  const int32_t* channel_terms;
  int channels, group_channels;
  // To f32: [rows], each of `channels` values; or null. With it, row_bias may be per channel.
  const float* row_scale;
  const float* row_bias;
};

}  // namespace torchq
