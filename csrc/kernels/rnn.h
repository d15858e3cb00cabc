// SPDX-License-Identifier: Apache-2.0
// Recurrent cells (contracts: RnnInput, RnnStep and QuantizeRow in table.h; formulas:
// reference_rnn.h).
//
// The products of a row with all gates of 16 units are summed in registers and pass to the cell
// through a tile in L1, so that the cell works on one row at a time with all registers to itself.
#pragma once

#include "gemm.h"
#include "rnn_cell.h"

namespace {

/// Sums of one block, in panels: 4 KB of L1.
constexpr int kRnnBlock = 64;

struct RnnTile {
  const uint8_t* src;
  int64_t row_offset[kTileRows];
  int64_t quads;
  const int8_t* weight;
  int64_t panel_stride;  // bytes as they lie in memory
  const int32_t* init;
  int32_t* acc;
  int64_t acc_stride;  // between rows
  const float *multiplier, *bias;
};

/// acc[row][panel] = init[panel] + sum over k of src[row][k] * weight[panel][k]; with kScaled the
/// floats fma(acc, multiplier[panel], bias[panel]) in its place.
template <class Isa, int MR, int NP, bool kNarrow, bool kScaled>
TORCHQ_NOINLINE void rnn_tile(const RnnTile& t) {
  constexpr int kSteps = kNarrow ? 1 : Isa::kSteps;
  using Int = typename Isa::Int;
  int64_t row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = t.row_offset[r];
  Int acc[MR][NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const Int init = Isa::load_int(t.init + p * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
  }
  const int64_t panel_stride = t.panel_stride;
  const uint8_t* src = t.src;
  const uint8_t* const end = src + t.quads * kQuad;
  const int8_t* weight = t.weight;
  while (src != end) {
    const auto quad = [&](int r) { return Isa::broadcast(src + row[r]); };
    if constexpr (kSteps == 1) {
      dot_step<Isa, MR, NP, kNarrow>(acc, weight, panel_stride, quad);
    } else {
      dot_step<Isa, MR, NP, kNarrow>(acc, weight, panel_stride,
                                     [&](int r) { return Isa::template split_src<0>(quad(r)); });
      asm("" : "+r"(src), "+r"(weight));  // as in gemm_tile
      dot_step<Isa, MR, NP, kNarrow>(acc, weight + kPanel * kQuad, panel_stride,
                                     [&](int r) { return Isa::template split_src<1>(quad(r)); });
    }
    src += kQuad;
    weight += kSteps * kPanel * kQuad;
  }
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::pin(acc[r][p]);
  }
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    if constexpr (kScaled) {
      const auto multiplier = Isa::load(t.multiplier + p * kPanel);
      const auto bias = Isa::load(t.bias + p * kPanel);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        float* dst = reinterpret_cast<float*>(t.acc + r * t.acc_stride + p * kPanel);
        Isa::store(dst, Isa::fma(Isa::to_float(acc[r][p]), multiplier, bias));
      }
    } else {
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        Isa::store_int(t.acc + r * t.acc_stride + p * kPanel, acc[r][p]);
      }
    }
  }
}

using RnnTileFn = void (*)(const RnnTile&);

/// fn[rows - 1][panels - 1]
template <class Isa, bool kNarrow, bool kScaled>
struct RnnTiles {
  RnnTileFn fn[kTileRows][Isa::kMaxPanels];

  template <int MR, int NP>
  constexpr void fill() {
    fn[MR - 1][NP - 1] = &rnn_tile<Isa, MR, NP, kNarrow, kScaled>;
    if constexpr (NP < Isa::kMaxPanels) {
      fill<MR, NP + 1>();
    } else if constexpr (MR < kTileRows) {
      fill<MR + 1, 1>();
    }
  }
  constexpr RnnTiles() : fn() { fill<1, 1>(); }
};

template <class Isa, bool kNarrow, bool kScaled>
constexpr RnnTiles<Isa, kNarrow, kScaled> kRnnTiles;

/// All of `panels` consecutive panels, for up to kTileRows rows.
template <class Isa, bool kNarrow, bool kScaled>
TORCHQ_INLINE void rnn_dot(RnnTile t, int rows, int panels) {
  constexpr int most = Isa::kMaxPanels;
  const RnnTile first = t;
  for (int panel = 0; panel < panels; panel += most) {
    const int count = min_int(panels - panel, most);
    t.weight = first.weight + panel * first.panel_stride;
    t.init = first.init + panel * kPanel;
    t.acc = first.acc + panel * kPanel;
    t.multiplier = first.multiplier + panel * kPanel;
    t.bias = first.bias + panel * kPanel;
    kRnnTiles<Isa, kNarrow, kScaled>.fn[rows - 1][count - 1](t);
  }
}

template <class Isa, bool kScaled>
TORCHQ_INLINE void rnn_dot(const RnnTile& t, int rows, int panels, bool narrow) {
  if constexpr (Isa::kHasNarrow) {
    if (narrow) return rnn_dot<Isa, true, kScaled>(t, rows, panels);
  }
  rnn_dot<Isa, false, kScaled>(t, rows, panels);
}

/// Rows of a tile: sizes differ by at most one.
TORCHQ_INLINE int64_t rnn_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

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
    for (int r = 0; r < rows; ++r) t.row_offset[r] = in.row_offset[first + r];
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

/// One cell's lanes, or those of two independent cells whose instructions alternate: a cell alone
/// is a chain of 200 cycles, longer than the reorder buffer hides.
template <class Isa>
struct OneCell : Isa {
  static constexpr int kCells = 1;
  template <class Body>
  static TORCHQ_INLINE auto each(const Body& body) {
    return body(0);
  }
  template <class Value, class Body>
  static TORCHQ_INLINE void for_each(const Value& v, const Body& body) {
    body(0, v);
  }
};

template <class Isa>
struct TwoCells {
  static constexpr int kCells = 2;
  struct Float {
    typename Isa::Float a, b;
  };
  struct Int {
    typename Isa::Int a, b;
  };

  template <class Body>
  static TORCHQ_INLINE Float each(const Body& body) {
    return {body(0), body(1)};
  }
  template <class Value, class Body>
  static TORCHQ_INLINE void for_each(const Value& v, const Body& body) {
    body(0, v.a);
    body(1, v.b);
  }
  static TORCHQ_INLINE Float set(float x) { return {Isa::set(x), Isa::set(x)}; }
  static TORCHQ_INLINE Int set_int(int32_t x) { return {Isa::set_int(x), Isa::set_int(x)}; }
  static TORCHQ_INLINE Float add(Float x, Float y) {
    return {Isa::add(x.a, y.a), Isa::add(x.b, y.b)};
  }
  static TORCHQ_INLINE Int add(Int x, Int y) { return {Isa::add(x.a, y.a), Isa::add(x.b, y.b)}; }
  static TORCHQ_INLINE Float sub(Float x, Float y) {
    return {Isa::sub(x.a, y.a), Isa::sub(x.b, y.b)};
  }
  static TORCHQ_INLINE Float mul(Float x, Float y) {
    return {Isa::mul(x.a, y.a), Isa::mul(x.b, y.b)};
  }
  static TORCHQ_INLINE Float div(Float x, Float y) {
    return {Isa::div(x.a, y.a), Isa::div(x.b, y.b)};
  }
  static TORCHQ_INLINE Float max(Float x, Float y) {
    return {Isa::max(x.a, y.a), Isa::max(x.b, y.b)};
  }
  static TORCHQ_INLINE Float min(Float x, Float y) {
    return {Isa::min(x.a, y.a), Isa::min(x.b, y.b)};
  }
  static TORCHQ_INLINE Float fma(Float x, Float y, Float z) {
    return {Isa::fma(x.a, y.a, z.a), Isa::fma(x.b, y.b, z.b)};
  }
  static TORCHQ_INLINE Float to_float(Int x) { return {Isa::to_float(x.a), Isa::to_float(x.b)}; }
  static TORCHQ_INLINE Int bits(Float x) { return {Isa::bits(x.a), Isa::bits(x.b)}; }
  static TORCHQ_INLINE Float from_bits(Int x) { return {Isa::from_bits(x.a), Isa::from_bits(x.b)}; }
  template <int kBits>
  static TORCHQ_INLINE Int shift_left(Int x) {
    return {Isa::template shift_left<kBits>(x.a), Isa::template shift_left<kBits>(x.b)};
  }
};

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
  t.src = s.src;
  t.quads = s.quads;
  t.acc_stride = kGates * kPanel;
  const int widening = s.narrow ? 1 : Isa::kSteps;
  t.panel_stride = s.panel_stride * widening;
  const int64_t tiles = rnn_tiles(s.rows);
  // One row: the panels of many groups in one go, and then their cells, which are independent of
  // each other and overlap. Many rows: a group's weights stay in L1 for all of them.
  const bool consecutive =
      s.group_stride == kGates * s.panel_stride && s.param_stride == kGates * kPanel;
  const int block = s.rows == 1 && consecutive ? kRnnBlock / kGates : 1;
  for (int group = 0; group < s.groups; group += block) {
    const int count = min_int(s.groups - group, block);
    t.weight = s.weight + group * s.group_stride * widening;
    t.init = s.init + group * s.param_stride;
    t.acc = acc;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t first = s.rows * i / tiles;
      const int rows = static_cast<int>(s.rows * (i + 1) / tiles - first);
      for (int r = 0; r < rows; ++r) t.row_offset[r] = (first + r) * s.src_stride;
      rnn_dot<Isa, false>(t, rows, count * kGates, s.narrow);
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
