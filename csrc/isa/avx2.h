// SPDX-License-Identifier: Apache-2.0
// 16 lanes of AVX2: two ymm registers where AVX-512 has one zmm. The interface is that of avx512.h.
#pragma once

#include "isa/avx2_lanes.h"
#include "isa/avx2_short.h"
#include "isa/isa_concept.h"
#include "isa/last_bytes.h"

namespace {

// Read from memory each time: 12 accumulators, 2 weights, a source and a product fill the 16
// registers.
struct Dwords8 {
  alignas(32) uint32_t lanes[8];
};
constexpr Dwords8 fill(uint32_t value) {
  Dwords8 result{};
  for (uint32_t& lane : result.lanes) lane = value;
  return result;
}
constexpr Dwords8 kSignBits = fill(0x80808080u);
constexpr Dwords8 kEvenBytes = fill(0x00ff00ffu);
constexpr Dwords8 kOnes = fill(0x00010001u);

struct Avx2 : Avx2Lanes {
  static constexpr Tier kTier = Tier::avx2;
  static constexpr int kMaxPanels = 1;
  static constexpr int kVectors = 8;
  static constexpr int kTallRows = kTileRows, kTallestRows = kTileRows;
  static constexpr bool kPrefetches = false;
  static constexpr bool kMasksTails = false;
  static constexpr int kSteps = 2;
  static constexpr bool kWidensSrc = true;
  static constexpr bool kHasNarrow = true;

  // bytes
  static TORCHQ_INLINE __m128i load_bytes(const void* p, Mask count) {
    if (count >= 16) return _mm_loadu_si128(static_cast<const __m128i*>(p));
    return load_short(static_cast<const uint8_t*>(p), count);
  }
  /// Eight bytes, which become lanes without a shuffle of their own.
  static TORCHQ_INLINE __m128i load_half(const void* p, int half) {
    return _mm_loadu_si64(static_cast<const uint8_t*>(p) + 8 * half);
  }
  static TORCHQ_INLINE Int load_u8(const void* p) {
    return {_mm256_cvtepu8_epi32(load_half(p, 0)), _mm256_cvtepu8_epi32(load_half(p, 1))};
  }
  static TORCHQ_INLINE Int load_s8(const void* p) {
    return {_mm256_cvtepi8_epi32(load_half(p, 0)), _mm256_cvtepi8_epi32(load_half(p, 1))};
  }
  static TORCHQ_INLINE Int load_u8(const void* p, Mask count) {
    if (count >= kPanel) return load_u8(p);
    const __m128i bytes = load_bytes(p, count);
    return load_u8(&bytes);
  }
  static TORCHQ_INLINE Int load_s8(const void* p, Mask count) {
    if (count >= kPanel) return load_s8(p);
    const __m128i bytes = load_bytes(p, count);
    return load_s8(&bytes);
  }
  static TORCHQ_INLINE void store_bytes(void* p, Int v, Mask count, bool is_signed) {
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);  // back to natural order
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    const __m128i bytes = is_signed ? _mm_packs_epi16(low, high) : _mm_packus_epi16(low, high);
    store_first(static_cast<uint8_t*>(p), bytes, count);
  }
  static TORCHQ_INLINE void store_panel(uint8_t* p, Int v, bool is_signed) {
    store_bytes(p, v, kPanel, is_signed);
  }
  /// 32 channels in natural order.
  static TORCHQ_INLINE __m256i pack_row(const Int (&v)[2], bool is_signed) {
    const __m256i first = _mm256_packs_epi32(v[0].lo, v[0].hi);
    const __m256i second = _mm256_packs_epi32(v[1].lo, v[1].hi);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(
        is_signed ? _mm256_packs_epi16(first, second) : _mm256_packus_epi16(first, second), order);
  }
  /// Returns true if a lane is INT32_MIN, the result of converting NaN or a float beyond int32.
  static TORCHQ_INLINE bool any_invalid(const Int (&v)[2]) {
    const __m256i least =
        _mm256_min_epi32(_mm256_min_epi32(v[0].lo, v[0].hi), _mm256_min_epi32(v[1].lo, v[1].hi));
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(least, _mm256_set1_epi32(INT32_MIN))) != 0;
  }
  static TORCHQ_INLINE void store_row(uint8_t* p, const Int (&v)[2], bool is_signed) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_row(v, is_signed));
  }
  /// Panels to as many places in one go.
  static constexpr int kStoredPanels = 2;
  static TORCHQ_INLINE void store_panels(uint8_t* const (&p)[2], const Int (&v)[2],
                                         bool is_signed) {
    const __m256i bytes = pack_row(v, is_signed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p[0]), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p[1]), _mm256_extracti128_si256(bytes, 1));
  }
  static TORCHQ_INLINE void store_u8(void* p, Int v, Mask count) {
    store_bytes(p, v, count, false);
  }
  static TORCHQ_INLINE void store_s8(void* p, Int v, Mask count) { store_bytes(p, v, count, true); }

  // dot products of quads
  static TORCHQ_INLINE void pin(Int& v) { asm("" : "+x"(v.lo), "+x"(v.hi)); }
  static TORCHQ_INLINE Int load_weight(const int8_t* p) {
    Int v = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
    pin(v);
    return v;
  }
  /// Half of what `widen` makes, in registers.
  template <int kStep>
  static TORCHQ_INLINE __m256i split_weight(__m256i quads) {
    return _mm256_srai_epi16(kStep == 0 ? _mm256_slli_epi16(quads, 8) : quads, 8);
  }
  template <int kStep>
  static TORCHQ_INLINE Int split_weight(Int w) {
    return {split_weight<kStep>(w.lo), split_weight<kStep>(w.hi)};
  }
  static TORCHQ_INLINE __m256i flip_sign(__m256i v) {
    asm("vpxor %1, %0, %0" : "+x"(v) : "m"(kSignBits));
    return v;
  }
  /// A broadcast is the same in both halves, so one register serves.
  static TORCHQ_INLINE __m256i broadcast(const uint8_t* p) { return _mm256_set1_epi32(load32(p)); }
  template <int kStep>
  static TORCHQ_INLINE __m256i split_src(__m256i quad) {
    if constexpr (kStep == 1) return _mm256_srli_epi16(quad, 8);
    asm("vpand %1, %0, %0" : "+x"(quad) : "m"(kEvenBytes));
    return quad;
  }
  /// Pinned, since GCC reassociates the sums of several steps and then spills the products.
  static TORCHQ_INLINE void dot(Int& acc, __m256i src, Int weight) {
    acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(src, weight.lo));
    acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(src, weight.hi));
    pin(acc);
  }
  static TORCHQ_INLINE __m256i pair_sums(__m256i src, __m256i weight) {
    __m256i v = _mm256_maddubs_epi16(src, weight);
    asm("vpmaddwd %1, %0, %0" : "+x"(v) : "m"(kOnes));
    return v;
  }
  static TORCHQ_INLINE void dot_narrow(Int& acc, __m256i src, Int weight) {
    acc.lo = _mm256_add_epi32(acc.lo, pair_sums(src, weight.lo));
    acc.hi = _mm256_add_epi32(acc.hi, pair_sums(src, weight.hi));
    pin(acc);
  }
  /// Codes below 16 as the unsigned operand: pair sums fit.
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, __m256i quad) {
    acc.lo = _mm256_add_epi32(acc.lo, pair_sums(codes.lo, quad));
    acc.hi = _mm256_add_epi32(acc.hi, pair_sums(codes.hi, quad));
    pin(acc);
  }
  /// small groups: lane 4 i + j from lane 4 j + i
  static TORCHQ_INLINE Int transpose_lanes(Int v) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return {_mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(v.lo, v.hi), order),
            _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(v.lo, v.hi), order)};
  }
  /// Pairs of lanes added: of each four lanes the first two are a's, the others b's.
  static TORCHQ_INLINE Int add_pairs(Int a, Int b) {
    return {_mm256_hadd_epi32(a.lo, b.lo), _mm256_hadd_epi32(a.hi, b.hi)};
  }
  /// The second and third of each four lanes change places.
  static TORCHQ_INLINE Int swap_middle(Int v) {
    return {_mm256_shuffle_epi32(v.lo, 0xd8), _mm256_shuffle_epi32(v.hi, 0xd8)};
  }
  /// A quad of `Kernels::clip`; whether there is any excess. Only pairs of one sign have some,
  /// whose even bytes keep their sign without it.
  static TORCHQ_INLINE bool clip_pairs(const int8_t* packed, int8_t* clipped, int8_t* excess) {
    const __m256i most = _mm256_set1_epi16(128), least = _mm256_set1_epi16(-128);
    __m256i any = _mm256_setzero_si256();
    for (int half = 0; half < 2; ++half) {
      const __m256i quads =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 32 * half));
      const __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(1), quads);
      const __m256i fit = _mm256_max_epi16(_mm256_min_epi16(sums, most), least);
      const __m256i rest = _mm256_sub_epi16(sums, fit);
      const __m256i bytes = _mm256_and_si256(rest, _mm256_set1_epi16(0xff));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(clipped + 32 * half),
                          _mm256_sub_epi8(quads, bytes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(excess + 32 * half), rest);
      any = _mm256_or_si256(any, rest);
    }
    return _mm256_testz_si256(any, any) == 0;
  }
  static TORCHQ_INLINE void widen(const int8_t* packed, int8_t* dst) {
    for (int half = 0; half < 2; ++half) {
      const __m256i quads =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed + 32 * half));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32 * half), split_weight<0>(quads));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 64 + 32 * half), split_weight<1>(quads));
    }
  }

  // depthwise: 32 bytes at a time, of one row or 2 x 16, four taps per lane; an Int is 16 lanes
  static constexpr int kDepthwiseChannels = 32;
  static constexpr int kDepthwiseVectors = 2;
  static constexpr int kDepthwiseSplits = 2;
  static constexpr int kDepthwisePixels = 3;
  using Bytes = __m256i;
  static TORCHQ_INLINE Bytes load_channels(const uint8_t* p, int count) {
    if (count >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if (count < 16) return _mm256_zextsi128_si256(load_short(p, count));
    return _mm256_set_m128i(load_short(p + 16, count - 16), load_bytes(p, 16));
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[1], int count) {
    return load_channels(p[0], count);
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[2], int count) {
    return _mm256_set_m128i(load_bytes(p[1], count), load_bytes(p[0], count));
  }
  /// Half kHalf of two rows of taps interleaved, and what two of those make: quads 2 kHalf and
  /// 2 kHalf + 1. Quad i, 128-bit lane L, element e: the four taps of byte 16 L + 4 i + e.
  template <int kHalf>
  static TORCHQ_INLINE Bytes pair_half(Bytes a, Bytes b) {
    return kHalf == 0 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
  }
  static TORCHQ_INLINE void interleave_half(Bytes a, Bytes b, Int (&quads)[1]) {
    quads[0] = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
  }
  /// One Int already has the two vectors that make words.
  static TORCHQ_INLINE Bytes pack_words(Int first, Int) {
    return _mm256_packs_epi32(first.lo, first.hi);
  }
  static TORCHQ_INLINE Bytes pack_bytes(Bytes low, Bytes high, bool is_signed) {
    return is_signed ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  }
  static TORCHQ_INLINE void store_rows(uint8_t* p, const int64_t* offset, int rows, Bytes v,
                                       int count) {
    if (rows == 1) return store_channels(p + offset[0], v, count);
    const __m128i half[2] = {_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)};
    for (int r = 0; r < 2; ++r) store_first(p + offset[r], half[r], count);
  }
  static TORCHQ_INLINE void natural_order(Int (&v)[2]) {
    const Int a = v[0], b = v[1];
    v[0] = {_mm256_permute2x128_si256(a.lo, a.hi, 0x20),
            _mm256_permute2x128_si256(b.lo, b.hi, 0x20)};
    v[1] = {_mm256_permute2x128_si256(a.lo, a.hi, 0x31),
            _mm256_permute2x128_si256(b.lo, b.hi, 0x31)};
  }
  static TORCHQ_INLINE void lane_order(Int (&v)[2]) {
    const Int a = v[0], b = v[1];
    v[0] = {_mm256_permute2x128_si256(a.lo, b.lo, 0x20),
            _mm256_permute2x128_si256(a.lo, b.lo, 0x31)};
    v[1] = {_mm256_permute2x128_si256(a.hi, b.hi, 0x20),
            _mm256_permute2x128_si256(a.hi, b.hi, 0x31)};
  }
  static TORCHQ_INLINE Int flip_sign(Int v) { return {flip_sign(v.lo), flip_sign(v.hi)}; }
  template <int kStep>
  static TORCHQ_INLINE Int split_src(Int quad) {
    return {split_src<kStep>(quad.lo), split_src<kStep>(quad.hi)};
  }
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(src.lo, weight.lo));
    acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(src.hi, weight.hi));
  }

  // whole vectors of bytes
  static constexpr int kByteLanes = 32;
  static TORCHQ_INLINE void store_channels(uint8_t* p, Bytes v, int count) {
    if (count >= 32) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
    store_first(p, _mm256_castsi256_si128(v), count);
    if (count > 16) store_first(p + 16, _mm256_extracti128_si256(v, 1), count - 16);
  }
  static TORCHQ_INLINE Bytes max_bytes(Bytes a, Bytes b, bool is_signed) {
    return is_signed ? _mm256_max_epi8(a, b) : _mm256_max_epu8(a, b);
  }
  static TORCHQ_INLINE Bytes min_bytes(Bytes a, Bytes b, bool is_signed) {
    return is_signed ? _mm256_min_epi8(a, b) : _mm256_min_epu8(a, b);
  }
  static TORCHQ_INLINE int32_t largest(Bytes v, bool is_signed) {
    const __m128i a = _mm256_castsi256_si128(v), b = _mm256_extracti128_si256(v, 1);
    return largest_byte(is_signed ? _mm_max_epi8(a, b) : _mm_max_epu8(a, b), is_signed);
  }
  /// Sums of bytes, as words: of `all`, which may wrap, and of the odd ones only.
  static TORCHQ_INLINE void add_words(Bytes& all, Bytes& odd, Bytes v) {
    all = _mm256_add_epi16(all, v);
    odd = _mm256_add_epi16(odd, _mm256_srli_epi16(v, 8));
  }
  /// Adds them to integers: vector j has byte j of each dword.
  static TORCHQ_INLINE void split_words(Bytes all, Bytes odd, Int (&v)[2]) {
    const Bytes even = _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8));
    const __m256i low = _mm256_set1_epi32(0xffff);
    v[0] = add(v[0], Int{_mm256_and_si256(even, low), _mm256_and_si256(odd, low)});
    v[1] = add(v[1], Int{_mm256_srli_epi32(even, 16), _mm256_srli_epi32(odd, 16)});
  }
  /// The inverse: dwords of four bytes, saturated.
  static TORCHQ_INLINE Bytes join_bytes(const Int (&v)[2], bool is_signed) {
    const Bytes lanes = pack_bytes(pack_words(v[0], v[0]), pack_words(v[1], v[1]), is_signed);
    return _mm256_shuffle_epi8(lanes, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                          0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
  }
  /// Adds bytes and their squares to integers, each lane those of some of them.
  static TORCHQ_INLINE void add_moments(Int& sums, Int& squares, Bytes v) {
    const __m256i even = _mm256_and_si256(v, _mm256_set1_epi16(0xff));
    const __m256i odd = _mm256_srli_epi16(v, 8);
    sums.lo = _mm256_add_epi32(sums.lo, _mm256_sad_epu8(v, _mm256_setzero_si256()));
    squares.lo = _mm256_add_epi32(squares.lo, _mm256_madd_epi16(even, even));
    squares.hi = _mm256_add_epi32(squares.hi, _mm256_madd_epi16(odd, odd));
  }
  static TORCHQ_INLINE Bytes xor_bytes(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
  static TORCHQ_INLINE Bytes set_bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static TORCHQ_INLINE Bytes load_lane(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  /// row[v & 15] where v, as s8, is not negative, else 0.
  static TORCHQ_INLINE Bytes lookup_row(Bytes row, Bytes v) { return _mm256_shuffle_epi8(row, v); }
  /// As s8.
  static TORCHQ_INLINE Bytes subtract_saturated(Bytes a, Bytes b) { return _mm256_subs_epi8(a, b); }
};

static_assert(Isa<Avx2>);

}  // namespace
