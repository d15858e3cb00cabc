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

/// Registers 0..3 to two panels of [2 * 16][kFinishPanels * 16].
void store_tiles(int32_t* sums) {
  constexpr int64_t kBytes = kFinishPanels * kPanel * sizeof(int32_t);
  int32_t* below = sums + kUnitRows * kFinishPanels * kPanel;
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kPanel, kBytes);
  _tile_stored(2, below, kBytes);
  _tile_stored(3, below + kPanel, kBytes);
}

/// Sums on their way to the destination, a group of kFinishPanels panels at a time. They stay in
/// registers until the first products of the next tiles, where storing them costs nothing (else 14
/// cycles each), and are finished a few rows at a time between the products that follow.
template <class Isa>
class Finish {
 public:
  Finish(const GemmTile& tile, const Epilogue& epilogue)
      : tile_(tile),
        epilogue_(epilogue),
        is_plain_(!epilogue.clamp && epilogue.lo == nullptr &&
                  (epilogue.num_sums == 0 ||
                   (epilogue.num_sums == 1 && epilogue.sums[0].dtype == DType::u8))) {}

  /// The next groups are of the 2 * 16 rows from `first` on.
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
  }

  /// Where the sums in registers go: [2 * 16][kStride], of which they are two panels.
  int32_t* held() { return held_.group + held_.pair; }

  /// They have gone there, and the registers now hold panels `pair` and on of a group, its last if
  /// `panels`, the size of the group, is not 0.
  TORCHQ_INLINE void hold(int panel, int pair, int panels) {
    if (held_.panels > 0) {
      all();
      take();
    }
    held_ = {sums_[next_], &rows_[current_], panel, pair * kPanel, panels};
    if (panels > 0) next_ ^= 1;
  }

  /// Finishes some of the rows that wait.
  TORCHQ_INLINE void step() {
    if (waiting_.row + kRows > waiting_.end) return;
    if (is_plain_) {
      finish_plain(kRows);
    } else {
      finish_rows<kRows, kFinishPanels>();
    }
  }

  void all() {
    if (waiting_.row == waiting_.end) return;
    if (is_plain_) {
      finish_plain(waiting_.end - waiting_.row);
    } else {
      finish_all<kFinishPanels>();
    }
  }

  /// Behind the last group.
  void end() {
    store_tiles(held());
    hold(0, 0, 0);
    all();
  }

 private:
  static constexpr int kRows = 4;
  static constexpr int kStride = kFinishPanels * kPanel;

  struct Rows {
    int count;
    int64_t at[2 * kUnitRows + 8], dst_offset[2 * kUnitRows + 8];  // written 8 at a time
  };
  struct Held {
    int32_t* group;
    const Rows* rows;
    int panel, pair, panels;
  };
  struct Waiting {
    const int32_t* sums;
    const Rows* rows;
    int panel, row, end;
  };

  typename Isa::Int init(int panel) const { return Isa::load_int(tile_.acc_init + panel * kPanel); }

  /// The group that was held is stored.
  TORCHQ_NOINLINE void take() {
    const int channel = held_.panel * kPanel, rows = held_.rows->count;
    const int channels = min_int(tile_.channels - channel, held_.panels * kPanel);
    if (!finishes_in_registers(epilogue_, channels, held_.panels)) {
      int32_t* end = held_.group;  // rows side by side
      for (int r = 0; r < rows; ++r) {
        for (int p = 0; p < held_.panels; ++p, end += kPanel) {
          const int32_t* sums = held_.group + held_.rows->at[r] + p * kPanel;
          Isa::store_int(end, Isa::add(Isa::load_int(sums), init(held_.panel + p)));
        }
      }
      return finish_tile<Isa>({held_.group, rows, held_.panels, held_.rows->dst_offset,
                               tile_.channel + channel, channels},
                              epilogue_);
    }
    // One by one: as a whole they would be read back before they are written.
    waiting_.sums = held_.group;
    waiting_.rows = held_.rows;
    waiting_.panel = held_.panel;
    waiting_.row = 0;
    waiting_.end = rows;
    if (held_.panels == 1) finish_all<1>();
    if (held_.panels == 2) finish_all<2>();
    if (held_.panels == 3) finish_all<3>();
  }

  template <int NP>
  void finish_all() {
    while (waiting_.row + kRows <= waiting_.end) finish_rows<kRows, NP>();
    while (waiting_.row < waiting_.end) finish_rows<1, NP>();
  }

  /// finish_rows of rows that are only scaled, and at most added to one u8 source: their parameters
  /// stay in registers.
  TORCHQ_INLINE void finish_plain(int count) {
    epilogue_.num_sums == 0 ? finish_plain_rows<false>(count) : finish_plain_rows<true>(count);
  }

  template <bool kSum>
  TORCHQ_INLINE void finish_plain_rows(int count) {
    const int channel = tile_.channel + waiting_.panel * kPanel;
    typename Isa::Int initial[kFinishPanels];
    typename Isa::Float multiplier[kFinishPanels], offset[kFinishPanels], factor[kFinishPanels];
    TORCHQ_UNROLL for (int p = 0; p < kFinishPanels; ++p) {
      initial[p] = init(waiting_.panel + p);
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
    for (int r = 0; r < count; ++r) {
      typename Isa::Int acc[kFinishPanels];
      TORCHQ_UNROLL for (int p = 0; p < kFinishPanels; ++p) {
        const auto sum = Isa::add(Isa::load_int(sums + at[r] + p * kPanel), initial[p]);
        auto y = Isa::fma(Isa::to_float(sum), multiplier[p], offset[p]);
        if constexpr (kSum) {
          const auto q = Isa::load_u8(old + dst_offset[r] + p * kPanel);
          y = Isa::fma(Isa::to_float(q), factor[p], y);
        }
        acc[p] = Isa::to_int(y);
      }
      Isa::store_row(dst + dst_offset[r], acc, is_signed);
    }
  }

  template <int MR, int NP>
  TORCHQ_NOINLINE void finish_rows() {
    typename Isa::Int acc[MR][NP];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      const int32_t* sums = waiting_.sums + waiting_.rows->at[waiting_.row + r];
      TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
        acc[r][p] = Isa::add(Isa::load_int(sums + p * kPanel), init(waiting_.panel + p));
      }
    }
    const int channel = tile_.channel + waiting_.panel * kPanel;
    finish_in_registers<Isa, MR, NP>(epilogue_, acc, waiting_.rows->dst_offset + waiting_.row,
                                     channel);
    waiting_.row += MR;
  }

  const GemmTile& tile_;
  const Epilogue& epilogue_;
  const bool is_plain_;
  alignas(64) int32_t sums_[2][2 * kUnitRows * kStride];
  Rows rows_[2] = {};
  Held held_ = {sums_[1], rows_, 0, 0, 0};
  Waiting waiting_ = {sums_[1], rows_, 0, 0, 0};
  int current_ = 0, next_ = 0;
};

/// Asks for a part of the next group's weights that are as far in it as `weight`: as much as the
/// rows from `row` on are of all rows, so that memory is busy while all of them meet this group.
template <int NP>
TORCHQ_INLINE void fetch_weights(const int8_t* weight, const GemmTile& t, int row) {
  constexpr int kLine = 64;
  const int blocks = (t.rows + 2 * kUnitRows - 1) / (2 * kUnitRows), block = row / (2 * kUnitRows);
  const int8_t* next = weight + kFinishPanels * t.panel_stride;
  const int end = kTileBytes / kLine * (block + 1) / blocks * kLine;
  for (int at = kTileBytes / kLine * block / blocks * kLine; at < end; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
    if constexpr (NP > 1) {
      _mm_prefetch(reinterpret_cast<const char*>(next + t.panel_stride + at), _MM_HINT_T1);
    }
  }
}

/// Sums of kUnits x 16 rows from `row` on, and of NP panels: `pair` and on of the group that begins
/// with `panel`, which has `panels` if they are its last, else 0. They stay in registers; those
/// there before are stored.
///
/// Weights do not pass through L1, where they would displace the rows that meet all of them
/// (measured at K = 1024: 104 cycles for 4 products, without 72).
template <class Isa, int kUnits, int NP>
TORCHQ_NOINLINE void multiply_tile(const GemmTile& t, const UnitRows& rows, int row, int panel,
                                   int pair, int panels, Finish<Isa>& finish) {
  int32_t* held = finish.held();
  constexpr int64_t kBytes = kFinishPanels * kPanel * sizeof(int32_t);
  int32_t* held_below = held + kUnitRows * kFinishPanels * kPanel;
  const bool fetches = panel + pair + kFinishPanels < rows.far_panels;
  bool first = true;
  for (int i = 0; i < t.num_runs; ++i) {
    const GemmRun& run = t.runs[i];
    const uint8_t* src = t.src + run.src_offset + t.row_offset[row];
    const uint8_t* below = t.src + run.src_offset + t.row_offset[row + (kUnits - 1) * kUnitRows];
    const int8_t* weight = t.weight + (panel + pair) * t.panel_stride + run.weight_offset;
    const int8_t* next = weight + t.panel_stride;
    for (int64_t left = run.quads;;) {
      _tile_loadd(4, src, rows.stride);
      _tile_stream_loadd(6, weight, kPanel * kQuad);
      if (first) {
        _tile_stored(0, held, kBytes);
        _tile_zero(0);
      }
      _tile_dpbusd(0, 4, 6);
      if constexpr (kUnits > 1) _tile_loadd(5, below, rows.stride);
      if (first) {
        _tile_stored(2, held_below, kBytes);
        if constexpr (kUnits > 1) _tile_zero(2);
      }
      if constexpr (kUnits > 1) _tile_dpbusd(2, 5, 6);
      if constexpr (NP > 1) _tile_stream_loadd(7, next, kPanel * kQuad);
      if (first) {
        _tile_stored(1, held + kPanel, kBytes);
        _tile_stored(3, held_below + kPanel, kBytes);
        if constexpr (NP > 1) _tile_zero(1);
        if constexpr (kUnits > 1 && NP > 1) _tile_zero(3);
        finish.hold(panel, pair, panels);
        first = false;
      }
      if constexpr (NP > 1) {
        _tile_dpbusd(1, 4, 7);
        if constexpr (kUnits > 1) _tile_dpbusd(3, 5, 7);
      }
      if (fetches) fetch_weights<NP>(weight, t, row);
      finish.step();
      left -= kTileQuads;
      if (left <= 0) break;
      const int64_t step = min_int(left, kTileQuads) * kQuad;
      if (left < kTileQuads && rows.tails != nullptr) {
        src += step;
        below += step;
        weight = rows.tails + ((panel + pair) * t.num_runs + i) * kTileBytes;
        next = weight + t.num_runs * kTileBytes;
      } else {  // the last chunk ends where the panel does
        src += kTileQuads * kQuad;
        below += kTileQuads * kQuad;
        weight += step * kPanel;
        next += step * kPanel;
      }
    }
  }
}

/// Panels from `begin` on, before `end`.
template <class Isa, int kUnits>
TORCHQ_INLINE void multiply_units(const GemmTile& t, const UnitRows& rows, int first, int begin,
                                  int end, Finish<Isa>& finish) {
  finish.begin_rows(first);
  for (int panel = begin; panel < end; panel += kFinishPanels) {
    const int panels = min_int(t.panels - panel, kFinishPanels);
    for (int pair = 0; pair < panels; pair += 2) {
      const int group = pair + 2 >= panels ? panels : 0;
      if (panels - pair > 1) {
        multiply_tile<Isa, kUnits, 2>(t, rows, first, panel, pair, group, finish);
      } else {
        multiply_tile<Isa, kUnits, 1>(t, rows, first, panel, pair, group, finish);
      }
    }
  }
}

/// Rows outermost, which stay in L1 while weights come from L2. Far weights instead meet all rows
/// group by group, since with few rows it is their way that takes the time (measured: ResNet-50 8.6
/// to 7.9 ms, its 1x1 of 512 to 2048 channels with a sum 175 to 125 us).
template <class Isa>
void multiply_rows(const GemmTile& t, const UnitRows& rows, const Epilogue& e) {
  Finish<Isa> finish(t, e);
  const int step = rows.far_panels > 0 ? kFinishPanels : t.panels;
  for (int panel = 0; panel < t.panels; panel += step) {
    for (int first = 0; first < t.rows; first += 2 * kUnitRows) {
      if (t.rows - first > kUnitRows) {
        multiply_units<Isa, 2>(t, rows, first, panel, panel + step, finish);
      } else {
        multiply_units<Isa, 1>(t, rows, first, panel, panel + step, finish);
      }
    }
  }
  finish.end();
}

}  // namespace
