// SPDX-License-Identifier: Apache-2.0
// The products of recurrent cells on AMX, tile for tile what VectorTiles does with vectors.
#pragma once

#include "kernels/amx/matrix.h"
#include "kernels/rnn/rnn.h"

namespace {

// A product's sums are there after 52 cycles, and the next product may begin after 16: fewer than
// four sums in registers wait for themselves. So 16 rows meet up to four panels in one pass, and
// twice 16 rows three, a GRU's gates. Weights do not pass through L1, where they would displace the
// rows.

/// Sums of 16 rows and NP panels, NP <= 4.
template <int NP>
TORCHQ_NOINLINE void rnn_multiply_unit(const RnnTile& t, int panel) {
  constexpr int64_t kBytes = kPanel * kQuad;
  const int64_t src_stride = t.row_offset[1] - t.row_offset[0], next = t.panel_stride;
  const uint8_t* src = t.src + t.row_offset[0];
  const int8_t* weight = t.weight + panel * next;
  const int32_t* init = t.init + panel * kPanel;
  _tile_loadd(0, init, 0);  // 16 times the same row
  if constexpr (NP > 1) _tile_loadd(1, init + kPanel, 0);
  if constexpr (NP > 2) _tile_loadd(2, init + 2 * kPanel, 0);
  if constexpr (NP > 3) _tile_loadd(3, init + 3 * kPanel, 0);
  for (int64_t quad = 0; quad < t.quads; quad += kChunkQuads) {
    _tile_loadd(4, src, src_stride);
    _tile_stream_loadd(5, weight, kBytes);
    _tile_dpbusd(0, 4, 5);
    if constexpr (NP > 1) {
      _tile_stream_loadd(6, weight + next, kBytes);
      _tile_dpbusd(1, 4, 6);
    }
    if constexpr (NP > 2) {
      _tile_stream_loadd(7, weight + 2 * next, kBytes);
      _tile_dpbusd(2, 4, 7);
    }
    if constexpr (NP > 3) {
      _tile_stream_loadd(5, weight + 3 * next, kBytes);
      _tile_dpbusd(3, 4, 5);
    }
    src += kChunkQuads * kQuad;
    weight += kChunkQuads * kBytes;
  }
  const int64_t bytes = t.acc_stride * static_cast<int64_t>(sizeof(int32_t));
  int32_t* acc = t.acc + panel * kPanel;
  _tile_stored(0, acc, bytes);
  if constexpr (NP > 1) _tile_stored(1, acc + kPanel, bytes);
  if constexpr (NP > 2) _tile_stored(2, acc + 2 * kPanel, bytes);
  if constexpr (NP > 3) _tile_stored(3, acc + 3 * kPanel, bytes);
}

/// Sums of 2 x 16 rows and NP panels, NP <= 3. The rows of the second unit begin `below` rows after
/// those of the first.
template <int NP>
TORCHQ_NOINLINE void rnn_multiply_units(const RnnTile& t, int panel, int below) {
  constexpr int64_t kBytes = kPanel * kQuad;
  const int64_t src_stride = t.row_offset[1] - t.row_offset[0], next = t.panel_stride;
  const uint8_t* src = t.src + t.row_offset[0];
  const uint8_t* lower = src + below * src_stride;
  const int8_t* weight = t.weight + panel * next;
  const int32_t* init = t.init + panel * kPanel;
  _tile_loadd(0, init, 0);  // 16 times the same row
  _tile_loadd(1, init, 0);
  if constexpr (NP > 1) _tile_loadd(2, init + kPanel, 0);
  if constexpr (NP > 1) _tile_loadd(3, init + kPanel, 0);
  if constexpr (NP > 2) _tile_loadd(4, init + 2 * kPanel, 0);
  if constexpr (NP > 2) _tile_loadd(5, init + 2 * kPanel, 0);
  for (int64_t quad = 0; quad < t.quads; quad += kChunkQuads) {
    // Each panel meets the rows that are there, then the others.
    _tile_loadd(6, src, src_stride);
    _tile_stream_loadd(7, weight, kBytes);
    _tile_dpbusd(0, 6, 7);
    _tile_loadd(6, lower, src_stride);
    _tile_dpbusd(1, 6, 7);
    if constexpr (NP > 1) {
      _tile_stream_loadd(7, weight + next, kBytes);
      _tile_dpbusd(3, 6, 7);
      _tile_loadd(6, src, src_stride);
      _tile_dpbusd(2, 6, 7);
    }
    if constexpr (NP > 2) {
      _tile_stream_loadd(7, weight + 2 * next, kBytes);
      _tile_dpbusd(4, 6, 7);
      _tile_loadd(6, lower, src_stride);
      _tile_dpbusd(5, 6, 7);
    }
    src += kChunkQuads * kQuad;
    lower += kChunkQuads * kQuad;
    weight += kChunkQuads * kBytes;
  }
  const int64_t bytes = t.acc_stride * static_cast<int64_t>(sizeof(int32_t));
  int32_t* acc = t.acc + panel * kPanel;
  int32_t* acc_below = acc + below * t.acc_stride;
  _tile_stored(0, acc, bytes);
  _tile_stored(1, acc_below, bytes);
  if constexpr (NP > 1) _tile_stored(2, acc + kPanel, bytes);
  if constexpr (NP > 1) _tile_stored(3, acc_below + kPanel, bytes);
  if constexpr (NP > 2) _tile_stored(4, acc + 2 * kPanel, bytes);
  if constexpr (NP > 2) _tile_stored(5, acc_below + 2 * kPanel, bytes);
}

/// Up to two units of rows. The second one ends with the last row, and shares rows with the first
/// where there are fewer than 32; fewer than 16 rows are read and summed as 16.
template <class T>
struct MatrixTiles {
  using Isa = T;
  static constexpr int kRows = 2 * kUnitRows, kUnit = kUnitRows, kPanels = 4;

  static void begin() { begin_tiles(kChunkQuads); }
  static void end() { end_tiles(); }

  static void multiply_unit(const RnnTile& t, int panel, int count) {
    switch (count) {
      case 1:
        return rnn_multiply_unit<1>(t, panel);
      case 2:
        return rnn_multiply_unit<2>(t, panel);
      case 3:
        return rnn_multiply_unit<3>(t, panel);
      default:
        return rnn_multiply_unit<4>(t, panel);
    }
  }
  static void multiply_units(const RnnTile& t, int panel, int count, int below) {
    switch (count) {
      case 1:
        return rnn_multiply_units<1>(t, panel, below);
      case 2:
        return rnn_multiply_units<2>(t, panel, below);
      default:
        return rnn_multiply_units<3>(t, panel, below);
    }
  }

  template <bool kScaled>
  static TORCHQ_INLINE void dot(const RnnTile& t, int rows, int panels, bool, bool) {
    const int below = rows - kUnitRows;
    const int most = below <= 0 ? 4 : panels == 3 ? 3 : 2;
    for (int panel = 0; panel < panels; panel += most) {
      const int count = min_int(panels - panel, most);
      below > 0 ? multiply_units(t, panel, count, below) : multiply_unit(t, panel, count);
    }
    if constexpr (kScaled) {
      for (int p = 0; p < panels; ++p) {
        const auto multiplier = Isa::load(t.multiplier + p * kPanel);
        const auto bias = Isa::load(t.bias + p * kPanel);
        for (int r = 0; r < rows; ++r) {
          int32_t* at = t.acc + r * t.acc_stride + p * kPanel;
          Isa::store(reinterpret_cast<float*>(at),
                     scaled<Isa>(Isa::load_int(at), multiplier, bias));
        }
      }
    }
  }
};

}  // namespace
