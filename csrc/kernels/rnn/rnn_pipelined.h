// SPDX-License-Identifier: Apache-2.0
// Many rows of an LSTM or GRU: a tile's cells are interleaved with the products of the next tile.
//
// Note [Pipelined cells]
// A cell is a chain of dependent instructions. After its tile's products it takes 46 cycles on Zen
// 5, beside 512 for those products with 512 units, and the multipliers are nearly idle meanwhile.
// So the sums of a tile wait in L1 until the next tile is multiplied, and the steps of the cells'
// formulas alternate with its quads. On Zen 4 a cell with products between its two stages took 80
// to 90 cycles. With products between all steps it takes 45 to 50; its multiplications and
// divisions, which share the products' ports, would take 32 by themselves.
//
// 16 sums leave registers for a step, the 24 of other tiles do not. Pipelined tiles read weights
// more often, so the weights must be few, or L2 fast beside the products: on Zen 5 layers of 1024
// units would take 1.05 of the time. Time beside tiles of six rows, one thread; Zen 5 with whole
// stages between the quads: an LSTM of 256 and 512 units takes 0.96 to 0.97 with 8, 16 and 64 rows,
// of 768 units 0.98; a GRU 0.98 to 0.99, 0.96 to 0.97 and 0.98. Zen 4 with steps: an LSTM of 128 to
// 192 units 0.94 to 0.96, of 1024 0.98 to 0.99, of 1536 0.97; a GRU of 192 units 0.94, of 1024 and
// more 0.99 to 1.00. Steps instead of stages: 0.97 to 0.99.
#pragma once

#include "kernels/cpu_tuning.h"
#include "kernels/rnn/rnn_epilogue.h"
#include "kernels/rnn/rnn_input.h"

namespace {

/// Most rows of a tile. A tile has four rows or three: every number from six on is a sum of fours
/// and threes.
constexpr int kRnnPipelinedRows = 4;
/// Parts into which the cells of a tile divide the quads of the next one. With fewer quads than
/// parts some would be empty: a GRU of 160 units, 40 quads, takes 1.06 of the time on Zen 4.
constexpr int pipelined_parts(RnnCell cell) { return kRnnPipelinedRows * (rnn_pauses(cell) + 1); }
/// Tiles whose inputs are multiplied in one go, so that the inputs' weights and the state's seldom
/// displace each other in L1.
constexpr int kInputTiles = 16;

/// Tiles of RnnRows.
struct RnnPipelinedTiles {
  static constexpr int kRows = kRnnPipelinedRows, kUnit = 1;
};

/// Vectors only: a matrix unit multiplies beside them anyway.
template <class Tiles>
constexpr bool kMayPipeline = false;
template <class Isa>
constexpr bool kMayPipeline<VectorTiles<Isa>> = kHasWide<Isa>;

template <class Isa>
inline bool rnn_is_pipelined(const RnnStep& s) {
  return s.rows > 2 * kRnnPipelinedRows - 2 && s.quads >= pipelined_parts(s.cell) &&
         s.quads >= cpu_tuning->rnn_pipelined_quads &&
         s.gates * s.panel_stride <= cpu_tuning->rnn_pipelined_bytes && rnn_is_plain(s);
}

/// t.acc = init + the products of kRows rows with all gates of a group, interleaved with the cells
/// of the tile before.
template <class Isa, int kRows, RnnCell kCell>
TORCHQ_NOINLINE void rnn_pipelined_tile(const RnnStep& s, const RnnTile& t,
                                        const RnnBlock& before) {
  constexpr int kGates = rnn_gates(kCell);
  using Cell = Cells<Isa, 1>;
  typename Isa::Int acc[kRows][kGates];
  TORCHQ_UNROLL for (int g = 0; g < kGates; ++g) {
    const auto init = Isa::load_int(t.init + g * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) acc[r][g] = init;
  }
  const uint8_t* row[kRows];
  TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) row[r] = t.src + t.row_offset[r];
  const int64_t panel_stride = t.panel_stride, prefetch_offset = t.prefetch_offset,
                size = t.quads * kQuad;
  const int8_t* weight = t.weight;
  int64_t k = 0;
  const auto multiply = [&](int64_t end) {
    while (k != end) {
      asm("" : "+r"(k), "+r"(weight));  // as in gemm_tile
      Isa::prefetch_l2(weight + prefetch_offset);
      dot_step<Isa, kRows, kGates, false>(acc, weight, panel_stride,
                                          [&](int r) { return Isa::broadcast(row[r] + k); });
      k += kQuad;
      weight += kPanel * kQuad;
    }
  };
  const int64_t part = t.quads / pipelined_parts(kCell) * kQuad;
  const auto between = [&] { multiply(k + part); };
  for (int r = 0; r < before.rows; ++r) {
    const RnnSums sums = before.sums(s, 0, r);
    rnn_epilogue<Isa, Cell, kCell, 0, true>(s, &sums, between);
    between();
    rnn_epilogue<Isa, Cell, kCell, 1, true>(s, &sums, between);
  }
  multiply(size);
  int32_t* const to = t.acc;
  TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
    TORCHQ_UNROLL for (int g = 0; g < kGates; ++g) {
      Isa::store_int(to + (r * kGates + g) * kPanel, acc[r][g]);
    }
  }
}

template <class Tiles, RnnCell kCell>
class RnnPipelined {
 public:
  explicit RnnPipelined(const RnnStep& s) : s_(s), tiles_(s.rows) {
    for (int r = 0; r < kRnnPipelinedRows; ++r) row_offset_[r] = r * s.src_stride;
    tile_.row_offset = row_offset_;
    tile_.quads = s.quads;
    tile_.panel_stride = s.panel_stride;
    before_.groups = 1;
    before_.acc_row_stride = kGates * kPanel;
  }

  void run() {
    for (int i = 0; i < s_.groups; ++i) {
      const int group = s_.descending ? s_.groups - 1 - i : i;
      step_ = i + 1 == s_.groups ? 0 : s_.descending ? -kGates : kGates;
      tile_.weight = s_.weight + group * s_.group_stride;
      tile_.init = s_.init + group * s_.param_stride;
      for (int64_t first = 0; first < tiles_.count; first += kInputTiles) {
        run_tiles(group, first, min_int(first + kInputTiles, tiles_.count));
      }
    }
    rnn_epilogue_block<Isa, kCell, true>(s_, before_);
  }

 private:
  using Isa = typename Tiles::Isa;
  static constexpr int kGates = rnn_gates(kCell);
  static constexpr int kTile = kRnnPipelinedRows * kGates * kPanel;  // sums

  void run_tiles(int group, int64_t begin, int64_t end) {
    const int64_t first = tiles_.first(begin);
    const float* input;
    int64_t stride = kGates * kPanel;
    if (s_.source != nullptr) {
      input = multiply_inputs(group, first, tiles_.first(end) - first);
    } else {
      stride = s_.input_row_stride;
      input = s_.input + group * s_.input_group_stride + first * stride;
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = tiles_.first(i);
      const int rows = static_cast<int>(tiles_.first(i + 1) - row);
      tile_.src = s_.src + row * s_.src_stride;
      tile_.acc = before_.acc == acc_[0] ? acc_[1] : acc_[0];
      tile_.prefetch_offset = rnn_prefetch_panel(step_, i) * tile_.panel_stride;
      (rows == kRnnPipelinedRows
           ? &rnn_pipelined_tile<Isa, kRnnPipelinedRows, kCell>
           : &rnn_pipelined_tile<Isa, kRnnPipelinedRows - 1, kCell>)(s_, tile_, before_);
      before_.first_group = group;
      before_.first_row = row;
      before_.rows = rows;
      before_.acc = tile_.acc;
      before_.input = input + (row - first) * stride;
      before_.input_row_stride = stride;
    }
  }

  /// Multiplies inputs into the buffer that the cells of the tile before do not read.
  const float* multiply_inputs(int group, int64_t first, int64_t rows) {
    next_input_ ^= 1;
    float* const dst = input_[next_input_];
    const RnnRows<Tiles> tiles(rows);
    for (int64_t i = 0; i < tiles.count; ++i) {
      const int64_t row = tiles.first(i);
      rnn_input_tile<Tiles>(*s_.source, group, 1, first + row,
                            static_cast<int>(tiles.first(i + 1) - row), dst + row * kGates * kPanel,
                            rnn_prefetch_panel(step_, i));
    }
    return dst;
  }

  const RnnStep& s_;
  const RnnRows<RnnPipelinedTiles> tiles_;
  RnnTile tile_{};
  RnnBlock before_{};  // of no rows before the first tile
  int step_ = 0;       // panels to the next group
  int next_input_ = 0;
  int64_t row_offset_[kRnnPipelinedRows];
  alignas(64) int32_t acc_[2][kTile];
  alignas(64) float input_[2][kInputTiles * kTile];
};

template <class Tiles>
void rnn_pipelined(const RnnStep& s) {
  if (s.cell == RnnCell::kLstm) return RnnPipelined<Tiles, RnnCell::kLstm>(s).run();
  RnnPipelined<Tiles, RnnCell::kGru>(s).run();
}

}  // namespace
