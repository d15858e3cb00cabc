// SPDX-License-Identifier: Apache-2.0
// 16 lanes of int32 or float32 as one zmm register.
#pragma once

#include <immintrin.h>

#include "kernels/common.h"

namespace {

struct Avx512Lanes {
  using Int = __m512i;
  using Float = __m512;
  using Mask = __mmask16;

  static TORCHQ_INLINE Mask mask(int count) {
    return count >= 16 ? Mask(0xffff) : Mask((1u << count) - 1);
  }

  // int32 and float lanes
  static TORCHQ_INLINE Int zero() { return _mm512_setzero_si512(); }
  static TORCHQ_INLINE Int set_int(int32_t x) { return _mm512_set1_epi32(x); }
  static TORCHQ_INLINE Int load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
  static TORCHQ_INLINE Int load_int(const int32_t* p, Mask m) {
    return _mm512_maskz_loadu_epi32(m, p);
  }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v) { _mm512_storeu_si512(p, v); }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v, Mask m) {
    _mm512_mask_storeu_epi32(p, m, v);
  }
  static TORCHQ_INLINE Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static TORCHQ_INLINE Int sub(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  /// The sum of all lanes, in 64 bits.
  static TORCHQ_INLINE int64_t sum_lanes(Int v) {
    return _mm512_reduce_add_epi64(
        _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(v)),
                         _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(v, 1))));
  }
  static TORCHQ_INLINE Int mul(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
  static TORCHQ_INLINE Float set(float x) { return _mm512_set1_ps(x); }
  static TORCHQ_INLINE Float load(const float* p) { return _mm512_loadu_ps(p); }
  static TORCHQ_INLINE Float load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
  static TORCHQ_INLINE void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static TORCHQ_INLINE void store(float* p, Float v, Mask m) { _mm512_mask_storeu_ps(p, m, v); }
  static TORCHQ_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static TORCHQ_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static TORCHQ_INLINE Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static TORCHQ_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  /// c - a b
  static TORCHQ_INLINE Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
  /// a[0], b[0], a[1], b[1], ...
  static TORCHQ_INLINE void interleave_lanes(Float a, Float b, Float (&v)[2]) {
    const Int low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    v[0] = _mm512_permutex2var_ps(a, low, b);
    v[1] = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
  }
  /// Lanes j and j + 8 added, then j and j + 4, j + 2, j + 1.
  static TORCHQ_INLINE float sum_halves(Float v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  /// The largest lane; anything where one is NaN.
  static TORCHQ_INLINE float largest_lane(Float v) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static TORCHQ_INLINE Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static TORCHQ_INLINE Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static TORCHQ_INLINE Float where_positive(Float x, Float a, Float b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), b, a);
  }
  static TORCHQ_INLINE Float replace_nan(Float x, Float value) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, value);
  }
  static TORCHQ_INLINE Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }
  /// float(a - b), which may need 33 bits: through double, rounded once.
  static TORCHQ_INLINE Float difference(Int a, Int b) {
    const auto half = [](__m256i x, __m256i y) {
      return _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_cvtepi32_pd(x), _mm512_cvtepi32_pd(y)));
    };
    const __m256 low = half(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
    const __m256 high = half(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static TORCHQ_INLINE Int to_int(Float v) { return _mm512_cvtps_epi32(v); }
  static TORCHQ_INLINE Int to_int_saturated(Float v) {
    const Mask high = _mm512_cmp_ps_mask(v, _mm512_set1_ps(2147483648.0f), _CMP_GE_OQ);
    return _mm512_mask_blend_epi32(high, _mm512_cvtps_epi32(v), _mm512_set1_epi32(INT32_MAX));
  }

  // comparisons, bits and rounding (kernels/math.h); a comparison with NaN is false
  using Lanes = __mmask16;
  static TORCHQ_INLINE Lanes less(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static TORCHQ_INLINE Lanes less_equal(Float a, Float b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
  }
  static TORCHQ_INLINE Lanes equal(Float a, Float b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
  }
  static TORCHQ_INLINE Float select(Lanes m, Float a, Float b) {
    return _mm512_mask_blend_ps(m, b, a);
  }
  static TORCHQ_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static TORCHQ_INLINE Float sqrt(Float x) { return _mm512_sqrt_ps(x); }
  static TORCHQ_INLINE Float round(Float x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static TORCHQ_INLINE Int bits(Float x) { return _mm512_castps_si512(x); }
  static TORCHQ_INLINE Float from_bits(Int x) { return _mm512_castsi512_ps(x); }
  static TORCHQ_INLINE Int bit_and(Int a, Int b) { return _mm512_and_si512(a, b); }
  static TORCHQ_INLINE Int bit_or(Int a, Int b) { return _mm512_or_si512(a, b); }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_right(Int a) {
    return _mm512_srai_epi32(a, kBits);
  }
};

}  // namespace
