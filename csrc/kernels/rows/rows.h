// SPDX-License-Identifier: Apache-2.0
// Rows in real units: softmax, normalizations, resampling, reductions (contracts in contract.h).
#pragma once

#include "kernels/epilogue/epilogue.h"
#include "kernels/rows/contract.h"

namespace {

/// 16 values as integers.
template <class Isa>
TORCHQ_INLINE typename Isa::Int load_q(const uint8_t* p, bool is_signed, typename Isa::Mask m) {
  return is_signed ? Isa::load_s8(p, m) : Isa::load_u8(p, m);
}

/// 16 values of a source from element i on.
template <class Isa, DType kSrc>
TORCHQ_INLINE typename Isa::Float load_real(const void* src, int64_t i, typename Isa::Mask m) {
  if constexpr (kSrc == DType::f32) {
    return Isa::load(static_cast<const float*>(src) + i, m);
  } else {
    return Isa::to_float(load_q<Isa>(static_cast<const uint8_t*>(src) + i, kSrc == DType::s8, m));
  }
}

/// use(tag), whose `value` is the dtype of a RealRow, or of a source: u8, s8 or f32.
template <class Use>
TORCHQ_INLINE void with_real_dtype(DType dtype, Use use) {
  if (dtype == DType::u8) return use(DTypeTag<DType::u8>{});
  if (dtype == DType::s8) return use(DTypeTag<DType::s8>{});
  use(DTypeTag<DType::f32>{});
}

/// Stores value(i, lanes that are valid), in real units, for each panel i of `size` values from
/// d's element `first` on.
template <class Isa, DType kDst, class Value>
TORCHQ_INLINE void store_real_row(const RealRow& d, int64_t first, int64_t size, Value value) {
  const auto inverse = Isa::set(d.inverse_scale), zero_point = Isa::set(d.zero_point);
  store_row_as<Isa, kDst>(element(d.data, kDst, first), size, zero_point, [&](int64_t i, auto m) {
    if constexpr (kDst == DType::f32) return value(i, m);
    return Isa::fma(value(i, m), inverse, zero_point);
  });
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

/// The sum of value(i, lanes that are valid) for each panel i of `size` values, in the order of
/// SoftmaxRow.
template <class Isa, class Value>
TORCHQ_INLINE float sum_row(int64_t size, Value value) {
  auto sum = Isa::set(0.0f);
  for (int64_t first = 0; first < size; first += kSumBlock) {
    const int64_t count = size - first < kSumBlock ? size - first : kSumBlock;
    auto block = Isa::set(0.0f);
    for_each_row_panel<Isa>(count, [&](int64_t i, auto m) {
      auto x = value(first + i, m);
      if (count - i < kPanel) {
        float lanes[kPanel];
        Isa::store(lanes, x);
        x = Isa::load(lanes, m);  // zeros behind the last value
      }
      block = Isa::add(block, x);
    });
    sum = Isa::add(sum, block);
  }
  return Isa::sum_halves(sum);
}

/// Any of them where one is NaN.
template <class Isa>
TORCHQ_INLINE float largest_of(const float* src, int64_t size) {
  if (size < kPanel) {
    float lanes[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) lanes[i] = src[i < size ? i : 0];
    return Isa::largest_lane(Isa::load(lanes));
  }
  auto best = Isa::load(src + size - kPanel);
  for (int64_t i = 0; i + kPanel < size; i += kPanel) best = Isa::max(best, Isa::load(src + i));
  return Isa::largest_lane(best);
}

/// values = z if kLogarithmic, else e; returns the sum S of e.
template <class Isa, bool kLogarithmic, DType kSrc>
TORCHQ_INLINE float exponentials(const SoftmaxRow& s) {
  using Float = typename Isa::Float;
  float max;
  if constexpr (kSrc == DType::f32) {
    max = largest_of<Isa>(static_cast<const float*>(s.src), s.size);
  } else {
    const auto* bytes = static_cast<const uint8_t*>(s.src);
    max = static_cast<float>(largest_of<Isa>(bytes, s.size, kSrc == DType::s8));
  }
  const Float largest = Isa::set(max), scale = Isa::set(s.scale);
  return sum_row<Isa>(s.size, [&](int64_t i, auto m) {
    const Float z = Isa::mul(scale, Isa::sub(load_real<Isa, kSrc>(s.src, i, m), largest));
    const Float e = Math<Isa>::exp_normal(z);
    Isa::store(s.values + i, kLogarithmic ? z : e);
    return e;
  });
}

template <class Isa>
bool row_range(const float* src, int64_t size, float* lo, float* hi) {
  using Float = typename Isa::Float;
  const Float zero = Isa::set(0.0f);
  Float low = zero, high = zero, invalid = zero;
  for_each_row_panel<Isa>(size, [&](int64_t i, auto m) {
    const Float x = Isa::load(src + i, m);
    low = Isa::min(low, x);
    high = Isa::max(high, x);
    invalid = Isa::fma(x, zero, invalid);  // NaN from what is not finite
  });
  float lows[kPanel], highs[kPanel], zeros[kPanel];
  Isa::store(lows, low);
  Isa::store(highs, high);
  Isa::store(zeros, invalid);
  *lo = *hi = 0.0f;
  bool finite = true;
  for (int i = 0; i < kPanel; ++i) {
    *lo = lows[i] < *lo ? lows[i] : *lo;
    *hi = highs[i] > *hi ? highs[i] : *hi;
    finite = finite && zeros[i] == 0.0f;
  }
  return finite;
}

template <class Isa>
void softmax(const SoftmaxRow& s) {
  float sum = 0;
  with_real_dtype(s.src_dtype, [&](auto src) {
    constexpr DType kSrc = decltype(src)::value;
    sum = s.logarithmic ? exponentials<Isa, true, kSrc>(s) : exponentials<Isa, false, kSrc>(s);
  });
  with_real_dtype(s.dst.dtype, [&](auto dst) {
    constexpr DType kDst = decltype(dst)::value;
    if (s.logarithmic) {
      const auto log_sum = Math<Isa>::log(Isa::set(sum));
      store_real_row<Isa, kDst>(s.dst, 0, s.size, [&](int64_t i, auto m) {
        return Isa::sub(Isa::load(s.values + i, m), log_sum);
      });
    } else {
      const auto inverse = Isa::set(1.0f / sum);
      store_real_row<Isa, kDst>(s.dst, 0, s.size, [&](int64_t i, auto m) {
        return Isa::mul(Isa::load(s.values + i, m), inverse);
      });
    }
  });
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
    s += Isa::sum_lanes(sums);
    s2 += Isa::sum_lanes(products);
  }
  const int64_t filled = (size + kLanes - 1) / kLanes * kLanes;
  *sum = is_signed ? s - 128 * filled : s;
  *squares = is_signed ? s2 - 256 * s + 16384 * filled : s2;
}

struct PanelOf {
  alignas(64) float lanes[kPanel];
};
constexpr PanelOf panel_of(float x) {
  PanelOf result{};
  for (float& lane : result.lanes) lane = x;
  return result;
}
constexpr PanelOf kPanelOf0 = panel_of(0), kPanelOf1 = panel_of(1);

/// A parameter per value, or where there is none a panel for all: without a branch in the loop.
template <class Isa>
struct OptionalRow {
  TORCHQ_INLINE OptionalRow(const float* row, const PanelOf& otherwise)
      : values(row != nullptr ? row : otherwise.lanes), keep(row != nullptr ? -1 : 0) {}
  TORCHQ_INLINE typename Isa::Float load(int64_t i, typename Isa::Mask m) const {
    return Isa::load(values + (i & keep), m);
  }
  const float* values;
  int64_t keep;
};

template <class Isa>
void row_deviations(const float* src, int64_t size, bool centered, float* mean, float* squares) {
  const auto load = [&](int64_t i, auto m) { return Isa::load(src + i, m); };
  const double n = static_cast<double>(size);
  *mean = centered ? static_cast<float>(sum_row<Isa>(size, load) / n) : 0.0f;
  const auto center = Isa::set(*mean);
  *squares = sum_row<Isa>(size, [&](int64_t i, auto m) {
    const auto d = Isa::sub(load(i, m), center);
    return Isa::mul(d, d);
  });
}

/// kPanels panels from column i on; `m` of the last. Squares of integers are summed as floats,
/// exactly: 256 of them are below 2^24.
template <class Isa, DType kSrc, int kPanels>
TORCHQ_INLINE void column_moments(const MomentsRows& s, int64_t i, typename Isa::Mask m) {
  using Float = typename Isa::Float;
  constexpr bool kFloat = kSrc == DType::f32;
  const auto valid = [&](int p) { return p + 1 < kPanels ? Isa::mask(kPanel) : m; };
  Float origin[kPanels], sum[kPanels], squares[kPanels];
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
    sum[p] = squares[p] = origin[p] = Isa::set(0.0f);
    if constexpr (kFloat) origin[p] = load_real<Isa, kSrc>(s.src, i + p * kPanel, valid(p));
  }
  for (int64_t r = kFloat ? 1 : 0; r < s.rows; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
      Float x = load_real<Isa, kSrc>(s.src, r * s.stride + i + p * kPanel, valid(p));
      if constexpr (kFloat) x = Isa::sub(x, origin[p]);
      sum[p] = Isa::add(sum[p], x);
      squares[p] = Isa::fma(x, x, squares[p]);
    }
  }
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
    const auto store = [&](void* dst, Float x) {
      if constexpr (kFloat) {
        Isa::store(static_cast<float*>(dst) + i + p * kPanel, x, valid(p));
      } else {
        Isa::store_int(static_cast<int32_t*>(dst) + i + p * kPanel, Isa::to_int(x), valid(p));
      }
    };
    store(s.sums, sum[p]);
    store(s.squares, squares[p]);
  }
}

/// Two panels at a time: one waits for its additions.
template <class Isa>
void moments(const MomentsRows& s) {
  with_real_dtype(s.src_dtype, [&](auto src) {
    constexpr DType kSrc = decltype(src)::value;
    for (int64_t i = 0; i < s.size; i += 2 * kPanel) {
      const int64_t left = s.size - i;
      if (left > kPanel) {
        column_moments<Isa, kSrc, 2>(s, i, Isa::mask(min_int(left - kPanel, kPanel)));
      } else {
        column_moments<Isa, kSrc, 1>(s, i, Isa::mask(static_cast<int>(left)));
      }
    }
  });
}

template <class Isa, DType kDst, DType kSrc, bool kPerValue>
TORCHQ_INLINE void affine_rows(const AffineRows& a) {
  const OptionalRow<Isa> weight(a.weight, kPanelOf1), bias(a.bias, kPanelOf0);
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t row = kPerValue ? 0 : r, first = r * a.size;
    const auto center = Isa::set(a.center[row]);
    const auto factor = Isa::set(a.factor[row]), shift = Isa::set(a.shift[row]);
    store_real_row<Isa, kDst>(a.dst, first, a.size, [&](int64_t i, auto m) {
      const auto x = Isa::sub(load_real<Isa, kSrc>(a.src, first + i, m),
                              kPerValue ? Isa::load(a.center + i, m) : center);
      const auto y = Isa::fma(x, kPerValue ? Isa::load(a.factor + i, m) : factor,
                              kPerValue ? Isa::load(a.shift + i, m) : shift);
      return Isa::fma(y, weight.load(i, m), bias.load(i, m));
    });
  }
}

template <class Isa>
void affine(const AffineRows& a) {
  if (a.size == 0) return;
  with_real_dtype(a.dst.dtype, [&](auto dst) {
    with_real_dtype(a.src_dtype, [&](auto src) {
      constexpr DType kDst = decltype(dst)::value, kSrc = decltype(src)::value;
      a.per_value ? affine_rows<Isa, kDst, kSrc, true>(a) : affine_rows<Isa, kDst, kSrc, false>(a);
    });
  });
}

template <class Isa, DType kDst, int kTaps>
TORCHQ_INLINE void blend_pixels(const BlendRow& b) {
  const auto scale = Isa::set(b.scale);
  for (int64_t p = 0; p < b.pixels; ++p) {
    const float* tap[kTaps];
    typename Isa::Float weight[kTaps];
    TORCHQ_UNROLL for (int k = 0; k < kTaps; ++k) {
      tap[k] = b.lines[k / 2] + b.offset[2 * p + k % 2];
      weight[k] = Isa::set(b.weight[kTaps * p + k]);
    }
    store_real_row<Isa, kDst>(b.dst, p * b.channels, b.channels, [&](int64_t c, auto m) {
      auto sum = Isa::mul(weight[0], Isa::load(tap[0] + c, m));
      TORCHQ_UNROLL for (int k = 1; k < kTaps; ++k) {
        sum = Isa::fma(weight[k], Isa::load(tap[k] + c, m), sum);
      }
      return Isa::mul(scale, sum);
    });
  }
}

template <class Isa>
void blend(const BlendRow& b) {
  with_real_dtype(b.dst.dtype, [&](auto dst) {
    constexpr DType kDst = decltype(dst)::value;
    if (b.num_lines == 1) return blend_pixels<Isa, kDst, 2>(b);
    if (b.num_lines == 2) return blend_pixels<Isa, kDst, 4>(b);
    blend_pixels<Isa, kDst, 8>(b);
  });
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
