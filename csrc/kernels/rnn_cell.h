// SPDX-License-Identifier: Apache-2.0
// The formulas of the recurrent cells, once for every tier: `V` is an Isa trait, or `Scalar`.
//
// The gates share one exponential and few divisions: logistic(a) = 1 / (1 + e^-a), and
// tanh(a) = (1 - e^-2a) / (1 + e^-2a), so that sums and products of gates have one denominator,
// whose reciprocal comes before all that may be large (c, or a state). Absolute error of each below
// 5e-7 (tests/test_rnn_kernels.py). exp_gates is shorter than Math<V>::exp, which counts five times
// a unit: it has the range that gates need, and not more.
#pragma once

#include "math.h"

namespace {

constexpr int rnn_gates(RnnCell cell) {
  switch (cell) {
    case RnnCell::kLstm:
      return 4;
    case RnnCell::kGru:
    case RnnCell::kGruVanilla:
      return 3;
    case RnnCell::kGruGates:
      return 2;
    default:
      return 1;
  }
}

template <class V>
struct RnnFormula {
  using Float = typename V::Float;

  /// e^x as p * power, a power of two: the product rounds once with what is added to it.
  struct Exp {
    Float p, power;
    Float value() const { return V::mul(p, power); }
    Float plus_one() const { return V::fma(p, power, V::set(1.0f)); }
    Float from_one() const { return V::fnma(p, power, V::set(1.0f)); }
  };

  /// e[i] = e^(factor[i] * x[i]), with the exponent clamped to [-20, 20]: beyond, 1 + e and 1 - e
  /// are what they are at infinity, up to 3e-9. Relative error below 3e-7; NaN stays NaN. All take
  /// a step before any takes the next one, since a chain of 15 steps waits for its own results.
  template <int N>
  static TORCHQ_INLINE void exp_gates(Float (&x)[N], const float (&factor)[N], Exp (&e)[N]) {
    constexpr float c[] = {1.0f,          0.693147004f,   0.240222424f,
                           0.0555073358f, 0.00967151299f, 0.00132647273f};
    // 1.5 * 2^23 + 127: the low bits of y + magic are rne(y) with the bias of an exponent.
    const Float magic = V::set(12583039.0f);
    Float shifted[N], p[N];
    const auto limit = [&](int i) { return 20.0f / (factor[i] < 0.0f ? -factor[i] : factor[i]); };
    const auto base = [&](int i) { return V::set(factor[i] * 1.44269504f); };
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::max(V::set(-limit(i)), x[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::min(V::set(limit(i)), x[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) shifted[i] = V::fma(x[i], base(i), magic);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) p[i] = V::sub(magic, shifted[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::fma(x[i], base(i), p[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) p[i] = V::fma(V::set(c[5]), x[i], V::set(c[4]));
    TORCHQ_UNROLL for (int k = 3; k >= 0; --k) {
      TORCHQ_UNROLL for (int i = 0; i < N; ++i) p[i] = V::fma(p[i], x[i], V::set(c[k]));
    }
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) {
      e[i] = {p[i], V::from_bits(V::template shift_left<23>(V::bits(shifted[i])))};
    }
  }

  static TORCHQ_INLINE Exp exp_gate(Float x, float factor) {
    Float one[] = {x};
    Exp e[1];
    exp_gates(one, {factor}, e);
    return e[0];
  }

  static TORCHQ_INLINE Float logistic(Float a) { return V::div(V::set(1.0f), inverse_logistic(a)); }
  static TORCHQ_INLINE Float inverse_logistic(Float a) { return exp_gate(a, -1.0f).plus_one(); }
  static TORCHQ_INLINE Float tanh(Float a) {
    const Exp e = exp_gate(a, -2.0f);
    return V::div(e.from_one(), e.plus_one());
  }

  /// An LSTM's next c: logistic(f) * c + logistic(i) * tanh(g)
  static TORCHQ_INLINE Float next_cell(Float i, Float f, Float g, Float c) {
    Float x[] = {i, f, g};
    Exp e[3];
    exp_gates(x, {-1.0f, -1.0f, -2.0f}, e);
    return next_cell(e[0], e[1], e[2], c);
  }
  static TORCHQ_INLINE Float next_cell(Exp i, Exp f, Exp g, Float c) {
    const Float forget = f.plus_one(), input = V::mul(i.plus_one(), g.plus_one());
    const Float inverse = V::div(V::set(1.0f), V::mul(forget, input));
    const Float fresh = V::mul(g.from_one(), V::mul(forget, inverse));
    return V::fma(c, V::mul(input, inverse), fresh);
  }
  /// The same, with o becoming inverse_logistic(o) meanwhile.
  static TORCHQ_INLINE Float next_cell(Float i, Float f, Float g, Float c, Float& o) {
    Float x[] = {i, f, g, o};
    Exp e[4];
    exp_gates(x, {-1.0f, -1.0f, -2.0f, -1.0f}, e);
    o = e[3].plus_one();
    return next_cell(e[0], e[1], e[2], c);
  }
  /// An LSTM's h: tanh(c) / inverse_o
  static TORCHQ_INLINE Float output(Float inverse_o, Float c) {
    const Exp e = exp_gate(c, -2.0f);
    return V::div(e.from_one(), V::mul(inverse_o, e.plus_one()));
  }

  /// A GRU's gates: logistic(r), with z becoming e^-z meanwhile.
  static TORCHQ_INLINE Float reset(Float r, Float& z) {
    Float x[] = {r, z};
    Exp e[2];
    exp_gates(x, {-1.0f, -1.0f}, e);
    z = e[1].value();
    return V::div(V::set(1.0f), e[0].plus_one());
  }
  /// Its h: logistic(z) * old + (1 - logistic(z)) * tanh(n), of e^-z
  static TORCHQ_INLINE Float update(Float exp_z, Float old, Float n) {
    const Exp e = exp_gate(n, -2.0f);
    const Float keep = V::add(V::set(1.0f), exp_z), fresh = e.plus_one();
    const Float inverse = V::div(V::set(1.0f), V::mul(keep, fresh));
    return V::fma(old, V::mul(fresh, inverse), V::mul(V::mul(exp_z, e.from_one()), inverse));
  }
  /// The same of the gates themselves: z * old + (1 - z) * n
  static TORCHQ_INLINE Float mix(Float z, Float old, Float n) {
    return V::fma(z, V::sub(old, n), n);
  }
};

/// x with NaN as 0 and infinities as the largest numbers: what a row's range is taken from.
template <class V>
TORCHQ_INLINE typename V::Float rnn_finite(typename V::Float x) {
  const auto largest = V::set(3.40282347e+38f);
  x = V::select(V::equal(x, x), x, V::set(0.0f));
  return V::min(V::max(x, V::sub(V::set(0.0f), largest)), largest);
}

/// The scale of QuantizeRow, from the range of its values, zero included.
struct RowScale {
  float inverse, zero_point;
};
inline RowScale rnn_row_scale(QuantizeRow& q, float low, float high) {
  constexpr float kSmallest = 1.17549435e-38f;  // below, a reciprocal is not finite
  if (q.symmetric) {
    const float largest = -low > high ? -low : high;
    q.scale = largest < 127.0f * kSmallest ? kSmallest : largest / 127.0f;
    q.zero_point = 128;
  } else {
    // Halves, since the difference of two floats may not be finite.
    const float range = high * 0.5f - low * 0.5f;
    q.scale = range < 255.0f * kSmallest ? kSmallest : range / 127.5f;
    const float shifted = Scalar::round(-low / q.scale);
    q.zero_point = shifted > 255.0f ? 255 : static_cast<int32_t>(shifted);
  }
  return {1.0f / q.scale, static_cast<float>(q.zero_point)};
}

}  // namespace
