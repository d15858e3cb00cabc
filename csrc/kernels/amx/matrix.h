// SPDX-License-Identifier: Apache-2.0
// Rows times packed panels on AMX (contract: MatrixUnit in amx/contract.h).
//
// A tile register holds 16 rows of 64 bytes. 16 quads of a packed panel are one, 64 bytes of 16
// source rows another, and their product, 16 rows of 16 sums, a third. Registers 0..3 sum 2 x 16
// rows times 2 panels; 4 and 5 hold rows, 6 and 7 weights: four loads for four products, which the
// loads of two would not keep busy.
#pragma once

#include <immintrin.h>

#include "kernels/amx/matrix_epilogue.h"
#include "kernels/amx/matrix_gather.h"
#include "kernels/cpu_tuning.h"

namespace {

constexpr int kTileBytes = kChunkQuads * kPanel * kQuad;
/// Panels of far weights that meet all rows before the next panels.
constexpr int kFarPanels = 4;

/// Nearest cache that holds the weights: L1, L2, or neither.
enum class NearestCache { l1, l2, none };

/// Operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// LDTILECFG takes about 200 cycles: once per run of tiles, not per tile.
void begin_tiles(int64_t chunk_quads) {
  const int chunk = static_cast<int>(chunk_quads);
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

/// Weights that one block of rows prefetches: bytes [begin, end) of each chunk, in the panels
/// `ahead` bytes further on. The share equals the block's share of all rows, so that memory stays
/// busy while all rows meet this group.
struct Fetch {
  int64_t ahead;
  int begin, end;
};

template <int NP>
TORCHQ_INLINE void fetch_weights(const int8_t* weight, const int8_t* next, const Fetch& fetch) {
  constexpr int kLine = 64;
  for (int64_t at = fetch.ahead + fetch.begin; at < fetch.ahead + fetch.end; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(weight + at), _MM_HINT_T1);
    if constexpr (NP > 1) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
  }
}

/// Sums of kUnits x 16 rows from `row` on, and of NP panels from `panel` on. They stay in
/// registers; those there before are stored.
template <class Isa, int kUnits, int NP, NearestCache kCache>
TORCHQ_NOINLINE void multiply_tile(const GemmTile& t, const UnitRows& rows, int row, int panel,
                                   const Fetch& fetch, MatrixEpilogue<Isa>& epilogue) {
  constexpr int64_t kSumBytes = kPair * kPanel * sizeof(int32_t);
  const int64_t stride = rows.stride;
  const uint8_t* const upper = t.src + t.row_offset[row];
  const int64_t lower = t.row_offset[row + (kUnits - 1) * kUnitRows] - t.row_offset[row];
  bool is_first = true;
  for (int i = 0; i < rows.num_runs; ++i) {
    const UnitRun& run = rows.runs[i];
    const uint8_t* src = upper + run.src_offset;
    const int8_t* weight = run.weight + (rows.first_panel + panel) * run.panel_stride;
    const int8_t* next = weight + run.panel_stride;
    for (int left = run.chunks; left > 0; --left) {
      const int32_t* init = t.acc_init + panel * kPanel;  // all rows begin alike
      int32_t* held = epilogue.held();
      _tile_loadd(4, src, stride);
      if constexpr (kCache == NearestCache::l1) {
        _tile_loadd(6, weight, kPanel * kQuad);
      } else {
        _tile_stream_loadd(6, weight, kPanel * kQuad);
      }
      if (is_first) {
        _tile_stored(0, held, kSumBytes);
        _tile_loadd(0, init, 0);
      }
      _tile_dpbusd(0, 4, 6);
      if constexpr (kUnits > 1) _tile_loadd(5, src + lower, stride);
      if (is_first) {
        if (epilogue.holds_lower()) {
          _tile_stored(2, held + kUnitRows * kPair * kPanel, kSumBytes);
          _tile_stored(3, held + kUnitRows * kPair * kPanel + kPanel, kSumBytes);
        }
        if constexpr (kUnits > 1) _tile_loadd(2, init, 0);
      }
      if constexpr (kUnits > 1) _tile_dpbusd(2, 5, 6);
      if constexpr (NP > 1 && kCache == NearestCache::l1) {
        _tile_loadd(7, next, kPanel * kQuad);
      } else if constexpr (NP > 1) {
        _tile_stream_loadd(7, next, kPanel * kQuad);
      }
      if (is_first) {
        _tile_stored(1, held + kPanel, kSumBytes);
        if constexpr (NP > 1) _tile_loadd(1, init + kPanel, 0);
        if constexpr (kUnits > 1 && NP > 1) _tile_loadd(3, init + kPanel, 0);
      }
      if constexpr (NP > 1) _tile_dpbusd(1, 4, 7);
      if constexpr (kUnits > 1 && NP > 1) _tile_dpbusd(3, 5, 7);
      if constexpr (kCache == NearestCache::none) fetch_weights<NP>(weight, next, fetch);
      src += rows.chunk_bytes;
      weight += rows.chunk_bytes * kPanel;
      next += rows.chunk_bytes * kPanel;
      if (is_first) epilogue.hold(panel, NP);
      is_first = false;
      epilogue.step();
    }
  }
}

/// Panels from `begin` on, before `end`.
template <class Isa, int kUnits>
TORCHQ_INLINE void multiply_units(const GemmTile& t, const UnitRows& rows, int first, int begin,
                                  int end, bool is_near, MatrixEpilogue<Isa>& epilogue) {
  constexpr int kLines = kTileBytes / 64;
  const int blocks = (t.rows + 2 * kUnitRows - 1) / (2 * kUnitRows),
            block = first / (2 * kUnitRows);
  const Fetch fetch = {kFarPanels * rows.runs[0].panel_stride, kLines * block / blocks * 64,
                       kLines * (block + 1) / blocks * 64};
  const bool is_far = begin < rows.far_panels - kFarPanels;
  epilogue.begin_rows(first);
  int panel = begin;
  const auto multiply = is_near  ? &multiply_tile<Isa, kUnits, kPair, NearestCache::l1>
                        : is_far ? &multiply_tile<Isa, kUnits, kPair, NearestCache::none>
                                 : &multiply_tile<Isa, kUnits, kPair, NearestCache::l2>;
  const auto multiply_last = &multiply_tile<Isa, kUnits, 1, NearestCache::l2>;
  for (; panel + 1 < end; panel += kPair) multiply(t, rows, first, panel, fetch, epilogue);
  if (panel < end) multiply_last(t, rows, first, panel, fetch, epilogue);
}

/// Rows outermost, which stay in L1 while weights come from L2. Far weights instead meet all rows
/// group by group, since with few rows it is their way that takes the time (measured: ResNet-50 8.6
/// to 7.9 ms, its 1x1 of 512 to 2048 channels with a sum 175 to 125 us).
template <class Isa>
void multiply_rows(const GemmTile& t, const UnitRows& rows, const Epilogue& e) {
  int64_t chunks = 0;
  for (int i = 0; i < rows.num_runs; ++i) chunks += rows.runs[i].chunks;
  MatrixEpilogue<Isa> epilogue(t, e, chunks);
  const bool is_near = t.panels * chunks * kTileBytes <= tuning::kNearWeightBytes;
  const int step = rows.far_panels > 0 ? kFarPanels : t.panels;
  for (int panel = 0; panel < t.panels; panel += step) {
    const int end = min_int(panel + step, t.panels);
    for (int first = 0; first < t.rows; first += 2 * kUnitRows) {
      if (t.rows - first > kUnitRows) {
        multiply_units<Isa, 2>(t, rows, first, panel, end, is_near, epilogue);
      } else {
        multiply_units<Isa, 1>(t, rows, first, panel, end, is_near, epilogue);
      }
    }
  }
  epilogue.end();
}

}  // namespace
