// SPDX-License-Identifier: Apache-2.0
// The epilogue in plain loops, and loads and stores of single values.
#pragma once

#include <limits.h>
#include <math.h>

#include "kernels/epilogue/eltwise.h"

namespace {

float load_value(const void* base, DType dtype, int64_t index, int32_t zero_point) {
  const void* p = element(base, dtype, index);
  switch (dtype) {
    case DType::u8:
      return static_cast<float>(*static_cast<const uint8_t*>(p) - zero_point);
    case DType::s8:
      return static_cast<float>(*static_cast<const int8_t*>(p) - zero_point);
    case DType::s32: {
      int32_t q;
      memcpy(&q, p, sizeof q);
      return static_cast<float>(int64_t{q} - zero_point);
    }
    default: {
      float x;
      memcpy(&x, p, sizeof x);
      return x;
    }
  }
}

float max_float(float a, float b) { return a > b ? a : b; }
float min_float(float a, float b) { return a < b ? a : b; }

/// Integers: rne, saturated, NaN becomes zero_point. f32: as it is, every NaN the same.
void store_value(void* base, DType dtype, int64_t index, float y, float zero_point) {
  void* p = element(base, dtype, index);
  if (dtype == DType::f32) {
    if (y != y) y = Math<Scalar>::kNan;
    memcpy(p, &y, sizeof y);
    return;
  }
  if (y != y) y = zero_point;
  if (dtype == DType::s32) {
    const int32_t q = y >= 2147483648.0f   ? INT_MAX
                      : y < -2147483648.0f ? INT_MIN
                                           : static_cast<int32_t>(nearbyintf(y));
    memcpy(p, &q, sizeof q);
  } else if (dtype == DType::s8) {
    *static_cast<int8_t*>(p) = static_cast<int8_t>(nearbyintf(min_float(max_float(y, -128), 127)));
  } else {
    *static_cast<uint8_t*>(p) = static_cast<uint8_t>(nearbyintf(min_float(max_float(y, 0), 255)));
  }
}

/// Note [One operation sequence] in math.h: what an eltwise algorithm computes is stated there.
float apply_chain_op(const Epilogue& e, const ChainOp& op, float x, int channel, int64_t index) {
  const auto source = [&](int i) {
    return load_value(e.sums[i].data, e.sums[i].dtype, index, e.sums[i].zero_point);
  };
  float y = x;
  if (op.kind == ChainOp::kEltwise) {
    with_eltwise<Scalar>(op.eltwise, [&](auto f) { y = f(x); });
    return y;
  }
  if (op.kind == ChainOp::kSum) return fmaf(e.sums[op.src].chain_scale, source(op.src), x);
  const float v = op.values != nullptr ? op.values[channel] : source(op.src);
  if (op.binary == Binary::select) return source(op.condition) != 0 ? x : v;
  with_binary<Scalar>(op.binary, [&](auto f) { y = f(x, v); });
  return y;
}

void apply_chain(const Epilogue& e, float x, int channel, int64_t index) {
  for (int i = 0; i < e.num_ops; ++i) x = apply_chain_op(e, e.ops[i], x, channel, index);
  const float y = e.dst_dtype == DType::f32 ? x : fmaf(x, e.inv_scale[channel], e.zero_point);
  store_value(e.dst, e.dst_dtype, index, y, e.zero_point);
}

void apply_epilogue(const Epilogue& e, int32_t acc, int channel, int64_t index) {
  if (e.row_terms != nullptr) {
    const int groups = e.channels / e.group_channels;
    const int32_t term = e.row_terms[index / e.channels * groups + channel / e.group_channels];
    const uint32_t product =
        static_cast<uint32_t>(term) * static_cast<uint32_t>(e.channel_terms[channel]);
    acc = static_cast<int32_t>(static_cast<uint32_t>(acc) - product);
  }
  if (e.mode == Epilogue::kRaw) {
    memcpy(element(e.dst, DType::s32, index), &acc, sizeof acc);
    return;
  }
  float y = fmaf(static_cast<float>(acc), e.multiplier[channel], e.offset[channel]);
  if (e.row_scale != nullptr) y = y * e.row_scale[index / e.channels];
  if (e.row_bias != nullptr) y = y + e.row_bias[channel];
  if (e.mode == Epilogue::kFolded) {
    for (int s = 0; s < e.num_sums; ++s) {
      y = fmaf(load_value(e.sums[s].data, e.sums[s].dtype, index, 0), e.sums[s].scale[channel], y);
    }
    if (e.lo != nullptr) {
      y = min_float(e.hi[channel], max_float(e.lo[channel], y));
    } else if (e.clamp) {
      y = min_float(e.hi_scalar, max_float(e.lo_scalar, y));
    }
  } else {
    return apply_chain(e, y, channel, index);
  }
  store_value(e.dst, e.dst_dtype, index, y, e.zero_point);
}

void epilogue_row(float* x, int64_t size, const Epilogue& e) {
  for (int64_t i = 0; i < size; ++i) apply_chain(e, x[i], static_cast<int>(i), i);
}

}  // namespace
