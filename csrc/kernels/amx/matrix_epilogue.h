// SPDX-License-Identifier: Apache-2.0
// Epilogue of a matrix unit's sums (matrix.h): tile registers, then memory, then dst.
#pragma once

#include <immintrin.h>

#include "kernels/amx/contract.h"
#include "kernels/epilogue/register_epilogue.h"

namespace {

/// Panels whose sums a tile's registers hold.
constexpr int kPair = 2;

/// Position of the sums of each row of a tile.
template <int kStride>
struct SumsAt {
  int64_t row[2 * kUnitRows];
  constexpr SumsAt() : row{} {
    for (int r = 0; r < 2 * kUnitRows; ++r) row[r] = r * kStride;
  }
};

/// Software-pipelined epilogue. Sums stay in tile registers until the first products of the next
/// tile, where storing them is free (else 14 cycles each). The epilogue then runs a few rows at a
/// time between the products that follow. Meanwhile only one port converts and multiplies floats:
/// 192 cycles for 2 x 16 rows of two panels.
///
/// Loads beside those of tiles cost more than their instructions, perhaps because a tile takes 16
/// of the load buffer's 192 entries (not proven by counters). Hence few steps of many rows (1x1 of
/// 512 to 128 channels, 8 rows in place of 4: 33.6 to 31.3 us), and computed instead of loaded
/// addresses for evenly spaced rows.
template <class Isa>
class MatrixEpilogue {
 public:
  /// `chunks`: of K, in each tile.
  MatrixEpilogue(const GemmTile& tile, const Epilogue& epilogue, int64_t chunks)
      : tile_(tile),
        epilogue_(epilogue),
        is_plain_(!epilogue.clamp && epilogue.lo == nullptr &&
                  (epilogue.num_sums == 0 ||
                   (epilogue.num_sums == 1 && epilogue.sums[0].dtype == DType::u8))),
        rows_at_once_(chunks == 1  ? 0
                      : chunks < 4 ? 4 * kRows
                                   : 2 * kRows) {}

  /// The next tiles are of the 2 * 16 rows from `first` on.
  void begin_rows(int first) {
    const int64_t* dst_offset = tile_.dst_offset + first;
    const int count = min_int(tile_.rows - first, 2 * kUnitRows);
    Rows& rows = rows_[current_ = (current_ + 1) % kRowsAtOnce];
    rows.is_low = count > kUnitRows;
    rows.count = count;
    rows.at = kSumsAt.row;
    rows.dst_offset = dst_offset;
    rows.is_even = count % 8 == 0 && dst_offset[0] >= 0 && are_even(dst_offset, count);
    rows.is_dense = rows.is_even || keep(rows);
  }

  /// Memory for the tile in the registers: 0 and 1 are two panels of the upper 16 rows, 2 and 3 of
  /// the lower; `[2 * 16][kStride]`.
  int32_t* held() { return sums_[next_]; }
  /// Returns true if the tile has lower rows.
  bool holds_lower() const { return held_panels_ > 0 && held_rows_->is_low; }

  /// Takes over the stored tile; the registers now hold `panels` panels from `panel` on.
  TORCHQ_INLINE void hold(int panel, int panels) {
    if (held_panels_ > 0) {
      all();
      take();
    }
    next_ ^= 1;
    held_rows_ = &rows_[current_];
    held_panel_ = panel;
    held_panels_ = panels;
  }

  /// Runs the epilogue of some waiting rows; of none where the only chunk has just stored them (1x1
  /// of 64 to 256 channels with a sum: 138 to 125 us).
  TORCHQ_INLINE void step() {
    if (row_ < end_ && rows_at_once_ > 0) run_rows_(*this, rows_at_once_);
  }

  void all() {
    if (row_ < end_) run_rows_(*this, end_ - row_);
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
  static constexpr SumsAt<kStride> kSumsAt{};

  /// Row sets in use: of the waiting tile, of the tile in the registers, and of the next one.
  static constexpr int kRowsAtOnce = 3;

  struct Rows {
    int count;
    bool is_dense, is_low;           // all rows are kept; there are more than 16
    bool is_even;                    // dense, of even number, and evenly spaced in dst
    const int64_t *at, *dst_offset;  // of sums and results; where not is_even, the last ones twice
    int64_t kept_at[2 * kUnitRows + 8], kept_dst_offset[2 * kUnitRows + 8];  // written 8 at a time
  };

  static TORCHQ_INLINE bool are_even(const int64_t* dst_offset, int count) {
    const int64_t step = dst_offset[1] - dst_offset[0];
    const __m512i each = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    __m512i even = _mm512_add_epi64(_mm512_set1_epi64(dst_offset[0]),
                                    _mm512_mullo_epi64(_mm512_set1_epi64(step), each));
    __mmask8 different = 0;
    for (int r = 0; r < count; r += 8) {
      different |= _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(dst_offset + r), even);
      even = _mm512_add_epi64(even, _mm512_set1_epi64(8 * step));
    }
    return different == 0;
  }

  /// Drops rows that are not stored; returns true if none was dropped.
  static TORCHQ_NOINLINE bool keep(Rows& rows) {
    const int count = rows.count;
    int kept = 0;
    for (int r = 0; r < count; r += 8) {
      const __mmask8 exist = static_cast<__mmask8>(0xff >> (8 - min_int(count - r, 8)));
      const __m512i at = _mm512_maskz_loadu_epi64(exist, kSumsAt.row + r);
      const __m512i to = _mm512_maskz_loadu_epi64(exist, rows.dst_offset + r);
      const __mmask8 is_kept = _mm512_mask_cmpge_epi64_mask(exist, to, _mm512_setzero_si512());
      _mm512_storeu_si512(rows.kept_at + kept, _mm512_maskz_compress_epi64(is_kept, at));
      _mm512_storeu_si512(rows.kept_dst_offset + kept, _mm512_maskz_compress_epi64(is_kept, to));
      kept += __builtin_popcount(is_kept);
    }
    if (kept > 0) {
      rows.kept_at[kept] = rows.kept_at[kept - 1];
      rows.kept_dst_offset[kept] = rows.kept_dst_offset[kept - 1];
    }
    rows.at = rows.kept_at;
    rows.dst_offset = rows.kept_dst_offset;
    rows.count = kept;
    return kept == count;
  }

  static void store_tiles(int32_t* sums) {
    constexpr int64_t kBytes = kStride * sizeof(int32_t);
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + kPanel, kBytes);
    _tile_stored(2, sums + kUnitRows * kStride, kBytes);
    _tile_stored(3, sums + kUnitRows * kStride + kPanel, kBytes);
  }

  /// Makes the stored tile the waiting one, or runs its epilogue at once.
  TORCHQ_NOINLINE void take() {
    const int channel = held_panel_ * kPanel;
    const int channels = min_int(tile_.channels - channel, held_panels_ * kPanel);
    const Rows& rows = *held_rows_;
    waiting_ = sums_[next_];
    if (fits_register_epilogue(epilogue_, channels, held_panels_)) {
      channel_ = tile_.channel + channel;
      waiting_rows_ = held_rows_;
      panels_ = held_panels_;
      row_ = 0;
      end_ = rows.count;
      if (!is_plain_ || held_panels_ < kPair) {
        run_rows_ = &any_rows;
      } else if (epilogue_.num_sums == 0) {
        run_rows_ = rows.is_even ? &plain_rows<false, true> : &plain_rows<false, false>;
      } else {
        run_rows_ = rows.is_even ? &plain_rows<true, true> : &plain_rows<true, false>;
      }
      return;
    }
    int32_t* const sums = sums_[next_];
    if (!rows.is_dense || held_panels_ < kPair) {  // rows side by side
      int32_t* end = sums;
      for (int r = 0; r < rows.count; ++r) {
        for (int p = 0; p < held_panels_; ++p, end += kPanel) {
          Isa::store_int(end, Isa::load_int(sums + rows.at[r] + p * kPanel));
        }
      }
    }
    memory_epilogue<Isa>(
        {sums, rows.count, held_panels_, rows.dst_offset, tile_.channel + channel, channels},
        epilogue_);
  }

  /// Epilogue of rows that are only scaled, and at most added to one u8 source: two rows fill a
  /// vector.
  template <bool kSum, bool kEven>
  static void plain_rows(MatrixEpilogue& f, int count) {
    const Epilogue& epilogue = f.epilogue_;
    const int channel = f.channel_, first = f.row_;
    const int end = min_int(first + count, f.end_);
    typename Isa::Float multiplier[kPair], offset[kPair], factor[kPair];
    TORCHQ_UNROLL for (int p = 0; p < kPair; ++p) {
      multiplier[p] = Isa::load(epilogue.multiplier + channel + p * kPanel);
      offset[p] = Isa::load(epilogue.offset + channel + p * kPanel);
      if constexpr (kSum) factor[p] = Isa::load(epilogue.sums[0].scale + channel + p * kPanel);
    }
    const uint8_t* old = nullptr;
    if constexpr (kSum) old = static_cast<const uint8_t*>(epilogue.sums[0].data) + channel;
    uint8_t* const dst = static_cast<uint8_t*>(epilogue.dst) + channel;
    const bool is_signed = epilogue.dst_dtype == DType::s8;
    const int32_t* sums = f.waiting_;
    const int64_t *each_at = f.waiting_rows_->at, *each_to = f.waiting_rows_->dst_offset;
    const int64_t start = each_to[0], step = each_to[1] - start;
    const auto at = [&](int r) { return kEven ? int64_t{r} * kStride : each_at[r]; };
    const auto to = [&](int r) { return kEven ? start + r * step : each_to[r]; };
    f.row_ = end;
    const auto row = [&](int r, typename Isa::Int* q) {
      TORCHQ_UNROLL for (int p = 0; p < kPair; ++p) {
        const auto sum = Isa::load_int(sums + at(r) + p * kPanel);
        auto y = scaled<Isa>(sum, multiplier[p], offset[p]);
        if constexpr (kSum) {
          const auto x = Isa::load_u8(old + to(r) + p * kPanel);
          y = Isa::fma(Isa::to_float(x), factor[p], y);
        }
        q[p] = Isa::to_int(y);
      }
    };
    for (int r = first; r < end; r += 2) {
      typename Isa::Int q[2 * kPair];
      row(r, q);
      row(r + 1, q + kPair);
      const __m512i bytes = Isa::pack_row(q, is_signed);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + to(r)), _mm512_castsi512_si256(bytes));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + to(r + 1)),
                          _mm512_extracti64x4_epi64(bytes, 1));
    }
  }

  static void any_rows(MatrixEpilogue& f, int count) {
    count = min_int(count, f.end_ - f.row_);
    for (; count >= kRows; count -= kRows) f.template some_rows<kRows>();
    for (; count > 0; --count) f.template some_rows<1>();
  }

  template <int MR>
  TORCHQ_INLINE void some_rows() {
    if (panels_ == kPair) {
      some_rows<MR, kPair>();
    } else {
      some_rows<MR, 1>();
    }
    row_ += MR;
  }

  template <int MR, int NP>
  TORCHQ_INLINE void some_rows() {
    typename Isa::Int acc[MR][NP];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      const int32_t* sums = waiting_ + waiting_rows_->at[row_ + r];
      TORCHQ_UNROLL for (int p = 0; p < NP; ++p) acc[r][p] = Isa::load_int(sums + p * kPanel);
    }
    register_epilogue<Isa, MR, NP>(epilogue_, acc, waiting_rows_->dst_offset + row_, channel_);
  }

  const GemmTile& tile_;
  const Epilogue& epilogue_;
  const bool is_plain_;
  const int rows_at_once_;
  alignas(64) int32_t sums_[2][2 * kUnitRows * kStride];
  Rows rows_[kRowsAtOnce] = {};
  int current_ = 0, next_ = 0;  // of rows_, of sums_
  // The tile in the registers.
  const Rows* held_rows_ = rows_;
  int held_panel_ = 0, held_panels_ = 0;  // no panels: there is none
  // The rows that wait, [row_, end_) of a tile's.
  const int32_t* waiting_ = nullptr;
  const Rows* waiting_rows_ = rows_;
  int channel_ = 0, panels_ = 0, row_ = 0, end_ = 0;
  void (*run_rows_)(MatrixEpilogue&, int count) = nullptr;
};

}  // namespace
