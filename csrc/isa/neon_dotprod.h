// SPDX-License-Identifier: Apache-2.0
// 16 lanes of NEON with dot products of s8 by s8 (SDOT). Of u8 sources these are the products of
// src - 128; 128 times the sum of the weights is what they leave out.
#pragma once

#include "isa/neon.h"

namespace {

struct NeonDotprod : NeonQuads {
  static constexpr Tier kTier = Tier::neon_dotprod;

  /// u8 - 128.
  static TORCHQ_INLINE int8x8_t to_s8(uint8x8_t v) { return vreinterpret_s8_u8(flip_sign(v)); }
  static TORCHQ_INLINE int8x16_t to_s8(uint8x16_t v) { return vreinterpretq_s8_u8(flip_sign(v)); }
  /// Of an s8 quad in lane 0.
  static TORCHQ_INLINE void dot(Int& acc, int8x8_t src, Int weight) {
    const auto multiply = [&](int32x4_t a, int32x4_t w) {
      return vdotq_lane_s32(a, vreinterpretq_s8_s32(w), src, 0);
    };
    acc = each<Int>(multiply, acc, weight);
  }
  /// Twice 64, since s8 has no 128.
  static TORCHQ_INLINE void add_128_times(Int& acc, Int weight) {
    const int8x8_t half = vdup_n_s8(64);
    dot(acc, half, weight);
    dot(acc, half, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, uint8x8_t src, Int weight) {
    dot(acc, to_s8(src), weight);
    add_128_times(acc, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, Bytes lanes, Int weight) {
    const int8x16_t src = to_s8(lanes.lo);
    const auto multiply = [&](int32x4_t a, int32x4_t w) {
      return vdotq_s32(a, src, vreinterpretq_s8_s32(w));
    };
    acc = each<Int>(multiply, acc, weight);
    add_128_times(acc, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    const auto multiply = [](int32x4_t a, int32x4_t s, int32x4_t w) {
      return vdotq_s32(a, to_s8(vreinterpretq_u8_s32(s)), vreinterpretq_s8_s32(w));
    };
    acc = each<Int>(multiply, acc, src, weight);
    add_128_times(acc, weight);
  }
  /// Codes below 16 are s8, too.
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, uint8x8_t quad) {
    dot(acc, vreinterpret_s8_u8(quad), codes);
  }
};

static_assert(Isa<NeonDotprod>);

}  // namespace
