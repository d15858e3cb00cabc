// SPDX-License-Identifier: Apache-2.0
// The formulas of the recurrent cells, once for every tier: `V` is an Isa trait, or `Scalar`.
//
// The gates share one exponential and few divisions: logistic(a) = 1 / (1 + e^-a), and
// tanh(a) = (1 - e^-2a) / (1 + e^-2a), so that a product of two gates is one quotient. Absolute
// error of each below 5e-7 (tests/test_rnn_kernels.py). exp_gates is shorter than Math<V>::exp,
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

  /// x[i] = e^(factor[i] * x[i]), with the exponent clamped to [-20, 20]: beyond, 1 + e and 1 - e
  /// are what they are at infinity, up to 3e-9. Relative error below 3e-7; NaN stays NaN. All take
  /// a step before any takes the next one, since a chain of 15 steps waits for its own results.
  template <int N>
  static TORCHQ_INLINE void exp_gates(Float (&x)[N], const float (&factor)[N]) {
    constexpr float c[] = {1.0f,          0.693147004f,   0.240222424f,
                           0.0555073358f, 0.00967151299f, 0.00132647273f};
    const Float magic = V::set(12582912.0f);  // 1.5 * 2^23: the low bits of y + magic are rne(y)
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
      x[i] = V::from_bits(V::add(V::bits(p[i]), V::template shift_left<23>(V::bits(shifted[i]))));
    }
  }

  static TORCHQ_INLINE Float one_plus(Float e) { return V::add(V::set(1.0f), e); }
  static TORCHQ_INLINE Float one_minus(Float e) { return V::sub(V::set(1.0f), e); }

  static TORCHQ_INLINE Float logistic(Float a) {
    Float e[] = {a};
    exp_gates(e, {-1.0f});
    return V::div(V::set(1.0f), one_plus(e[0]));
  }
  static TORCHQ_INLINE Float tanh(Float a) {
    Float e[] = {a};
    exp_gates(e, {-2.0f});
    return V::div(one_minus(e[0]), one_plus(e[0]));
  }
  /// logistic(a) * tanh(b)
  static TORCHQ_INLINE Float logistic_tanh(Float a, Float b) {
    Float e[] = {a, b};
    exp_gates(e, {-1.0f, -2.0f});
    return V::div(one_minus(e[1]), V::mul(one_plus(e[0]), one_plus(e[1])));
  }

  /// An LSTM's next c: logistic(f) * c + logistic(i) * tanh(g). Its h is logistic_tanh(o, c).
  static TORCHQ_INLINE Float next_cell(Float i, Float f, Float g, Float c) {
    Float e[] = {i, f, g};
    exp_gates(e, {-1.0f, -1.0f, -2.0f});
    const Float forget = V::div(c, one_plus(e[1]));
    const Float input = V::div(one_minus(e[2]), V::mul(one_plus(e[0]), one_plus(e[2])));
    return V::add(forget, input);
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
