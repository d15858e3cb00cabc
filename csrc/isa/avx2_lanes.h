// SPDX-License-Identifier: Apache-2.0
// 16 lanes of int32 or float32 as two ymm registers.
#pragma once

#include <immintrin.h>

#include "kernels/common.h"

namespace {

struct Avx2Lanes {
  struct Int {
    __m256i lo, hi;
  };
  struct Float {
    __m256 lo, hi;
  };
  using Mask = int;  // number of valid lanes

  static TORCHQ_INLINE Mask mask(int count) { return count; }
  /// All ones in the first `count` lanes; vpmaskmov loads never touch the others.
  static TORCHQ_INLINE Int lane_mask(Mask count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i limit = _mm256_set1_epi32(count);
    return {_mm256_cmpgt_epi32(limit, lanes),
            _mm256_cmpgt_epi32(limit, _mm256_add_epi32(lanes, _mm256_set1_epi32(8)))};
  }

  // int32 and float lanes
  static TORCHQ_INLINE Int zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static TORCHQ_INLINE Int set_int(int32_t x) {
    return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
  }
  static TORCHQ_INLINE Int load_int(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
  }
  static TORCHQ_INLINE Int load_int(const int32_t* p, Mask count) {
    const Int m = lane_mask(count);
    return {_mm256_maskload_epi32(p, m.lo), _mm256_maskload_epi32(p + 8, m.hi)};
  }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), v.hi);
  }
  static TORCHQ_INLINE void store_int(int32_t* p, Int v, Mask count) {
    store(reinterpret_cast<float*>(p), {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)},
          count);
  }
  static TORCHQ_INLINE Int add(Int a, Int b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Int sub(Int a, Int b) {
    return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
  }
  /// Lanes j and j + 4 added, in 64 bits.
  static TORCHQ_INLINE __m256i wide_halves(__m256i v) {
    return _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)),
                            _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1)));
  }
  /// The sum of all lanes, in 64 bits.
  static TORCHQ_INLINE int64_t sum_lanes(Int v) {
    const __m256i four = _mm256_add_epi64(wide_halves(v.lo), wide_halves(v.hi));
    const __m128i two =
        _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return _mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
  }
  static TORCHQ_INLINE Int mul(Int a, Int b) {
    return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static TORCHQ_INLINE Float load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  static TORCHQ_INLINE Float load(const float* p, Mask count) {
    const Int m = lane_mask(count);
    return {_mm256_maskload_ps(p, m.lo), _mm256_maskload_ps(p + 8, m.hi)};
  }
  static TORCHQ_INLINE void store(float* p, Float v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  /// In parts: vpmaskmov stores are microcoded on AMD.
  static TORCHQ_INLINE void store(float* p, Float v, Mask count) {
    if (count >= 16) return store(p, v);
    __m256 eight = v.lo;
    if (count & 8) {
      _mm256_storeu_ps(p, v.lo);
      eight = v.hi;
      p += 8;
    }
    __m128 four = _mm256_castps256_ps128(eight);
    if (count & 4) {
      _mm_storeu_ps(p, four);
      four = _mm256_extractf128_ps(eight, 1);
      p += 4;
    }
    if (count & 2) {
      _mm_storel_pi(reinterpret_cast<__m64*>(p), four);
      four = _mm_movehl_ps(four, four);
      p += 2;
    }
    if (count & 1) _mm_store_ss(p, four);
  }
  static TORCHQ_INLINE Float add(Float a, Float b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float mul(Float a, Float b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float div(Float a, Float b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float fma(Float a, Float b, Float c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  /// c - a b
  static TORCHQ_INLINE Float fnma(Float a, Float b, Float c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
  }
  static TORCHQ_INLINE Float interleave_lanes(__m256 a, __m256 b) {
    const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  }
  /// a[0], b[0], a[1], b[1], ...
  static TORCHQ_INLINE void interleave_lanes(Float a, Float b, Float (&v)[2]) {
    v[0] = interleave_lanes(a.lo, b.lo);
    v[1] = interleave_lanes(a.hi, b.hi);
  }
  /// Lanes j and j + 8 added, then j and j + 4, j + 2, j + 1.
  static TORCHQ_INLINE float sum_halves(Float v) {
    const __m256 eight = _mm256_add_ps(v.lo, v.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  /// The largest lane; anything where one is NaN.
  static TORCHQ_INLINE float largest_lane(Float v) {
    const __m256 eight = _mm256_max_ps(v.lo, v.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static TORCHQ_INLINE Float max(Float a, Float b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float min(Float a, Float b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float where_positive(Float x, Float a, Float b) {
    const __m256 zero = _mm256_setzero_ps();
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, zero, _CMP_GT_OQ)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, zero, _CMP_GT_OQ))};
  }
  static TORCHQ_INLINE Float replace_nan(Float x, Float value) {
    return {_mm256_blendv_ps(x.lo, value.lo, _mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q)),
            _mm256_blendv_ps(x.hi, value.hi, _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q))};
  }
  static TORCHQ_INLINE Float to_float(Int v) {
    return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)};
  }
  /// float(a - b), which may need 33 bits: through double, rounded once.
  static TORCHQ_INLINE __m256 difference(__m256i a, __m256i b) {
    const auto half = [](__m128i x, __m128i y) {
      return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_cvtepi32_pd(x), _mm256_cvtepi32_pd(y)));
    };
    const __m128 low = half(_mm256_castsi256_si128(a), _mm256_castsi256_si128(b));
    return _mm256_set_m128(half(_mm256_extracti128_si256(a, 1), _mm256_extracti128_si256(b, 1)),
                           low);
  }
  static TORCHQ_INLINE Float difference(Int a, Int b) {
    return {difference(a.lo, b.lo), difference(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Int to_int(Float v) {
    return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)};
  }
  static TORCHQ_INLINE __m256i to_int_saturated(__m256 v) {
    const __m256 high = _mm256_cmp_ps(v, _mm256_set1_ps(2147483648.0f), _CMP_GE_OQ);
    return _mm256_blendv_epi8(_mm256_cvtps_epi32(v), _mm256_set1_epi32(INT32_MAX),
                              _mm256_castps_si256(high));
  }
  static TORCHQ_INLINE Int to_int_saturated(Float v) {
    return {to_int_saturated(v.lo), to_int_saturated(v.hi)};
  }

  // comparisons, bits and rounding (kernels/math.h); a comparison with NaN is false
  using Lanes = Float;
  static TORCHQ_INLINE Lanes less(Float a, Float b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
  }
  static TORCHQ_INLINE Lanes less_equal(Float a, Float b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LE_OQ)};
  }
  static TORCHQ_INLINE Lanes equal(Float a, Float b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
  }
  static TORCHQ_INLINE Float select(Lanes m, Float a, Float b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
  }
  static TORCHQ_INLINE Float sub(Float a, Float b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Float sqrt(Float x) { return {_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)}; }
  static TORCHQ_INLINE Float round(Float x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, kMode), _mm256_round_ps(x.hi, kMode)};
  }
  static TORCHQ_INLINE Int bits(Float x) {
    return {_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)};
  }
  static TORCHQ_INLINE Float from_bits(Int x) {
    return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)};
  }
  static TORCHQ_INLINE Int bit_and(Int a, Int b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Int bit_or(Int a, Int b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int a) {
    return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
  }
  template <int kBits>
  static TORCHQ_INLINE Int shift_right(Int a) {
    return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
  }
};

}  // namespace
