// SPDX-License-Identifier: Apache-2.0
// Small groups along a line: rows that are as far apart as the taps of a kernel row share sources.
//
// On Zen 4 a block of 16 inputs takes as long to load as a product, so a tile that loads one for
// each is bound by loads as much as by products. Three taps of MR rows in a line meet MR + 2 of
// them.
#pragma once

#include "small_groups_finish.h"

namespace {

/// Taps that share sources: a kernel row of three.
constexpr int kLineTaps = 3;
/// Rows of the longest tile, as registers allow, and of the shortest.
template <int Q>
constexpr int kLongestLine = Q == 1 ? 18 : 8;
constexpr int kShortestLine = 4;
static_assert((kLongestLine<2> + 1) / 2 >= kShortestLine, "tiles are half of the longest, or more");

/// Runs as kernel rows or columns of kLineTaps each: those of one are `apart` in `runs`, those of
/// the next begin `behind` later. Rows of the tile that are `step` bytes apart share sources.
struct LineTaps {
  int64_t step;  // 0: the runs are no such taps
  int apart, behind;

  LineTaps(const GemmTile& t, int taps_apart, int next_behind)
      : step(0), apart(taps_apart), behind(next_behind) {
    if (t.num_runs == 0 || t.num_runs % kLineTaps != 0) return;
    const auto from_to = [&](int i) { return t.runs[i + apart].src_offset - t.runs[i].src_offset; };
    for (int i = 0; i < t.num_runs / kLineTaps; ++i) {
      for (int j = 0; j + 1 < kLineTaps; ++j) {
        if (from_to(i * behind + j * apart) != from_to(0)) return;
      }
    }
    step = from_to(0);
  }
};

/// How many rows from `first` on are `step` apart.
inline int line_length(const GemmTile& t, int first, int64_t step) {
  int end = first + 1;
  while (end < t.rows && t.row_offset[end] - t.row_offset[end - 1] == step) ++end;
  return end - first;
}

/// The products of one kernel row; ended(r) once row r has met all its taps.
template <class Isa, int MR, int Q, bool kFlip, class Ended>
TORCHQ_INLINE void multiply_line(typename Isa::Int (&acc)[MR][Q], const uint8_t* src, int64_t step,
                                 const int8_t* panel_weight, const GemmRun* run, int apart,
                                 const Ended& ended) {
  typename Isa::Int w[kLineTaps][Q];
  TORCHQ_UNROLL for (int j = 0; j < kLineTaps; ++j) {
    TORCHQ_UNROLL for (int q = 0; q < Q; ++q) {
      w[j][q] = Isa::load_weight(panel_weight + run[j * apart].weight_offset + q * kPanel * kQuad);
    }
  }
  src += run->src_offset;
  TORCHQ_UNROLL for (int c = 0; c < MR + kLineTaps - 1; ++c) {
    asm volatile("" : "+r"(src));  // block by block: else GCC loads many at once, and spills
    auto block = Isa::load_lane(src);
    if constexpr (kFlip) block = Isa::flip_sign(block);
    src += step;
    TORCHQ_UNROLL for (int j = 0; j < kLineTaps; ++j) {
      if (c < j || c - j >= MR) continue;
      TORCHQ_UNROLL for (int q = 0; q < Q; ++q) Isa::dot(acc[c - j][q], block, w[j][q]);
    }
    if (c >= kLineTaps - 1) ended(c - (kLineTaps - 1));
  }
}

/// MR rows from `row` on, in a line of such taps, x the panel whose channels start at `first` of
/// the tile's. A plain end follows each row's last product, among those of the rows behind it.
template <class Isa, int MR, int Q, bool kFlip>
TORCHQ_NOINLINE void small_group_line_tile(const GemmTile& t, const Epilogue& e,
                                           const LineTaps& taps, int row, int panel, int first) {
  typename Isa::Int acc[MR][Q];
  begin_small_group<Isa, MR, Q>(t, acc, first);
  const uint8_t* const src = t.src + t.row_offset[row] + first;
  const int8_t* const weight = t.weight + panel * t.panel_stride;
  const GemmRun* run = t.runs;
  const GemmRun* const last = run + (t.num_runs / kLineTaps - 1) * taps.behind;
  const auto goes_on = [](int) {};
  for (; run != last; run += taps.behind) {
    multiply_line<Isa, MR, Q, kFlip>(acc, src, taps.step, weight, run, taps.apart, goes_on);
  }
  const int64_t* const dst_offset = t.dst_offset + row;
  if (!finishes_in_registers(e, kPanel, 1) || !is_plain(e)) {
    multiply_line<Isa, MR, Q, kFlip>(acc, src, taps.step, weight, run, taps.apart, goes_on);
    return finish_small_group<Isa, MR, Q>(t, e, acc, dst_offset, MR, first);
  }
  const TransposedEnd<Isa> end(e, dst_offset, t.channel + first);
  typename Isa::Int done[MR];
  const auto ended = [&](int r) __attribute__((always_inline)) {  // else the sums are in memory
    TORCHQ_UNROLL for (int q = 0; q < Q; ++q) Isa::pin(acc[r][q]);
    done[r] = end.finish(Q == 1 ? acc[r][0] : Isa::add_pairs(acc[r][0], acc[r][Q - 1]));
    if (r % 4 == 3 || r == MR - 1) end.template store<MR>(done, r);
  };
  multiply_line<Isa, MR, Q, kFlip>(acc, src, taps.step, weight, run, taps.apart, ended);
}

using SmallGroupLineFn = void (*)(const GemmTile&, const Epilogue&, const LineTaps&, int row,
                                  int panel, int first);

/// fn[rows - kShortestLine]
template <class Isa, int Q, bool kFlip>
struct SmallGroupLines {
  SmallGroupLineFn fn[kLongestLine<Q> - kShortestLine + 1];

  template <int MR>
  constexpr void fill() {
    fn[MR - kShortestLine] = &small_group_line_tile<Isa, MR, Q, kFlip>;
    if constexpr (MR < kLongestLine<Q>) fill<MR + 1>();
  }
  constexpr SmallGroupLines() : fn() { fill<kShortestLine>(); }
};
template <class Isa, int Q, bool kFlip>
constexpr SmallGroupLines<Isa, Q, kFlip> kSmallGroupLines;

/// `count` rows from `begin` on, of which there are kShortestLine or more, through all panels.
template <class Isa, int Q, bool kFlip>
void small_group_line(const GemmTile& t, const Epilogue& e, const LineTaps& taps, int begin,
                      int count) {
  for_each_tile(count, kLongestLine<Q>, [&](int first, int rows) {
    const auto tile = kSmallGroupLines<Isa, Q, kFlip>.fn[rows - kShortestLine];
    for (int panel = 0; panel < t.panels; ++panel) {
      tile(t, e, taps, begin + first, panel, min_int(panel * kPanel, t.channels - kPanel));
    }
  });
}

}  // namespace
