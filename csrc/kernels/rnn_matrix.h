// SPDX-License-Identifier: Apache-2.0
// The products of recurrent cells on AMX, tile for tile what VectorTiles does with vectors.
#pragma once

#include "matrix.h"
#include "rnn.h"

namespace {

/// Sums of kUnits x 16 rows and NP panels, NP <= 2. The rows of the second unit begin `below` rows
/// after those of the first.
template <int kUnits, int NP>
TORCHQ_NOINLINE void rnn_multiply(const RnnTile& t, int panel, int below) {
  const int64_t src_stride = t.row_offset[1] - t.row_offset[0];
  const uint8_t* src = t.src + t.row_offset[0];
  const int8_t* weight = t.weight + panel * t.panel_stride;
  const int32_t* init = t.init + panel * kPanel;
  _tile_loadd(0, init, 0);  // 16 times the same row
  if constexpr (NP > 1) _tile_loadd(1, init + kPanel, 0);
  if constexpr (kUnits > 1) _tile_loadd(2, init, 0);
  if constexpr (kUnits > 1 && NP > 1) _tile_loadd(3, init + kPanel, 0);
  for (int64_t quad = 0; quad < t.quads; quad += kTileQuads) {
    _tile_loadd(4, src, src_stride);
    _tile_loadd(6, weight, kPanel * kQuad);
    _tile_dpbusd(0, 4, 6);
    if constexpr (kUnits > 1) {
      _tile_loadd(5, src + below * src_stride, src_stride);
      _tile_dpbusd(2, 5, 6);
    }
    if constexpr (NP > 1) {
      _tile_loadd(7, weight + t.panel_stride, kPanel * kQuad);
      _tile_dpbusd(1, 4, 7);
      if constexpr (kUnits > 1) _tile_dpbusd(3, 5, 7);
    }
    src += kTileQuads * kQuad;
    weight += kTileQuads * kPanel * kQuad;
  }
  const int64_t bytes = t.acc_stride * static_cast<int64_t>(sizeof(int32_t));
  int32_t* acc = t.acc + panel * kPanel;
  _tile_stored(0, acc, bytes);
  if constexpr (NP > 1) _tile_stored(1, acc + kPanel, bytes);
  acc += below * t.acc_stride;
  if constexpr (kUnits > 1) _tile_stored(2, acc, bytes);
  if constexpr (kUnits > 1 && NP > 1) _tile_stored(3, acc + kPanel, bytes);
}

/// Up to two units of rows. The second one ends with the last row, and shares rows with the first
/// where there are fewer than 32; fewer than 16 rows are read and summed as 16.
template <class T>
struct MatrixTiles {
  using Isa = T;
  static constexpr int kRows = 2 * kUnitRows, kUnit = kUnitRows, kPanels = 4;

  static void begin() { begin_tiles(kTileQuads); }
  static void end() { end_tiles(); }

  template <bool kScaled>
  static TORCHQ_INLINE void dot(const RnnTile& t, int rows, int panels, bool, bool) {
    const int below = rows - kUnitRows;
    for (int panel = 0; panel < panels; panel += 2) {
      if (below > 0) {
        panels - panel > 1 ? rnn_multiply<2, 2>(t, panel, below)
                           : rnn_multiply<2, 1>(t, panel, below);
      } else {
        panels - panel > 1 ? rnn_multiply<1, 2>(t, panel, 0) : rnn_multiply<1, 1>(t, panel, 0);
      }
    }
    if constexpr (kScaled) {
      for (int p = 0; p < panels; ++p) {
        const auto multiplier = Isa::load(t.multiplier + p * kPanel);
        const auto bias = Isa::load(t.bias + p * kPanel);
        for (int r = 0; r < rows; ++r) {
          int32_t* at = t.acc + r * t.acc_stride + p * kPanel;
          const auto sum = Isa::to_float(Isa::load_int(at));
          Isa::store(reinterpret_cast<float*>(at), Isa::fma(sum, multiplier, bias));
        }
      }
    }
  }
};

}  // namespace
