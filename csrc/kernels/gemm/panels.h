// SPDX-License-Identifier: Apache-2.0
// Packing at run time, for operands that are not constant (contracts: PanelSource, sum_bytes in
// table.h). 16 bytes at a time: every x86 tier has these instructions, and a panel is 16 wide.
#pragma once

#include <immintrin.h>

#include "kernels/common.h"

namespace {

TORCHQ_INLINE __m128i load_16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
TORCHQ_INLINE void store_16(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }

/// One quad of up to 16 channels, byte by byte.
TORCHQ_INLINE void pack_tail_quad(const PanelSource& s, int64_t k, int8_t* dst) {
  memset(dst, 0, kPanel * kQuad);
  const int steps = min_int(s.k - k, kQuad);
  for (int n = 0; n < s.channels; ++n) {
    for (int i = 0; i < steps; ++i) {
      const uint8_t q = s.data[(k + i) * s.k_stride + n * s.channel_stride];
      dst[n * kQuad + i] = static_cast<int8_t>(s.flip ? q ^ 0x80 : q);
    }
  }
}

/// Four rows of 16 channels to 16 channels of four.
TORCHQ_INLINE void interleave_rows(const uint8_t* src, int64_t stride, __m128i flip, int8_t* dst) {
  __m128i row[kQuad];
  for (int i = 0; i < kQuad; ++i) row[i] = _mm_xor_si128(load_16(src + i * stride), flip);
  const __m128i low01 = _mm_unpacklo_epi8(row[0], row[1]),
                low23 = _mm_unpacklo_epi8(row[2], row[3]);
  const __m128i high01 = _mm_unpackhi_epi8(row[0], row[1]),
                high23 = _mm_unpackhi_epi8(row[2], row[3]);
  store_16(dst, _mm_unpacklo_epi16(low01, low23));
  store_16(dst + 16, _mm_unpackhi_epi16(low01, low23));
  store_16(dst + 32, _mm_unpacklo_epi16(high01, high23));
  store_16(dst + 48, _mm_unpackhi_epi16(high01, high23));
}

/// Four channels of 16 k to four quads of four channels each, 64 bytes apart.
TORCHQ_INLINE void transpose_quads(const uint8_t* src, int64_t stride, __m128i flip, int8_t* dst) {
  __m128i channel[4];
  for (int n = 0; n < 4; ++n) channel[n] = _mm_xor_si128(load_16(src + n * stride), flip);
  const __m128i low01 = _mm_unpacklo_epi32(channel[0], channel[1]),
                low23 = _mm_unpacklo_epi32(channel[2], channel[3]);
  const __m128i high01 = _mm_unpackhi_epi32(channel[0], channel[1]),
                high23 = _mm_unpackhi_epi32(channel[2], channel[3]);
  store_16(dst, _mm_unpacklo_epi64(low01, low23));
  store_16(dst + 64, _mm_unpackhi_epi64(low01, low23));
  store_16(dst + 128, _mm_unpacklo_epi64(high01, high23));
  store_16(dst + 192, _mm_unpackhi_epi64(high01, high23));
}

/// The same of fewer channels; the others are 0.
TORCHQ_INLINE void transpose_some(const uint8_t* src, int64_t stride, int channels, __m128i flip,
                                  int8_t* dst) {
  __m128i rows[4] = {flip, flip, flip, flip};
  for (int n = 0; n < channels; ++n) rows[n] = load_16(src + n * stride);
  transpose_quads(reinterpret_cast<const uint8_t*>(rows), sizeof rows[0], flip, dst);
}

/// sums[n] = sum over k of the packed weights of channel n.
TORCHQ_INLINE void sum_panel(const int8_t* panel, int64_t quads, int32_t* sums) {
  const __m128i one_byte = _mm_set1_epi8(1), one_word = _mm_set1_epi16(1);
  __m128i total[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(),
                      _mm_setzero_si128()};
  for (int64_t q = 0; q < quads; ++q) {
    TORCHQ_UNROLL for (int i = 0; i < 4; ++i) {
      const __m128i pairs = _mm_maddubs_epi16(one_byte, load_16(panel + q * 64 + i * 16));
      total[i] = _mm_add_epi32(total[i], _mm_madd_epi16(pairs, one_word));
    }
  }
  for (int i = 0; i < 4; ++i) store_16(sums + 4 * i, total[i]);
}

template <class Isa>
void pack_panel(const PanelSource& s, int8_t* dst, int32_t* sums) {
  const __m128i flip = _mm_set1_epi8(static_cast<char>(s.flip ? 0x80 : 0));
  const int64_t quads = (s.k + kQuad - 1) / kQuad;
  int64_t k = 0;
  if (s.channels == kPanel && s.channel_stride == 1) {
    for (; k + kQuad <= s.k; k += kQuad) {
      interleave_rows(s.data + k * s.k_stride, s.k_stride, flip, dst + k * kPanel);
    }
  } else if (s.k_stride == 1) {
    for (; k + 4 * kQuad <= s.k; k += 4 * kQuad) {
      for (int n = 0; n < kPanel; n += 4) {
        const uint8_t* src = s.data + k + n * s.channel_stride;
        int8_t* const quads_of_four = dst + k * kPanel + n * kQuad;
        if (s.channels - n >= 4) {
          transpose_quads(src, s.channel_stride, flip, quads_of_four);
        } else {
          transpose_some(src, s.channel_stride, s.channels - n, flip, quads_of_four);
        }
      }
    }
  }
  for (; k < s.k; k += kQuad) pack_tail_quad(s, k, dst + k * kPanel);
  sum_panel(dst, quads, sums);
}

template <class Isa>
int32_t sum_bytes(const uint8_t* src, int64_t size, bool flip) {
  const __m128i mask = _mm_set1_epi8(static_cast<char>(flip ? 0x80 : 0));
  __m128i total = _mm_setzero_si128();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const __m128i bytes = _mm_xor_si128(load_16(src + i), mask);
    total = _mm_add_epi64(total, _mm_sad_epu8(bytes, _mm_setzero_si128()));
  }
  int32_t sum = _mm_cvtsi128_si32(total) + _mm_extract_epi32(total, 2);
  for (; i < size; ++i) sum += flip ? src[i] ^ 0x80 : src[i];
  return sum;
}

}  // namespace
