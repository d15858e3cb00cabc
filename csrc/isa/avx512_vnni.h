// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX-512 with VPDPBUSD.
#pragma once

#include "isa/avx512.h"

namespace {

struct Avx512Vnni : Avx512 {
  static constexpr Tier kTier = Tier::avx512_vnni;
  /// With their addresses 10 fit the general registers. With 12, tiles of one panel take 0.95 of
  /// the time nevertheless, those of two 1.08; measured on Emerald Rapids.
  static constexpr int kTallRows = 10, kTallestRows = 12;
  static constexpr bool kPrefetches = true;
  static TORCHQ_INLINE void prefetch(const int8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }
  static TORCHQ_INLINE void prefetch_l2(const int8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
  static constexpr int kSteps = 1;
  static constexpr bool kHasNarrow = false;

  static TORCHQ_INLINE Int flip_sign(Int v) {
    return _mm512_xor_si512(v, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
  }
  template <int kStep>
  static TORCHQ_INLINE Int split_src(Int quad) {
    return quad;
  }
  /// Inline assembly because GCC 12 copies the accumulator around the intrinsic inside loops
  /// (measured: 278 instead of 459 GOPS).
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) { TORCHQ_ASM_DOT(acc, src, weight); }
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, Int quad) { dot(acc, codes, quad); }
  /// A row's products with NP panels as few statements: GCC 12 moves sums between registers around
  /// statements of their own, two to six in recurrent tiles of three and four panels (GRU of 512
  /// units on Zen 5: 0.98 of the time without). On copies, since elements of an array that are
  /// outputs keep all of it in memory in loops of loops.
  template <int NP>
  static TORCHQ_INLINE void dot_row(Int* acc, Int src, const Int* w) {
    if constexpr (NP >= 4) {
      Int a = acc[0], b = acc[1], c = acc[2], d = acc[3];
      TORCHQ_ASM_DOT_FOUR(a, b, c, d, src, w);
      acc[0] = a, acc[1] = b, acc[2] = c, acc[3] = d;
      dot_row<NP - 4>(acc + 4, src, w + 4);
    } else if constexpr (NP == 3) {
      Int a = acc[0], b = acc[1], c = acc[2];
      TORCHQ_ASM_DOT_THREE(a, b, c, src, w);
      acc[0] = a, acc[1] = b, acc[2] = c;
    } else if constexpr (NP > 0) {
      dot(acc[0], src, w[0]);
      dot_row<NP - 1>(acc + 1, src, w + 1);
    }
  }

  /// dst = table[src], of 256 entries, with permutations of 128 of them.
  __attribute__((target("avx512vbmi"))) static TORCHQ_NOINLINE void lookup_vbmi(
      const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size) {
    Bytes part[4];
    TORCHQ_UNROLL for (int i = 0; i < 4; ++i) part[i] = _mm512_loadu_si512(table + 64 * i);
    for (int64_t i = 0; i < size; i += 64) {
      const int count = min_int(size - i, 64);
      const Bytes v = load_channels(src + i, count);
      const Bytes low = _mm512_permutex2var_epi8(part[0], v, part[1]);
      const Bytes high = _mm512_permutex2var_epi8(part[2], v, part[3]);
      store_channels(dst + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(v), low, high), count);
    }
  }
  static TORCHQ_INLINE bool has_vbmi() {
#ifdef TORCHQ_EMULATED
    return false;  // a function with this target passes emulated vectors in other places
#else
    return __builtin_cpu_supports("avx512vbmi");
#endif
  }
};

static_assert(Isa<Avx512Vnni>);

}  // namespace
