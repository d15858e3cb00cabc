// SPDX-License-Identifier: Apache-2.0
// Initial sums of small groups and their epilogue (small_groups.h).
#pragma once

#include "kernels/conv/contract.h"
#include "kernels/epilogue/register_epilogue.h"
#include "kernels/gemm/dot_step.h"
#include "kernels/gemm/tiles.h"

namespace {

/// Lanes whose sums start from acc_init in the first vector of two; the others do in the second.
alignas(64) constexpr int32_t kEvenLanes[kPanel] = {-1, 0, -1, 0, -1, 0, -1, 0,
                                                    -1, 0, -1, 0, -1, 0, -1, 0};

/// Sets the sums of the panel from channel `first` of the tile on to their initial values.
template <class Isa, int MR, int Q>
TORCHQ_INLINE void begin_small_group(const GemmTile& t, typename Isa::Int (&acc)[MR][Q],
                                     int first) {
  const auto init = Isa::transpose_lanes(Isa::load_int(t.acc_init + first));
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    acc[r][0] = Q == 1 ? init : Isa::bit_and(init, Isa::load_int(kEvenLanes));
    if constexpr (Q == 2) acc[r][1] = Isa::sub(init, acc[r][0]);
  }
}

/// Returns the outputs of a row: lane 4 i + j is channel 4 j + i; where pairs of lanes are added, j
/// runs 0, 2, 1, 3.
template <class Isa, int Q>
TORCHQ_INLINE typename Isa::Int add_up(const typename Isa::Int (&acc)[Q]) {
  if constexpr (Q == 1) return acc[0];
  return Isa::add_pairs(acc[0], acc[Q - 1]);
}

/// Returns the outputs in the order of channels.
template <class Isa, int Q>
TORCHQ_INLINE typename Isa::Int in_order(typename Isa::Int sums) {
  return Isa::transpose_lanes(Q == 1 ? sums : Isa::swap_middle(sums));
}

/// True for tiers with an epilogue for sums in transposed order.
template <class Isa>
constexpr bool kStoresTransposed = requires(uint8_t* p, typename Isa::Int v) {
  Isa::template store_transposed<true>(p, v, false);
};

/// Plain epilogue in transposed order: only the bytes are put in the order of channels.
template <class Isa, int Q>
class TransposedEpilogue {
 public:
  TORCHQ_INLINE TransposedEpilogue(const Epilogue& e, const int64_t* dst_offset, int channel)
      : multiplier_(load(e.multiplier + channel)),
        offset_(load(e.offset + channel)),
        dst_(static_cast<uint8_t*>(e.dst) + channel),
        dst_offset_(dst_offset),
        is_signed_(e.dst_dtype == DType::s8) {}

  TORCHQ_INLINE void store(int row, const typename Isa::Int (&acc)[Q]) const {
    const auto y = scaled<Isa>(add_up<Isa, Q>(acc), multiplier_, offset_);
    Isa::template store_transposed<Q == 2>(dst_ + dst_offset_[row], Isa::to_int(y), is_signed_);
  }

 private:
  static TORCHQ_INLINE typename Isa::Float load(const float* values) {
    const auto transposed = Isa::transpose_lanes(Isa::bits(Isa::load(values)));
    return Isa::from_bits(Q == 1 ? transposed : Isa::swap_middle(transposed));
  }

  const typename Isa::Float multiplier_, offset_;
  uint8_t* const dst_;
  const int64_t* const dst_offset_;
  const bool is_signed_;
};

/// Epilogue of `count` rows of the panel from channel `first` of the tile on; further rows, up to
/// MR, repeat the last.
template <class Isa, int MR, int Q>
TORCHQ_INLINE void small_group_epilogue(const GemmTile& t, const Epilogue& e,
                                        typename Isa::Int (&acc)[MR][Q], const int64_t* dst_offset,
                                        int count, int first) {
  pin_sums<Isa>(acc);
  const int channel = t.channel + first;
  const bool in_registers = fits_register_epilogue(e, kPanel, 1);
  if constexpr (kStoresTransposed<Isa>) {
    if (in_registers && is_plain(e)) {
      const TransposedEpilogue<Isa, Q> epilogue(e, dst_offset, channel);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) epilogue.store(r, acc[r]);
      return;
    }
  }
  typename Isa::Int sums[MR][1];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    sums[r][0] = in_order<Isa, Q>(add_up<Isa, Q>(acc[r]));
  }
  if (in_registers) return register_epilogue<Isa, MR, 1>(e, sums, dst_offset, channel);
  alignas(64) int32_t tile[MR * kPanel];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) Isa::store_int(tile + r * kPanel, sums[r][0]);
  memory_epilogue<Isa>({tile, count, 1, dst_offset, channel, kPanel}, e);
}

}  // namespace
