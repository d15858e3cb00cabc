// SPDX-License-Identifier: Apache-2.0
// Small groups along a line: rows that are as far apart as the taps of a kernel row share sources.
//
// The weights of up to three kernel rows stay in registers while a window passes along the line,
// and so do the sums of the three rows that a column of sources meets. Tiles wait for their sums
// where they begin and end; here rows end among the products of those behind them. On Zen 4 the
// groups of 4 and 8 channels of benchmarks' suite `grouped` are 1.15 to 1.58 times as fast as with
// tiles (geometric mean 1.29).
#pragma once

#include "kernels/conv/small_groups_epilogue.h"

namespace {

/// Taps that share sources: a kernel row of three.
constexpr int kLineTaps = 3;
/// Kernel rows whose weights have room in the registers. Others take another pass.
constexpr int kMostKernelRows = 3;
/// Rows that make a line: it has four columns that not all taps meet.
constexpr int kShortestLine = 4;
/// Lines that one load of the weights serves: 0.98 of the time of one, no gain from more.
constexpr int kLinesAtOnce = 4;
/// Rows whose sums wait in memory, for other passes or an end that takes more than registers.
constexpr int kWaitingRows = 32;

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

/// Returns the number of rows from `first` on that are `step` apart.
inline int line_length(const GemmTile& t, int first, int64_t step) {
  int end = first + 1;
  while (end < t.rows && t.row_offset[end] - t.row_offset[end - 1] == step) ++end;
  return end - first;
}

/// The window of R kernel rows, and the panel whose channels start at `first` of the tile's.
template <class Isa, int R, int Q, bool kFlip>
class GroupWindow {
 public:
  using Int = typename Isa::Int;
  using Sums = Int[Q];

  TORCHQ_INLINE GroupWindow(const GemmTile& t, const LineTaps& taps, int panel, int first)
      : step_(taps.step) {
    const int8_t* const panel_weight = t.weight + panel * t.panel_stride;
    TORCHQ_UNROLL for (int r = 0; r < R; ++r) {
      const GemmRun* const run = t.runs + r * taps.behind;
      TORCHQ_UNROLL for (int j = 0; j < kLineTaps; ++j) {
        const int8_t* const weight = panel_weight + run[j * taps.apart].weight_offset;
        TORCHQ_UNROLL for (int q = 0; q < Q; ++q) {
          weight_[r][j][q] = Isa::load_weight(weight + q * kPanel * kQuad);
        }
      }
    }
    begin_small_group<Isa, 1, Q>(t, init_, first);
  }

  /// The line whose first row this is.
  TORCHQ_INLINE void enter(const GemmTile& t, const LineTaps& taps, int row, int first) {
    TORCHQ_UNROLL for (int r = 0; r < R; ++r) {
      src_[r] = t.src + t.row_offset[row] + first + t.runs[r * taps.behind].src_offset;
    }
  }

  TORCHQ_INLINE void start(Sums& sums) const {
    TORCHQ_UNROLL for (int q = 0; q < Q; ++q) sums[q] = init_[0][q];
  }

  /// The next column of sources. Of those of the three rows that are there it is tap 0 of the
  /// newest, tap 1 of the middle one and tap 2 of the last.
  template <bool kNewest, bool kMiddle, bool kLast>
  TORCHQ_INLINE void multiply(Sums& newest, Sums& middle, Sums& last) {
    TORCHQ_UNROLL for (int r = 0; r < R; ++r) {
      auto block = Isa::load_lane(src_[r]);
      if constexpr (kFlip) block = Isa::flip_sign(block);
      src_[r] += step_;
      if constexpr (kNewest) dot(newest, block, weight_[r][0]);
      if constexpr (kMiddle) dot(middle, block, weight_[r][1]);
      if constexpr (kLast) dot(last, block, weight_[r][2]);
    }
  }

 private:
  static TORCHQ_INLINE void dot(Sums& sums, Int block, const Int (&weight)[Q]) {
    TORCHQ_UNROLL for (int q = 0; q < Q; ++q) Isa::dot(sums[q], block, weight[q]);
  }

  const int64_t step_;
  Int weight_[R][kLineTaps][Q];
  Int init_[1][Q];
  const uint8_t* src_[R];
};

/// `lines` lines of `count` rows, two or more, from `row` on; ended(row, sums) where a row has all
/// its products.
template <class Isa, int R, int Q, bool kFlip, class Ended>
TORCHQ_INLINE void slide_along(const GemmTile& t, const LineTaps& taps, int row, int count,
                               int lines, int panel, int first, const Ended& ended) {
  using Window = GroupWindow<Isa, R, Q, kFlip>;
  using Sums = typename Window::Sums;
  Window window(t, taps, panel, first);
  for (const int end = row + lines * count; row != end;) {
    window.enter(t, taps, row, first);
    const int last_two = row + count - 2;
    Sums a, b, c;
    window.start(a);
    window.template multiply<true, false, false>(a, a, a);
    window.start(b);
    window.template multiply<true, true, false>(b, a, a);
    const auto end_row = [&](Sums& sums) TORCHQ_INLINE_LAMBDA {
      TORCHQ_UNROLL for (int q = 0; q < Q; ++q) Isa::pin(sums[q]);
      ended(row++, sums);
    };
    const auto ends_line = [&](Sums& last, Sums& middle, Sums& newest) TORCHQ_INLINE_LAMBDA {
      if (row == last_two) {
        window.template multiply<false, true, true>(middle, middle, last);
        end_row(last);
        window.template multiply<false, false, true>(middle, middle, middle);
        end_row(middle);
        return true;
      }
      window.start(newest);
      window.template multiply<true, true, true>(newest, middle, last);
      end_row(last);
      return false;
    };
    while (!ends_line(a, b, c) && !ends_line(b, c, a) && !ends_line(c, a, b)) {
    }
  }
}

/// Lines of one panel to their ends, which are in registers.
template <class Isa, int R, int Q, bool kFlip>
TORCHQ_NOINLINE void small_group_slide(const GemmTile& t, const Epilogue& e, const LineTaps& taps,
                                       int row, int count, int lines, int panel, int first) {
  using Sums = typename Isa::Int[Q];
  const int channel = t.channel + first;
  if (is_plain(e)) {
    const TransposedEpilogue<Isa, Q> epilogue(e, t.dst_offset, channel);
    return slide_along<Isa, R, Q, kFlip>(t, taps, row, count, lines, panel, first,
                                         [&](int r, const Sums& sums)
                                             TORCHQ_INLINE_LAMBDA { epilogue.store(r, sums); });
  }
  slide_along<Isa, R, Q, kFlip>(
      t, taps, row, count, lines, panel, first, [&](int r, const Sums& sums) TORCHQ_INLINE_LAMBDA {
        typename Isa::Int sum[1][1] = {{in_order<Isa, Q>(add_up<Isa, Q>(sums))}};
        register_epilogue<Isa, 1, 1>(e, sum, t.dst_offset + r, channel);
      });
}

/// The sums of one line and panel to memory, in the order of channels, or added to those of other
/// kernel rows.
template <class Isa, int R, int Q, bool kFlip>
TORCHQ_NOINLINE void small_group_sums(const GemmTile& t, const LineTaps& taps, int row, int count,
                                      int panel, int first, bool adds, int32_t* waiting) {
  using Int = typename Isa::Int;
  slide_along<Isa, R, Q, kFlip>(
      t, taps, row, count, 1, panel, first, [&](int, const Int(&sums)[Q]) TORCHQ_INLINE_LAMBDA {
        Int sum = in_order<Isa, Q>(add_up<Isa, Q>(sums));
        if (adds) {  // both started from acc_init
          const Int old = Isa::sub(Isa::load_int(waiting), Isa::load_int(t.acc_init + first));
          sum = Isa::add(sum, old);
        }
        Isa::store_int(waiting, sum);
        waiting += kPanel;
      });
}

/// The end of rows whose sums wait in the order of channels.
template <class Isa>
TORCHQ_INLINE void waiting_epilogue(const Epilogue& e, int32_t* waiting, int rows,
                                    const int64_t* dst_offset, int channel) {
  if (!fits_register_epilogue(e, kPanel, 1)) {
    return memory_epilogue<Isa>({waiting, rows, 1, dst_offset, channel, kPanel}, e);
  }
  for (int r = 0; r < rows; ++r) {
    typename Isa::Int sum[1][1] = {{Isa::load_int(waiting + r * kPanel)}};
    register_epilogue<Isa, 1, 1>(e, sum, dst_offset + r, channel);
  }
}

/// Up to kWaitingRows rows of a line through all panels, by way of memory.
template <class Isa, int Q, bool kFlip>
void small_group_passes(const GemmTile& t, const Epilogue& e, const LineTaps& taps, int row,
                        int count) {
  alignas(64) int32_t waiting[kWaitingRows * kPanel];
  for (int panel = 0; panel < t.panels; ++panel) {
    const int first = min_int(panel * kPanel, t.channels - kPanel);
    GemmTile pass = t;  // those of its kernel rows that are left
    for (int left = t.num_runs / kLineTaps; left > 0; left -= kMostKernelRows) {
      const auto slide = left == 1   ? &small_group_sums<Isa, 1, Q, kFlip>
                         : left == 2 ? &small_group_sums<Isa, 2, Q, kFlip>
                                     : &small_group_sums<Isa, kMostKernelRows, Q, kFlip>;
      slide(pass, taps, row, count, panel, first, pass.runs != t.runs, waiting);
      pass.runs += kMostKernelRows * taps.behind;
    }
    waiting_epilogue<Isa>(e, waiting, count, t.dst_offset + row, t.channel + first);
  }
}

/// `lines` lines of `count` rows each, of which there are kShortestLine or more, from `begin` on,
/// through all panels.
template <class Isa, int Q, bool kFlip>
void small_group_lines(const GemmTile& t, const Epilogue& e, const LineTaps& taps, int begin,
                       int count, int lines) {
  const int kernel_rows = t.num_runs / kLineTaps;
  if (kernel_rows > kMostKernelRows || !fits_register_epilogue(e, kPanel, 1)) {
    for (int line = 0; line < lines; ++line) {
      for_each_tile(count, kWaitingRows, [&](int from, int rows) {
        small_group_passes<Isa, Q, kFlip>(t, e, taps, begin + line * count + from, rows);
      });
    }
    return;
  }
  const auto slide = kernel_rows == 1   ? &small_group_slide<Isa, 1, Q, kFlip>
                     : kernel_rows == 2 ? &small_group_slide<Isa, 2, Q, kFlip>
                                        : &small_group_slide<Isa, kMostKernelRows, Q, kFlip>;
  for (int panel = 0; panel < t.panels; ++panel) {
    const int first = min_int(panel * kPanel, t.channels - kPanel);
    slide(t, e, taps, begin, count, lines, panel, first);
  }
}

}  // namespace
