// SPDX-License-Identifier: Apache-2.0
// The formulas of the recurrent cells, once for every tier: `V` is an Isa trait, or `Scalar`.
//
// The gates share one exponential and few divisions: logistic(a) = 1 / (1 + e^-a), and
// tanh(a) = (1 - e^-2a) / (1 + e^-2a), so that a product of two gates is one quotient. Absolute
// error of each below 5e-7 (tests/test_rnn_kernels.py). exp_gate is shorter than Math<V>::exp,
// which counts five times a unit: it has the range that gates need, and not more.
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

  /// e^(factor * x), with the exponent clamped to [-20, 20]: beyond, 1 + e and 1 - e are what they
  /// are at infinity, up to 3e-9. Relative error below 3e-7; NaN stays NaN.
  static TORCHQ_INLINE Float exp_gate(Float x, float factor) {
    const Float limit = V::set(28.8539009f);  // 20 log2(e)
    const Float magic = V::set(12582912.0f);  // 1.5 * 2^23: the low bits of y + magic are rne(y)
    Float y = V::mul(x, V::set(factor * 1.44269504f));
    y = V::min(limit, V::max(V::sub(V::set(0.0f), limit), y));
    const Float shifted = V::add(y, magic);
    const Float f = V::sub(y, V::sub(shifted, magic));  // exact
    constexpr float c[] = {1.0f,          0.693147004f,   0.240222424f,
                           0.0555073358f, 0.00967151299f, 0.00132647273f};
    const Float p = Math<V>::polynomial(c, f);  // 2^f
    return V::from_bits(V::add(V::bits(p), V::template shift_left<23>(V::bits(shifted))));
  }

  static TORCHQ_INLINE Float one_plus(Float e) { return V::add(V::set(1.0f), e); }
  static TORCHQ_INLINE Float one_minus(Float e) { return V::sub(V::set(1.0f), e); }

  static TORCHQ_INLINE Float logistic(Float a) {
    return V::div(V::set(1.0f), one_plus(exp_gate(a, -1.0f)));
  }
  static TORCHQ_INLINE Float tanh(Float a) {
    const Float e = exp_gate(a, -2.0f);
    return V::div(one_minus(e), one_plus(e));
  }
  /// logistic(a) * tanh(b)
  static TORCHQ_INLINE Float logistic_tanh(Float a, Float b) {
    const Float e = exp_gate(a, -1.0f), d = exp_gate(b, -2.0f);
    return V::div(one_minus(d), V::mul(one_plus(e), one_plus(d)));
  }

  /// An LSTM's next c: logistic(f) * c + logistic(i) * tanh(g). Its h is logistic_tanh(o, c).
  static TORCHQ_INLINE Float next_cell(Float i, Float f, Float g, Float c) {
    const Float forget = V::div(c, one_plus(exp_gate(f, -1.0f)));
    return V::add(forget, logistic_tanh(i, g));
  }

  /// A GRU's h, n being tanh of its argument: z * old + (1 - z) * n
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
