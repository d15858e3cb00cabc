// SPDX-License-Identifier: Apache-2.0
// Gathered rows times packed panels on AMX (contract: MatrixUnit in matrix_unit.h).
//
// A tile register holds 16 rows of 64 bytes. 16 quads of a packed panel are one, 64 bytes of 16
// source rows another, and their product, 16 rows of 16 sums, a third. Registers 0..3 sum 2 x 16
// rows times 2 panels; 4 and 5 hold rows, 6 and 7 weights: four loads for four products, which the
// loads of two would not keep busy.
#pragma once

#include <immintrin.h>

#include "gemm.h"
#include "matrix_unit.h"

namespace {

constexpr int kTileQuads = 16;
/// Panels whose sums are finished together: a whole vector of destination bytes.
constexpr int kFinishPanels = 4;

/// Operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// LDTILECFG takes about 200 cycles: once per run of tiles, not per tile.
void begin_tiles(int64_t quads) {
  const int chunk = min_int(quads, kTileQuads);
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    const bool weight = i >= 6;
    config.rows[i] = static_cast<uint8_t>(weight ? chunk : kUnitRows);
    config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? chunk * kQuad : kPanel * kQuad);
  }
  asm volatile("" ::: "memory");  // GCC 12 believes that the instruction reads 8 bytes
  _tile_loadconfig(&config);
}

void end_tiles() { _tile_release(); }

/// Whole vectors first: a count that is known saves the mask.
template <class Isa, bool kFlip>
TORCHQ_INLINE void copy_run(const uint8_t* src, uint8_t* dst, int64_t size) {
  const auto copy = [&](int64_t at, int count) {
    auto bytes = Isa::load_channels(src + at, count);
    if constexpr (kFlip) bytes = Isa::flip_sign(bytes);
    Isa::store_channels(dst + at, bytes, count);
  };
  int64_t done = 0;
  for (; done + Isa::kByteLanes <= size; done += Isa::kByteLanes) copy(done, Isa::kByteLanes);
  if (done < size) copy(done, static_cast<int>(size - done));
}

template <class Isa>
TORCHQ_INLINE void zero_bytes(uint8_t* p, const uint8_t* end) {
  for (; p < end; p += Isa::kByteLanes) {
    Isa::store_channels(p, Isa::set_bytes(0), min_int(end - p, Isa::kByteLanes));
  }
}

template <class Isa, bool kFlip>
TORCHQ_INLINE void gather_row(const GatherRows& g, const uint8_t* src, uint8_t* dst) {
  uint8_t* written = dst;
  for (int i = 0; i < g.num_runs; ++i) {
    const GemmRun& run = g.runs[i];
    uint8_t* to = dst + run.weight_offset / kPanel - g.first_quad * kQuad;
    zero_bytes<Isa>(written, to);
    copy_run<Isa, kFlip>(src + run.src_offset, to, run.quads * kQuad);
    written = to + run.quads * kQuad;
  }
  const uint8_t* end = dst + g.quads * kQuad;
  zero_bytes<Isa>(written, end);
  const int tail = static_cast<int>(g.quads % kTileQuads) * kQuad;
  if (g.quads > kTileQuads && tail != 0) {
    uint8_t* chunk = dst + g.quads * kQuad - tail;
    const auto last = Isa::load_channels(end - Isa::kByteLanes, Isa::kByteLanes);
    Isa::store_channels(chunk, last, Isa::kByteLanes);
    Isa::store_channels(chunk, Isa::set_bytes(0), Isa::kByteLanes - tail);
  }
}

template <class Isa>
void gather_rows(const GatherRows& g) {
  for (int r = 0; r < g.rows; ++r) {
    const uint8_t* src = g.src + g.row_offset[r];
    uint8_t* dst = g.dst + r * g.dst_stride;
    if (g.flip) {
      gather_row<Isa, true>(g, src, dst);
    } else {
      gather_row<Isa, false>(g, src, dst);
    }
  }
}

/// Rows of sums on their way to the destination: finished a few at a time while the unit works on
/// the next tile. Measured on Emerald Rapids, against finishing each tile at once: 3 to 10 % faster
/// at K = 512 to 1024, up to 6 % slower at K = 64.
template <class Isa>
class Finish {
 public:
  Finish(const GemmTile& tile, const Epilogue& epilogue) : tile_(tile), epilogue_(epilogue) {}

  /// Where the next tile's sums go, [2 * 16][kFinishPanels * 16] at most.
  int32_t* sums() { return sums_[next_]; }

  /// The sums of NP panels from `panel` on, of `rows` rows from `first` on, lie in sums().
  template <int NP>
  void take(int panel, int first, int rows) {
    const int channel = panel * kPanel;
    const int channels = min_int(tile_.channels - channel, NP * kPanel);
    int32_t* sums = sums_[next_];
    if (finishes_in_registers(epilogue_, channels, NP)) {
      if constexpr (NP == kFinishPanels) {
        waiting_ = {sums, panel, first, first + rows};
        next_ ^= 1;
      } else {
        int r = 0;
        for (; r + kRows <= rows; r += kRows) {
          finish_rows<kRows, NP>(sums + r * NP * kPanel, panel, first + r);
        }
        for (; r < rows; ++r) finish_rows<1, NP>(sums + r * NP * kPanel, panel, first + r);
      }
      return;
    }
    for (int i = 0; i < rows * NP; ++i) {
      int32_t* at = sums + i * kPanel;
      Isa::store_int(at, Isa::add(Isa::load_int(at), init(panel + i % NP)));
    }
    finish_tile<Isa>({sums, rows, NP, tile_.dst_offset + first, tile_.channel + channel, channels},
                     epilogue_);
  }

  /// Finishes up to kRows rows of those that wait.
  TORCHQ_INLINE void step() {
    if (waiting_.row + kRows <= waiting_.end) {
      finish_rows<kRows, kFinishPanels>(waiting_.sums, waiting_.panel, waiting_.row);
      waiting_.sums += kRows * kFinishPanels * kPanel;
      waiting_.row += kRows;
    }
  }

  void all() {
    while (waiting_.row + kRows <= waiting_.end) step();
    for (; waiting_.row < waiting_.end; ++waiting_.row) {
      finish_rows<1, kFinishPanels>(waiting_.sums, waiting_.panel, waiting_.row);
      waiting_.sums += kFinishPanels * kPanel;
    }
  }

 private:
  static constexpr int kRows = 4;

  typename Isa::Int init(int panel) const { return Isa::load_int(tile_.acc_init + panel * kPanel); }

  template <int MR, int NP>
  TORCHQ_INLINE void finish_rows(const int32_t* sums, int panel, int row) {
    typename Isa::Int acc[MR][NP];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
        acc[r][p] = Isa::add(Isa::load_int(sums + (r * NP + p) * kPanel), init(panel + p));
      }
    }
    const int channel = tile_.channel + panel * kPanel;
    finish_in_registers<Isa, MR, NP>(epilogue_, acc, tile_.dst_offset + row, channel);
  }

  struct Waiting {
    const int32_t* sums;
    int panel, row, end;
  };
  const GemmTile& tile_;
  const Epilogue& epilogue_;
  Waiting waiting_{};
  int next_ = 0;
  alignas(64) int32_t sums_[2][2 * kUnitRows * kFinishPanels * kPanel];
};

/// Sums of kUnits x 16 rows from `row` on, and of NP panels, to `sums` [kUnits * 16][stride].
template <class Isa, int kUnits, int NP>
TORCHQ_INLINE void multiply_tile(const GemmTile& t, int row, int64_t src_stride, int panel,
                                 int32_t* sums, int64_t stride, Finish<Isa>& finish) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < t.num_runs; ++i) {
    const GemmRun& run = t.runs[i];
    const uint8_t* src = t.src + run.src_offset + t.row_offset[row];
    const uint8_t* below = t.src + run.src_offset + t.row_offset[row + (kUnits - 1) * kUnitRows];
    const int8_t* weight = t.weight + panel * t.panel_stride + run.weight_offset;
    const int8_t* next = weight + t.panel_stride;
    constexpr int64_t kStep = kTileQuads * kPanel * kQuad;
    for (int64_t left = run.quads;;) {
      _tile_loadd(4, src, src_stride);
      _tile_loadd(6, weight, kPanel * kQuad);
      _tile_dpbusd(0, 4, 6);
      if constexpr (kUnits > 1) {
        _tile_loadd(5, below, src_stride);
        _tile_dpbusd(2, 5, 6);
      }
      if constexpr (NP > 1) {
        _tile_loadd(7, next, kPanel * kQuad);
        _tile_dpbusd(1, 4, 7);
        if constexpr (kUnits > 1) _tile_dpbusd(3, 5, 7);
      }
      finish.step();
      left -= kTileQuads;
      if (left <= 0) break;
      // The last chunk ends where the panel does.
      const int64_t step = left < kTileQuads ? left * kPanel * kQuad : kStep;
      src += kTileQuads * kQuad;
      below += kTileQuads * kQuad;
      weight += step;
      next += step;
    }
  }

  const int64_t bytes = stride * static_cast<int64_t>(sizeof(int32_t));
  _tile_stored(0, sums, bytes);
  if constexpr (NP > 1) _tile_stored(1, sums + kPanel, bytes);
  sums += kUnitRows * stride;
  if constexpr (kUnits > 1) _tile_stored(2, sums, bytes);
  if constexpr (kUnits > 1 && NP > 1) _tile_stored(3, sums + kPanel, bytes);
}

template <class Isa, int kUnits, int NP>
TORCHQ_NOINLINE void multiply_panels(const GemmTile& t, int64_t src_stride, int panel, int first,
                                     Finish<Isa>& finish) {
  int32_t* sums = finish.sums();
  constexpr int64_t kStride = NP * kPanel;
  multiply_tile<Isa, kUnits, (NP < 2 ? NP : 2)>(t, first, src_stride, panel, sums, kStride, finish);
  if constexpr (NP > 2) {
    multiply_tile<Isa, kUnits, NP - 2>(t, first, src_stride, panel + 2, sums + 2 * kPanel, kStride,
                                       finish);
  }
  finish.all();
  finish.template take<NP>(panel, first, min_int(t.rows - first, kUnits * kUnitRows));
}

template <class Isa, int kUnits>
TORCHQ_INLINE void multiply_units(const GemmTile& t, int64_t src_stride, int first,
                                  Finish<Isa>& finish) {
  int panel = 0;
  for (; panel + kFinishPanels <= t.panels; panel += kFinishPanels) {
    multiply_panels<Isa, kUnits, kFinishPanels>(t, src_stride, panel, first, finish);
  }
  switch (t.panels - panel) {
    case 3:
      return multiply_panels<Isa, kUnits, 3>(t, src_stride, panel, first, finish);
    case 2:
      return multiply_panels<Isa, kUnits, 2>(t, src_stride, panel, first, finish);
    case 1:
      return multiply_panels<Isa, kUnits, 1>(t, src_stride, panel, first, finish);
    default:
      return;
  }
}

template <class Isa>
void multiply_rows(const GemmTile& t, int64_t src_stride, const Epilogue& e) {
  Finish<Isa> finish(t, e);
  for (int first = 0; first < t.rows; first += 2 * kUnitRows) {
    if (t.rows - first > kUnitRows) {
      multiply_units<Isa, 2>(t, src_stride, first, finish);
    } else {
      multiply_units<Isa, 1>(t, src_stride, first, finish);
    }
  }
  finish.all();
}

}  // namespace
