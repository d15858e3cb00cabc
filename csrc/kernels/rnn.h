// SPDX-License-Identifier: Apache-2.0
// Recurrent cells (contracts: RnnInput, RnnStep and QuantizeRow in table.h; formulas:
// reference_rnn.h).
//
// The products of a row with all gates of 16 units are summed in registers and pass to the cell
// through a tile in L1, so that the cell works on one row at a time with all registers to itself.
#pragma once

#include "rnn_dot.h"
#include "rnn_lanes.h"

namespace {

/// Sums of one block, in panels: 4 KB of L1.
constexpr int kRnnBlock = 64;

template <class Isa>
void rnn_input(const RnnInput& in) {
  alignas(64) int32_t acc[kTileRows * 4 * kPanel];
  RnnTile t{};
  t.src = in.src;
  t.quads = in.quads;
  t.weight = in.weight;
  t.panel_stride = in.panel_stride * (in.narrow ? 1 : Isa::kSteps);
  t.init = in.init;
  t.acc = acc;
  t.acc_stride = in.gates * kPanel;
  const int64_t tiles = rnn_tiles(in.rows);
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t first = in.rows * i / tiles;
    const int rows = static_cast<int>(in.rows * (i + 1) / tiles - first);
    t.row_offset = in.row_offset + first;
    float* dst = in.dst + first * t.acc_stride;
    if (in.scale == nullptr) {
      t.acc = reinterpret_cast<int32_t*>(dst);
      t.multiplier = in.multiplier;
      t.bias = in.bias;
      rnn_dot<Isa, true>(t, rows, in.gates, in.narrow);
      continue;
    }
    rnn_dot<Isa, false>(t, rows, in.gates, in.narrow);
    for (int g = 0; g < in.gates; ++g) {
      const auto multiplier = Isa::load(in.multiplier + g * kPanel);
      const auto bias = Isa::load(in.bias + g * kPanel);
      for (int r = 0; r < rows; ++r) {
        const int64_t at = r * t.acc_stride + g * kPanel;
        const auto shift = Isa::mul(Isa::load_int(in.compensation + g * kPanel),
                                    Isa::set_int(in.zero_point[first + r]));
        const auto sum = Isa::sub(Isa::load_int(acc + at), shift);
        const auto factor = Isa::mul(multiplier, Isa::set(in.scale[first + r]));
        Isa::store(dst + at, Isa::fma(Isa::to_float(sum), factor, bias));
      }
    }
  }
}

/// What a step does with the result h of 16 units of a row, in this order.
template <class Isa>
TORCHQ_INLINE void rnn_emit(const RnnStep& s, int64_t row, int64_t unit, typename Isa::Float h) {
  using Float = typename Isa::Float;
  const auto m = Isa::mask(min_int(s.units - unit, kPanel));
  typename Isa::Int q{};
  if (s.quantized != nullptr) {
    const Float zero_point = Isa::set(s.zero_point);
    Float y = Isa::fma(h, Isa::set(s.inverse_scale), zero_point);
    y = Isa::replace_nan(y, zero_point);
    q = Isa::to_int(Isa::min(Isa::max(y, Isa::set(s.lo)), Isa::set(s.hi)));
    uint8_t* p = s.quantized + row * s.quantized_stride + unit;
    Isa::store_panel(p, Isa::add(q, Isa::set_int(s.flip)), false);
    if (s.requantized) {
      h = Isa::mul(Isa::set(s.real_scale), Isa::sub(Isa::to_float(q), zero_point));
    }
  }
  if (s.state != nullptr) Isa::store(s.state + row * s.unit_stride + unit, h);
  if (s.dst == nullptr) return;
  void* dst = element(s.dst, s.dst_dtype, row * s.dst_stride + unit);
  if (s.dst_dtype == DType::f32) {
    Isa::store(static_cast<float*>(dst), h, m);
  } else if (s.dst_dtype == DType::s8) {
    Isa::store_s8(dst, q, m);
  } else {
    Isa::store_u8(dst, q, m);
  }
}

/// The cells of V::kCells rows (or groups): that of sums acc[i], which are [gates][16].
template <class Isa, class V, RnnCell kCell>
TORCHQ_INLINE void rnn_finish(const RnnStep& s, const int32_t* const* acc, const int* group,
                              const int64_t* row) {
  using Float = typename V::Float;
  using Cell = RnnFormula<V>;
  const auto unit = [&](int i) { return int64_t{group[i]} * kPanel; };
  const auto at = [&](int i) { return row[i] * s.unit_stride + unit(i); };
  const auto gate = [&](int g, Float x) {
    Float factor = V::each([&](int i) {
      const auto m = Isa::load(s.multiplier + group[i] * s.param_stride + g * kPanel);
      return s.scale == nullptr ? m : Isa::mul(m, Isa::set(s.scale[row[i]]));
    });
    const Float sum =
        V::each([&](int i) { return Isa::to_float(Isa::load_int(acc[i] + g * kPanel)); });
    return V::fma(sum, factor, x);
  };
  const auto in = [&](int g) {
    return V::each([&](int i) {
      return Isa::load(s.input + group[i] * s.input_group_stride + row[i] * s.input_row_stride +
                       g * kPanel);
    });
  };
  const auto old = [&] { return V::each([&](int i) { return Isa::load(s.old + at(i)); }); };
  const auto extra = [&](int vector) {
    return V::each([&](int i) { return Isa::load(s.extra + vector * s.extra_stride + unit(i)); });
  };
  const auto store = [&](float* to, Float value) {
    V::for_each(value, [&](int i, auto each) { Isa::store(to + at(i), each); });
  };
  Float h;
  if constexpr (kCell == RnnCell::kLstm) {
    Float a[4] = {gate(0, in(0)), gate(1, in(1)), gate(2, in(2)), gate(3, in(3))};
    Float c = V::each([&](int i) { return Isa::load(s.cell_state + at(i)); });
    if (s.extra == nullptr) {
      h = Cell::lstm(a, c);
    } else {
      const Float w[3] = {extra(0), extra(1), extra(2)};
      h = Cell::lstm_peephole(a, w, c);
    }
    store(s.cell_state, c);
  } else if constexpr (kCell == RnnCell::kGru) {
    h = Cell::gru(gate(0, in(0)), gate(1, in(1)), gate(2, extra(0)), in(2), old());
  } else if constexpr (kCell == RnnCell::kGruGates) {
    store(s.update, Cell::logistic(gate(1, in(1))));
    h = V::mul(old(), Cell::logistic(gate(0, in(0))));
  } else if constexpr (kCell == RnnCell::kGruNew) {
    const Float z = V::each([&](int i) { return Isa::load(s.update + at(i)); });
    h = Cell::mix(z, old(), Cell::tanh(gate(0, in(0))));
  } else if constexpr (kCell == RnnCell::kTanh) {
    h = Cell::tanh(gate(0, in(0)));
  } else if constexpr (kCell == RnnCell::kRelu) {
    h = V::max(gate(0, in(0)), V::set(0.0f));
  } else {
    h = gate(0, V::set(0.0f));
  }
  V::for_each(h, [&](int i, auto each) { rnn_emit<Isa>(s, row[i], unit(i), each); });
}

/// The cells of `rows` rows and `groups` groups; acc is [groups][rows][gates][16].
template <class Isa, RnnCell kCell>
TORCHQ_INLINE void rnn_finish_block(const RnnStep& s, const int32_t* acc, int first_group,
                                    int groups, int64_t first_row, int rows) {
  constexpr int kGates = rnn_gates(kCell);
  constexpr bool kPairs = Isa::kMaxPanels > 1;  // 32 registers
  const int cells = groups * rows;
  const int32_t* sums[2];
  int group[2];
  int64_t row[2];
  const auto point = [&](int i, int cell) {
    sums[i] = acc + cell * kGates * kPanel;
    group[i] = first_group + cell / rows;
    row[i] = first_row + cell % rows;
  };
  int cell = 0;
  if constexpr (kPairs) {
    for (; cell + 2 <= cells; cell += 2) {
      point(0, cell);
      point(1, cell + 1);
      rnn_finish<Isa, TwoCells<Isa>, kCell>(s, sums, group, row);
    }
  }
  for (; cell < cells; ++cell) {
    point(0, cell);
    rnn_finish<Isa, OneCell<Isa>, kCell>(s, sums, group, row);
  }
}

template <class Isa, RnnCell kCell>
TORCHQ_NOINLINE void rnn_run(const RnnStep& s) {
  constexpr int kGates = rnn_gates(kCell);
  alignas(64) int32_t acc[kRnnBlock * kPanel];
  RnnTile t{};
  t.quads = s.quads;
  t.acc_stride = kGates * kPanel;
  const int widening = s.narrow ? 1 : Isa::kSteps;
  t.panel_stride = s.panel_stride * widening;
  int64_t row_offset[kTileRows];
  for (int r = 0; r < kTileRows; ++r) row_offset[r] = r * s.src_stride;
  t.row_offset = row_offset;
  const int64_t tiles = rnn_tiles(s.rows);
  // One row: the panels of many groups in one go, and then their cells, which are independent of
  // each other and overlap. Many rows: a group's weights stay in L1 for all of them.
  const bool consecutive =
      s.group_stride == kGates * s.panel_stride && s.param_stride == kGates * kPanel;
  const int block = s.rows == 1 && consecutive ? kRnnBlock / kGates : 1;
  const int blocks = (s.groups + block - 1) / block;
  for (int b = 0; b < blocks; ++b) {
    const int group = (s.descending ? blocks - 1 - b : b) * block;
    const int count = min_int(s.groups - group, block);
    t.weight = s.weight + group * s.group_stride * widening;
    t.init = s.init + group * s.param_stride;
    t.acc = acc;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = s.rows * i / tiles;
      const int rows = static_cast<int>(s.rows * (i + 1) / tiles - first);
      t.src = s.src + first * s.src_stride;
      rnn_dot<Isa, false>(t, rows, count * kGates, s.narrow, s.descending);
      rnn_finish_block<Isa, kCell>(s, acc, group, count, first, rows);
    }
  }
}

template <class Isa>
void rnn_step(const RnnStep& s) {
  switch (s.cell) {
    case RnnCell::kLstm:
      return rnn_run<Isa, RnnCell::kLstm>(s);
    case RnnCell::kGru:
      return rnn_run<Isa, RnnCell::kGru>(s);
    case RnnCell::kGruGates:
      return rnn_run<Isa, RnnCell::kGruGates>(s);
    case RnnCell::kGruNew:
      return rnn_run<Isa, RnnCell::kGruNew>(s);
    case RnnCell::kTanh:
      return rnn_run<Isa, RnnCell::kTanh>(s);
    case RnnCell::kRelu:
      return rnn_run<Isa, RnnCell::kRelu>(s);
    default:
      return rnn_run<Isa, RnnCell::kProjection>(s);
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
