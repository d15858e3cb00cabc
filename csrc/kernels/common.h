// SPDX-License-Identifier: Apache-2.0
// Basics of every kernel file: attributes and unaligned loads.
//
// Note [One symbol per ISA]
// Each ISA object is compiled with its own instruction set. An inline function with external
// linkage would be merged by the linker with the copy of another object, and an AVX-512 copy would
// then run on an AVX2 machine. So everything in kernels/ and isa/ lives in an anonymous namespace,
// only C headers and those of intrinsics are included, no function template of the standard library
// is used, and each object exports one symbol: its family's constant-initialized table for a tier.
// tests/kernels/test_isa.py checks that with `nm`.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels/types.h"

#define TORCHQ_INLINE inline __attribute__((always_inline))
// A lambda that is called twice would be a function with its state in memory.
#define TORCHQ_INLINE_LAMBDA __attribute__((always_inline))
#define TORCHQ_NOINLINE __attribute__((noinline))
// The K loop's loops over accumulators must be unrolled completely, else the accumulators live on
// the stack.
#define TORCHQ_UNROLL _Pragma("GCC unroll 64")

namespace {

using namespace torchq;  // types only, nothing with linkage

TORCHQ_INLINE int32_t load32(const void* p) {
  int32_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

TORCHQ_INLINE int element_size(DType dtype) {
  return dtype == DType::u8 || dtype == DType::s8 ? 1 : 4;
}

TORCHQ_INLINE const void* element(const void* base, DType dtype, int64_t index) {
  return static_cast<const char*>(base) + index * element_size(dtype);
}

TORCHQ_INLINE void* element(void* base, DType dtype, int64_t index) {
  return static_cast<char*>(base) + index * element_size(dtype);
}

/// Keeps the sums of a tile in their registers until here: behind a K loop, and in front of an end
/// that needs many registers. Without it GCC 12 makes room for that end in front of all ends, which
/// moves and spills nearly every sum (7x7 of 3 to 64 channels on Zen 4: 1.03 of the time).
template <class Isa, int MR, int NP>
TORCHQ_INLINE void pin_sums(typename Isa::Int (&acc)[MR][NP]) {
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::pin(acc[r][p]);
  }
}

/// A sum in real units, or in those of dst: one rounding.
template <class Isa>
TORCHQ_INLINE typename Isa::Float scaled(typename Isa::Int sum, typename Isa::Float multiplier,
                                         typename Isa::Float offset) {
  return Isa::fma(Isa::to_float(sum), multiplier, offset);
}

TORCHQ_INLINE int64_t whole_panels(int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; }

TORCHQ_INLINE int min_int(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

}  // namespace
