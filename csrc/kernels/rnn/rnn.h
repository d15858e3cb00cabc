// SPDX-License-Identifier: Apache-2.0
// Recurrent cells (contracts: RnnStep and QuantizeRow in contract.h; formulas: reference.h).
//
// The products of a row with all gates of 16 units are summed in registers and pass to the cell
// through a tile in L1, so that cells of two or three rows have the registers to themselves.
#pragma once

#include "kernels/rnn/rnn_streamed.h"

namespace {

/// Panels of one row's sums, 4 KB of L1.
constexpr int kRnnBlock = 64;

template <class Tiles, RnnCell kCell>
TORCHQ_NOINLINE void rnn_run(const RnnStep& s) {
  using Isa = typename Tiles::Isa;
  constexpr int kGates = rnn_gates(kCell);
  constexpr int kWidth = kGates < Tiles::kPanels ? Tiles::kPanels : kGates;  // panels of many rows
  constexpr int kMost = Tiles::kRows * kWidth < kRnnBlock ? kRnnBlock : Tiles::kRows * kWidth;
  alignas(64) int32_t acc[kMost * kPanel];
  alignas(64) float input[Tiles::kRows * kWidth * kPanel];
  int64_t row_offset[Tiles::kRows];
  for (int r = 0; r < Tiles::kRows; ++r) row_offset[r] = r * s.src_stride;
  const int widening = s.narrow ? 1 : kRnnSteps<Isa>;
  RnnTile t{};
  t.row_offset = row_offset;
  t.quads = s.quads;
  t.acc = acc;
  t.panel_stride = s.panel_stride * widening;
  const RnnRows<Tiles> tiles(s.rows);
  // One row: the panels of many groups in one go, and then their cells, which are independent of
  // each other and overlap. Many rows: a group's weights stay in L1 for all of them.
  const bool consecutive =
      s.group_stride == kGates * s.panel_stride && s.param_stride == kGates * kPanel;
  const int most = !consecutive                         ? 1
                   : s.rows == 1 && s.source == nullptr ? kRnnBlock / kGates
                                                        : kWidth / kGates;
  const int blocks = (s.groups + most - 1) / most;
  constexpr bool kMayBePlain = rnn_stages(kCell) > 1;
  const auto epilogue = kMayBePlain && rnn_is_plain(s)
                            ? &rnn_epilogue_block<Isa, kCell, kMayBePlain>
                            : &rnn_epilogue_block<Isa, kCell, false>;
  Tiles::begin();
  for (int b = 0; b < blocks; ++b) {
    const int group = (s.descending ? blocks - 1 - b : b) * most;
    RnnBlock block{};
    block.first_group = group;
    block.groups = min_int(s.groups - group, most);
    block.acc = acc;
    block.acc_group_stride = kGates * kPanel;
    block.acc_row_stride = t.acc_stride = block.groups * kGates * kPanel;
    t.weight = s.weight + group * s.group_stride * widening;
    t.init = s.init + group * s.param_stride;
    const int step = b + 1 == blocks ? 0 : s.descending ? -most * kGates : most * kGates;
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t prefetch_panel = rnn_prefetch_panel(step, i);
      t.prefetch_offset = prefetch_panel * t.panel_stride;
      block.first_row = tiles.first(i);
      block.rows = static_cast<int>(tiles.first(i + 1) - block.first_row);
      if (s.source != nullptr) {
        rnn_input_tile<Tiles>(*s.source, group, block.groups, block.first_row, block.rows, input,
                              prefetch_panel);
        block.input = input;
        block.input_group_stride = block.acc_group_stride;
        block.input_row_stride = block.acc_row_stride;
      } else {
        block.input = s.input + group * s.input_group_stride + block.first_row * s.input_row_stride;
        block.input_group_stride = s.input_group_stride;
        block.input_row_stride = s.input_row_stride;
      }
      t.src = s.src + block.first_row * s.src_stride;
      Tiles::template dot<false>(t, block.rows, block.groups * kGates, s.narrow, s.descending);
      epilogue(s, block);
    }
  }
  Tiles::end();
}

/// Vectors only: a matrix unit multiplies beside them anyway.
template <class Tiles>
constexpr bool kMayStream = false;
template <class Isa>
constexpr bool kMayStream<VectorTiles<Isa>> = kHasWide<Isa>;

template <class Tiles, RnnCell kCell>
void rnn_cells(const RnnStep& s) {
  // A vanilla GRU's stages leave panels out.
  if constexpr (kMayStream<Tiles> && kCell != RnnCell::kGruGates && kCell != RnnCell::kGruNew) {
    if (s.streams > 0) return rnn_streamed<typename Tiles::Isa, kCell>(s);
  }
  rnn_run<Tiles, kCell>(s);
}

template <class Tiles>
void rnn_step(const RnnStep& s) {
  switch (s.cell) {
    case RnnCell::kLstm:
      return rnn_cells<Tiles, RnnCell::kLstm>(s);
    case RnnCell::kGru:
      return rnn_cells<Tiles, RnnCell::kGru>(s);
    case RnnCell::kGruGates:
      return rnn_cells<Tiles, RnnCell::kGruGates>(s);
    case RnnCell::kGruNew:
      return rnn_cells<Tiles, RnnCell::kGruNew>(s);
    case RnnCell::kTanh:
      return rnn_cells<Tiles, RnnCell::kTanh>(s);
    case RnnCell::kRelu:
      return rnn_cells<Tiles, RnnCell::kRelu>(s);
    default:
      return rnn_cells<Tiles, RnnCell::kProjection>(s);
  }
}

template <class Isa>
void quantize_row(QuantizeRow& q) {
  using Float = typename Isa::Float;
  const Float zero = Isa::set(0.0f);
  Float low = zero, high = zero;
  for (int64_t i = 0; i < q.size; i += kPanel) {
    const Float x = rnn_finite<Isa>(Isa::load(q.src + i, Isa::mask(min_int(q.size - i, kPanel))));
    low = Isa::min(low, x);
    high = Isa::max(high, x);
  }
  float lows[kPanel], highs[kPanel];
  Isa::store(lows, low);
  Isa::store(highs, high);
  for (int i = 1; i < kPanel; ++i) {
    lows[0] = lows[i] < lows[0] ? lows[i] : lows[0];
    highs[0] = highs[i] > highs[0] ? highs[i] : highs[0];
  }
  const RowScale row = rnn_row_scale(q, lows[0], highs[0]);
  const Float inverse = Isa::set(row.inverse), zero_point = Isa::set(row.zero_point);
  for (int64_t i = 0; i < q.size; i += kPanel) {
    const auto m = Isa::mask(min_int(q.size - i, kPanel));
    Float y = Isa::fma(rnn_finite<Isa>(Isa::load(q.src + i, m)), inverse, zero_point);
    y = Isa::min(Isa::max(y, zero), Isa::set(255.0f));
    Isa::store_u8(q.dst + i, Isa::to_int(y), m);
  }
}

}  // namespace
