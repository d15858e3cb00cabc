// SPDX-License-Identifier: Apache-2.0
// The one microkernel of linear and of every dense convolution (contract: GemmTile in table.h).
#pragma once

#include "epilogue.h"

namespace {

/// One weight step (64 bytes a panel) against one source dword per row.
template <class Isa, int MR, int NP, bool kNarrow, class Src>
TORCHQ_INLINE void dot_step(typename Isa::Int (&acc)[MR][NP], const int8_t* weight,
                            int64_t panel_stride, Src src) {
  typename Isa::Int w[NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) w[p] = Isa::load_weight(weight + p * panel_stride);
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    const auto s = src(r);
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      if constexpr (kNarrow) {
        Isa::dot_narrow(acc[r][p], s, w[p]);
      } else {
        Isa::dot(acc[r][p], s, w[p]);
      }
    }
  }
}

/// MR rows x NP panels; `panel` counts from the tile's first panel. kNarrow: weights as packed,
/// four bytes per lane through 16-bit pair sums; else kSteps widened vectors per quad (1 for VNNI).
template <class Isa, int MR, int NP, bool kFlip, bool kNarrow>
TORCHQ_NOINLINE void gemm_tile(const GemmTile& t, const Epilogue& e, int panel) {
  constexpr int kSteps = kNarrow ? 1 : Isa::kSteps;
  using Int = typename Isa::Int;
  // A spilled accumulator costs half the speed; tests/test_disassembly.py looks for them.
  static_assert(MR <= (NP == 1 ? Isa::kTallRows : kTileRows) && NP <= Isa::kMaxPanels);

  int64_t row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = t.row_offset[r];
  Int acc[MR][NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const Int init = Isa::load_int(t.acc_init + (panel + p) * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
  }
  const int64_t panel_stride = t.panel_stride * kSteps;
  const int8_t* panels = t.weight + panel * panel_stride;
  for (int i = 0; i < t.num_runs; ++i) {
    const GemmRun run = t.runs[i];
    const uint8_t* src = t.src + run.src_offset;
    const uint8_t* const end = src + run.quads * kQuad;
    const int8_t* weight = panels + run.weight_offset * kSteps;
    while (src != end) {
      const auto quad = [&](int r) {
        const auto q = Isa::broadcast(src + row[r]);
        if constexpr (kFlip) return Isa::flip_sign(q);
        return q;
      };
      if constexpr (kSteps == 1) {
        dot_step<Isa, MR, NP, kNarrow>(acc, weight, panel_stride, quad);
      } else {
        dot_step<Isa, MR, NP, kNarrow>(acc, weight, panel_stride,
                                       [&](int r) { return Isa::template split_src<0>(quad(r)); });
        // Load everything anew: keeping MR quads or the next weights across the steps spills.
        asm("" : "+r"(src), "+r"(weight));
        dot_step<Isa, MR, NP, kNarrow>(acc, weight + kPanel * kQuad, panel_stride,
                                       [&](int r) { return Isa::template split_src<1>(quad(r)); });
      }
      src += kQuad;
      weight += kSteps * kPanel * kQuad;
    }
  }
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::pin(acc[r][p]);
  }

  const int first = panel * kPanel;
  const int channels = min_int(t.channels - first, NP * kPanel);
  if (finishes_in_registers(e, channels, NP)) {
    finish_in_registers<Isa, MR, NP>(e, acc, t.dst_offset, t.channel + first);
    return;
  }
  alignas(64) int32_t tile[MR * NP * kPanel];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      Isa::store_int(tile + (r * NP + p) * kPanel, acc[r][p]);
    }
  }
  finish_tile<Isa>({tile, MR, NP, t.dst_offset, t.channel + first, channels}, e);
}

using TileFn = void (*)(const GemmTile&, const Epilogue&, int);

/// kTiles<...>.fn[rows - 1][panels - 1]
template <class Isa, bool kFlip, bool kNarrow>
struct TileTable {
  TileFn fn[Isa::kTallRows][Isa::kMaxPanels];

  template <int MR, int NP>
  constexpr void fill() {
    fn[MR - 1][NP - 1] = &gemm_tile<Isa, MR, NP, kFlip, kNarrow>;
    if constexpr (NP < (MR <= kTileRows ? Isa::kMaxPanels : 1)) {
      fill<MR, NP + 1>();
    } else if constexpr (MR < Isa::kTallRows) {
      fill<MR + 1, 1>();
    }
  }
  constexpr TileTable() : fn() { fill<1, 1>(); }
};

template <class Isa, bool kFlip, bool kNarrow>
constexpr TileTable<Isa, kFlip, kNarrow> kTiles;

/// All panels of the tile, as wide as the registers allow; the last chunk takes what is left.
template <class Isa, bool kNarrow>
void gemm(const GemmTile& t, const Epilogue& e) {
  const auto& tiles = t.flip ? kTiles<Isa, true, kNarrow>.fn[t.rows - 1]
                             : kTiles<Isa, false, kNarrow>.fn[t.rows - 1];
  for (int panel = 0; panel < t.panels; panel += Isa::kMaxPanels) {
    tiles[min_int(t.panels - panel, Isa::kMaxPanels) - 1](t, e, panel);
  }
}

/// 64 packed bytes (a quad of 16 channels) become two 64-byte steps: the even bytes, then the odd
/// ones.
template <class Isa>
void widen(const int8_t* packed, int64_t bytes, int8_t* dst) {
  for (int64_t i = 0; i < bytes; i += kPanel * kQuad) Isa::widen(packed + i, dst + 2 * i);
}

template <class Isa>
void compensate(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init) {
  for (int64_t i = 0; i < n; i += kPanel) {
    const auto m = Isa::mask(min_int(n - i, kPanel));
    auto sum = Isa::zero();
    for (int t = 0; t < num_taps; ++t) {
      sum = Isa::add(sum, Isa::load_int(compensation + taps[t] * stride + i, m));
    }
    auto init = bias == nullptr ? Isa::zero() : Isa::load_int(bias + i, m);
    Isa::store_int(acc_init + i, Isa::sub(init, Isa::mul(sum, Isa::set_int(zero_point))), m);
  }
}

}  // namespace
