// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX2 with the 256-bit VPDPBUSD of CPUs that may lack AVX-512.
#pragma once

#include "isa/avx2.h"

#ifndef TORCHQ_EMULATED
#define TORCHQ_ASM_DOT(acc, src, w) \
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(src), "x"(w))
#endif

namespace {

struct Avx2Vnni : Avx2 {
  static constexpr Tier kTier = Tier::avx2_vnni;
  static constexpr int kSteps = 1;
  static constexpr bool kWidensSrc = false;
  static constexpr bool kHasNarrow = false;

  template <int kStep, class V>
  static TORCHQ_INLINE V split_src(V quad) {
    return quad;
  }
  static TORCHQ_INLINE void dot(__m256i& acc, __m256i src, __m256i weight) {
    TORCHQ_ASM_DOT(acc, src, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, __m256i src, Int weight) {
    dot(acc.lo, src, weight.lo);
    dot(acc.hi, src, weight.hi);
  }
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    dot(acc.lo, src.lo, weight.lo);
    dot(acc.hi, src.hi, weight.hi);
  }
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, __m256i quad) {
    dot(acc.lo, codes.lo, quad);
    dot(acc.hi, codes.hi, quad);
  }
};

static_assert(Isa<Avx2Vnni>);

}  // namespace
