// SPDX-License-Identifier: Apache-2.0
// Rows in real units: softmax, normalizations, resampling, reductions (contracts in table.h).
#pragma once

#include "epilogue.h"

namespace {

/// 16 values as integers.
template <class Isa>
TORCHQ_INLINE typename Isa::Int load_q(const uint8_t* p, bool is_signed, typename Isa::Mask m) {
  return is_signed ? Isa::load_s8(p, m) : Isa::load_u8(p, m);
}

/// The largest of size >= 1 values.
template <class Isa>
TORCHQ_INLINE int32_t largest_of(const uint8_t* src, int64_t size, bool is_signed) {
  constexpr int kLanes = Isa::kByteLanes;
  if (size < kLanes) {  // the tail is filled with the smallest value
    uint8_t bytes[kLanes];
    memset(bytes, is_signed ? 0x80 : 0, sizeof bytes);
    memcpy(bytes, src, static_cast<size_t>(size));
    return Isa::largest(Isa::load_channels(bytes, kLanes), is_signed);
  }
  auto best = Isa::load_channels(src + size - kLanes, kLanes);
  for (int64_t i = 0; i + kLanes < size; i += kLanes) {
    best = Isa::max_bytes(best, Isa::load_channels(src + i, kLanes), is_signed);
  }
  return Isa::largest(best, is_signed);
}

/// dst = z if `logarithmic`, else e; returns the sum S of e.
template <class Isa, bool kLogarithmic>
TORCHQ_INLINE float exponentials(const SoftmaxRow& s) {
  using Float = typename Isa::Float;
  const auto largest = Isa::set_int(largest_of<Isa>(s.src, s.size, s.is_signed));
  const Float scale = Isa::set(s.scale);
  Float sum = Isa::set(0.0f);
  for (int64_t first = 0; first < s.size; first += kSumBlock) {
    const int64_t end = first + kSumBlock < s.size ? first + kSumBlock : s.size;
    Float block = Isa::set(0.0f);
    for (int64_t i = first; i < end; i += kPanel) {
      const auto m = Isa::mask(min_int(end - i, kPanel));
      const auto q = load_q<Isa>(s.src + i, s.is_signed, m);
      const Float z = Isa::mul(scale, Isa::to_float(Isa::sub(q, largest)));
      Float e = Math<Isa>::exp_normal(z);
      Isa::store(s.dst + i, kLogarithmic ? z : e);
      if (end - i < kPanel) {
        float lanes[kPanel];
        Isa::store(lanes, e);
        e = Isa::load(lanes, m);  // zeros behind the last value
      }
      block = Isa::add(block, e);
    }
    sum = Isa::add(sum, block);
  }
  float lanes[kPanel];
  Isa::store(lanes, sum);
  for (int half = kPanel / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

template <class Isa>
void softmax(const SoftmaxRow& s) {
  if (s.logarithmic) {
    const auto log_sum = Math<Isa>::log(Isa::set(exponentials<Isa, true>(s)));
    for (int64_t i = 0; i < s.size; i += kPanel) {
      Isa::store(s.dst + i, Isa::sub(Isa::load(s.dst + i), log_sum));
    }
  } else {
    const auto inverse = Isa::set(1.0f / exponentials<Isa, false>(s));
    for (int64_t i = 0; i < s.size; i += kPanel) {
      Isa::store(s.dst + i, Isa::mul(Isa::load(s.dst + i), inverse));
    }
  }
}

/// Squares are summed as floats, exactly: 256 of them are below 2^24.
template <class Isa>
void moments(const MomentsRows& m) {
  for (int64_t i = 0; i < m.size; i += kPanel) {
    const auto mask = Isa::mask(min_int(m.size - i, kPanel));
    auto sum = Isa::zero();
    auto squares = Isa::set(0.0f);
    for (int64_t r = 0; r < m.rows; ++r) {
      const auto q = load_q<Isa>(m.src + r * m.stride + i, m.is_signed, mask);
      const auto x = Isa::to_float(q);
      sum = Isa::add(sum, q);
      squares = Isa::fma(x, x, squares);
    }
    Isa::store_int(m.sums + i, sum, mask);
    Isa::store_int(m.squares + i, Isa::to_int(squares), mask);
  }
}

/// s8 values as u8 ones, q + 128, which is undone in the end; the last vector is filled up with
/// q = 0. A lane adds at most 2^15 of 255^2.
template <class Isa>
void row_moments(const uint8_t* src, int64_t size, bool is_signed, int64_t* sum, int64_t* squares) {
  constexpr int64_t kLanes = Isa::kByteLanes, kBlock = kLanes << 13;
  const auto sign = Isa::set_bytes(is_signed ? 0x80 : 0);
  int64_t s = 0, s2 = 0;
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t end = size - first < kBlock ? size : first + kBlock;
    auto sums = Isa::zero(), products = Isa::zero();
    for (int64_t i = first; i < end; i += kLanes) {
      const auto v = Isa::load_channels(src + i, min_int(end - i, kLanes));
      Isa::add_moments(sums, products, Isa::xor_bytes(v, sign));
    }
    int32_t lanes[2][kPanel];
    Isa::store_int(lanes[0], sums);
    Isa::store_int(lanes[1], products);
    for (int j = 0; j < kPanel; ++j) {
      s += lanes[0][j];
      s2 += lanes[1][j];
    }
  }
  const int64_t filled = (size + kLanes - 1) / kLanes * kLanes;
  *sum = is_signed ? s - 128 * filled : s;
  *squares = is_signed ? s2 - 256 * s + 16384 * filled : s2;
}

template <class Isa, bool kPerValue, bool kWeighted>
TORCHQ_INLINE void affine_row(const AffineRow& a) {
  const auto center = Isa::set_int(*a.center);
  const auto factor = Isa::set(*a.factor), shift = Isa::set(*a.shift);
  const auto one = Isa::set(1.0f), zero = Isa::set(0.0f);
  for_each_row_panel<Isa>(a.size, [&](int64_t i, auto m) {
    const auto q = load_q<Isa>(a.src + i, a.is_signed, m);
    const auto x = Isa::to_float(Isa::sub(q, kPerValue ? Isa::load_int(a.center + i, m) : center));
    auto y = Isa::fma(x, kPerValue ? Isa::load(a.factor + i, m) : factor,
                      kPerValue ? Isa::load(a.shift + i, m) : shift);
    if constexpr (kWeighted) {
      y = Isa::fma(y, a.weight != nullptr ? Isa::load(a.weight + i, m) : one,
                   a.bias != nullptr ? Isa::load(a.bias + i, m) : zero);
    } else {
      y = Isa::add(y, zero);  // as the fma with 1 and 0
    }
    Isa::store(a.dst + i, y);
  });
}

template <class Isa>
void affine(const AffineRow& a) {
  const bool weighted = a.weight != nullptr || a.bias != nullptr;
  if (a.size == 0) return;
  if (a.step != 0) {
    weighted ? affine_row<Isa, true, true>(a) : affine_row<Isa, true, false>(a);
  } else {
    weighted ? affine_row<Isa, false, true>(a) : affine_row<Isa, false, false>(a);
  }
}

template <class Isa>
void blend(const BlendRow& b) {
  using Float = typename Isa::Float;
  constexpr int kTogether = 4;  // panels
  const Float scale = Isa::set(b.scale);
  int64_t c = 0;
  for (; c + kTogether * kPanel <= b.size; c += kTogether * kPanel) {
    Float sum[kTogether];
    for (int k = 0; k < b.num_taps; ++k) {
      const Float weight = Isa::set(b.weight[k]);
      TORCHQ_UNROLL for (int v = 0; v < kTogether; ++v) {
        const Float x = Isa::load(b.taps[k] + c + v * kPanel);
        sum[v] = k == 0 ? Isa::mul(weight, x) : Isa::fma(weight, x, sum[v]);
      }
    }
    TORCHQ_UNROLL for (int v = 0; v < kTogether; ++v) {
      Isa::store(b.dst + c + v * kPanel, Isa::mul(scale, sum[v]));
    }
  }
  for (; c < b.size; c += kPanel) {
    const auto m = Isa::mask(min_int(b.size - c, kPanel));
    Float sum = Isa::mul(Isa::set(b.weight[0]), Isa::load(b.taps[0] + c, m));
    for (int k = 1; k < b.num_taps; ++k) {
      sum = Isa::fma(Isa::set(b.weight[k]), Isa::load(b.taps[k] + c, m), sum);
    }
    Isa::store(b.dst + c, Isa::mul(scale, sum));
  }
}

template <class Isa>
void reduce(const ReduceRows& r) {
  if (r.alg == Reduce::sum) {
    for (int64_t i = 0; i < r.size; i += kPanel) {
      const auto m = Isa::mask(min_int(r.size - i, kPanel));
      auto sum = Isa::zero();
      for (int64_t row = 0; row < r.rows; ++row) {
        sum = Isa::add(sum, load_q<Isa>(r.src + row * r.stride + i, r.is_signed, m));
      }
      Isa::store_int(r.dst + i, sum, m);
    }
    return;
  }
  constexpr int kLanes = Isa::kByteLanes;
  for (int64_t i = 0; i < r.size; i += kLanes) {
    const int count = min_int(r.size - i, kLanes);
    auto best = Isa::load_channels(r.src + i, count);
    for (int64_t row = 1; row < r.rows; ++row) {
      const auto other = Isa::load_channels(r.src + row * r.stride + i, count);
      best = r.alg == Reduce::max ? Isa::max_bytes(best, other, r.is_signed)
                                  : Isa::min_bytes(best, other, r.is_signed);
    }
    uint8_t bytes[kLanes];
    Isa::store_channels(bytes, best, kLanes);
    for (int j = 0; j < count; j += kPanel) {
      const auto m = Isa::mask(min_int(count - j, kPanel));
      Isa::store_int(r.dst + i + j, load_q<Isa>(bytes + j, r.is_signed, m), m);
    }
  }
}

}  // namespace
