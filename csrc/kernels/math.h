// SPDX-License-Identifier: Apache-2.0
// Transcendental functions of float32, written once for every tier.
//
// Note [One operation sequence]
// `Math<V>` is a template on a vector type: an Isa trait (16 lanes) or `Scalar` (one, the
// `reference` tier). Each function is one fixed sequence of IEEE operations, each correctly rounded
// on every CPU: add, multiply, divide, square root, fused multiply-add, and integer operations on
// the bits. There is no approximate reciprocal, no libm, no branch on the data and no contraction
// the compiler could choose (-ffp-contract=off). So all tiers return the same bits.
//
// A NaN in a float32 result is always the quiet one of sign 0 and payload 0, 0x7fc00000. IEEE
// arithmetic leaves open which operand's NaN an operation hands on, and compilers swap operands. So
// NaNs are replaced where results are stored. (Not in recurrent layers: only their parameters can
// be NaN there.)
//
// Special values are those of the formulas in IEEE arithmetic: NaN stays NaN, exp(inf) = inf,
// exp(-inf) = 0, log(0) = -inf, log(-1) = NaN, tanh(inf) = 1, swish(-inf) = -inf * 0 = NaN. The
// stated errors are checked against float64 over the whole range in tests/kernels/test_math.py.
#pragma once

#include "kernels/common.h"

namespace {

/// One lane: the trait of the reference tier.
struct Scalar {
  using Float = float;
  using Int = int32_t;
  using Lanes = bool;

  static Float set(float x) { return x; }
  static Int set_int(int32_t x) { return x; }
  static Int add(Int a, Int b) { return from_unsigned(uint32_t(a) + uint32_t(b)); }
  static Int sub(Int a, Int b) { return from_unsigned(uint32_t(a) - uint32_t(b)); }
  static Int bit_and(Int a, Int b) { return a & b; }
  static Int bit_or(Int a, Int b) { return a | b; }
  template <int kBits>
  static Int shift_left(Int a) {
    return from_unsigned(uint32_t(a) << kBits);
  }
  template <int kBits>
  static Int shift_right(Int a) {
    return a >> kBits;
  }
  static Int bits(Float x) { return load32(&x); }
  static Float from_bits(Int x) {
    float value;
    memcpy(&value, &x, sizeof value);
    return value;
  }
  static Float to_float(Int x) { return static_cast<float>(x); }
  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
  /// c - a b.
  static Float fnma(Float a, Float b, Float c) { return fma(a, -b, c); }
  static Float sqrt(Float x) { return __builtin_sqrtf(x); }
  static Float round(Float x) { return __builtin_nearbyintf(x); }
  /// As vmaxps and vminps: the second operand if either is NaN, or if both are equal.
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Float min(Float a, Float b) { return a < b ? a : b; }
  static Lanes less(Float a, Float b) { return a < b; }
  static Lanes less_equal(Float a, Float b) { return a <= b; }
  static Lanes equal(Float a, Float b) { return a == b; }
  static Float select(Lanes m, Float a, Float b) { return m ? a : b; }

 private:
  static Int from_unsigned(uint32_t x) { return static_cast<int32_t>(x); }
};

template <class V>
struct Math {
  using Float = typename V::Float;
  using Int = typename V::Int;

  static constexpr float kInf = __builtin_inff();
  static constexpr float kNan = __builtin_nanf("");

  /// c[0] + c[1] x + ... by Horner's rule, the highest first.
  template <int kTerms>
  static TORCHQ_INLINE Float polynomial(const float (&c)[kTerms], Float x) {
    Float y = V::set(c[kTerms - 1]);
    TORCHQ_UNROLL for (int i = kTerms - 2; i >= 0; --i) y = V::fma(y, x, V::set(c[i]));
    return y;
  }

  static TORCHQ_INLINE Float abs(Float x) {
    return V::from_bits(V::bit_and(V::bits(x), V::set_int(0x7fffffff)));
  }
  /// |x| with the sign of s.
  static TORCHQ_INLINE Float copy_sign(Float x, Float s) {
    const Int sign = V::bit_and(V::bits(s), V::set_int(INT32_MIN));
    return V::from_bits(V::bit_or(V::bits(abs(x)), sign));
  }
  /// The second operand survives where it is NaN.
  static TORCHQ_INLINE Float clamp(Float x, float lo, float hi) {
    return V::min(V::set(hi), V::max(V::set(lo), x));
  }

  /// e^x = 2^n (1 + q) with |q| < 0.42, for |x| < 2^21.
  struct Power {
    Float q;
    Int n;
  };
  static TORCHQ_INLINE Power power(Float x) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
    const Float magic = V::set(12582912.0f);
    const Float shifted = V::fma(x, V::set(1.44269504f), magic);
    const Float n = V::sub(shifted, magic);
    return {remainder(minus_log2_times(n, x)), V::sub(V::bits(shifted), V::bits(magic))};
  }
  /// x - n log(2). 0.693359375 has 9 bits, so that its product with n is exact.
  static TORCHQ_INLINE Float minus_log2_times(Float n, Float x) {
    return V::fma(n, V::set(2.12194440e-4f), V::fma(n, V::set(-0.693359375f), x));
  }
  /// e^r - 1 for |r| <= 0.36: relative error 3e-9 before rounding.
  static TORCHQ_INLINE Float remainder(Float r) {
    constexpr float c[] = {0.5f, 0.166665182f, 0.0416662022f, 0.00836902484f, 0.00139507256f};
    return V::fma(V::mul(r, r), polynomial(c, r), r);
  }
  /// 2^n, for -127 (which gives 0) <= n <= 128 (infinity).
  static TORCHQ_INLINE Float power_of_two(Int n) {
    return V::from_bits(V::template shift_left<23>(V::add(n, V::set_int(127))));
  }
  /// (1 + q) 2^n, in two steps: each power is a normal number, and only the last rounds.
  static TORCHQ_INLINE Float scaled(Power p) {
    const Int half = V::template shift_right<1>(p.n);
    const Float s = power_of_two(half);
    return V::mul(V::fma(p.q, s, s), power_of_two(V::sub(p.n, half)));
  }

  /// e^x. Error below 1 ulp, denormal results included.
  static TORCHQ_INLINE Float exp(Float x) { return scaled(power(clamp(x, -104.5f, 89.0f))); }

  /// e^x where 0 and infinity are good enough below 2^-126 and above 2^127.5.
  static TORCHQ_INLINE Float exp_normal(Float x) {
    const Power p = power(clamp(x, -88.0f, 88.5f));
    return V::mul(V::add(p.q, V::set(1.0f)), power_of_two(p.n));
  }

  /// 2^t for t <= 0, relative error below 1e-4, where 2^-120 is as good as less. (A denormal number
  /// in place of it doubled the time of rows that hide keys, on Zen 5.)
  static TORCHQ_INLINE Float exp2_coarse(Float t) {
    constexpr float c[] = {0.999928057f, 0.693260968f, 0.242611125f, 0.0551716536f};
    const Float magic = V::set(12582912.0f);
    t = V::max(V::set(-120.0f), t);
    const Float shifted = V::add(t, magic), n = V::sub(shifted, magic);
    return V::mul(polynomial(c, V::sub(t, n)),
                  power_of_two(V::sub(V::bits(shifted), V::bits(magic))));
  }

  /// e^x - 1 for x <= 88. Error below 1 ulp; exact at 0.
  static TORCHQ_INLINE Float expm1(Float x) {
    const Power p = power(V::max(V::set(-88.0f), x));
    const Float s = power_of_two(p.n);
    return V::fma(p.q, s, V::sub(s, V::set(1.0f)));
  }

  /// log(1 + f) for sqrt(1/2) - 1 <= f <= sqrt(2) - 1: relative error 6e-9 before rounding.
  static TORCHQ_INLINE Float log1p_reduced(Float f) {
    constexpr float c[] = {0.333333313f, -0.250008196f, 0.200012267f, -0.166233569f,
                           0.142017588f, -0.131601825f, 0.12761575f,  -0.0763449296f};
    const Float square = V::mul(f, f);
    const Float tail = V::fma(polynomial(c, f), f, V::set(-0.5f));
    return V::fma(square, tail, f);
  }
  /// x = 2^n (1 + f) for positive finite x; n is a whole number.
  struct Parts {
    Float n, f;
  };
  static TORCHQ_INLINE Parts parts(Float x) {
    const auto tiny = V::less(x, V::set(1.17549435e-38f));
    x = V::select(tiny, V::mul(x, V::set(8388608.0f)), x);
    const Int bits = V::bits(x);
    const Int n = V::template shift_right<23>(V::sub(bits, V::set_int(0x3f3504f3)));  // sqrt(1/2)
    const Float mantissa = V::from_bits(V::sub(bits, V::template shift_left<23>(n)));
    const Float whole = V::to_float(n);
    return {V::select(tiny, V::sub(whole, V::set(23.0f)), whole), V::sub(mantissa, V::set(1.0f))};
  }
  /// n log(2) + y.
  static TORCHQ_INLINE Float add_exponent(Float n, Float y) {
    return V::fma(n, V::set(0.693359375f), V::fma(n, V::set(-2.12194440e-4f), y));
  }
  /// Natural logarithm. Error below 1 ulp.
  static TORCHQ_INLINE Float log(Float x) {
    const Parts p = parts(x);
    Float y = add_exponent(p.n, log1p_reduced(p.f));
    y = V::select(V::equal(x, V::set(kInf)), x, y);
    y = V::select(V::equal(x, V::set(0.0f)), V::set(-kInf), y);
    return V::select(V::less_equal(V::set(0.0f), x), y, V::set(kNan));
  }

  /// log(1 + e^x): max(x, 0) + log(1 + u) with u = e^-|x| in (0, 1]. Error below 2 ulp.
  static TORCHQ_INLINE Float softplus(Float x) {
    const Float u = exp(V::sub(V::set(0.0f), abs(x)));
    const auto high = V::less(V::set(0.414213562f), u);
    const Float f = V::select(high, V::mul(V::sub(u, V::set(1.0f)), V::set(0.5f)), u);
    const Float n = V::select(high, V::set(1.0f), V::set(0.0f));
    return V::add(V::max(V::set(0.0f), x), add_exponent(n, log1p_reduced(f)));
  }

  /// tanh |x| = t / (t + 2) with t = e^(2 |x|) - 1. Error below 2 ulp.
  static TORCHQ_INLINE Float tanh(Float x) {
    const Float t = expm1(V::min(V::set(20.0f), abs(V::add(x, x))));
    const Float y = V::div(t, V::add(t, V::set(2.0f)));
    return copy_sign(V::select(V::equal(x, x), y, x), x);
  }

  /// 1 / (1 + e^-x). Error below 2 ulp where the result is at least 2^-126.
  static TORCHQ_INLINE Float logistic(Float x) { return over_one_plus_exp(V::set(1.0f), x); }
  /// a / (1 + e^-x): swish with a = x. Error below 2 ulp where the result is at least 2^-110.
  static TORCHQ_INLINE Float over_one_plus_exp(Float a, Float x) {
    return V::div(a, V::add(V::set(1.0f), exp_normal(V::sub(V::set(0.0f), x))));
  }

  /// Complementary error function of y >= 0 as e^(-y g(y)); absolute error below 4e-7. g is a
  /// polynomial up to 4 and grows like y beyond, where the result is below 2e-8.
  static TORCHQ_INLINE Float erfc(Float y) {
    constexpr float c[] = {1.12837934f,      0.636616111f,    0.102799207f,
                           -0.0192171428f,   -5.87815084e-5f, 0.00157676009f,
                           -0.000587950693f, 0.000106026651f, -8.04382307e-6f};
    const Float bounded = V::min(V::set(4.0f), y);
    const Float g = V::add(polynomial(c, bounded), V::sub(y, bounded));
    return exp_normal(V::sub(V::set(0.0f), V::mul(y, g)));
  }
  /// x Phi(x) = x (1 - erfc(x / sqrt(2)) / 2), or x erfc(-x / sqrt(2)) / 2 for x < 0. Absolute
  /// error below 2e-7 max(1, |x|).
  static TORCHQ_INLINE Float gelu_erf(Float x) {
    const Float half = V::mul(V::set(0.5f), erfc(V::mul(abs(x), V::set(0.707106781f))));
    const auto negative = V::less(x, V::set(0.0f));
    return V::mul(x, V::select(negative, half, V::sub(V::set(1.0f), half)));
  }
  /// x (1 + tanh(z)) / 2 with z = sqrt(2/pi) (x + 0.044715 x^3), which is x / (1 + e^(-2 z)).
  /// Absolute error below 2e-7 max(1, |x|).
  static TORCHQ_INLINE Float gelu_tanh(Float x) {
    const Float inner = V::fma(V::mul(x, x), V::set(0.0713548163f), V::set(1.59576912f));
    return over_one_plus_exp(x, V::mul(x, inner));
  }
  /// x tanh(log(1 + e^x)) = x n / (n + 2) with n = e (e + 2), e = e^x. Error below 3 ulp where the
  /// result is at least 2^-100.
  static TORCHQ_INLINE Float mish(Float x) {
    const Float two = V::set(2.0f);
    const Float e = exp_normal(V::min(V::set(20.0f), x));  // beyond 20 the quotient is 1
    const Float n = V::mul(e, V::add(e, two));
    return V::mul(x, V::div(n, V::add(n, two)));
  }

  /// x^beta for |x|, with 2^(beta log2 x) split so that large powers lose nothing: relative error
  /// below (3 + |beta|) 2^-24. x is at least 0.
  static TORCHQ_INLINE Float pow_positive(Float x, float beta) {
    const Float b = V::set(beta);
    const Parts p = parts(x);
    const Float y = V::mul(b, log1p_reduced(p.f));  // beta log(1 + f)
    const Float n =
        V::round(clamp(V::fma(b, p.n, V::mul(y, V::set(1.44269504f))), -151.0f, 129.0f));
    const Float rest = V::fma(b, p.n, V::sub(V::set(0.0f), n));  // exact but for one rounding
    const Float r = V::fma(rest, V::set(0.693147181f), y);
    const Float whole = V::add(n, V::set(12582912.0f));
    const Int exponent = V::sub(V::bits(whole), V::set_int(0x4b400000));
    Float result = scaled({remainder(clamp(r, -0.7f, 0.7f)), exponent});
    const Float at_zero = V::set(beta > 0 ? 0.0f : kInf), at_inf = V::set(beta > 0 ? kInf : 0.0f);
    result = V::select(V::equal(x, V::set(kInf)), at_inf, result);
    return V::select(V::equal(x, V::set(0.0f)), at_zero, result);
  }
  /// x^beta as C's pow: negative x needs a whole beta, else NaN; beta 0 gives 1. Exact up to one
  /// rounding for beta 0, 1, 2, -1 and 1/2 (of x >= 0).
  static TORCHQ_INLINE Float pow(Float x, float beta) {
    if (beta == 0.0f) return V::set(1.0f);
    if (beta == 1.0f) return x;
    if (beta == 2.0f) return V::mul(x, x);
    if (beta == -1.0f) return V::div(V::set(1.0f), x);
    if (beta == 0.5f) {
      const Float y = V::sqrt(V::add(x, V::set(0.0f)));  // -0 gives 0
      return V::select(V::equal(x, V::set(-kInf)), V::set(kInf), y);
    }
    const Float y = pow_positive(abs(x), beta);
    const bool whole = Scalar::round(beta) == beta;
    const bool odd = whole && Scalar::round(beta * 0.5f) != beta * 0.5f;
    Float result = odd ? copy_sign(y, x) : y;
    if (!whole) {
      const Float undefined = V::select(V::less(V::set(-kInf), x), V::set(kNan), y);
      result = V::select(V::less(x, V::set(0.0f)), undefined, result);
    }
    return V::select(V::equal(x, x), result, x);
  }
};

}  // namespace
