// SPDX-License-Identifier: Apache-2.0
// One destination pixel of a pooling window; channels are lanes (contract: PoolRow in table.h).
#pragma once

#include "epilogue.h"

namespace {

template <class Isa>
void max_pool(const PoolRow& p) {
  for (int64_t c = 0; c < p.channels; c += Isa::kByteLanes) {
    const int count = min_int(p.channels - c, Isa::kByteLanes);
    auto best = Isa::load_channels(p.taps[0] + c, count);
    for (int t = 1; t < p.num_taps; ++t) {
      best = Isa::max_bytes(best, Isa::load_channels(p.taps[t] + c, count), p.is_signed);
    }
    Isa::store_channels(static_cast<uint8_t*>(p.dst) + c, best, count);
  }
}

/// kQuick: multiplies by the reciprocal and corrects, q + (x - q n) / n, which is what the division
/// gives for every sum of n <= kQuickDivisor bytes (tests/test_pool.py tries them all).
template <class Isa, bool kSigned, DType kDst, bool kQuick>
TORCHQ_INLINE void avg_pool_row(const PoolRow& p) {
  const auto divisor = Isa::set(p.divisor), zero = Isa::set(0.0f);
  const auto negative = Isa::set(-p.divisor), reciprocal = Isa::set(1.0f / p.divisor);
  for_each_row_panel<Isa>(p.channels, [&](int64_t c, auto m) {
    auto sum = Isa::set_int(p.bias);
    for (int t = 0; t < p.num_taps; ++t) {
      sum =
          Isa::add(sum, kSigned ? Isa::load_s8(p.taps[t] + c, m) : Isa::load_u8(p.taps[t] + c, m));
    }
    const auto x = Isa::to_float(sum);
    auto y = zero;
    if constexpr (kQuick) {
      const auto q = Isa::mul(x, reciprocal);
      y = Isa::fma(Isa::fma(q, negative, x), reciprocal, q);
    } else {
      y = Isa::div(x, divisor);
    }
    store_as<Isa, kDst>(p.dst, c, y, zero, m);
  });
}

constexpr float kQuickDivisor = 256;

template <class Isa>
void avg_pool(const PoolRow& p) {
  const bool quick = p.divisor <= kQuickDivisor && p.num_taps <= kQuickDivisor;
  const auto run = [&](auto dst) {
    constexpr DType kDst = decltype(dst)::value;
    constexpr bool kSigned = kDst == DType::s8;
    quick ? avg_pool_row<Isa, kSigned, kDst, true>(p) : avg_pool_row<Isa, kSigned, kDst, false>(p);
  };
  if (p.dst_dtype == DType::u8) return run(DTypeTag<DType::u8>{});
  if (p.dst_dtype == DType::s8) return run(DTypeTag<DType::s8>{});
  p.is_signed ? avg_pool_row<Isa, true, DType::f32, false>(p)
              : avg_pool_row<Isa, false, DType::f32, false>(p);
}

}  // namespace
