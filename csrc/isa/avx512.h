// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX-512: multiplies weights widened to 16 bits, exact on every AVX-512 CPU. Internal
// linkage throughout, see Note [One symbol per ISA] in kernels/common.h.
#pragma once

#include "isa/avx512_asm.h"
#include "isa/avx512_lanes.h"
#include "isa/isa_concept.h"
#include "isa/last_bytes.h"

namespace {

struct Dwords16 {
  alignas(64) uint32_t lanes[16];
};
constexpr Dwords16 fill(uint32_t value) {
  Dwords16 result{};
  for (uint32_t& lane : result.lanes) lane = value;
  return result;
}
constexpr Dwords16 kSignBits = fill(0x80808080u);
constexpr Dwords16 kEvenBytes = fill(0x00ff00ffu);
constexpr Dwords16 kZeros = fill(0);
/// The lanes of channels 0 to 15 in the sums of small groups: without pairs, and with.
alignas(16) constexpr uint8_t kChannelOrder[2][16] = {
    {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15},
    {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15}};

struct Avx512 : Avx512Lanes {
  static constexpr Tier kTier = Tier::avx512;
  static constexpr int kMaxPanels = 4;
  static constexpr int kVectors = 32;
  /// Rows of the tallest tiles of two panels, and of one.
  static constexpr int kTallRows = kTileRows, kTallestRows = kTileRows;
  static constexpr bool kPrefetches = false;
  /// True where masks make partial panels cheap to store.
  static constexpr bool kMasksTails = true;
  /// Weight vectors per quad: 2 where a quad is multiplied as two pairs of 16-bit values.
  static constexpr int kSteps = 2;
  /// Four panels share what is split; copying rows took as long (Zen 5).
  static constexpr bool kWidensSrc = false;
  static constexpr bool kHasNarrow = true;

  // bytes
  static TORCHQ_INLINE __m128i load_bytes(const void* p, Mask m) {
    return _mm_maskz_loadu_epi8(m, p);
  }
  static TORCHQ_INLINE Int load_u8(const void* p, Mask m) {
    return _mm512_cvtepu8_epi32(load_bytes(p, m));
  }
  static TORCHQ_INLINE Int load_u8(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static TORCHQ_INLINE Int load_s8(const void* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static TORCHQ_INLINE Int load_s8(const void* p, Mask m) {
    return _mm512_cvtepi8_epi32(load_bytes(p, m));
  }
  /// Saturates to the byte range.
  static TORCHQ_INLINE void store_u8(void* p, Int v, Mask m) {
    _mm_mask_storeu_epi8(p, m, _mm512_cvtusepi32_epi8(_mm512_max_epi32(v, _mm512_setzero_si512())));
  }
  static TORCHQ_INLINE void store_s8(void* p, Int v, Mask m) {
    _mm_mask_storeu_epi8(p, m, _mm512_cvtsepi32_epi8(v));
  }
  /// 16 channels, saturated.
  static TORCHQ_INLINE void store_panel(uint8_t* p, Int v, bool is_signed) {
    const __m128i bytes = is_signed
                              ? _mm512_cvtsepi32_epi8(v)
                              : _mm512_cvtusepi32_epi8(_mm512_max_epi32(v, _mm512_setzero_si512()));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  /// The same for the lane orders of small groups: lane 4 i + j is channel 4 j + i, or, where
  /// kPairs, the second and third of each four lanes change places.
  template <bool kPairs>
  static TORCHQ_INLINE void store_transposed(uint8_t* p, Int v, bool is_signed) {
    if (!is_signed) TORCHQ_ASM_MAX(v, kZeros);
    __m128i bytes = is_signed ? _mm512_cvtsepi32_epi8(v) : _mm512_cvtusepi32_epi8(v);
    TORCHQ_ASM_SHUFFLE(bytes, kChannelOrder[kPairs]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  /// 64 channels in natural order: the two packs interleave 128-bit lanes, one vpermd puts them
  /// back.
  static TORCHQ_INLINE __m512i pack_row(const Int (&v)[4], bool is_signed) {
    const __m512i low = _mm512_packs_epi32(v[0], v[1]);
    const __m512i high = _mm512_packs_epi32(v[2], v[3]);
    const __m512i bytes =
        is_signed ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, bytes);
  }
  /// Returns true if a lane is INT32_MIN, the result of converting NaN or a float beyond int32.
  static TORCHQ_INLINE bool any_invalid(const Int (&v)[4]) {
    const Int least = _mm512_min_epi32(_mm512_min_epi32(v[0], v[1]), _mm512_min_epi32(v[2], v[3]));
    return _mm512_cmpeq_epi32_mask(least, _mm512_set1_epi32(INT32_MIN)) != 0;
  }
  static TORCHQ_INLINE void store_row(uint8_t* p, const Int (&v)[4], bool is_signed) {
    _mm512_storeu_si512(p, pack_row(v, is_signed));
  }
  /// Panels to as many places in one go: a quarter of the shuffles of four store_panel, and one
  /// store where they follow one another, as do those of layers with 32 channels.
  static constexpr int kStoredPanels = 4;
  static TORCHQ_INLINE void store_panels(uint8_t* const (&p)[4], const Int (&v)[4],
                                         bool is_signed) {
    const __m512i bytes = pack_row(v, is_signed);
    if (p[1] == p[0] + kPanel && p[2] == p[1] + kPanel && p[3] == p[2] + kPanel) {
      return _mm512_storeu_si512(p[0], bytes);
    }
    const auto store = [](uint8_t* to, __m128i x) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), x);
    };
    store(p[0], _mm512_castsi512_si128(bytes));
    store(p[1], _mm512_extracti32x4_epi32(bytes, 1));
    store(p[2], _mm512_extracti32x4_epi32(bytes, 2));
    store(p[3], _mm512_extracti32x4_epi32(bytes, 3));
  }

  // dot products of quads
  /// Keeps an accumulator in its register between the K loop and the epilogue: without it GCC 12
  /// spills inside the loop (48 % of peak instead of 98 %).
  static TORCHQ_INLINE void pin(Int& v) { TORCHQ_ASM_PIN(v); }
  static TORCHQ_INLINE Int load_weight(const int8_t* p) {
    Int v = _mm512_loadu_si512(p);
    pin(v);  // one load for all rows instead of a memory operand in each of them
    return v;
  }
  /// u8 from s8.
  static TORCHQ_INLINE Int flip_sign(Int v) {
    TORCHQ_ASM_XOR(v, kSignBits);
    return v;
  }
  static TORCHQ_INLINE Int broadcast(const uint8_t* p) { return _mm512_set1_epi32(load32(p)); }
  /// The even (step 0) or odd (step 1) bytes of each dword, zero-extended to 16 bits.
  template <int kStep>
  static TORCHQ_INLINE Int split_src(Int quad) {
    if constexpr (kStep == 1) return _mm512_srli_epi16(quad, 8);
    TORCHQ_ASM_AND(quad, kEvenBytes);
    return quad;
  }
  /// Pinned, since GCC reassociates the sums of several steps and then spills the products.
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(src, weight));
    pin(acc);
  }
  /// Four bytes per lane in one go; exact while pair sums fit 16 bits (pair bound <= 128).
  static TORCHQ_INLINE void dot_narrow(Int& acc, Int src, Int weight) {
    const Int pairs = _mm512_maddubs_epi16(src, weight);
    acc = _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  /// Codes below 16 as the unsigned operand: pair sums fit.
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, Int quad) {
    dot_narrow(acc, codes, quad);
  }
  /// small groups: lane 4 i + j from lane 4 j + i
  static TORCHQ_INLINE Int transpose_lanes(Int v) {
    const Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, v);
  }
  /// Pairs of lanes added: of each four lanes the first two are a's, the others b's.
  static TORCHQ_INLINE Int add_pairs(Int a, Int b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  }
  /// The second and third of each four lanes change places.
  static TORCHQ_INLINE Int swap_middle(Int v) { return _mm512_shuffle_epi32(v, _MM_PERM_DBCA); }
  static TORCHQ_INLINE void widen(const int8_t* packed, int8_t* dst) {
    const Int quads = _mm512_loadu_si512(packed);
    _mm512_storeu_si512(dst, _mm512_srai_epi16(_mm512_slli_epi16(quads, 8), 8));
    _mm512_storeu_si512(dst + 64, _mm512_srai_epi16(quads, 8));
  }

  // depthwise: 64 bytes at a time, of one row or 2 x 32 or 4 x 16, four taps per lane
  static constexpr int kDepthwiseChannels = 64;
  static constexpr int kDepthwiseVectors = 4;
  static constexpr int kDepthwiseSplits = 4;
  /// Destinations per pass: their sums take 7 registers, the packed halves of their results 14.
  static constexpr int kDepthwisePixels = 7;
  using Bytes = __m512i;
  static TORCHQ_INLINE Bytes load_channels(const uint8_t* p, int count) {
    if (count >= 64) return _mm512_loadu_si512(p);
    return _mm512_maskz_loadu_epi8((__mmask64(1) << count) - 1, p);
  }
  /// `count` bytes of each row, zeros behind them.
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[1], int count) {
    return load_channels(p[0], count);
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[2], int count) {
    if (count >= 32) {
      return _mm512_inserti64x4(
          _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[0]))),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p[1])), 1);
    }
    const __mmask32 m = (__mmask32{1} << count) - 1;
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(m, p[0])),
                              _mm256_maskz_loadu_epi8(m, p[1]), 1);
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[4], int count) {
    const Mask m = mask(count);
    const auto load = [&](const uint8_t* row) {
      return count >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(row))
                         : load_bytes(row, m);
    };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(p[0])), load(p[1]), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(p[2])), load(p[3]), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  /// Half kHalf of two rows of taps interleaved, and what two of those make: quads 2 kHalf and
  /// 2 kHalf + 1. Quad j, 128-bit lane L, element e: the four taps of byte 16 L + 4 j + e.
  template <int kHalf>
  static TORCHQ_INLINE Bytes pair_half(Bytes a, Bytes b) {
    return kHalf == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  }
  static TORCHQ_INLINE void interleave_half(Bytes a, Bytes b, Int (&quads)[2]) {
    quads[0] = _mm512_unpacklo_epi16(a, b);
    quads[1] = _mm512_unpackhi_epi16(a, b);
  }
  /// Two vectors in lane order to words; two of those to bytes in natural order: packing undoes
  /// what interleaving did.
  static TORCHQ_INLINE Bytes pack_words(Int first, Int second) {
    return _mm512_packs_epi32(first, second);
  }
  static TORCHQ_INLINE Bytes pack_bytes(Bytes low, Bytes high, bool is_signed) {
    return is_signed ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
  }
  /// `count` bytes of each row to p + offset[row].
  static TORCHQ_INLINE void store_rows(uint8_t* p, const int64_t* offset, int rows, Bytes v,
                                       int count) {
    if (rows == 1) return store_channels(p + offset[0], v, count);
    const __m256i low = _mm512_castsi512_si256(v), high = _mm512_extracti64x4_epi64(v, 1);
    if (rows == 2) {
      if (count >= 32) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + offset[0]), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + offset[1]), high);
        return;
      }
      const __mmask32 m = (__mmask32{1} << count) - 1;
      _mm256_mask_storeu_epi8(p + offset[0], m, low);
      _mm256_mask_storeu_epi8(p + offset[1], m, high);
      return;
    }
    const Mask m = mask(count);
    _mm_mask_storeu_epi8(p + offset[0], m, _mm256_castsi256_si128(low));
    _mm_mask_storeu_epi8(p + offset[1], m, _mm256_extracti128_si256(low, 1));
    _mm_mask_storeu_epi8(p + offset[2], m, _mm256_castsi256_si128(high));
    _mm_mask_storeu_epi8(p + offset[3], m, _mm256_extracti128_si256(high, 1));
  }
  /// From lane order to 64 values in natural order.
  static TORCHQ_INLINE void natural_order(Int (&v)[4]) {
    const Int a = _mm512_shuffle_i32x4(v[0], v[1], 0x44),
              b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
    const Int c = _mm512_shuffle_i32x4(v[2], v[3], 0x44),
              d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  /// Its inverse, which is the same transposition.
  static TORCHQ_INLINE void lane_order(Int (&v)[4]) { natural_order(v); }

  // whole vectors of bytes
  static constexpr int kByteLanes = 64;
  static TORCHQ_INLINE void store_channels(uint8_t* p, Bytes v, int count) {
    if (count >= 64) {
      _mm512_storeu_si512(p, v);
    } else {
      _mm512_mask_storeu_epi8(p, (__mmask64(1) << count) - 1, v);
    }
  }
  static TORCHQ_INLINE Bytes max_bytes(Bytes a, Bytes b, bool is_signed) {
    return is_signed ? _mm512_max_epi8(a, b) : _mm512_max_epu8(a, b);
  }
  static TORCHQ_INLINE Bytes min_bytes(Bytes a, Bytes b, bool is_signed) {
    return is_signed ? _mm512_min_epi8(a, b) : _mm512_min_epu8(a, b);
  }
  static TORCHQ_INLINE int32_t largest(Bytes v, bool is_signed) {
    const __m256i low = _mm512_castsi512_si256(v), high = _mm512_extracti64x4_epi64(v, 1);
    const __m256i best = is_signed ? _mm256_max_epi8(low, high) : _mm256_max_epu8(low, high);
    const __m128i a = _mm256_castsi256_si128(best), b = _mm256_extracti128_si256(best, 1);
    return largest_byte(is_signed ? _mm_max_epi8(a, b) : _mm_max_epu8(a, b), is_signed);
  }
  /// Sums of bytes, as words: of `all`, which may wrap, and of the odd ones only.
  static TORCHQ_INLINE void add_words(Bytes& all, Bytes& odd, Bytes v) {
    all = _mm512_add_epi16(all, v);
    odd = _mm512_add_epi16(odd, _mm512_srli_epi16(v, 8));
  }
  /// Adds them to integers: v[j] has byte j of each dword.
  static TORCHQ_INLINE void split_words(Bytes all, Bytes odd, Int (&v)[4]) {
    const Bytes even = _mm512_sub_epi16(all, _mm512_slli_epi16(odd, 8));
    const Int low = _mm512_set1_epi32(0xffff);
    v[0] = _mm512_add_epi32(v[0], _mm512_and_si512(even, low));
    v[1] = _mm512_add_epi32(v[1], _mm512_and_si512(odd, low));
    v[2] = _mm512_add_epi32(v[2], _mm512_srli_epi32(even, 16));
    v[3] = _mm512_add_epi32(v[3], _mm512_srli_epi32(odd, 16));
  }
  /// The inverse: dwords of the four bytes v[0..3], saturated.
  static TORCHQ_INLINE Bytes join_bytes(const Int (&v)[4], bool is_signed) {
    const Bytes lanes = pack_bytes(pack_words(v[0], v[1]), pack_words(v[2], v[3]), is_signed);
    return _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                          0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  /// Adds bytes and their squares to integers, each lane those of some of them.
  static TORCHQ_INLINE void add_moments(Int& sums, Int& squares, Bytes v) {
    const Int even = _mm512_and_si512(v, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(v, 8);
    sums = _mm512_add_epi32(sums, _mm512_sad_epu8(v, _mm512_setzero_si512()));
    squares = _mm512_add_epi32(squares, _mm512_madd_epi16(even, even));
    squares = _mm512_add_epi32(squares, _mm512_madd_epi16(odd, odd));
  }
  static TORCHQ_INLINE Bytes xor_bytes(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
  static TORCHQ_INLINE Bytes set_bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  /// 16 bytes in every 128-bit lane.
  static TORCHQ_INLINE Bytes load_lane(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  /// row[v & 15] where v, as s8, is not negative, else 0.
  static TORCHQ_INLINE Bytes lookup_row(Bytes row, Bytes v) { return _mm512_shuffle_epi8(row, v); }
  /// As s8.
  static TORCHQ_INLINE Bytes subtract_saturated(Bytes a, Bytes b) { return _mm512_subs_epi8(a, b); }
};

static_assert(Isa<Avx512>);

}  // namespace
