// SPDX-License-Identifier: Apache-2.0
// Fewer than 16 bytes of an xmm register.
#pragma once

#include <immintrin.h>

#include "isa/few_bytes.h"

namespace {

/// The first `count` bytes, 0 to 15, and zeros.
TORCHQ_INLINE __m128i load_short(const uint8_t* p, int count) {
  if (count >= 8) {
    return _mm_set_epi64x(static_cast<int64_t>(load_after_eight(p, count)), read<int64_t>(p));
  }
  return _mm_cvtsi64_si128(static_cast<int64_t>(load_few(p, count)));
}

/// Stores the first `count` bytes.
TORCHQ_INLINE void store_first(uint8_t* p, __m128i v, int count) {
  if (count >= 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
  const uint64_t low = static_cast<uint64_t>(_mm_cvtsi128_si64(v));
  if (count < 8) return store_few(p, low, count);
  store_eight_or_more(p, low, static_cast<uint64_t>(_mm_extract_epi64(v, 1)), count);
}

}  // namespace
