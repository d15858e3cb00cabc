// SPDX-License-Identifier: Apache-2.0
// Rows times packed panels on AMX (contract: MatrixUnit in matrix_unit.h).
//
// A tile register holds 16 rows of 64 bytes. 16 quads of a packed panel are one, 64 bytes of 16
// source rows another, and their product, 16 rows of 16 sums, a third. Registers 0..3 sum 2 x 16
// rows times 2 panels; 4 and 5 hold rows, 6 and 7 weights: four loads for four products, which the
// loads of two would not keep busy.
#pragma once

#include <immintrin.h>

#include "gemm.h"
#include "matrix_gather.h"

namespace {

constexpr int kTileBytes = kTileQuads * kPanel * kQuad;
/// Panels whose sums a tile's registers hold.
constexpr int kPair = 2;
/// Panels whose far weights meet all rows before the next ones do.
constexpr int kFarPanels = 4;

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

/// Sums on their way to the destination. They stay in registers until the first products of the
/// next tile, where storing them costs nothing (else 14 cycles each), and are finished a few rows
/// at a time between the products that follow. While those run, only one port converts and
/// multiplies floats: 192 cycles for 2 x 16 rows of two panels.
template <class Isa>
class Finish {
 public:
  /// `chunks`: of K, in each tile.
  Finish(const GemmTile& tile, const Epilogue& epilogue, int64_t chunks)
      : tile_(tile),
        epilogue_(epilogue),
        is_plain_(!epilogue.clamp && epilogue.lo == nullptr &&
                  (epilogue.num_sums == 0 ||
                   (epilogue.num_sums == 1 && epilogue.sums[0].dtype == DType::u8))),
        rows_at_once_(chunks < 4   ? 4 * kRows
                      : chunks < 8 ? 2 * kRows
                                   : kRows) {}

  /// The next tiles are of the 2 * 16 rows from `first` on.
  void begin_rows(int first) {
    all();
    Rows& rows = rows_[current_ ^= 1];
    const int count = min_int(tile_.rows - first, 2 * kUnitRows);
    __m512i at = _mm512_setr_epi64(0, kStride, 2 * kStride, 3 * kStride, 4 * kStride, 5 * kStride,
                                   6 * kStride, 7 * kStride);
    rows.count = 0;
    for (int r = 0; r < count; r += 8) {
      const __mmask8 exist = static_cast<__mmask8>(0xff >> (8 - min_int(count - r, 8)));
      const __m512i dst_offset = _mm512_maskz_loadu_epi64(exist, tile_.dst_offset + first + r);
      const __mmask8 kept = _mm512_mask_cmpge_epi64_mask(exist, dst_offset, _mm512_setzero_si512());
      _mm512_storeu_si512(rows.at + rows.count, _mm512_maskz_compress_epi64(kept, at));
      _mm512_storeu_si512(rows.dst_offset + rows.count,
                          _mm512_maskz_compress_epi64(kept, dst_offset));
      rows.count += __builtin_popcount(kept);
      at = _mm512_add_epi64(at, _mm512_set1_epi64(8 * kStride));
    }
    rows.is_dense = rows.count == count;
    rows.is_low = count > kUnitRows;
  }

  /// Registers 0 and 1, two panels of the upper 16 rows, and 2 and 3, of the lower, to where they
  /// wait: `[2 * 16][kStride]`.
  int32_t* held() { return sums_[next_]; }
  /// Whether the lower rows have sums.
  bool holds_lower() const { return held_.panels > 0 && held_.rows->is_low; }

  /// They have gone there, and the registers now hold `panels` panels from `panel` on.
  TORCHQ_INLINE void hold(int panel, int panels) {
    if (held_.panels > 0) {
      all();
      take();
    }
    next_ ^= 1;
    held_ = {sums_[next_], &rows_[current_], panel, panels};
  }

  /// Finishes some of the rows that wait.
  TORCHQ_INLINE void step() {
    if (waiting_.row < waiting_.end) finish(min_int(waiting_.end - waiting_.row, rows_at_once_));
  }

  void all() {
    if (waiting_.row < waiting_.end) finish(waiting_.end - waiting_.row);
  }

  /// Behind the last tile.
  void end() {
    store_tiles(held());
    hold(0, 0);
    all();
  }

 private:
  static constexpr int kRows = 4;
  static constexpr int kStride = kPair * kPanel;

  struct Rows {
    int count;
    bool is_dense, is_low;  // all rows are kept; there are more than 16
    int64_t at[2 * kUnitRows + 8], dst_offset[2 * kUnitRows + 8];  // written 8 at a time
  };
  struct Held {
    int32_t* sums;
    const Rows* rows;
    int panel, panels;
  };
  struct Waiting {
    const int32_t* sums;
    const Rows* rows;
    int panel, panels, row, end;
  };

  static void store_tiles(int32_t* sums) {
    constexpr int64_t kBytes = kStride * sizeof(int32_t);
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + kPanel, kBytes);
    _tile_stored(2, sums + kUnitRows * kStride, kBytes);
    _tile_stored(3, sums + kUnitRows * kStride + kPanel, kBytes);
  }

  /// The tile that was held is stored.
  TORCHQ_NOINLINE void take() {
    const int channel = held_.panel * kPanel, rows = held_.rows->count;
    const int channels = min_int(tile_.channels - channel, held_.panels * kPanel);
    if (finishes_in_registers(epilogue_, channels, held_.panels)) {
      waiting_ = {held_.sums, held_.rows, held_.panel, held_.panels, 0, rows};
      return;
    }
    if (!held_.rows->is_dense || held_.panels < kPair) {  // rows side by side
      int32_t* end = held_.sums;
      for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < held_.panels; ++p, end += kPanel) {
          Isa::store_int(end, Isa::load_int(held_.sums + held_.rows->at[r] + p * kPanel));
        }
      }
    }
    finish_tile<Isa>(
        {held_.sums, rows, held_.panels, held_.rows->dst_offset, tile_.channel + channel, channels},
        epilogue_);
  }

  TORCHQ_INLINE void finish(int count) {
    if (!is_plain_ || waiting_.panels < kPair) return finish_any(count);
    epilogue_.num_sums == 0 ? finish_plain<false>(count) : finish_plain<true>(count);
  }

  /// Rows that are only scaled, and at most added to one u8 source: two of them fill a vector.
  template <bool kSum>
  TORCHQ_NOINLINE void finish_plain(int count) {
    const int channel = tile_.channel + waiting_.panel * kPanel;
    typename Isa::Float multiplier[kPair], offset[kPair], factor[kPair];
    TORCHQ_UNROLL for (int p = 0; p < kPair; ++p) {
      multiplier[p] = Isa::load(epilogue_.multiplier + channel + p * kPanel);
      offset[p] = Isa::load(epilogue_.offset + channel + p * kPanel);
      if constexpr (kSum) factor[p] = Isa::load(epilogue_.sums[0].scale + channel + p * kPanel);
    }
    const uint8_t* old = nullptr;
    if constexpr (kSum) old = static_cast<const uint8_t*>(epilogue_.sums[0].data) + channel;
    uint8_t* dst = static_cast<uint8_t*>(epilogue_.dst) + channel;
    const bool is_signed = epilogue_.dst_dtype == DType::s8;
    const int32_t* sums = waiting_.sums;
    const int64_t* at = waiting_.rows->at + waiting_.row;
    const int64_t* dst_offset = waiting_.rows->dst_offset + waiting_.row;
    waiting_.row += count;
    const auto row = [&](int r, typename Isa::Int* q) {
      TORCHQ_UNROLL for (int p = 0; p < kPair; ++p) {
        const auto sum = Isa::load_int(sums + at[r] + p * kPanel);
        auto y = Isa::fma(Isa::to_float(sum), multiplier[p], offset[p]);
        if constexpr (kSum) {
          const auto x = Isa::load_u8(old + dst_offset[r] + p * kPanel);
          y = Isa::fma(Isa::to_float(x), factor[p], y);
        }
        q[p] = Isa::to_int(y);
      }
    };
    for (int r = 0; r < count; r += 2) {
      const int second = min_int(r + 1, count - 1);
      typename Isa::Int q[2 * kPair];
      row(r, q);
      row(second, q + kPair);
      const __m512i bytes = Isa::pack_row(q, is_signed);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + dst_offset[r]),
                          _mm512_castsi512_si256(bytes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + dst_offset[second]),
                          _mm512_extracti64x4_epi64(bytes, 1));
    }
  }

  TORCHQ_NOINLINE void finish_any(int count) {
    for (; count >= kRows; count -= kRows) finish_rows<kRows>();
    for (; count > 0; --count) finish_rows<1>();
  }

  template <int MR>
  TORCHQ_INLINE void finish_rows() {
    if (waiting_.panels == kPair) {
      finish_rows<MR, kPair>();
    } else {
      finish_rows<MR, 1>();
    }
    waiting_.row += MR;
  }

  template <int MR, int NP>
  TORCHQ_INLINE void finish_rows() {
    typename Isa::Int acc[MR][NP];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      const int32_t* sums = waiting_.sums + waiting_.rows->at[waiting_.row + r];
      TORCHQ_UNROLL for (int p = 0; p < NP; ++p) acc[r][p] = Isa::load_int(sums + p * kPanel);
    }
    finish_in_registers<Isa, MR, NP>(epilogue_, acc, waiting_.rows->dst_offset + waiting_.row,
                                     tile_.channel + waiting_.panel * kPanel);
  }

  const GemmTile& tile_;
  const Epilogue& epilogue_;
  const bool is_plain_;
  const int rows_at_once_;
  alignas(64) int32_t sums_[2][2 * kUnitRows * kStride];
  Rows rows_[2] = {};
  Held held_ = {sums_[1], rows_, 0, 0};
  Waiting waiting_ = {sums_[1], rows_, 0, 0, 0, 0};
  int current_ = 0, next_ = 0;
};

/// The part [begin, end) of each chunk's bytes of weights that a block of rows asks for, of the
/// panels `ahead`: as much as the block is of all rows, so that memory is busy while all of them
/// meet this group. Nothing from `end_panel` on.
struct Fetch {
  int64_t ahead;
  int end_panel, begin, end;
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
///
/// Weights do not pass through L1, where they would displace the rows that meet all of them
/// (measured at K = 1024: 104 cycles for 4 products, without 72).
template <class Isa, int kUnits, int NP>
TORCHQ_NOINLINE void multiply_tile(const GemmTile& t, const UnitRows& rows, int row, int panel,
                                   const Fetch& fetch, Finish<Isa>& finish) {
  const int64_t stride = rows.stride;
  const uint8_t *src, *below;
  const int8_t *weight, *next;
  const bool fetches = panel < fetch.end_panel;
  const auto multiply = [&](bool is_first) __attribute__((always_inline)) {
    constexpr int64_t kBytes = kPair * kPanel * sizeof(int32_t);
    const int32_t* init = t.acc_init + panel * kPanel;
    int32_t* held = finish.held();
    _tile_loadd(4, src, stride);
    _tile_stream_loadd(6, weight, kPanel * kQuad);
    if (is_first) {  // all rows begin alike
      _tile_stored(0, held, kBytes);
      _tile_loadd(0, init, 0);
    }
    _tile_dpbusd(0, 4, 6);
    if constexpr (kUnits > 1) _tile_loadd(5, below, stride);
    if (is_first) {
      if (finish.holds_lower()) {
        _tile_stored(2, held + kUnitRows * kPair * kPanel, kBytes);
        _tile_stored(3, held + kUnitRows * kPair * kPanel + kPanel, kBytes);
      }
      if constexpr (kUnits > 1) _tile_loadd(2, init, 0);
    }
    if constexpr (kUnits > 1) _tile_dpbusd(2, 5, 6);
    if constexpr (NP > 1) _tile_stream_loadd(7, next, kPanel * kQuad);
    if (is_first) {
      _tile_stored(1, held + kPanel, kBytes);
      if constexpr (NP > 1) _tile_loadd(1, init + kPanel, 0);
      if constexpr (kUnits > 1 && NP > 1) _tile_loadd(3, init + kPanel, 0);
    }
    if constexpr (NP > 1) _tile_dpbusd(1, 4, 7);
    if constexpr (kUnits > 1 && NP > 1) _tile_dpbusd(3, 5, 7);
    if (fetches) fetch_weights<NP>(weight, next, fetch);
    if (is_first) finish.hold(panel, NP);
    finish.step();
  };
  for (int i = 0; i < t.num_runs; ++i) {
    const GemmRun& run = t.runs[i];
    src = t.src + run.src_offset + t.row_offset[row];
    below = t.src + run.src_offset + t.row_offset[row + (kUnits - 1) * kUnitRows];
    weight = t.weight + panel * t.panel_stride + run.weight_offset;
    next = weight + t.panel_stride;
    int64_t left = run.quads;
    i == 0 ? multiply(true) : multiply(false);
    while ((left -= rows.chunk_quads) > 0) {
      const int64_t step = min_int(left, rows.chunk_quads) * kQuad;
      if (left < rows.chunk_quads && rows.tails != nullptr) {
        src += step;
        below += step;
        weight = rows.tails + (panel * t.num_runs + i) * kTileBytes;
        next = weight + t.num_runs * kTileBytes;
      } else {  // the last chunk ends where the panel does
        src += rows.chunk_quads * kQuad;
        below += rows.chunk_quads * kQuad;
        weight += step * kPanel;
        next += step * kPanel;
      }
      multiply(false);
    }
  }
}

/// Panels from `begin` on, before `end`.
template <class Isa, int kUnits>
TORCHQ_INLINE void multiply_units(const GemmTile& t, const UnitRows& rows, int first, int begin,
                                  int end, Finish<Isa>& finish) {
  constexpr int kLines = kTileBytes / 64;
  const int blocks = (t.rows + 2 * kUnitRows - 1) / (2 * kUnitRows),
            block = first / (2 * kUnitRows);
  const Fetch fetch = {kFarPanels * t.panel_stride, static_cast<int>(rows.far_panels) - kFarPanels,
                       kLines * block / blocks * 64, kLines * (block + 1) / blocks * 64};
  finish.begin_rows(first);
  int panel = begin;
  for (; panel + 1 < end; panel += kPair) {
    multiply_tile<Isa, kUnits, kPair>(t, rows, first, panel, fetch, finish);
  }
  if (panel < end) multiply_tile<Isa, kUnits, 1>(t, rows, first, panel, fetch, finish);
}

/// Rows outermost, which stay in L1 while weights come from L2. Far weights instead meet all rows
/// group by group, since with few rows it is their way that takes the time (measured: ResNet-50 8.6
/// to 7.9 ms, its 1x1 of 512 to 2048 channels with a sum 175 to 125 us).
template <class Isa>
void multiply_rows(const GemmTile& t, const UnitRows& rows, const Epilogue& e) {
  const int64_t chunks = t.num_runs * ((t.runs[0].quads + rows.chunk_quads - 1) / rows.chunk_quads);
  Finish<Isa> finish(t, e, chunks);
  const int step = rows.far_panels > 0 ? kFarPanels : t.panels;
  for (int panel = 0; panel < t.panels; panel += step) {
    const int end = min_int(panel + step, t.panels);
    for (int first = 0; first < t.rows; first += 2 * kUnitRows) {
      if (t.rows - first > kUnitRows) {
        multiply_units<Isa, 2>(t, rows, first, panel, end, finish);
      } else {
        multiply_units<Isa, 1>(t, rows, first, panel, end, finish);
      }
    }
  }
  finish.end();
}

}  // namespace
