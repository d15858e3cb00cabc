// SPDX-License-Identifier: Apache-2.0
// The formulas of the recurrent cells, once for every tier: `V` is an Isa trait, or `Scalar`.
//
// Note [Recurrent cells]
// The gates share one exponential and few divisions: logistic(a) = 1 / (1 + e^-a), and
// tanh(a) = (1 - e^-2a) / (1 + e^-2a), so that a product of two gates is one quotient. Absolute
// error of each below 5e-7 (tests/kernels/test_rnn_cells.py). exp_gates is shorter than
// Math<V>::exp, which counts five times a unit: it has the range that gates need, and not more.
//
// An open gate is exactly 1, and a closed one is below 5e-18. So a state that gates hold keeps its
// bits, except for cell states below 1e-10. Otherwise an error of half a digit, the same in every
// step, would move a state that is held for thousands of steps.
#pragma once

#include "kernels/math.h"
#include "kernels/rnn/contract.h"

namespace {

/// Stages of rnn_epilogue.
constexpr int rnn_stages(RnnCell cell) {
  return cell == RnnCell::kLstm || cell == RnnCell::kGru ? 2 : 1;
}

/// Number of calls of `between` in rnn_epilogue, in all stages.
constexpr int rnn_pauses(RnnCell cell) {
  return cell == RnnCell::kLstm ? 7 : cell == RnnCell::kGru ? 10 : cell == RnnCell::kTanh ? 4 : 1;
}

/// Called between the steps of a formula; does nothing. rnn_streamed.h runs products there.
struct Nothing {
  TORCHQ_INLINE void operator()() const {}
};

template <class V>
struct RnnFormula {
  using Float = typename V::Float;

  /// A gate's e^x as up / down, so that a function of it divides once, as it does anyway:
  /// 1 + e^x = plus / down, and 1 - e^x = minus / down.
  struct Exp {
    Float up, down;
    TORCHQ_INLINE Float plus() const { return V::add(up, down); }
    TORCHQ_INLINE Float minus() const { return V::sub(down, up); }
  };

  /// e[i] = e^(factor[i] * x[i]), with the exponent clamped to [-40, 40]: beyond, 1 + e and 1 - e
  /// are what they are at infinity, up to 5e-18. Relative error below 2.4e-6, below 1e-6 up to
  /// exponents of 8; e^0 = 1; NaN stays NaN, which `down` sees to. 2^r = (a + r) / (a - r),
  /// a = c[0] + c[1] r^2, |r| <= 1/2, is two steps shorter than a polynomial. All take a step
  /// before any takes the next one, since a chain of them waits for its own results. Additions in
  /// place of multiplications, where there is a choice: Zen has units for them that products do not
  /// use. Elsewhere these are two instructions more (avx2 on Zen 4: 1.00 of the time).
  template <int N, class Between = Nothing>
  static TORCHQ_INLINE void exp_gates(const Float (&args)[N], const float (&factor)[N], Exp (&e)[N],
                                      const Between& between = {}) {
    constexpr float kLog2E = 1.44269504f, kLimit = 40.0f * kLog2E;
    constexpr float c[] = {2.88540816f, 0.115236066f};
    const Float magic = V::set(12582912.0f);  // 1.5 * 2^23: the low bits of x + magic are rne(x)
    Float x[N], shifted[N], a[N];
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::mul(args[i], V::set(factor[i] * kLog2E));
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::max(V::set(-kLimit), x[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::min(V::set(kLimit), x[i]);
    between();
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) shifted[i] = V::add(x[i], magic);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) x[i] = V::sub(x[i], V::sub(shifted[i], magic));
    between();
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) a[i] = V::mul(x[i], x[i]);
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) a[i] = V::fma(a[i], V::set(c[1]), V::set(c[0]));
    TORCHQ_UNROLL for (int i = 0; i < N; ++i) {
      const auto power = V::template shift_left<23>(V::bits(shifted[i]));
      e[i] = {V::from_bits(V::add(V::bits(V::add(a[i], x[i])), power)), V::sub(a[i], x[i])};
    }
    between();
  }

  template <class Between = Nothing>
  static TORCHQ_INLINE Float logistic(Float a, const Between& between = {}) {
    Exp e[1];
    exp_gates({a}, {-1.0f}, e, between);
    return V::div(e[0].down, e[0].plus());
  }
  template <class Between = Nothing>
  static TORCHQ_INLINE Float tanh(Float a, const Between& between = {}) {
    Exp e[1];
    exp_gates({a}, {-2.0f}, e, between);
    return V::div(e[0].minus(), e[0].plus());
  }
  /// logistic(a) * tanh(b)
  template <class Between = Nothing>
  static TORCHQ_INLINE Float logistic_tanh(Float a, Float b, const Between& between = {}) {
    Exp e[2];
    exp_gates({a, b}, {-1.0f, -2.0f}, e, between);
    return logistic_tanh(e[0], e[1]);
  }
  static TORCHQ_INLINE Float logistic_tanh(const Exp& a, const Exp& b) {
    return V::div(V::mul(a.down, b.minus()), V::mul(a.plus(), b.plus()));
  }

  /// An LSTM's next c: logistic(f) * c + logistic(i) * tanh(g). Its h is logistic_tanh(o, c).
  template <class Between = Nothing>
  static TORCHQ_INLINE Float next_cell(Float i, Float f, Float g, Float c,
                                       const Between& between = {}) {
    Exp e[3];
    exp_gates({i, f, g}, {-1.0f, -1.0f, -2.0f}, e, between);
    return V::fma(V::div(e[1].down, e[1].plus()), c, logistic_tanh(e[0], e[2]));
  }

  /// A GRU's h, n being tanh of its argument: z * old + (1 - z) * n, which is old where z is 1.
  static TORCHQ_INLINE Float mix(Float z, Float old, Float n) {
    return V::fma(z, old, V::fnma(z, n, n));
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
