// SPDX-License-Identifier: Apache-2.0
// Eltwise and binary algorithms on float32 values, for every tier (contracts: Eltwise, Binary in
// contract.h).
#pragma once

#include "kernels/epilogue/contract.h"
#include "kernels/math.h"

namespace {

/// Calls use(f) with f(x) = scale * alg(x). The switch stands outside the loop over x, which is in
/// `use`.
template <class V, class Use>
TORCHQ_INLINE void with_eltwise(const Eltwise& e, Use use) {
  using Float = typename V::Float;
  using M = Math<V>;
  const Float alpha = V::set(e.alpha), beta = V::set(e.beta), scale = V::set(e.scale);
  const auto scaled = [&](auto f) {
    if (e.scale == 1.0f) return use(f);
    use([&](Float x) { return V::mul(f(x), scale); });
  };
  const auto hardsigmoid = [&](Float x) { return M::clamp(V::fma(x, alpha, beta), 0.0f, 1.0f); };
  const auto alpha_times = [&](Float x) { return V::mul(alpha, x); };
  switch (e.alg) {
    case Eltwise::kRelu:
      if (e.alpha == 0.0f) return scaled([&](Float x) { return V::max(V::set(0.0f), x); });
      return scaled(
          [&](Float x) { return V::select(V::less(V::set(0.0f), x), x, alpha_times(x)); });
    case Eltwise::kLinear: {
      const Float factor = V::set(static_cast<float>(double{e.alpha} * e.scale));
      const Float addend = V::set(static_cast<float>(double{e.beta} * e.scale));
      return use([&](Float x) { return V::fma(x, factor, addend); });
    }
    case Eltwise::kClip:
      return scaled([&](Float x) { return V::min(beta, V::max(alpha, x)); });
    case Eltwise::kAbs:
      return scaled([](Float x) { return M::abs(x); });
    case Eltwise::kElu:
      return scaled([&](Float x) {
        const Float below = V::mul(alpha, M::expm1(V::min(V::set(0.0f), x)));
        return V::select(V::less(V::set(0.0f), x), x, below);
      });
    case Eltwise::kExp:
      return scaled([](Float x) { return M::exp(x); });
    case Eltwise::kGeluErf:
      return scaled([](Float x) { return M::gelu_erf(x); });
    case Eltwise::kGeluTanh:
      return scaled([](Float x) { return M::gelu_tanh(x); });
    case Eltwise::kHardsigmoid:
      return scaled(hardsigmoid);
    case Eltwise::kHardswish:
      return scaled([&](Float x) { return V::mul(x, hardsigmoid(x)); });
    case Eltwise::kLog:
      return scaled([](Float x) { return M::log(x); });
    case Eltwise::kLogistic:
      return scaled([](Float x) { return M::logistic(x); });
    case Eltwise::kMish:
      return scaled([](Float x) { return M::mish(x); });
    case Eltwise::kPow:
      return scaled([&](Float x) { return V::mul(alpha, M::pow(x, e.beta)); });
    case Eltwise::kRound:
      return scaled([](Float x) { return V::round(x); });
    case Eltwise::kSoftRelu:
      return scaled([&](Float x) { return V::div(M::softplus(alpha_times(x)), alpha); });
    case Eltwise::kSqrt:
      return scaled([](Float x) { return V::sqrt(x); });
    case Eltwise::kSquare:
      return scaled([](Float x) { return V::mul(x, x); });
    case Eltwise::kSwish:
      return scaled([&](Float x) { return M::over_one_plus_exp(x, alpha_times(x)); });
    case Eltwise::kTanh:
      return scaled([](Float x) { return M::tanh(x); });
  }
}

/// Calls use(f) with f(x, v) = alg(x, v), for every algorithm of two operands.
template <class V, class Use>
TORCHQ_INLINE void with_binary(Binary alg, Use use) {
  using Float = typename V::Float;
  const Float one = V::set(1.0f), zero = V::set(0.0f);
  switch (alg) {
    case Binary::add:
      return use([](Float x, Float v) { return V::add(x, v); });
    case Binary::sub:
      return use([](Float x, Float v) { return V::sub(x, v); });
    case Binary::mul:
      return use([](Float x, Float v) { return V::mul(x, v); });
    case Binary::div:
      return use([](Float x, Float v) { return V::div(x, v); });
    case Binary::max:
      return use([](Float x, Float v) { return V::max(v, x); });
    case Binary::min:
      return use([](Float x, Float v) { return V::min(v, x); });
    case Binary::ge:
      return use([=](Float x, Float v) { return V::select(V::less_equal(v, x), one, zero); });
    case Binary::gt:
      return use([=](Float x, Float v) { return V::select(V::less(v, x), one, zero); });
    case Binary::le:
      return use([=](Float x, Float v) { return V::select(V::less_equal(x, v), one, zero); });
    case Binary::lt:
      return use([=](Float x, Float v) { return V::select(V::less(x, v), one, zero); });
    case Binary::eq:
      return use([=](Float x, Float v) { return V::select(V::equal(x, v), one, zero); });
    case Binary::ne:
      return use([=](Float x, Float v) { return V::select(V::equal(x, v), zero, one); });
    case Binary::prelu:
      return use(
          [=](Float x, Float v) { return V::select(V::less_equal(zero, x), x, V::mul(x, v)); });
    case Binary::select:  // three operands: the caller's
      return;
  }
}

}  // namespace
