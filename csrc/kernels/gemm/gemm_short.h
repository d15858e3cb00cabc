// SPDX-License-Identifier: Apache-2.0
// Rows that sum few quads: the first layers of networks, and 1x1 convolutions of 16 to 96 channels.
#pragma once

#include "kernels/epilogue/register_epilogue.h"

namespace {

/// Rows of a tile of NP panels: more than 8 with three runs each are too many addresses for one.
template <int NP, int kRuns>
constexpr int kShortRows = NP == 4                              ? kTileRows
                           : NP == 3 || (NP == 1 && kRuns == 3) ? 8
                                                                : 12;

/// As `gemm_tile`, of NP full panels, for all tiles of rows, and with the sums written out: around
/// so few, a loop takes as long as they do, and so do a call and what it sets up. Returns how many
/// rows that were. The epilogue `is_byte_epilogue` and `is_plain`. Measured on Emerald Rapids,
/// beside `gemm_tile`: 3x3 s2 of 3 to 32 channels takes 0.80 of the time, 1x1 of 32 to 16 0.82, of
/// 16 to 96 0.83, of 24 to 144 0.88, of 32 to 192 0.90, of 40 to 240 0.92. On Zen 5 1x1 of 64 to 64
/// takes 0.93, of 64 to 256 0.945, of 96 to 576 0.945; with a sum 64 to 256 would take 1.03.
template <class Isa, int NP, int kRuns, int kQuads>
TORCHQ_NOINLINE int gemm_short(const GemmTile& t, const Epilogue& e, int panel) {
  constexpr int MR = kShortRows<NP, kRuns>;
  using Int = typename Isa::Int;
  const uint8_t* const src = t.src + t.runs[0].src_offset;
  int64_t run_offset[kRuns];
  TORCHQ_UNROLL for (int i = 0; i < kRuns; ++i) {
    run_offset[i] = t.runs[i].src_offset - t.runs[0].src_offset;
  }
  const int8_t* const weight = t.weight + panel * t.panel_stride + t.runs[0].weight_offset;
  const int32_t* acc_init = t.acc_init + panel * kPanel;
  int first = 0;
  for (; first + MR <= t.rows; first += MR) {
    const uint8_t* row[MR];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      row[r] = src + t.row_offset[first + r];
      asm("" : "+r"(row[r]));
    }
    // From memory for each tile: GCC would keep them in registers, and spill sums.
    const int8_t* w = weight;
    asm("" : "+r"(acc_init), "+r"(w));
    Int acc[MR][NP];
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      const Int init = Isa::load_int(acc_init + p * kPanel);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
    }
    TORCHQ_UNROLL for (int i = 0; i < kRuns; ++i) {
      TORCHQ_UNROLL for (int q = 0; q < kQuads; ++q) {
        Int v[NP];
        TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
          v[p] = Isa::load_weight(w + p * t.panel_stride + (i * kQuads + q) * kPanel * kQuad);
        }
        TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
          const auto s = Isa::broadcast(row[r] + run_offset[i] + q * kQuad);
          TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::dot(acc[r][p], s, v[p]);
        }
      }
    }
    pin_sums<Isa>(acc);
    register_epilogue<Isa, MR, NP, true>(e, acc, t.dst_offset + first, t.channel + panel * kPanel);
  }
  return first;
}

}  // namespace
