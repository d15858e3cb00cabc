// SPDX-License-Identifier: Apache-2.0
// Fewer than 16 bytes of a vector, for ISAs without masks: no others are read or written. Two parts
// that overlap take the place of memcpy: its call, and the load of what it wrote, took 5 ns.
#pragma once

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

/// The first `count` bytes, 0 to 7, and zeros.
TORCHQ_INLINE uint64_t load_few(const uint8_t* p, int count) {
  const int last = 8 * count;
  if (count >= 4) {
    return read<uint32_t>(p) | uint64_t{read<uint32_t>(p + count - 4)} << (last - 32);
  }
  if (count == 0) return 0;
  const int middle = count / 2;
  return p[0] | uint64_t{p[middle]} << 8 * middle | uint64_t{p[count - 1]} << (last - 8);
}

/// Bytes 8 to `count` - 1, for a count of 8 to 15, and zeros.
TORCHQ_INLINE uint64_t load_after_eight(const uint8_t* p, int count) {
  const int last = 8 * (count & 7);
  return last == 0 ? 0 : read<uint64_t>(p + count - 8) >> (64 - last);
}

/// Stores the first `count` bytes, 0 to 7, of `bytes`.
TORCHQ_INLINE void store_few(uint8_t* p, uint64_t bytes, int count) {
  const int last = 8 * count;
  if (count >= 4) {
    write(p, static_cast<uint32_t>(bytes));
    write(p + count - 4, static_cast<uint32_t>(bytes >> (last - 32)));
  } else if (count > 0) {
    const int middle = count / 2;
    p[0] = static_cast<uint8_t>(bytes);
    p[middle] = static_cast<uint8_t>(bytes >> 8 * middle);
    p[count - 1] = static_cast<uint8_t>(bytes >> (last - 8));
  }
}

/// Stores the first `count` bytes, 8 to 15, of `low` and `high`.
TORCHQ_INLINE void store_eight_or_more(uint8_t* p, uint64_t low, uint64_t high, int count) {
  const int last = 8 * (count & 7);
  write(p, low);
  write(p + count - 8, last == 0 ? low : low >> last | high << (64 - last));
}

}  // namespace
