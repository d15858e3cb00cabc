// SPDX-License-Identifier: Apache-2.0
// Bytes as 16-bit values, for tiers that multiply those (contracts: `widen` and `widen_src` in
// contract.h).
#pragma once

#include "kernels/common.h"
#include "kernels/gemm/contract.h"

namespace {

/// 64 packed bytes (a quad of 16 channels) become two 64-byte steps: the even bytes, then the odd
/// ones.
template <class Isa>
void widen(const int8_t* packed, int64_t bytes, int8_t* dst) {
  for (int64_t i = 0; i < bytes; i += kPanel * kQuad) Isa::widen(packed + i, dst + 2 * i);
}

/// A quad of a source as two dwords of 16-bit values, the even bytes, then the odd ones.
TORCHQ_INLINE void widen_quad(const uint8_t* src, uint32_t signs, uint8_t* dst) {
  const uint64_t quad = static_cast<uint32_t>(load32(src)) ^ signs;
  const uint64_t wide = (quad | quad << 24) & 0x00ff00ff00ff00ffu;
  memcpy(dst, &wide, sizeof wide);
}

/// The rows of a tile, their runs side by side. The compiler's vectors serve long runs; what comes
/// before and behind them would cost short ones more than their quads: a 3x3 convolution of 3
/// channels takes 0.63 of the time without (Zen 3).
template <class Isa>
void widen_src(const GemmTile& t, uint8_t* __restrict dst) {
  const uint32_t signs = t.flip ? 0x80808080u : 0u;
  for (int r = 0; r < t.rows; ++r) {
    for (int i = 0; i < t.num_runs; ++i) {
      const uint8_t* __restrict src = t.src + t.row_offset[r] + t.runs[i].src_offset;
      const int64_t quads = t.runs[i].quads, whole = quads / 8 * 8;
      for (int64_t k = 0; k < whole; ++k) {
        widen_quad(src + k * kQuad, signs, dst + k * 2 * kQuad);
      }
      for (int64_t k = whole; k < quads; ++k) {
        asm("");  // not as vectors
        widen_quad(src + k * kQuad, signs, dst + k * 2 * kQuad);
      }
      dst += quads * 2 * kQuad;
    }
  }
}

}  // namespace
