// SPDX-License-Identifier: Apache-2.0
// Convolutions of groups with 4 or 8 channels in and out (contract: GemmTile in gemm/contract.h,
// layout: Note [Conv packings] in ops/gemm/packing.h).
//
// The 16 inputs of a panel are broadcast to every 128-bit lane. In groups of 4, lane 4 i + j then
// holds inputs 4 j .. 4 j + 3 and sums output i of group j. In groups of 8, each half of the inputs
// has its lane, in two vectors of outputs, and pairs of lanes are added at the end.
#pragma once

#include "kernels/conv/small_groups_line.h"

namespace {

/// Rows of the largest tile: their addresses fit the general registers, their sums the others.
constexpr int kMaxSmallGroupTile = 8;
template <class Isa, int Q>
constexpr int kSmallGroupTile = Isa::kVectors == 32 ? kMaxSmallGroupTile
                                : Q == 1            ? kTileRows
                                                    : 2;

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
  begin_small_group<Isa, MR, Q>(t, acc, first);
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
  small_group_epilogue<Isa, MR, Q>(t, e, acc, rows.dst, rows.count, first);
}

/// `count` rows from `begin` on, as few tiles as there can be, of nearly the same size, each
/// through all panels.
template <class Isa, int Q, bool kFlip, bool kNarrow>
void small_group_tiles(const GemmTile& t, const Epilogue& e, int begin, int count) {
  constexpr int kRows = kSmallGroupTile<Isa, Q>;
  for_each_tile(count, kRows, [&](int first, int tile_rows) {
    SmallGroupRows rows;
    rows.count = tile_rows;
    for (int r = 0; r < kRows; ++r) {
      const int row = begin + first + min_int(r, rows.count - 1);
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

/// All rows: lines where they are long enough, what is between them as tiles.
template <class Isa, int Q, bool kFlip, bool kNarrow>
void small_group_rows(const GemmTile& t, const Epilogue& e) {
  int first = 0;  // that is left
  if constexpr (kHasWide<Isa>) {
    const LineTaps along[] = {{t, 1, kLineTaps}, {t, t.num_runs / kLineTaps, 1}};
    for (int row = 0; row + 1 < t.rows;) {
      const int64_t step = t.row_offset[row + 1] - t.row_offset[row];
      const int count = line_length(t, row, step);
      const bool is_row = step == along[0].step, is_column = step == along[1].step;
      // Rows of an empty source are 0 bytes apart, and LineTaps without a step are no line.
      if (count >= kShortestLine && step != 0 && (is_row || is_column)) {
        if (row > first) small_group_tiles<Isa, Q, kFlip, kNarrow>(t, e, first, row - first);
        int lines = 1;
        while (lines < kLinesAtOnce && line_length(t, row + lines * count, step) == count) ++lines;
        small_group_lines<Isa, Q, kFlip>(t, e, along[is_row ? 0 : 1], row, count, lines);
        row = first = row + lines * count;
      } else {
        row += count - 1;  // its last row may be the first of another line
      }
    }
  }
  if (first < t.rows) small_group_tiles<Isa, Q, kFlip, kNarrow>(t, e, first, t.rows - first);
}

template <class Isa, bool kNarrow>
void small_groups(const GemmTile& t, const Epilogue& e) {
  if (t.group_quads == 1) {
    t.flip ? small_group_rows<Isa, 1, true, kNarrow>(t, e)
           : small_group_rows<Isa, 1, false, kNarrow>(t, e);
  } else {
    t.flip ? small_group_rows<Isa, 2, true, kNarrow>(t, e)
           : small_group_rows<Isa, 2, false, kNarrow>(t, e);
  }
}

}  // namespace
