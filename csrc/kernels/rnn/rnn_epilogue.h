// SPDX-License-Identifier: Apache-2.0
// Epilogue of a recurrent cell's sums (contract: RnnStep in contract.h; formulas: reference.h).
#pragma once

#include "kernels/rnn/rnn_lanes.h"

namespace {

/// Returns true for the common step: static, u8, whole groups, an LSTM without peephole or a GRU.
/// Its cells need no further checks: 8 to 10 % less of an LSTM's or GRU's time outside of products.
inline bool rnn_is_plain(const RnnStep& s) {
  return s.scale == nullptr && s.quantized != nullptr && !s.requantized && s.flip == 0 &&
         s.dst != nullptr && s.units == s.groups * kPanel &&
         (s.cell == RnnCell::kLstm ? s.extra == nullptr : s.cell == RnnCell::kGru);
}

/// Quantizes and stores the result h of 16 units of a row.
template <class Isa, bool kPlain>
TORCHQ_INLINE void rnn_emit(const RnnStep& s, int64_t row, int64_t unit, typename Isa::Float h) {
  using Float = typename Isa::Float;
  typename Isa::Int q{};
  uint8_t* quantized = nullptr;
  if (kPlain || s.quantized != nullptr) {
    const Float zero_point = Isa::set(s.zero_point);
    Float y = Isa::fma(h, Isa::set(s.inverse_scale), zero_point);
    y = Isa::replace_nan(y, zero_point);
    q = Isa::to_int(Isa::min(Isa::max(y, Isa::set(s.lo)), Isa::set(s.hi)));
    quantized = s.quantized + row * s.quantized_stride + unit;
    const bool flips = !kPlain && s.flip != 0;
    Isa::store_panel(quantized, flips ? Isa::add(q, Isa::set_int(s.flip)) : q, false);
    if (!kPlain && s.requantized) {
      h = Isa::mul(Isa::set(s.real_scale), Isa::sub(Isa::to_float(q), zero_point));
    }
  }
  if (s.state != nullptr) Isa::store(s.state + row * s.unit_stride + unit, h);
  if (!kPlain && s.dst == nullptr) return;
  void* dst = element(s.dst, s.dst_dtype, row * s.dst_stride + unit);
  if constexpr (kPlain) {
    if (s.dst_dtype == DType::f32) return Isa::store(static_cast<float*>(dst), h);
    return Isa::store_panel(static_cast<uint8_t*>(dst), q, false);
  }
  const int64_t count = s.units - unit;
  if (s.dst_dtype == DType::f32) {
    Isa::store(static_cast<float*>(dst), h, Isa::mask(min_int(count, kPanel)));
  } else if (s.flip == 0 && count >= kPanel) {
    memcpy(dst, quantized, kPanel);
  } else if (s.dst_dtype == DType::s8) {
    Isa::store_s8(dst, q, Isa::mask(min_int(count, kPanel)));
  } else {
    Isa::store_u8(dst, q, Isa::mask(min_int(count, kPanel)));
  }
}

/// Operands of a cell: its sums and its input, both [gates][16], and the positions of its units in
/// the other buffers.
struct RnnSums {
  int32_t* acc;
  const float* input;
  int64_t row, unit, at;  // at: in buffers of units
  const float* multiplier;
};

/// As many cells as V has, of other rows or groups. Those of an LSTM or GRU have two stages, the
/// first of which ends with c, or with the new gate's argument: all of a block's cells take it
/// before any takes the second. Each has fewer instructions in a row that wait for others (whole
/// layers of 512 units: 1 to 3 % faster with vectors, up to 4 % on AMX).
template <class Isa, class V, RnnCell kCell, int kStage, bool kPlain, class Between = Nothing>
TORCHQ_INLINE void rnn_epilogue(const RnnStep& s, const RnnSums* sums,
                                const Between& between = {}) {
  using Float = typename V::Float;
  using Cell = RnnFormula<V>;
  const auto gate = [&](int g, Float x) {
    Float factor = V::each([&](int i) { return Isa::load(sums[i].multiplier + g * kPanel); });
    if (!kPlain && s.scale != nullptr) {
      factor = V::mul(factor, V::each([&](int i) { return Isa::set(s.scale[sums[i].row]); }));
    }
    const Float sum =
        V::each([&](int i) { return Isa::to_float(Isa::load_int(sums[i].acc + g * kPanel)); });
    return V::fma(sum, factor, x);
  };
  const auto in = [&](int g) {
    return V::each([&](int i) { return Isa::load(sums[i].input + g * kPanel); });
  };
  const auto old = [&] { return V::each([&](int i) { return Isa::load(s.old + sums[i].at); }); };
  const auto extra = [&](int vector) {
    return V::each(
        [&](int i) { return Isa::load(s.extra + vector * s.extra_stride + sums[i].unit); });
  };
  const auto store = [&](float* to, Float value) {
    V::for_each(value, [&](int i, auto each) { Isa::store(to + sums[i].at, each); });
  };
  Float h;
  if constexpr (kCell == RnnCell::kLstm) {
    Float c = V::each([&](int i) { return Isa::load(s.cell_state + sums[i].at); });
    const auto peephole = [&](int vector, Float a) {
      return kPlain || s.extra == nullptr ? a : V::fma(extra(vector), c, a);
    };
    if constexpr (kStage == 0) {
      const Float i = peephole(0, gate(0, in(0))), f = peephole(1, gate(1, in(1)));
      return store(s.cell_state, Cell::next_cell(i, f, gate(2, in(2)), c, between));
    }
    h = Cell::logistic_tanh(peephole(2, gate(3, in(3))), c, between);
  } else if constexpr (kCell == RnnCell::kGru) {
    // Between the stages the new gate's argument lies in place of the reset gate's sum.
    const auto argument = [&](int i) { return reinterpret_cast<float*>(sums[i].acc); };
    if constexpr (kStage == 0) {
      const Float x = V::fma(Cell::logistic(gate(0, in(0)), between), gate(2, extra(0)), in(2));
      return V::for_each(x, [&](int i, auto each) { Isa::store(argument(i), each); });
    }
    const Float n = Cell::tanh(V::each([&](int i) { return Isa::load(argument(i)); }), between);
    h = Cell::mix(Cell::logistic(gate(1, in(1)), between), old(), n);
  } else if constexpr (kCell == RnnCell::kGruGates) {
    store(s.update, Cell::logistic(gate(1, in(1))));
    h = V::mul(old(), Cell::logistic(gate(0, in(0))));
  } else if constexpr (kCell == RnnCell::kGruNew) {
    const Float z = V::each([&](int i) { return Isa::load(s.update + sums[i].at); });
    h = Cell::mix(z, old(), Cell::tanh(gate(0, in(0))));
  } else if constexpr (kCell == RnnCell::kTanh) {
    h = Cell::tanh(gate(0, in(0)), between);
  } else if constexpr (kCell == RnnCell::kRelu) {
    h = V::max(gate(0, in(0)), V::set(0.0f));
  } else {
    h = gate(0, V::set(0.0f));
  }
  between();
  V::for_each(h,
              [&](int i, auto each) { rnn_emit<Isa, kPlain>(s, sums[i].row, sums[i].unit, each); });
}

/// A tile of sums and inputs, where those of its first row and group are.
struct RnnBlock {
  int32_t* acc;
  int64_t acc_group_stride, acc_row_stride;
  const float* input;
  int64_t input_group_stride, input_row_stride;
  int first_group, groups;
  int64_t first_row;
  int rows;

  RnnSums sums(const RnnStep& s, int group, int row) const {
    const int64_t unit = int64_t{first_group + group} * kPanel;
    return {acc + group * acc_group_stride + row * acc_row_stride,
            input + group * input_group_stride + row * input_row_stride,
            first_row + row,
            unit,
            (first_row + row) * s.unit_stride + unit,
            s.multiplier + (first_group + group) * s.param_stride};
  }
};

/// Walks over the cells of a block, group by group.
class RnnWalk {
 public:
  RnnWalk(const RnnStep& s, const RnnBlock& block)
      : s_(s), block_(block), left_(block.groups * block.rows), next_(block.sums(s, 0, 0)) {}

  template <int N>
  bool take(RnnSums (&sums)[N]) {
    if (left_ < N) return false;
    left_ -= N;
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) {
      sums[i] = next_;
      if (++row_ == block_.rows) {
        row_ = 0;
        next_ = block_.sums(s_, ++group_, 0);
      } else {
        next_.acc += block_.acc_row_stride;
        next_.input += block_.input_row_stride;
        next_.row += 1;
        next_.at += s_.unit_stride;
      }
    }
    return true;
  }

 private:
  const RnnStep& s_;
  const RnnBlock& block_;
  int group_ = 0, row_ = 0, left_;
  RnnSums next_;
};

/// N cells side by side, as long as there are that many.
template <class Isa, int N, RnnCell kCell, int kStage, bool kPlain>
TORCHQ_INLINE void rnn_epilogue_by(const RnnStep& s, RnnWalk& walk) {
  RnnSums sums[N];
  while (walk.take(sums)) rnn_epilogue<Isa, Cells<Isa, N>, kCell, kStage, kPlain>(s, sums);
}

/// Up to six exponentials go side by side in 32 registers: those of three cells, but of two in an
/// LSTM's first stage.
template <class Isa, RnnCell kCell, int kStage, bool kPlain>
TORCHQ_NOINLINE void rnn_epilogue_stage(const RnnStep& s, const RnnBlock& block) {
  RnnWalk walk(s, block);
  if constexpr (Isa::kVectors == 32) {
    constexpr bool kThree = kCell != RnnCell::kLstm || kStage == 1;
    if constexpr (kThree) rnn_epilogue_by<Isa, 3, kCell, kStage, kPlain>(s, walk);
    rnn_epilogue_by<Isa, 2, kCell, kStage, kPlain>(s, walk);
  }
  rnn_epilogue_by<Isa, 1, kCell, kStage, kPlain>(s, walk);
}

template <class Isa, RnnCell kCell, bool kPlain>
void rnn_epilogue_block(const RnnStep& s, const RnnBlock& block) {
  rnn_epilogue_stage<Isa, kCell, 0, kPlain>(s, block);
  if constexpr (rnn_stages(kCell) > 1) {
    rnn_epilogue_stage<Isa, kCell, 1, kPlain>(s, block);
  }
}

}  // namespace
