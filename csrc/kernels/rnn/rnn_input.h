// SPDX-License-Identifier: Apache-2.0
// The tiles that rows of recurrent layers come in, and the products of their inputs (contract:
// RnnInput in contract.h).
#pragma once

#include "kernels/rnn/rnn_dot.h"

namespace {

/// Rows come in as few tiles as can be, of sizes that differ little; tile i has rows
/// [first(i), first(i + 1)), kUnit at least where there are two tiles, and begins with a whole unit
/// of kUnit rows where it can: what begins elsewhere is computed twice. (On AMX 16 and 32 rows take
/// about 0.95 of the time of 24 and 24.)
template <class Tiles>
struct RnnRows {
  int64_t rows, count;

  explicit RnnRows(int64_t all) : rows(all), count((all + Tiles::kRows - 1) / Tiles::kRows) {}
  int64_t first(int64_t i) const {
    const int64_t even = rows * i / count / Tiles::kUnit * Tiles::kUnit;
    const int64_t least = rows - Tiles::kRows * (count - i);  // the rest must fit its tiles
    return even > least ? even : least;
  }
};

/// Returns the panel that tile i prefetches into L2, counted from its own first one. The tiles
/// share the panels of the next group, which begin `step` panels further on (0: there is none).
/// Weights beyond L2 are read once a step, and the hardware prefetcher stops at every page. LSTM
/// with vectors, one thread of Emerald Rapids: 512 units 2 % (64 rows) and 3 to 5 % (16) faster,
/// 1024 units 8 to 12 % (16).
TORCHQ_INLINE int64_t rnn_prefetch_panel(int step, int64_t i) {
  return step == 0 ? 0 : step + min_int(i, (step < 0 ? -step : step) - 1);
}

/// A panel's sums in real units, for rows [first, first + rows) of the input: RnnInput's formula.
/// dst may be where the sums are.
template <class Isa>
TORCHQ_INLINE void rnn_scale_input(const RnnInput& in, int panel, int64_t first, int rows,
                                   const int32_t* sums, int64_t sums_stride, float* dst,
                                   int64_t dst_stride) {
  const auto multiplier = Isa::load(in.multiplier + panel * kPanel);
  const auto bias = Isa::load(in.bias + panel * kPanel);
  for (int r = 0; r < rows; ++r) {
    auto sum = Isa::load_int(sums + r * sums_stride);
    auto factor = multiplier;
    if (in.scale != nullptr) {
      sum = Isa::sub(sum, Isa::mul(Isa::load_int(in.compensation + panel * kPanel),
                                   Isa::set_int(in.zero_point[first + r])));
      factor = Isa::mul(factor, Isa::set(in.scale[first + r]));
    }
    Isa::store(dst + r * dst_stride, scaled<Isa>(sum, factor, bias));
  }
}

/// One tile of an input: `count` groups from `group` on, to dst [rows][count][gates][16].
template <class Tiles>
TORCHQ_INLINE void rnn_input_tile(const RnnInput& in, int group, int count, int64_t first, int rows,
                                  float* dst, int64_t prefetch_panel) {
  using Isa = typename Tiles::Isa;
  const int panel = group * in.gates, panels = count * in.gates;
  RnnTile t{};
  t.src = in.src;
  t.row_offset = in.row_offset + first;
  t.quads = in.quads;
  t.panel_stride = in.panel_stride * (in.narrow ? 1 : kRnnSteps<Isa>);
  t.weight = in.weight + panel * t.panel_stride;
  t.init = in.init + panel * kPanel;
  t.acc = reinterpret_cast<int32_t*>(dst);
  t.acc_stride = panels * kPanel;
  t.prefetch_offset = prefetch_panel * t.panel_stride;
  t.multiplier = in.multiplier + panel * kPanel;
  t.bias = in.bias + panel * kPanel;
  if (in.scale == nullptr) {
    return Tiles::template dot<true>(t, rows, panels, in.narrow, false);
  }
  Tiles::template dot<false>(t, rows, panels, in.narrow, false);
  for (int p = 0; p < panels; ++p) {
    rnn_scale_input<Isa>(in, panel + p, first, rows, t.acc + p * kPanel, t.acc_stride,
                         dst + p * kPanel, t.acc_stride);
  }
}

template <class Tiles>
void rnn_input(const RnnInput& in) {
  const RnnRows<Tiles> tiles(in.rows);
  Tiles::begin();
  for (int group = 0; group < in.groups; ++group) {
    float* dst = in.dst + group * in.dst_group_stride;
    const int step = group + 1 == in.groups ? 0 : in.gates;
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t first = tiles.first(i);
      const int rows = static_cast<int>(tiles.first(i + 1) - first);
      rnn_input_tile<Tiles>(in, group, 1, first, rows, dst + first * in.gates * kPanel,
                            rnn_prefetch_panel(step, i));
    }
  }
  Tiles::end();
}

}  // namespace
