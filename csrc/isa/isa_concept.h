// SPDX-License-Identifier: Apache-2.0
// Every name that kernels use of an instruction set. A trait that satisfies Isa serves all kernels.
//
// A trait is a struct of static functions on 16 lanes of 32 bits (kPanel), in as many registers as
// that takes. Int, Float: 16 lanes. Mask: the first `count` lanes. Bytes: kByteLanes bytes, cut in
// lanes of 128 bits as x86 does. A quad: the four bytes of a lane. The examples to copy are avx2.h,
// and neon.h where registers have 128 bits.
#pragma once

#include "kernels/common.h"

namespace {

template <class A, class B>
concept Is = __is_same(A, B);

/// Loads, stores and arithmetic of 16 lanes of int32 and float32.
template <class T>
concept HasLanes =
    requires(typename T::Int i, typename T::Float f, typename T::Mask m, int32_t* ip, float* fp) {
      { T::mask(1) } -> Is<typename T::Mask>;
      { T::zero() } -> Is<typename T::Int>;
      { T::set_int(1) } -> Is<typename T::Int>;
      { T::set(1.0f) } -> Is<typename T::Float>;
      { T::load_int(ip) } -> Is<typename T::Int>;
      { T::load_int(ip, m) } -> Is<typename T::Int>;  // reads only lanes in m, zeros elsewhere
      { T::load(fp) } -> Is<typename T::Float>;
      { T::load(fp, m) } -> Is<typename T::Float>;
      T::store_int(ip, i), T::store_int(ip, i, m);
      T::store(fp, f), T::store(fp, f, m);
      { T::add(i, i) } -> Is<typename T::Int>;
      { T::sub(i, i) } -> Is<typename T::Int>;
      { T::mul(i, i) } -> Is<typename T::Int>;  // the low 32 bits
      { T::add(f, f) } -> Is<typename T::Float>;
      { T::sub(f, f) } -> Is<typename T::Float>;
      { T::mul(f, f) } -> Is<typename T::Float>;
      { T::div(f, f) } -> Is<typename T::Float>;
      { T::sqrt(f) } -> Is<typename T::Float>;
      { T::fma(f, f, f) } -> Is<typename T::Float>;   // a b + c, rounded once
      { T::fnma(f, f, f) } -> Is<typename T::Float>;  // c - a b, rounded once
      { T::max(f, f) } -> Is<typename T::Float>;      // a > b ? a : b; b where one is NaN
      { T::min(f, f) } -> Is<typename T::Float>;      // a < b ? a : b; b where one is NaN
      { T::sum_lanes(i) } -> Is<int64_t>;
      { T::sum_halves(f) } -> Is<float>;  // adds lanes j and j + 8, then j and j + 4, + 2, + 1
      { T::largest_lane(f) } -> Is<float>;
    };

/// Comparisons, bits, rounding and conversions of lanes. A comparison with NaN is false.
template <class T>
concept HasConversions = requires(typename T::Int i, typename T::Float f, typename T::Lanes l,
                                  typename T::Float (&two)[2]) {
  { T::less(f, f) } -> Is<typename T::Lanes>;
  { T::less_equal(f, f) } -> Is<typename T::Lanes>;
  { T::equal(f, f) } -> Is<typename T::Lanes>;
  { T::select(l, f, f) } -> Is<typename T::Float>;          // l ? a : b
  { T::where_positive(f, f, f) } -> Is<typename T::Float>;  // x > 0 ? a : b
  { T::replace_nan(f, f) } -> Is<typename T::Float>;        // isnan(x) ? value : x
  { T::round(f) } -> Is<typename T::Float>;                 // half to even
  { T::to_int(f) } -> Is<typename T::Int>;                  // half to even; INT32_MIN if invalid
  { T::to_int_saturated(f) } -> Is<typename T::Int>;        // INT32_MAX from 2^31 on
  { T::to_float(i) } -> Is<typename T::Float>;
  { T::difference(i, i) } -> Is<typename T::Float>;  // float(a - b) of 33 bits, rounded once
  { T::bits(f) } -> Is<typename T::Int>;
  { T::from_bits(i) } -> Is<typename T::Float>;
  { T::bit_and(i, i) } -> Is<typename T::Int>;
  { T::bit_or(i, i) } -> Is<typename T::Int>;
  { T::template shift_left<3>(i) } -> Is<typename T::Int>;
  { T::template shift_right<3>(i) } -> Is<typename T::Int>;  // arithmetic
  T::interleave_lanes(f, f, two);                            // a[0], b[0], a[1], b[1], ...
};

/// Panels: 16 bytes of memory as lanes, and back. kStoredPanels go to memory at once.
template <class T>
concept HasPanels = requires(typename T::Int i, typename T::Mask m, void* p, uint8_t* u,
                             typename T::Int (&v)[T::kStoredPanels],
                             uint8_t* const (&places)[T::kStoredPanels], bool is_signed) {
  { T::load_u8(p) } -> Is<typename T::Int>;
  { T::load_u8(p, m) } -> Is<typename T::Int>;
  { T::load_s8(p) } -> Is<typename T::Int>;
  { T::load_s8(p, m) } -> Is<typename T::Int>;
  T::store_u8(p, i, m), T::store_s8(p, i, m);  // saturated
  T::store_panel(u, i, is_signed);             // all 16, saturated
  T::store_row(u, v, is_signed);               // 16 kStoredPanels bytes side by side
  T::store_panels(places, v, is_signed);       // 16 bytes to each place
  { T::any_invalid(v) } -> Is<bool>;           // a lane is INT32_MIN
};

/// Dot products: acc += the four products of each quad, exact in int32.
template <class T>
concept HasDots =
    requires(typename T::Int i, uint8_t* u, int8_t* s, decltype(T::broadcast(nullptr)) quad) {
      { T::load_weight(s) } -> Is<typename T::Int>;  // 16 quads of a packed panel
      { T::flip_sign(i) } -> Is<typename T::Int>;    // s8 to u8, by 128
      T::flip_sign(quad);
      T::template split_src<0>(quad);  // what step 0 of kSteps multiplies
      T::dot(i, T::template split_src<0>(quad), i);
      T::dot(i, i, i);           // with a quad of its own in each lane
      T::dot_codes(i, i, quad);  // of unsigned codes below 16, a quad in each lane, with one of s8
      T::pin(i);                 // keeps an accumulator in its register
    } && (!T::kHasNarrow || requires(typename T::Int i, uint8_t* u) {
      T::dot_narrow(i, T::broadcast(u), i);  // in one step, where pair bounds prove it exact
    }) && (T::kSteps == 1 || requires(int8_t* s) {
      T::widen(s, s);  // weights as 16-bit values, for kSteps == 2
    }) && (!T::kWidensSrc || requires(typename T::Int i, int8_t* s) {
      { T::template split_weight<0>(i) } -> Is<typename T::Int>;  // half of what widen makes
      { T::clip_pairs(s, s, s) } -> Is<bool>;  // weights clipped for dot_narrow, and the rest
    });

/// Lanes of small groups, whose sums are 4 x 4 matrices.
template <class T>
concept HasGroups = requires(typename T::Int i, uint8_t* u) {
  T::dot(i, T::template split_src<0>(T::flip_sign(T::load_lane(u))), i);  // 16 bytes, in each lane
  { T::transpose_lanes(i) } -> Is<typename T::Int>;  // lane 4 a + b from lane 4 b + a
  { T::add_pairs(i, i) } -> Is<typename T::Int>;     // of each four: sums of a's pairs, then b's
  { T::swap_middle(i) } -> Is<typename T::Int>;      // of each four: the second and third swapped
};

/// Depthwise: kDepthwiseChannels bytes of up to kDepthwiseSplits rows, four taps to a quad.
template <class T>
concept HasDepthwise = requires(typename T::Bytes b, uint8_t* u, const uint8_t* const (&rows)[1],
                                const uint8_t* const (&two)[2], const int64_t* offset,
                                typename T::Int i, typename T::Int (&v)[T::kDepthwiseVectors],
                                typename T::Int (&half)[T::kDepthwiseVectors / 2], bool is_signed) {
  { T::load_channels(u, 1) } -> Is<typename T::Bytes>;  // `count` bytes, zeros behind them
  { T::load_rows(rows, 1) } -> Is<typename T::Bytes>;   // `count` of each row, side by side
  { T::load_rows(two, 1) } -> Is<typename T::Bytes>;
  T::store_channels(u, b, 1), T::store_rows(u, offset, 1, b, 1);
  { T::template pair_half<0>(b, b) } -> Is<typename T::Bytes>;  // taps 0 and 1 of half the bytes
  T::interleave_half(b, b, half);                               // two pairs as quads, in lane order
  { T::pack_words(i, i) } -> Is<typename T::Bytes>;             // undo these, saturated:
  { T::pack_bytes(b, b, is_signed) } -> Is<typename T::Bytes>;  // to words, then to bytes
  T::natural_order(v), T::lane_order(v);  // from lane order to channels, and back
};

/// Whole vectors of bytes: pools, lookups, sums.
template <class T>
concept HasBytes = requires(typename T::Bytes b, typename T::Int i, uint8_t* u, bool is_signed,
                            typename T::Int (&v)[T::kByteLanes / 16],
                            const typename T::Int (&c)[T::kByteLanes / 16]) {
  { T::max_bytes(b, b, is_signed) } -> Is<typename T::Bytes>;
  { T::min_bytes(b, b, is_signed) } -> Is<typename T::Bytes>;
  { T::largest(b, is_signed) } -> Is<int32_t>;
  T::add_words(b, b, b);    // sums of bytes as words: of all, which wrap, and of the odd ones
  T::split_words(b, b, v);  // adds them to v[j], the sums of byte j of each dword
  { T::join_bytes(c, is_signed) } -> Is<typename T::Bytes>;  // its inverse, saturated
  T::add_moments(i, i, b);                                   // sums and sums of squares
  { T::xor_bytes(b, b) } -> Is<typename T::Bytes>;
  { T::set_bytes(1) } -> Is<typename T::Bytes>;
  { T::load_lane(u) } -> Is<typename T::Bytes>;              // 16 bytes in each 128 bits
  { T::lookup_row(b, b) } -> Is<typename T::Bytes>;          // row[v & 15]; 0 where v < 0, as s8
  { T::subtract_saturated(b, b) } -> Is<typename T::Bytes>;  // as s8
};

/// Sizes and choices.
template <class T>
concept HasConstants = requires {
  requires T::kMaxPanels >= 1;                // panels of a tile
  requires T::kVectors >= 8;                  // of 16 lanes, in all registers
  requires T::kSteps == 1 || T::kSteps == 2;  // 2: a quad as two pairs of 16-bit values
  requires T::kTallRows >= 1 &&
                   T::kTallestRows >= T::kTallRows;   // rows of two-panel, one-panel tiles
  requires Is<decltype(T::kMasksTails), const bool>;  // partial panels are cheap to store
  requires Is<decltype(T::kWidensSrc), const bool>;   // rows are widened too, or weights clipped
  requires Is<decltype(T::kHasNarrow), const bool>;
  requires T::kDepthwiseVectors * 16 == T::kDepthwiseChannels;
  requires T::kDepthwiseChannels == T::kByteLanes;
  requires T::kDepthwiseSplits == 2 || T::kDepthwiseSplits == 4;
  requires T::kDepthwisePixels >= 1;  // destinations of a pass
  requires T::kStoredPanels * 16 == T::kByteLanes;
  requires Is<decltype(T::kTier), const Tier>;
} && (!T::kPrefetches || requires(int8_t* s) { T::prefetch(s), T::prefetch_l2(s); });

template <class T>
concept Isa = HasConstants<T> && HasLanes<T> && HasConversions<T> && HasPanels<T> && HasDots<T> &&
              HasGroups<T> && HasDepthwise<T> && HasBytes<T>;

// Found with `requires` where they are used, since only some tiers gain from them: dot_row
// (gemm/dot_step.h), store_transposed (conv/small_groups_epilogue.h), lookup_vbmi
// (pointwise/elementwise.h), to_s8 (gemm/tiles.h).

}  // namespace
