// SPDX-License-Identifier: Apache-2.0
// Fewer than 16 bytes of a vector, where AVX2 has no masks: no others are read or written.
#pragma once

#include <immintrin.h>

#include "kernels/common.h"

namespace {

template <class T>
TORCHQ_INLINE T read(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
TORCHQ_INLINE void write(uint8_t* p, T value) {
  memcpy(p, &value, sizeof value);
}

/// The first `count` bytes, 0 to 15, and zeros; no others are read. Two parts, which overlap: a
/// call of memcpy, and the load of what it wrote, took 5 ns.
TORCHQ_INLINE __m128i load_short(const uint8_t* p, int count) {
  const int last = 8 * (count & 7);
  if (count >= 8) {
    const uint64_t end = read<uint64_t>(p + count - 8);
    return _mm_set_epi64x(static_cast<int64_t>(last == 0 ? 0 : end >> (64 - last)),
                          read<int64_t>(p));
  }
  uint64_t bytes = 0;
  if (count >= 4) {
    bytes = read<uint32_t>(p) | uint64_t{read<uint32_t>(p + count - 4)} << (last - 32);
  } else if (count > 0) {
    const int middle = count / 2;
    bytes = p[0] | uint64_t{p[middle]} << 8 * middle | uint64_t{p[count - 1]} << (last - 8);
  }
  return _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
}

/// Stores the first `count` bytes, in the same way.
TORCHQ_INLINE void store_first(uint8_t* p, __m128i v, int count) {
  if (count >= 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
  const uint64_t low = static_cast<uint64_t>(_mm_cvtsi128_si64(v));
  const int last = 8 * (count & 7);
  if (count >= 8) {
    const uint64_t high = static_cast<uint64_t>(_mm_extract_epi64(v, 1));
    const uint64_t end = last == 0 ? low : low >> last | high << (64 - last);
    write(p, low);
    write(p + count - 8, end);
  } else if (count >= 4) {
    write(p, static_cast<uint32_t>(low));
    write(p + count - 4, static_cast<uint32_t>(low >> (last - 32)));
  } else if (count > 0) {
    const int middle = count / 2;
    p[0] = static_cast<uint8_t>(low);
    p[middle] = static_cast<uint8_t>(low >> 8 * middle);
    p[count - 1] = static_cast<uint8_t>(low >> (last - 8));
  }
}

}  // namespace
