// SPDX-License-Identifier: Apache-2.0
// Adjacent windows of a pool; channels are lanes (contract: PoolRow in contract.h).
#pragma once

#include "kernels/epilogue/epilogue.h"
#include "kernels/pool/contract.h"

namespace {

template <class Isa>
void max_pool(const PoolRow& p) {
  for (int64_t c = 0; c < p.channels; c += Isa::kByteLanes) {
    const int count = min_int(p.channels - c, Isa::kByteLanes);
    for (int64_t x = 0; x < p.windows; ++x) {
      const int64_t at = x * p.step + c;
      auto best = Isa::load_channels(p.taps[0] + at, count);
      for (int t = 1; t < p.num_taps; ++t) {
        best = Isa::max_bytes(best, Isa::load_channels(p.taps[t] + at, count), p.is_signed);
      }
      Isa::store_channels(static_cast<uint8_t*>(p.dst) + x * p.channels + c, best, count);
    }
  }
}

/// Division of a sum x of at most 256 bytes by n <= 256. Rounding the result to an integer gives
/// the rounded quotient (tests/kernels/test_pool.py tries all values).
enum class Division {
  /// x (1/n): n is a power of two, or odd. Then no quotient is half of an odd number, and the
  /// product is nearer to it than such a number can be.
  kProduct,
  /// q + (x - q n) (1/n), q = x (1/n): the quotient itself.
  kCorrected,
  kQuotient
};
constexpr int kQuickDivisor = 256;

inline Division division_of(const PoolRow& p) {
  if (p.divisor > kQuickDivisor || p.num_taps > kQuickDivisor) return Division::kQuotient;
  const int n = static_cast<int>(p.divisor);
  return n % 2 == 1 || (n & (n - 1)) == 0 ? Division::kProduct : Division::kCorrected;
}

template <class Isa, Division kDivision>
struct Divide {
  using Float = typename Isa::Float;
  explicit TORCHQ_INLINE Divide(float n)
      : divisor(Isa::set(n)), negative(Isa::set(-n)), reciprocal(Isa::set(1.0f / n)) {}
  TORCHQ_INLINE Float operator()(Float x) const {
    if constexpr (kDivision == Division::kQuotient) return Isa::div(x, divisor);
    const Float q = Isa::mul(x, reciprocal);
    if constexpr (kDivision == Division::kProduct) return q;
    return Isa::fma(Isa::fma(q, negative, x), reciprocal, q);
  }
  Float divisor, negative, reciprocal;
};

/// finish(dst element, channels, sums) for the sums of every window at channels c and on, kVectors
/// times as many as a vector has bytes: as Isa::split_words has them. Words hold the sums of as
/// many as 257 bytes.
template <class Isa, bool kSigned, int kVectors, class Finish>
TORCHQ_INLINE void sum_windows(const PoolRow& p, int64_t c, Finish finish) {
  constexpr int kTaps = 256;
  // modulo 2^32, as the sum
  const uint32_t shift = kSigned ? 128 * static_cast<uint32_t>(p.num_taps) : 0;
  const auto bias = Isa::set_int(static_cast<int32_t>(static_cast<uint32_t>(p.bias) - shift));
  const auto sign = Isa::set_bytes(0x80);
  const int count = kVectors > 1 ? Isa::kByteLanes : min_int(p.channels - c, Isa::kByteLanes);
  for (int64_t x = 0; x < p.windows; ++x) {
    const int64_t at = x * p.step + c;
    typename Isa::Int sums[kVectors][Isa::kStoredPanels];
    TORCHQ_UNROLL for (int i = 0; i < kVectors; ++i) {
      TORCHQ_UNROLL for (int v = 0; v < Isa::kStoredPanels; ++v) sums[i][v] = bias;
    }
    for (int first = 0; first < p.num_taps; first += kTaps) {
      const int end = min_int(p.num_taps, first + kTaps);
      typename Isa::Bytes all[kVectors], odd[kVectors];
      TORCHQ_UNROLL for (int i = 0; i < kVectors; ++i) all[i] = odd[i] = Isa::set_bytes(0);
      for (int t = first; t < end; ++t) {
        TORCHQ_UNROLL for (int i = 0; i < kVectors; ++i) {
          auto v = Isa::load_channels(p.taps[t] + at + i * Isa::kByteLanes, count);
          if constexpr (kSigned) v = Isa::xor_bytes(v, sign);
          Isa::add_words(all[i], odd[i], v);
        }
      }
      TORCHQ_UNROLL for (int i = 0; i < kVectors; ++i) Isa::split_words(all[i], odd[i], sums[i]);
    }
    TORCHQ_UNROLL for (int i = 0; i < kVectors; ++i) {
      finish(x * p.channels + c + i * Isa::kByteLanes, count, sums[i]);
    }
  }
}

/// The same at all channels; by two vectors, the reads of pixels far apart overlap (7x7 of 2048
/// channels on Zen 5: 0.75 of the time).
template <class Isa, bool kSigned, class Finish>
TORCHQ_INLINE void for_each_sum(const PoolRow& p, Finish finish) {
  constexpr int kVectors = 2;
  int64_t c = 0;
  for (; c + kVectors * Isa::kByteLanes <= p.channels; c += kVectors * Isa::kByteLanes) {
    sum_windows<Isa, kSigned, kVectors>(p, c, finish);
  }
  for (; c < p.channels; c += Isa::kByteLanes) sum_windows<Isa, kSigned, 1>(p, c, finish);
}

template <class Isa, bool kSigned, Division kDivision>
void average_bytes(const PoolRow& p) {
  const Divide<Isa, kDivision> divide(p.divisor);
  for_each_sum<Isa, kSigned>(p, [&](int64_t i, int count, auto& sums) {
    TORCHQ_UNROLL for (int v = 0; v < Isa::kStoredPanels; ++v) {
      sums[v] = Isa::to_int(divide(Isa::to_float(sums[v])));
    }
    Isa::store_channels(static_cast<uint8_t*>(p.dst) + i, Isa::join_bytes(sums, kSigned), count);
  });
}

template <class Isa, bool kSigned>
void average_floats(const PoolRow& p) {
  constexpr int kDwords = Isa::kByteLanes / 4;
  const auto divisor = Isa::set(p.divisor);
  alignas(64) float lanes[Isa::kByteLanes];  // those of the bytes 0 of the dwords, of bytes 1, ...
  for_each_sum<Isa, kSigned>(p, [&](int64_t i, int count, auto& sums) {
    TORCHQ_UNROLL for (int v = 0; v < Isa::kStoredPanels; ++v) {
      Isa::store(lanes + v * kPanel, Isa::div(Isa::to_float(sums[v]), divisor));
    }
    float* dst = static_cast<float*>(p.dst) + i;
    for (int k = 0; k < count; ++k) dst[k] = lanes[k % 4 * kDwords + k / 4];
  });
}

template <class Isa, bool kSigned>
TORCHQ_INLINE void average_with(const PoolRow& p) {
  switch (division_of(p)) {
    case Division::kProduct:
      return average_bytes<Isa, kSigned, Division::kProduct>(p);
    case Division::kCorrected:
      return average_bytes<Isa, kSigned, Division::kCorrected>(p);
    case Division::kQuotient:
      return average_bytes<Isa, kSigned, Division::kQuotient>(p);
  }
}

template <class Isa>
void avg_pool(const PoolRow& p) {
  if (p.dst_dtype == DType::f32) {
    return p.is_signed ? average_floats<Isa, true>(p) : average_floats<Isa, false>(p);
  }
  p.is_signed ? average_with<Isa, true>(p) : average_with<Isa, false>(p);
}

}  // namespace
