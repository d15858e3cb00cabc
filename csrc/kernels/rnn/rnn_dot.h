// SPDX-License-Identifier: Apache-2.0
// The products of recurrent cells: rows of the source or the state with the panels of many gates.
#pragma once

#include "kernels/gemm/dot_step.h"
#include "kernels/gemm/tiles.h"

namespace {

/// Vectors of weights per quad in memory: packed bytes where tiles split them in registers. Of one
/// row, which waits for weights, these are half as many to read.
template <class Isa>
constexpr int kRnnSteps = Isa::kWidensSrc ? 1 : Isa::kSteps;

/// Arguments that tiles of the same rows share. Fields are stored and loaded one by one: a copy of
/// the whole struct waited for the stores of the tile before, 100 cycles each.
struct RnnTile {
  const uint8_t* src;
  const int64_t* row_offset;
  int64_t quads;
  const int8_t* weight;
  int64_t panel_stride;  // bytes as they lie in memory
  const int32_t* init;
  int32_t* acc;
  int64_t acc_stride;  // between rows
  const float *multiplier, *bias;
  /// Bytes from the tile's first panel to the panel that it prefetches into L2; 0: its own.
  int64_t prefetch_offset;
};

/// acc[row][p] = init[p] + sum over k of src[row][k] * weight[p][k] for NP panels from `panel` on;
/// with kScaled the floats fma(acc, multiplier[p], bias[p]) in its place.
template <class Isa, int MR, int NP, bool kNarrow, bool kScaled>
TORCHQ_NOINLINE void rnn_tile(const RnnTile& t, int panel) {
  constexpr bool kSplits = !kNarrow && Isa::kSteps > kRnnSteps<Isa>;
  constexpr int kSteps = kNarrow ? 1 : kRnnSteps<Isa>;
  using Int = typename Isa::Int;
  int64_t row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = t.row_offset[r];
  Int acc[MR][NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const Int init = Isa::load_int(t.init + (panel + p) * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
  }
  const int64_t panel_stride = t.panel_stride;
  const int64_t prefetch_offset = t.prefetch_offset;
  const uint8_t* src = t.src;
  const uint8_t* end = src + t.quads * kQuad;
  const int8_t* weight = t.weight + panel * panel_stride;
  while (src != end) {
    if constexpr (MR > 4) asm("" : "+m"(end));  // as in gemm_tile
    if constexpr (kNarrow || Isa::kSteps == 1) {
      if constexpr (MR > 3 && NP > 2) __builtin_prefetch(weight + prefetch_offset, 0, 2);
      dot_step<Isa, MR, NP, kNarrow>(acc, weight, panel_stride,
                                     [&](int r) { return Isa::broadcast(src + row[r]); });
    } else {
      dot_step<Isa, MR, NP, false>(
          acc, weight, panel_stride,
          [&](int r) { return load_src_half<Isa, kUnsigned, 0>(src + row[r]); },
          LoadHalf<Isa, kSplits, 0>());
      asm("" : "+r"(src), "+r"(weight));  // as in gemm_tile
      dot_step<Isa, MR, NP, false>(
          acc, weight + (kSplits ? 0 : kPanel * kQuad), panel_stride,
          [&](int r) { return load_src_half<Isa, kUnsigned, 1>(src + row[r]); },
          LoadHalf<Isa, kSplits, 1>());
    }
    src += kQuad;
    weight += kSteps * kPanel * kQuad;
  }
  pin_sums<Isa>(acc);
  int32_t* const to = t.acc + panel * kPanel;
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    if constexpr (kScaled) {
      const auto multiplier = Isa::load(t.multiplier + (panel + p) * kPanel);
      const auto bias = Isa::load(t.bias + (panel + p) * kPanel);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        float* dst = reinterpret_cast<float*>(to + r * t.acc_stride + p * kPanel);
        Isa::store(dst, scaled<Isa>(acc[r][p], multiplier, bias));
      }
    } else {
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        Isa::store_int(to + r * t.acc_stride + p * kPanel, acc[r][p]);
      }
    }
  }
}

using RnnTileFn = void (*)(const RnnTile&, int panel);

/// Panels of a tile of MR rows. A VNNI sum waits four or five cycles for the one before, so one row
/// wants more of them side by side than several rows. One thread of Emerald Rapids, batch 1: eight
/// panels instead of four take 0.97 of a layer's time at 256 units, 0.985 at 512; three instead of
/// one with AVX-VNNI 0.72 and 0.63. But each panel is a stream of its own: on Zen 5 six instead of
/// eight take 0.985 at 256 units, 0.95 at 384 and 512, 0.98 at 1024.
template <class Isa, int MR>
constexpr int kRnnPanels = MR > 1 || Isa::kSteps > 1 ? Isa::kMaxPanels
                           : Isa::kVectors == 32     ? 6
                                                     : 3;

/// fn[rows - 1][panels - 1]
template <class Isa, bool kNarrow, bool kScaled>
struct RnnTiles {
  RnnTileFn fn[kTileRows][kRnnPanels<Isa, 1>];

  template <int MR, int NP>
  constexpr void fill() {
    fn[MR - 1][NP - 1] = &rnn_tile<Isa, MR, NP, kNarrow, kScaled>;
    if constexpr (NP < kRnnPanels<Isa, MR>) {
      fill<MR, NP + 1>();
    } else if constexpr (MR < kTileRows) {
      fill<MR + 1, 1>();
    }
  }
  constexpr RnnTiles() : fn() { fill<1, 1>(); }
};

template <class Isa, bool kNarrow, bool kScaled>
constexpr RnnTiles<Isa, kNarrow, kScaled> kRnnTiles;

/// All of `panels` consecutive panels, for up to kTileRows rows; the last ones first if descending.
template <class Isa, bool kNarrow, bool kScaled>
TORCHQ_INLINE void rnn_dot(const RnnTile& t, int rows, int panels, bool descending) {
  const int most = rows == 1 ? kRnnPanels<Isa, 1> : Isa::kMaxPanels;
  const int tiles = (panels + most - 1) / most;
  for (int i = 0; i < tiles; ++i) {
    const int panel = (descending ? tiles - 1 - i : i) * most;
    const int count = min_int(panels - panel, most);
    kRnnTiles<Isa, kNarrow, kScaled>.fn[rows - 1][count - 1](t, panel);
  }
}

/// Products of recurrent cells on vectors: up to kRows rows in one go, kPanels panels in one pass
/// over them.
template <class T>
struct VectorTiles {
  using Isa = T;
  static constexpr int kRows = kTileRows, kUnit = 1, kPanels = Isa::kMaxPanels;

  static void begin() {}
  static void end() {}
  template <bool kScaled>
  static TORCHQ_INLINE void dot(const RnnTile& t, int rows, int panels, bool narrow,
                                bool descending) {
    if constexpr (Isa::kHasNarrow) {
      if (narrow) return rnn_dot<Isa, true, kScaled>(t, rows, panels, descending);
    }
    rnn_dot<Isa, false, kScaled>(t, rows, panels, descending);
  }
};

}  // namespace
