// SPDX-License-Identifier: Apache-2.0
// Rows of attention: scores to bytes, and weighted sums to means (contracts in contract.h).
#pragma once

#include "kernels/attention/contract.h"
#include "kernels/rows/rows.h"

namespace {

/// NaN where a value is not finite.
template <class Isa>
TORCHQ_INLINE float largest_magnitude(const float* src, int64_t size) {
  auto largest = Isa::set(0.0f), invalid = Isa::set(0.0f);
  for_each_row_panel<Isa>(size, [&](int64_t i, auto m) {
    const auto x = Isa::load(src + i, m);
    largest = Isa::max(largest, Math<Isa>::abs(x));
    invalid = Isa::fma(x, Isa::set(0.0f), invalid);  // NaN from what is not finite
  });
  return Isa::sum_halves(invalid) == 0.0f ? Isa::largest_lane(largest) : __builtin_nanf("");
}

template <class Isa>
void quantize_symmetric(const SymmetricRows& s) {
  float largest = 0.0f;
  for (int64_t r = 0; s.shared && r < s.rows && largest == largest; ++r) {
    const float own = largest_magnitude<Isa>(s.src + r * s.stride, s.size);
    largest = own > largest || own != own ? own : largest;
  }
  const auto zero_point = Isa::set(128.0f);
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* src = s.src + r * s.stride;
    uint8_t* dst = s.dst + r * s.dst_stride;
    if (!s.shared) largest = largest_magnitude<Isa>(src, s.size);
    const float scale = (largest < 1e-30f ? 1e-30f : largest) / 127.0f;
    s.scale[s.shared ? 0 : r] = scale;
    const auto factor = Isa::set(1.0f / scale);
    // NaN converts to the least integer, which is 0 as a byte.
    for_each_row_panel<Isa>(s.size, [&](int64_t i, auto m) {
      const auto y = Isa::fma(Isa::load(src + i, m), factor, zero_point);
      Isa::store_u8(dst + i, Isa::to_int(y), m);
    });
  }
}

/// Scores from n to the end of its panel become -inf, in one store: what reads them next would wait
/// for several. Of the others, NaN become infinity, which spoils as much.
template <class Isa>
TORCHQ_INLINE void hide_scores(float* x, int64_t n) {
  constexpr float all = __builtin_inff(), none = -all;
  alignas(64) static constexpr float kEdge[2 * kPanel] = {
      all,  all,  all,  all,  all,  all,  all,  all,  all,  all,  all,
      all,  all,  all,  all,  all,  none, none, none, none, none, none,
      none, none, none, none, none, none, none, none, none, none};
  float* const last = x + n / kPanel * kPanel;
  Isa::store(last, Isa::min(Isa::load(last), Isa::load(kEdge + kPanel - n % kPanel)));
}

/// The largest of n scores, to which the mask is added if there is one.
template <class Isa>
TORCHQ_INLINE float largest_score(float* x, int64_t n, const float* mask) {
  if (mask != nullptr) {
    for_each_row_panel<Isa>(n, [&](int64_t j, auto m) {
      Isa::store(x + j, Isa::add(Isa::load(x + j), Isa::load(mask + j, m)));
    });
  }
  constexpr int kVectors = 4;
  typename Isa::Float best[kVectors];
  TORCHQ_UNROLL for (auto& b : best) b = Isa::set(-__builtin_inff());
  int64_t j = 0;
  for (; j + kVectors * kPanel <= n; j += kVectors * kPanel) {
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      best[v] = Isa::max(best[v], Isa::load(x + j + v * kPanel));
    }
  }
  for (; j < n; j += kPanel) best[0] = Isa::max(best[0], Isa::load(x + j));
  return Isa::largest_lane(Isa::max(Isa::max(best[0], best[1]), Isa::max(best[2], best[3])));
}

/// dst of n scores, in whole panels; returns their total.
template <class Isa>
TORCHQ_INLINE float weigh_scores(const float* x, int64_t n, float largest_of_all, float unit_size,
                                 uint8_t* dst) {
  constexpr int kVectors = Isa::kStoredPanels;
  const auto largest = Isa::set(largest_of_all), unit = Isa::set(unit_size);
  const auto full = Isa::set(torchq::kFullWeight);
  auto sum = Isa::set(0.0f);
  auto before = Isa::zero();
  const auto weigh = [&](const float* scores) {
    const auto t = Isa::mul(Isa::sub(Isa::load(scores), largest), unit);
    sum = Isa::fma(Math<Isa>::exp2_coarse(t), full, sum);
    const auto rounded = Isa::to_int(sum), weight = Isa::sub(rounded, before);
    before = rounded;
    return weight;
  };
  int64_t j = 0;
  for (; j + kVectors * kPanel <= n; j += kVectors * kPanel) {
    typename Isa::Int q[kVectors];
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) q[v] = weigh(x + j + v * kPanel);
    Isa::store_row(dst + j, q, false);
  }
  for (; j < n; j += kPanel) Isa::store_panel(dst + j, weigh(x + j), false);
  const float total = Isa::sum_halves(Isa::round(sum));  // below 2^24, so exact
  return total == total ? total : __builtin_nanf("");
}

template <class Isa>
void attention_weights(const AttentionRows& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t n = a.visible + r < a.keys ? a.visible + r : a.keys;
    float* x = a.scores + r * a.stride;
    uint8_t* dst = a.dst + r * a.stride;
    if (n < a.keys && n % kPanel != 0) hide_scores<Isa>(x, n);
    const float largest =
        largest_score<Isa>(x, n, a.mask == nullptr ? nullptr : a.mask + r * a.mask_stride);
    if (largest == -__builtin_inff()) {
      memset(dst, 0, static_cast<size_t>(a.stride));
      a.total[r] = 0.0f;
      for (int64_t j = 0; j < n; ++j) a.total[r] = x[j] == x[j] ? a.total[r] : __builtin_nanf("");
      continue;
    }
    a.total[r] = weigh_scores<Isa>(x, n, largest, a.unit, dst);
    if (n < a.keys) {
      memset(dst + whole_panels(n), 0, static_cast<size_t>(a.stride - whole_panels(n)));
    }
  }
}

template <class Isa>
void attention_means(const AttentionMeans& a) {
  const auto inverse = Isa::set(a.dst.inverse_scale), zero_point = Isa::set(a.dst.zero_point);
  with_real_dtype(a.dst.dtype, [&](auto tag) {
    constexpr DType kDst = decltype(tag)::value;
    for (int64_t r = 0; r < a.rows; ++r) {
      const bool any = a.total[r] != 0.0f;
      const auto factor = Isa::set(any ? a.scale / a.total[r] : 0.0f);
      const auto shift = Isa::set(any ? a.shift : 0.0f);
      const float* sums = a.sums + r * a.size;
      store_row_as<Isa, kDst>(element(a.dst.data, kDst, r * a.dst_stride), a.size, zero_point,
                              [&](int64_t i, auto m) {
                                const auto y = Isa::fma(Isa::load(sums + i, m), factor, shift);
                                if constexpr (kDst == DType::f32) return y;
                                return Isa::fma(y, inverse, zero_point);
                              });
    }
  });
}

}  // namespace
