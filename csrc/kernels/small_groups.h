// SPDX-License-Identifier: Apache-2.0
// Convolutions of groups with 4 or 8 channels in and out (contract: GemmTile in table.h, layout:
// Note [Conv packings] in ops/packing.h).
//
// The 16 inputs of a panel are broadcast to every 128-bit lane. In groups of 4, lane 4 i + j then
// holds inputs 4 j .. 4 j + 3 and sums output i of group j. In groups of 8, each half of the inputs
// has its lane, in two vectors of outputs, and pairs of lanes are added at the end.
#pragma once

#include "gemm.h"

namespace {

/// Rows of the largest tile: their addresses fit the general registers, their sums the others.
constexpr int kMaxSmallGroupTile = 8;
template <class Isa, int Q>
constexpr int kSmallGroupTile = Isa::kMaxPanels > 1 ? kMaxSmallGroupTile
                                : Q == 1            ? kTileRows
                                                    : 2;

/// Lanes whose sums start from acc_init in the first vector of two; the others do in the second.
alignas(64) constexpr int32_t kEvenLanes[kPanel] = {-1, 0, -1, 0, -1, 0, -1, 0,
                                                    -1, 0, -1, 0, -1, 0, -1, 0};

/// Rows of one small tile; the last is repeated where there are fewer than the kernel has.
struct SmallGroupRows {
  int count;
  int64_t src[kMaxSmallGroupTile], dst[kMaxSmallGroupTile];
};

/// MR rows x the panel whose channels start at `first` of the tile's.
template <class Isa, int MR, int Q, bool kFlip, bool kNarrow>
TORCHQ_NOINLINE void small_group_tile(const GemmTile& t, const Epilogue& e,
                                      const SmallGroupRows& rows, int panel, int first) {
  constexpr int kSteps = kNarrow ? 1 : Isa::kSteps;
  constexpr int64_t kVector = int64_t{kSteps} * kPanel * kQuad;
  using Int = typename Isa::Int;
  int64_t row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = rows.src[r];
  Int acc[MR][Q];
  const Int init = Isa::transpose_lanes(Isa::load_int(t.acc_init + first));
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    acc[r][0] = Q == 1 ? init : Isa::bit_and(init, Isa::load_int(kEvenLanes));
    if constexpr (Q == 2) acc[r][1] = Isa::sub(init, acc[r][0]);
  }
  const uint8_t* const tile_src = t.src + first;
  const int8_t* const panel_weight = t.weight + panel * t.panel_stride * kSteps;
  const GemmRun* run = t.runs;
  const GemmRun* const end = run + t.num_runs;
  for (; run != end; ++run) {
    const uint8_t* src = tile_src + run->src_offset;
    const int8_t* weight = panel_weight + run->weight_offset * kSteps;
    const auto block = [&](int r) {
      const auto bytes = Isa::load_lane(src + row[r]);
      if constexpr (kFlip) return Isa::flip_sign(bytes);
      return bytes;
    };
    if constexpr (kSteps == 1) {
      dot_step<Isa, MR, Q, kNarrow>(acc, weight, kVector, block);
    } else {
      dot_step<Isa, MR, Q, kNarrow>(acc, weight, kVector,
                                    [&](int r) { return Isa::template split_src<0>(block(r)); });
      asm("" : "+r"(src), "+r"(weight));  // as in gemm_tile
      dot_step<Isa, MR, Q, kNarrow>(acc, weight + kPanel * kQuad, kVector,
                                    [&](int r) { return Isa::template split_src<1>(block(r)); });
    }
  }
  Int sums[MR][1];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int q = 0; q < Q; ++q) Isa::pin(acc[r][q]);
    sums[r][0] =
        Isa::transpose_lanes(Q == 1 ? acc[r][0] : Isa::add_pairs(acc[r][0], acc[r][Q - 1]));
  }
  const int channel = t.channel + first;
  if (finishes_in_registers(e, kPanel, 1)) {
    finish_in_registers<Isa, MR, 1>(e, sums, rows.dst, channel);
    return;
  }
  alignas(64) int32_t tile[MR * kPanel];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) Isa::store_int(tile + r * kPanel, sums[r][0]);
  finish_tile<Isa>({tile, rows.count, 1, rows.dst, channel, kPanel}, e);
}

/// As few tiles as there can be, of nearly the same size, each through all panels.
template <class Isa, int Q, bool kFlip, bool kNarrow>
void small_group_tiles(const GemmTile& t, const Epilogue& e) {
  constexpr int kRows = kSmallGroupTile<Isa, Q>;
  for_each_tile(t.rows, kRows, [&](int first, int count) {
    SmallGroupRows rows;
    rows.count = count;
    for (int r = 0; r < kRows; ++r) {
      const int row = first + min_int(r, rows.count - 1);
      rows.src[r] = t.row_offset[row];
      rows.dst[r] = t.dst_offset[row];
    }
    auto tile = &small_group_tile<Isa, kRows, Q, kFlip, kNarrow>;
    if (rows.count <= 6) tile = &small_group_tile<Isa, (kRows < 6 ? kRows : 6), Q, kFlip, kNarrow>;
    if (rows.count <= 4) tile = &small_group_tile<Isa, (kRows < 4 ? kRows : 4), Q, kFlip, kNarrow>;
    if (rows.count <= 2) tile = &small_group_tile<Isa, 2, Q, kFlip, kNarrow>;
    for (int panel = 0; panel < t.panels; ++panel) {
      tile(t, e, rows, panel, min_int(panel * kPanel, t.channels - kPanel));
    }
  });
}

template <class Isa, bool kNarrow>
void small_groups(const GemmTile& t, const Epilogue& e) {
  if (t.group_quads == 1) {
    t.flip ? small_group_tiles<Isa, 1, true, kNarrow>(t, e)
           : small_group_tiles<Isa, 1, false, kNarrow>(t, e);
  } else {
    t.flip ? small_group_tiles<Isa, 2, true, kNarrow>(t, e)
           : small_group_tiles<Isa, 2, false, kNarrow>(t, e);
  }
}

}  // namespace
