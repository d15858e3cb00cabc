// SPDX-License-Identifier: Apache-2.0
// 16 lanes of NEON, of every AArch64 CPU: four registers where AVX-512 has one. The interface is
// that of avx2.h; isa_concept.h says what each function returns.
#pragma once

#include "isa/few_bytes.h"
#include "isa/isa_concept.h"
#include "isa/neon_lanes.h"

namespace {

struct Neon : NeonLanes {
  static constexpr Tier kTier = Tier::neon;
  /// Six rows of a panel keep 24 accumulators, 4 weights and a source in the 32 registers.
  static constexpr int kMaxPanels = 1;
  static constexpr int kVectors = 8;
  static constexpr int kTallRows = kTileRows, kTallestRows = kTileRows;
  static constexpr bool kPrefetches = false;
  static constexpr bool kMasksTails = false;
  static constexpr int kSteps = 2;
  static constexpr bool kWidensSrc = false;
  static constexpr bool kHasNarrow = false;

  // bytes
  static constexpr int kByteLanes = 32;
  struct Bytes {
    uint8x16_t lo, hi;
  };
  static TORCHQ_INLINE uint8x16_t load_bytes(const void* from, int count) {
    const uint8_t* p = static_cast<const uint8_t*>(from);
    if (count >= 16) return vld1q_u8(p);
    if (count < 8) return vcombine_u8(vcreate_u8(load_few(p, count)), vcreate_u8(0));
    return vcombine_u8(vld1_u8(p), vcreate_u8(load_after_eight(p, count)));
  }
  static TORCHQ_INLINE void store_bytes(uint8_t* p, uint8x16_t v, int count) {
    if (count >= 16) return vst1q_u8(p, v);
    const uint64x2_t halves = vreinterpretq_u64_u8(v);
    const uint64_t low = vgetq_lane_u64(halves, 0);
    if (count < 8) return store_few(p, low, count);
    store_eight_or_more(p, low, vgetq_lane_u64(halves, 1), count);
  }
  static TORCHQ_INLINE Int widen_u8(uint8x16_t v) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
            vreinterpretq_s32_u32(vmovl_high_u16(low)),
            vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
            vreinterpretq_s32_u32(vmovl_high_u16(high))};
  }
  static TORCHQ_INLINE Int widen_s8(int8x16_t v) {
    const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
    return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
            vmovl_high_s16(high)};
  }
  static TORCHQ_INLINE Int load_u8(const void* p, Mask count = kPanel) {
    return widen_u8(load_bytes(p, count));
  }
  static TORCHQ_INLINE Int load_s8(const void* p, Mask count = kPanel) {
    return widen_s8(vreinterpretq_s8_u8(load_bytes(p, count)));
  }
  /// Eight lanes to words, and eight words to bytes, saturated.
  static TORCHQ_INLINE int16x8_t narrow(int32x4_t a, int32x4_t b) {
    return vqmovn_high_s32(vqmovn_s32(a), b);
  }
  static TORCHQ_INLINE uint8x16_t narrow(int16x8_t a, int16x8_t b, bool is_signed) {
    if (!is_signed) return vqmovun_high_s16(vqmovun_s16(a), b);
    return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(a), b));
  }
  static TORCHQ_INLINE uint8x16_t narrow(Int v, bool is_signed) {
    return narrow(narrow(v.a, v.b), narrow(v.c, v.d), is_signed);
  }
  static TORCHQ_INLINE void store_u8(void* p, Int v, Mask count) {
    store_bytes(static_cast<uint8_t*>(p), narrow(v, false), count);
  }
  static TORCHQ_INLINE void store_s8(void* p, Int v, Mask count) {
    store_bytes(static_cast<uint8_t*>(p), narrow(v, true), count);
  }
  static TORCHQ_INLINE void store_panel(uint8_t* p, Int v, bool is_signed) {
    vst1q_u8(p, narrow(v, is_signed));
  }
  static constexpr int kStoredPanels = 2;
  static TORCHQ_INLINE void store_row(uint8_t* p, const Int (&v)[2], bool is_signed) {
    store_panel(p, v[0], is_signed);
    store_panel(p + kPanel, v[1], is_signed);
  }
  static TORCHQ_INLINE void store_panels(uint8_t* const (&p)[2], const Int (&v)[2],
                                         bool is_signed) {
    store_panel(p[0], v[0], is_signed);
    store_panel(p[1], v[1], is_signed);
  }
  static TORCHQ_INLINE bool any_invalid(const Int (&v)[2]) {
    const Int least = each<Int>([](auto a, auto b) { return vminq_s32(a, b); }, v[0], v[1]);
    return vminvq_s32(vminq_s32(vminq_s32(least.a, least.b), vminq_s32(least.c, least.d))) ==
           INT32_MIN;
  }

  // dot products of quads
  static TORCHQ_INLINE void pin(Int& v) { asm("" : "+w"(v.a), "+w"(v.b), "+w"(v.c), "+w"(v.d)); }
  static TORCHQ_INLINE Int load_weight(const int8_t* p) {
    return load_int(reinterpret_cast<const int32_t*>(p));
  }
  /// A quad of the source in one register, the same in each lane.
  static TORCHQ_INLINE uint8x16_t broadcast(const uint8_t* p) {
    return vreinterpretq_u8_s32(vdupq_n_s32(load32(p)));
  }
  static TORCHQ_INLINE uint8x16_t flip_sign(uint8x16_t v) { return veorq_u8(v, vdupq_n_u8(0x80)); }
  static TORCHQ_INLINE Bytes flip_sign(Bytes v) { return {flip_sign(v.lo), flip_sign(v.hi)}; }
  static TORCHQ_INLINE Int flip_sign(Int v) {
    return each<Int>([](auto a) { return veorq_s32(a, vreinterpretq_s32_u8(vdupq_n_u8(0x80))); },
                     v);
  }
  /// The even (step 0) or odd (step 1) bytes of each dword, zero-extended to 16 bits.
  template <int kStep>
  static TORCHQ_INLINE uint8x16_t split_src(uint8x16_t quad) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(quad);
    return vreinterpretq_u8_u16(kStep == 1 ? vshrq_n_u16(pairs, 8)
                                           : vandq_u16(pairs, vdupq_n_u16(0xff)));
  }
  /// The same of `load_lane`, whose registers are equal.
  template <int kStep>
  static TORCHQ_INLINE uint8x16_t split_src(Bytes lanes) {
    return split_src<kStep>(lanes.lo);
  }
  template <int kStep>
  static TORCHQ_INLINE Int split_src(Int quad) {
    return each<Int>(
        [](auto v) { return vreinterpretq_s32_u8(split_src<kStep>(vreinterpretq_u8_s32(v))); },
        quad);
  }
  /// A product of u8 and s8 fits 16 bits.
  static TORCHQ_INLINE int32x4_t dot(int32x4_t acc, uint8x16_t src, int32x4_t weight) {
    const int16x8_t products = vmulq_s16(vreinterpretq_s16_u8(src), vreinterpretq_s16_s32(weight));
    return vpadalq_s16(acc, products);
  }
  static TORCHQ_INLINE void dot(Int& acc, uint8x16_t src, Int weight) {
    acc = each<Int>([&](auto a, auto w) { return dot(a, src, w); }, acc, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    acc = each<Int>([](auto a, auto s, auto w) { return dot(a, vreinterpretq_u8_s32(s), w); }, acc,
                    src, weight);
  }
  /// Codes below 16 are s8, too.
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, uint8x16_t quad) {
    const int8x16_t q = vreinterpretq_s8_u8(quad);
    const auto multiply = [&](int32x4_t a, int32x4_t c) {
      const int8x16_t w = vreinterpretq_s8_s32(c);
      const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(q)), high = vmull_high_s8(w, q);
      return vpadalq_s16(a, vpaddq_s16(low, high));
    };
    acc = each<Int>(multiply, acc, codes);
  }
  static TORCHQ_INLINE void widen(const int8_t* packed, int8_t* dst) {
    for (int i = 0; i < 4; ++i, packed += 16, dst += 16) {
      const int16x8_t pairs = vreinterpretq_s16_s8(vld1q_s8(packed));
      vst1q_s8(dst, vreinterpretq_s8_s16(vshrq_n_s16(vshlq_n_s16(pairs, 8), 8)));
      vst1q_s8(dst + 64, vreinterpretq_s8_s16(vshrq_n_s16(pairs, 8)));
    }
  }

  // small groups
  static TORCHQ_INLINE Int transpose_lanes(Int v) {
    const int32x4_t ac0 = vzip1q_s32(v.a, v.c), ac1 = vzip2q_s32(v.a, v.c);
    const int32x4_t bd0 = vzip1q_s32(v.b, v.d), bd1 = vzip2q_s32(v.b, v.d);
    return {vzip1q_s32(ac0, bd0), vzip2q_s32(ac0, bd0), vzip1q_s32(ac1, bd1), vzip2q_s32(ac1, bd1)};
  }
  static TORCHQ_INLINE Int add_pairs(Int x, Int y) {
    return each<Int>([](auto a, auto b) { return vpaddq_s32(a, b); }, x, y);
  }
  static TORCHQ_INLINE Int swap_middle(Int v) {
    const auto swap = [](int32x4_t x) {
      return vcombine_s32(vget_low_s32(vuzp1q_s32(x, x)), vget_low_s32(vuzp2q_s32(x, x)));
    };
    return each<Int>(swap, v);
  }

  // depthwise: 32 bytes at a time, of one row or 2 x 16, four taps per lane. The order of lanes is
  // that of bytes: zips of whole registers need no other.
  static constexpr int kDepthwiseChannels = 32;
  static constexpr int kDepthwiseVectors = 2;
  static constexpr int kDepthwiseSplits = 2;
  static constexpr int kDepthwisePixels = 3;
  static TORCHQ_INLINE Bytes load_channels(const uint8_t* p, int count) {
    if (count <= 16) return {load_bytes(p, count), vdupq_n_u8(0)};
    return {vld1q_u8(p), load_bytes(p + 16, count - 16)};
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[1], int count) {
    return load_channels(p[0], count);
  }
  static TORCHQ_INLINE Bytes load_rows(const uint8_t* const (&p)[2], int count) {
    return {load_bytes(p[0], count), load_bytes(p[1], count)};
  }
  static TORCHQ_INLINE void store_channels(uint8_t* p, Bytes v, int count) {
    store_bytes(p, v.lo, count);
    if (count > 16) store_bytes(p + 16, v.hi, count - 16);
  }
  static TORCHQ_INLINE void store_rows(uint8_t* p, const int64_t* offset, int rows, Bytes v,
                                       int count) {
    if (rows == 1) return store_channels(p + offset[0], v, count);
    store_bytes(p + offset[0], v.lo, count);
    store_bytes(p + offset[1], v.hi, count);
  }
  static TORCHQ_INLINE Bytes zip(uint8x16_t a, uint8x16_t b) {
    return {vzip1q_u8(a, b), vzip2q_u8(a, b)};
  }
  static TORCHQ_INLINE Int zip_pairs(Bytes a, Bytes b) {
    const auto words = [](uint8x16_t v) { return vreinterpretq_u16_u8(v); };
    return {vreinterpretq_s32_u16(vzip1q_u16(words(a.lo), words(b.lo))),
            vreinterpretq_s32_u16(vzip2q_u16(words(a.lo), words(b.lo))),
            vreinterpretq_s32_u16(vzip1q_u16(words(a.hi), words(b.hi))),
            vreinterpretq_s32_u16(vzip2q_u16(words(a.hi), words(b.hi)))};
  }
  template <int kHalf>
  static TORCHQ_INLINE Bytes pair_half(Bytes a, Bytes b) {
    return kHalf == 0 ? zip(a.lo, b.lo) : zip(a.hi, b.hi);
  }
  static TORCHQ_INLINE void interleave_half(Bytes a, Bytes b, Int (&quads)[1]) {
    quads[0] = zip_pairs(a, b);
  }
  /// One Int already has the lanes that make a vector of words.
  static TORCHQ_INLINE Bytes pack_words(Int first, Int) {
    return {vreinterpretq_u8_s16(narrow(first.a, first.b)),
            vreinterpretq_u8_s16(narrow(first.c, first.d))};
  }
  static TORCHQ_INLINE Bytes pack_bytes(Bytes low, Bytes high, bool is_signed) {
    const auto words = [](uint8x16_t v) { return vreinterpretq_s16_u8(v); };
    return {narrow(words(low.lo), words(low.hi), is_signed),
            narrow(words(high.lo), words(high.hi), is_signed)};
  }
  static TORCHQ_INLINE void natural_order(Int (&)[2]) {}
  static TORCHQ_INLINE void lane_order(Int (&)[2]) {}

  // whole vectors of bytes
  static TORCHQ_INLINE uint8x16_t max_bytes(uint8x16_t a, uint8x16_t b, bool is_signed) {
    if (!is_signed) return vmaxq_u8(a, b);
    return vreinterpretq_u8_s8(vmaxq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)));
  }
  static TORCHQ_INLINE uint8x16_t min_bytes(uint8x16_t a, uint8x16_t b, bool is_signed) {
    if (!is_signed) return vminq_u8(a, b);
    return vreinterpretq_u8_s8(vminq_s8(vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)));
  }
  static TORCHQ_INLINE Bytes max_bytes(Bytes a, Bytes b, bool is_signed) {
    return {max_bytes(a.lo, b.lo, is_signed), max_bytes(a.hi, b.hi, is_signed)};
  }
  static TORCHQ_INLINE Bytes min_bytes(Bytes a, Bytes b, bool is_signed) {
    return {min_bytes(a.lo, b.lo, is_signed), min_bytes(a.hi, b.hi, is_signed)};
  }
  static TORCHQ_INLINE int32_t largest(Bytes v, bool is_signed) {
    const uint8x16_t best = max_bytes(v.lo, v.hi, is_signed);
    return is_signed ? vmaxvq_s8(vreinterpretq_s8_u8(best)) : vmaxvq_u8(best);
  }
  /// Sums of bytes, as words: of `all`, which may wrap, and of the odd ones only.
  static TORCHQ_INLINE void add_words(uint8x16_t& all, uint8x16_t& odd, uint8x16_t v) {
    const uint16x8_t pairs = vreinterpretq_u16_u8(v);
    all = vreinterpretq_u8_u16(vaddq_u16(vreinterpretq_u16_u8(all), pairs));
    odd = vreinterpretq_u8_u16(vsraq_n_u16(vreinterpretq_u16_u8(odd), pairs, 8));
  }
  static TORCHQ_INLINE void add_words(Bytes& all, Bytes& odd, Bytes v) {
    add_words(all.lo, odd.lo, v.lo);
    add_words(all.hi, odd.hi, v.hi);
  }
  /// Adds the even and the odd words of `sums` to lanes.
  static TORCHQ_INLINE void add_halves(int32x4_t& even, int32x4_t& odd, uint16x8_t sums) {
    const uint32x4_t pairs = vreinterpretq_u32_u16(sums);
    even = vaddq_s32(even, vreinterpretq_s32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff))));
    odd = vaddq_s32(odd, vreinterpretq_s32_u32(vshrq_n_u32(pairs, 16)));
  }
  static TORCHQ_INLINE void split_words(Bytes all, Bytes odd, Int (&v)[2]) {
    const auto words = [](uint8x16_t x) { return vreinterpretq_u16_u8(x); };
    const auto even = [&](uint8x16_t x, uint8x16_t y) {
      return vsubq_u16(words(x), vshlq_n_u16(words(y), 8));
    };
    add_halves(v[0].a, v[1].a, even(all.lo, odd.lo));
    add_halves(v[0].b, v[1].b, even(all.hi, odd.hi));
    add_halves(v[0].c, v[1].c, words(odd.lo));
    add_halves(v[0].d, v[1].d, words(odd.hi));
  }
  static TORCHQ_INLINE Bytes join_bytes(const Int (&v)[2], bool is_signed) {
    // eight of byte 0, and eight of byte 1; of bytes 2 and 3
    const uint8x16_t low = narrow(v[0], is_signed), high = narrow(v[1], is_signed);
    const auto mix = [](uint8x16_t x) { return vzip1q_u8(x, vextq_u8(x, x, 8)); };
    const uint16x8_t a = vreinterpretq_u16_u8(mix(low)), b = vreinterpretq_u16_u8(mix(high));
    return {vreinterpretq_u8_u16(vzip1q_u16(a, b)), vreinterpretq_u8_u16(vzip2q_u16(a, b))};
  }
  /// Adds bytes and their squares to integers, each lane those of some of them.
  static TORCHQ_INLINE void add_moments(Int& sums, Int& squares, Bytes v) {
    const auto add = [](int32x4_t& lanes, uint16x8_t words) {
      lanes = vreinterpretq_s32_u32(vpadalq_u16(vreinterpretq_u32_s32(lanes), words));
    };
    const auto square = [](uint8x8_t x) { return vmull_u8(x, x); };
    add(sums.a, vpaddlq_u8(v.lo));
    add(sums.b, vpaddlq_u8(v.hi));
    add(squares.a, square(vget_low_u8(v.lo)));
    add(squares.b, square(vget_high_u8(v.lo)));
    add(squares.c, square(vget_low_u8(v.hi)));
    add(squares.d, square(vget_high_u8(v.hi)));
  }
  static TORCHQ_INLINE Bytes xor_bytes(Bytes a, Bytes b) {
    return {veorq_u8(a.lo, b.lo), veorq_u8(a.hi, b.hi)};
  }
  static TORCHQ_INLINE Bytes set_bytes(int x) {
    const uint8x16_t v = vdupq_n_u8(static_cast<uint8_t>(x));
    return {v, v};
  }
  static TORCHQ_INLINE Bytes load_lane(const uint8_t* p) {
    const uint8x16_t v = vld1q_u8(p);
    return {v, v};
  }
  /// TBL makes 0 of an index beyond 15: the sign stays in it.
  static TORCHQ_INLINE Bytes lookup_row(Bytes row, Bytes v) {
    const uint8x16_t index = vdupq_n_u8(0x8f);
    return {vqtbl1q_u8(row.lo, vandq_u8(v.lo, index)), vqtbl1q_u8(row.hi, vandq_u8(v.hi, index))};
  }
  static TORCHQ_INLINE Bytes subtract_saturated(Bytes a, Bytes b) {
    const auto subtract = [](uint8x16_t x, uint8x16_t y) {
      return vreinterpretq_u8_s8(vqsubq_s8(vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(y)));
    };
    return {subtract(a.lo, b.lo), subtract(a.hi, b.hi)};
  }
};

static_assert(Isa<Neon>);

/// What tiers share whose dot products take whole quads.
struct NeonQuads : Neon {
  static constexpr int kSteps = 1;

  template <int kStep, class V>
  static TORCHQ_INLINE V split_src(V quad) {
    return quad;
  }
  /// In lane 0 only, where dot products by element read it. Half a register: of a whole one GCC 12
  /// clears the other half, an instruction for each load.
  static TORCHQ_INLINE uint8x8_t broadcast(const uint8_t* p) {
    return vcreate_u8(read<uint32_t>(p));
  }
  using Neon::flip_sign;
  static TORCHQ_INLINE uint8x8_t flip_sign(uint8x8_t v) { return veor_u8(v, vdup_n_u8(0x80)); }
};

}  // namespace
