// SPDX-License-Identifier: Apache-2.0
// 16 lanes of NEON with the int8 matrix extension, whose USDOT is a VPDPBUSD of 128 bits.
#pragma once

#include "isa/neon.h"

namespace {

struct NeonI8mm : NeonQuads {
  static constexpr Tier kTier = Tier::neon_i8mm;

  static TORCHQ_INLINE void dot(Int& acc, uint8x8_t src, Int weight) {
    const auto multiply = [&](int32x4_t a, int32x4_t w) {
      return vsudotq_lane_s32(a, vreinterpretq_s8_s32(w), src, 0);
    };
    acc = each<Int>(multiply, acc, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, Bytes lanes, Int weight) {
    const auto multiply = [&](int32x4_t a, int32x4_t w) {
      return vusdotq_s32(a, lanes.lo, vreinterpretq_s8_s32(w));
    };
    acc = each<Int>(multiply, acc, weight);
  }
  static TORCHQ_INLINE void dot(Int& acc, Int src, Int weight) {
    const auto multiply = [](int32x4_t a, int32x4_t s, int32x4_t w) {
      return vusdotq_s32(a, vreinterpretq_u8_s32(s), vreinterpretq_s8_s32(w));
    };
    acc = each<Int>(multiply, acc, src, weight);
  }
  static TORCHQ_INLINE void dot_codes(Int& acc, Int codes, uint8x8_t quad) {
    const auto multiply = [&](int32x4_t a, int32x4_t c) {
      return vusdotq_lane_s32(a, vreinterpretq_u8_s32(c), vreinterpret_s8_u8(quad), 0);
    };
    acc = each<Int>(multiply, acc, codes);
  }
};

static_assert(Isa<NeonI8mm>);

}  // namespace
