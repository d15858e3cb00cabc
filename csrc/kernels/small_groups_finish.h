// SPDX-License-Identifier: Apache-2.0
// Where sums of small groups start and what becomes of them (small_groups.h).
#pragma once

#include "gemm.h"

namespace {

/// Lanes whose sums start from acc_init in the first vector of two; the others do in the second.
alignas(64) constexpr int32_t kEvenLanes[kPanel] = {-1, 0, -1, 0, -1, 0, -1, 0,
                                                    -1, 0, -1, 0, -1, 0, -1, 0};

/// What the sums of the panel whose channels start at `first` of the tile's start from.
template <class Isa, int MR, int Q>
TORCHQ_INLINE void begin_small_group(const GemmTile& t, typename Isa::Int (&acc)[MR][Q],
                                     int first) {
  const auto init = Isa::transpose_lanes(Isa::load_int(t.acc_init + first));
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    acc[r][0] = Q == 1 ? init : Isa::bit_and(init, Isa::load_int(kEvenLanes));
    if constexpr (Q == 2) acc[r][1] = Isa::sub(init, acc[r][0]);
  }
}

/// Whether a tier stores bytes of transposed sums in one go.
template <class Isa>
constexpr bool kStoresTransposed =
    requires(uint8_t* const (&p)[4], const typename Isa::Int (&v)[4]) {
      Isa::store_transposed(p, v, false);
    };

/// A plain end in the order of the sums; the bytes are put in order at last: fewer shuffles.
template <class Isa>
class TransposedEnd {
 public:
  TORCHQ_INLINE TransposedEnd(const Epilogue& e, const int64_t* dst_offset, int channel)
      : multiplier_(load(e.multiplier + channel)),
        offset_(load(e.offset + channel)),
        dst_(static_cast<uint8_t*>(e.dst) + channel),
        dst_offset_(dst_offset),
        is_signed_(e.dst_dtype == DType::s8) {}

  TORCHQ_INLINE typename Isa::Int finish(typename Isa::Int sum) const {
    return Isa::to_int(Isa::fma(Isa::to_float(sum), multiplier_, offset_));
  }

  /// The last up to four rows of `done` up to `last`, from a multiple of four on.
  template <int MR>
  TORCHQ_INLINE void store(const typename Isa::Int (&done)[MR], int last) const {
    typename Isa::Int panels[4];
    uint8_t* places[4];
    TORCHQ_UNROLL for (int i = 0; i < 4; ++i) {
      const int r = min_int(last - last % 4 + i, last);
      panels[i] = done[r];
      places[i] = dst_ + dst_offset_[r];
    }
    Isa::store_transposed(places, panels, is_signed_);
  }

 private:
  static TORCHQ_INLINE typename Isa::Float load(const float* values) {
    return Isa::from_bits(Isa::transpose_lanes(Isa::bits(Isa::load(values))));
  }

  const typename Isa::Float multiplier_, offset_;
  uint8_t* const dst_;
  const int64_t* const dst_offset_;
  const bool is_signed_;
};

/// The end of `count` rows of the panel whose channels start at `first` of the tile's; those behind
/// them, up to MR, repeat the last.
template <class Isa, int MR, int Q>
TORCHQ_INLINE void finish_small_group(const GemmTile& t, const Epilogue& e,
                                      typename Isa::Int (&acc)[MR][Q], const int64_t* dst_offset,
                                      int count, int first) {
  pin_sums<Isa>(acc);
  typename Isa::Int sums[MR][1];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    sums[r][0] = Q == 1 ? acc[r][0] : Isa::add_pairs(acc[r][0], acc[r][Q - 1]);
  }
  const int channel = t.channel + first;
  const bool in_registers = finishes_in_registers(e, kPanel, 1);
  if constexpr (kStoresTransposed<Isa>) {
    if (in_registers && is_plain(e)) {
      const TransposedEnd<Isa> end(e, dst_offset, channel);
      typename Isa::Int done[MR];
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        done[r] = end.finish(sums[r][0]);
        if (r % 4 == 3 || r == MR - 1) end.template store<MR>(done, r);
      }
      return;
    }
  }
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) sums[r][0] = Isa::transpose_lanes(sums[r][0]);
  if (in_registers) return finish_in_registers<Isa, MR, 1>(e, sums, dst_offset, channel);
  alignas(64) int32_t tile[MR * kPanel];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) Isa::store_int(tile + r * kPanel, sums[r][0]);
  finish_tile<Isa>({tile, count, 1, dst_offset, channel, kPanel}, e);
}

}  // namespace
