// SPDX-License-Identifier: Apache-2.0
// 128-bit operations that the AVX2 and AVX-512 traits share.
#pragma once

#include <immintrin.h>

#include "kernels/common.h"

namespace {

/// The largest of 16 bytes.
TORCHQ_INLINE int32_t largest_byte(__m128i v, bool is_signed) {
  const auto larger = [&](__m128i other) {
    return is_signed ? _mm_max_epi8(v, other) : _mm_max_epu8(v, other);
  };
  v = larger(_mm_srli_si128(v, 8));
  v = larger(_mm_srli_si128(v, 4));
  v = larger(_mm_srli_si128(v, 2));
  v = larger(_mm_srli_si128(v, 1));
  const int byte = _mm_cvtsi128_si32(v) & 0xff;
  return is_signed ? static_cast<int8_t>(byte) : byte;
}

}  // namespace
