// SPDX-License-Identifier: Apache-2.0
// 16 lanes of int32 or float32 as four NEON registers.
#pragma once

#include <arm_neon.h>

#include "kernels/common.h"

namespace {

/// Applies an operation to the four registers of the same place.
template <class R, class Op, class... V>
TORCHQ_INLINE R each(const Op& op, const V&... v) {
  return {op(v.a...), op(v.b...), op(v.c...), op(v.d...)};
}

/// Int, Float and Lanes are no instances of one template: of those GCC 12 lost stores (rnn_step).
struct NeonLanes {
  struct Int {
    int32x4_t a, b, c, d;
  };
  struct Float {
    float32x4_t a, b, c, d;
  };
  struct Lanes {
    uint32x4_t a, b, c, d;
  };
  using Mask = int;  // number of valid lanes

  static TORCHQ_INLINE Mask mask(int count) { return count; }

  // loads and stores
  static TORCHQ_INLINE Int set_int(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
  }
  static TORCHQ_INLINE Int zero() { return set_int(0); }
  static TORCHQ_INLINE Float set(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
  }
  /// By memcpy, which knows no type: kernels read floats where they stored integers.
  template <class V>
  static TORCHQ_INLINE V load_as(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  template <class V>
  static TORCHQ_INLINE void store_as(void* p, V v) {
    memcpy(p, &v, sizeof v);
  }
  template <class V, class T>
  static TORCHQ_INLINE void store_four(T* p, const V& v) {
    store_as(p, v.a), store_as(p + 4, v.b), store_as(p + 8, v.c), store_as(p + 12, v.d);
  }
  static TORCHQ_INLINE Int load_int(const int32_t* p) {
    return {load_as<int32x4_t>(p), load_as<int32x4_t>(p + 4), load_as<int32x4_t>(p + 8),
            load_as<int32x4_t>(p + 12)};
  }
  static TORCHQ_INLINE Float load(const float* p) {
    return {load_as<float32x4_t>(p), load_as<float32x4_t>(p + 4), load_as<float32x4_t>(p + 8),
            load_as<float32x4_t>(p + 12)};
  }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v) { store_four(p, v); }
  static TORCHQ_INLINE void store(float* p, Float v) { store_four(p, v); }
  /// The first `count` lanes of a register, at most four, and zeros.
  static TORCHQ_INLINE int32x4_t load_some(const int32_t* p, int count) {
    if (count >= 4) return load_as<int32x4_t>(p);
    int32x4_t v = vdupq_n_s32(0);
    if (count > 0) v = vsetq_lane_s32(load32(p), v, 0);
    if (count > 1) v = vsetq_lane_s32(load32(p + 1), v, 1);
    if (count > 2) v = vsetq_lane_s32(load32(p + 2), v, 2);
    return v;
  }
  static TORCHQ_INLINE Int load_int(const int32_t* p, Mask count) {
    if (count >= kPanel) return load_int(p);
    return {load_some(p, count), load_some(p + 4, count - 4), load_some(p + 8, count - 8),
            load_some(p + 12, count - 12)};
  }
  static TORCHQ_INLINE Float load(const float* p, Mask count) {
    return from_bits(load_int(reinterpret_cast<const int32_t*>(p), count));
  }
  static TORCHQ_INLINE void store_some(int32_t* p, int32x4_t v, int count) {
    if (count >= 4) return store_as(p, v);
    if (count > 0) store_as(p, vgetq_lane_s32(v, 0));
    if (count > 1) store_as(p + 1, vgetq_lane_s32(v, 1));
    if (count > 2) store_as(p + 2, vgetq_lane_s32(v, 2));
  }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v, Mask count) {
    if (count >= kPanel) return store_int(p, v);
    store_some(p, v.a, count);
    store_some(p + 4, v.b, count - 4);
    store_some(p + 8, v.c, count - 8);
    store_some(p + 12, v.d, count - 12);
  }
  static TORCHQ_INLINE void store(float* p, Float v, Mask count) {
    store_int(reinterpret_cast<int32_t*>(p), bits(v), count);
  }

  // arithmetic
  static TORCHQ_INLINE Int add(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vaddq_s32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Int sub(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vsubq_s32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Int mul(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vmulq_s32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float add(Float x, Float y) {
    return each<Float>([](auto a, auto b) { return vaddq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float sub(Float x, Float y) {
    return each<Float>([](auto a, auto b) { return vsubq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float mul(Float x, Float y) {
    return each<Float>([](auto a, auto b) { return vmulq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float div(Float x, Float y) {
    return each<Float>([](auto a, auto b) { return vdivq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float sqrt(Float x) {
    return each<Float>([](auto a) { return vsqrtq_f32(a); }, x);
  }
  static TORCHQ_INLINE Float fma(Float x, Float y, Float z) {
    return each<Float>([](auto a, auto b, auto c) { return vfmaq_f32(c, a, b); }, x, y, z);
  }
  static TORCHQ_INLINE Float fnma(Float x, Float y, Float z) {
    return each<Float>([](auto a, auto b, auto c) { return vfmsq_f32(c, a, b); }, x, y, z);
  }
  /// A comparison and a selection: FMAX returns NaN if either operand is one, and +0 of two zeros.
  static TORCHQ_INLINE Float max(Float x, Float y) { return select(less(y, x), x, y); }
  static TORCHQ_INLINE Float min(Float x, Float y) { return select(less(x, y), x, y); }
  static TORCHQ_INLINE int64_t sum_lanes(Int v) {
    const int64x2_t low = vpadalq_s32(vpaddlq_s32(v.a), v.b);
    const int64x2_t high = vpadalq_s32(vpaddlq_s32(v.c), v.d);
    return vaddvq_s64(vaddq_s64(low, high));
  }
  /// a[0], b[0], a[1], b[1], ...
  static TORCHQ_INLINE void interleave_lanes(Float x, Float y, Float (&v)[2]) {
    v[0] = {vzip1q_f32(x.a, y.a), vzip2q_f32(x.a, y.a), vzip1q_f32(x.b, y.b), vzip2q_f32(x.b, y.b)};
    v[1] = {vzip1q_f32(x.c, y.c), vzip2q_f32(x.c, y.c), vzip1q_f32(x.d, y.d), vzip2q_f32(x.d, y.d)};
  }
  static TORCHQ_INLINE float sum_halves(Float v) {
    const float32x4_t four = vaddq_f32(vaddq_f32(v.a, v.c), vaddq_f32(v.b, v.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  /// The largest lane; anything where one is NaN.
  static TORCHQ_INLINE float largest_lane(Float v) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v.a, v.b), vmaxq_f32(v.c, v.d)));
  }

  // comparisons and selections
  static TORCHQ_INLINE Lanes less(Float x, Float y) {
    return each<Lanes>([](auto a, auto b) { return vcltq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Lanes less_equal(Float x, Float y) {
    return each<Lanes>([](auto a, auto b) { return vcleq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Lanes equal(Float x, Float y) {
    return each<Lanes>([](auto a, auto b) { return vceqq_f32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Float select(Lanes m, Float x, Float y) {
    return each<Float>([](auto l, auto a, auto b) { return vbslq_f32(l, a, b); }, m, x, y);
  }
  static TORCHQ_INLINE Float where_positive(Float x, Float a, Float b) {
    return select(less(set(0.0f), x), a, b);
  }
  static TORCHQ_INLINE Float replace_nan(Float x, Float value) {
    return select(equal(x, x), x, value);
  }

  // rounding and conversions
  static TORCHQ_INLINE Float round(Float x) {
    return each<Float>([](auto a) { return vrndnq_f32(a); }, x);
  }
  /// The instruction saturates, and makes 0 of NaN; kernels look for INT32_MIN.
  static TORCHQ_INLINE Int to_int(Float x) {
    const auto convert = [](float32x4_t v) {
      const uint32x4_t fits = vcltq_f32(v, vdupq_n_f32(2147483648.0f));
      return vbslq_s32(fits, vcvtnq_s32_f32(v), vdupq_n_s32(INT32_MIN));
    };
    return each<Int>(convert, x);
  }
  /// INT32_MIN where NaN, as `to_int`.
  static TORCHQ_INLINE Int to_int_saturated(Float x) {
    const auto convert = [](float32x4_t v) {
      return vbslq_s32(vceqq_f32(v, v), vcvtnq_s32_f32(v), vdupq_n_s32(INT32_MIN));
    };
    return each<Int>(convert, x);
  }
  static TORCHQ_INLINE Float to_float(Int x) {
    return each<Float>([](auto a) { return vcvtq_f32_s32(a); }, x);
  }
  /// By way of doubles, which hold 33 bits exactly.
  static TORCHQ_INLINE Float difference(Int x, Int y) {
    const auto subtract = [](int32x4_t a, int32x4_t b) {
      const float64x2_t low = vcvtq_f64_s64(vsubl_s32(vget_low_s32(a), vget_low_s32(b)));
      return vcvt_high_f32_f64(vcvt_f32_f64(low), vcvtq_f64_s64(vsubl_high_s32(a, b)));
    };
    return each<Float>(subtract, x, y);
  }

  // bits
  static TORCHQ_INLINE Int bits(Float x) {
    return each<Int>([](auto a) { return vreinterpretq_s32_f32(a); }, x);
  }
  static TORCHQ_INLINE Float from_bits(Int x) {
    return each<Float>([](auto a) { return vreinterpretq_f32_s32(a); }, x);
  }
  static TORCHQ_INLINE Int bit_and(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vandq_s32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Int bit_or(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vorrq_s32(a, b); }, x, y);
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int x) {
    return each<Int>([](auto a) { return vshlq_n_s32(a, kBits); }, x);
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_right(Int x) {
    return each<Int>([](auto a) { return vshrq_n_s32(a, kBits); }, x);
  }
};

}  // namespace
