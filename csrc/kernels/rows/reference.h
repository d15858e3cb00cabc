// SPDX-License-Identifier: Apache-2.0
// Rows in real units in plain loops: softmax, normalizations, resampling, reductions.
#pragma once

#include "kernels/epilogue/reference.h"
#include "kernels/rows/contract.h"

namespace {

int32_t integer_at(const uint8_t* src, bool is_signed, int64_t i) {
  return is_signed ? static_cast<int8_t>(src[i]) : src[i];
}

void store_real(const RealRow& d, int64_t i, float y) {
  if (d.dtype != DType::f32) y = fmaf(y, d.inverse_scale, d.zero_point);
  store_value(d.data, d.dtype, i, y, d.zero_point);
}

bool row_range(const float* src, int64_t size, float* lo, float* hi) {
  *lo = *hi = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < size; ++i) {
    *lo = src[i] < *lo ? src[i] : *lo;  // never -0
    *hi = src[i] > *hi ? src[i] : *hi;
    finite = finite && src[i] - src[i] == 0.0f;
  }
  return finite;
}

/// Lanes j and j + 8 added, then j and j + 4, j + 2, j + 1.
float sum_lanes(float (&sum)[kPanel]) {
  for (int half = kPanel / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sum[j] += sum[j + half];
  }
  return sum[0];
}

template <class Value>
float sum_row(int64_t size, Value value) {
  float sum[kPanel] = {};
  for (int64_t first = 0; first < size; first += kSumBlock) {
    float block[kPanel] = {};
    for (int64_t i = first; i < size && i < first + kSumBlock; ++i) block[i % kPanel] += value(i);
    for (int j = 0; j < kPanel; ++j) sum[j] += block[j];
  }
  return sum_lanes(sum);
}

void softmax(const SoftmaxRow& s) {
  const auto value = [&](int64_t i) { return load_value(s.src, s.src_dtype, i, 0); };
  float largest = value(0);
  for (int64_t i = 1; i < s.size; ++i) largest = max_float(value(i), largest);
  const auto z = [&](int64_t i) { return s.scale * (value(i) - largest); };
  for (int64_t i = 0; i < s.size; ++i) s.values[i] = Math<Scalar>::exp_normal(z(i));
  const float sum = sum_row(s.size, [&](int64_t i) { return s.values[i]; });
  const float inverse = 1.0f / sum, log_sum = Math<Scalar>::log(sum);
  for (int64_t i = 0; i < s.size; ++i) {
    store_real(s.dst, i, s.logarithmic ? z(i) - log_sum : s.values[i] * inverse);
  }
}

void row_deviations(const float* src, int64_t size, bool centered, float* mean, float* squares) {
  const double n = static_cast<double>(size);
  *mean =
      centered ? static_cast<float>(sum_row(size, [&](int64_t i) { return src[i]; }) / n) : 0.0f;
  *squares = sum_row(size, [&](int64_t i) {
    const float d = src[i] - *mean;
    return d * d;
  });
}

void moments(const MomentsRows& m) {
  const auto x = [&](int64_t r, int64_t i) {
    return load_value(m.src, m.src_dtype, r * m.stride + i, 0);
  };
  for (int64_t i = 0; i < m.size; ++i) {
    if (m.src_dtype == DType::f32) {
      float sum = 0, squares = 0;
      for (int64_t r = 1; r < m.rows; ++r) {
        const float d = x(r, i) - x(0, i);
        sum += d;
        squares = fmaf(d, d, squares);
      }
      static_cast<float*>(m.sums)[i] = sum;
      static_cast<float*>(m.squares)[i] = squares;
    } else {
      int32_t sum = 0, squares = 0;
      for (int64_t r = 0; r < m.rows; ++r) {
        const int32_t q = static_cast<int32_t>(x(r, i));
        sum += q;
        squares += q * q;
      }
      static_cast<int32_t*>(m.sums)[i] = sum;
      static_cast<int32_t*>(m.squares)[i] = squares;
    }
  }
}

void row_moments(const uint8_t* src, int64_t size, bool is_signed, int64_t* sum, int64_t* squares) {
  *sum = *squares = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t q = integer_at(src, is_signed, i);
    *sum += q;
    *squares += q * q;
  }
}

void affine(const AffineRows& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t i = 0; i < a.size; ++i) {
      const int64_t p = a.per_value ? i : r, at = r * a.size + i;
      const float x = load_value(a.src, a.src_dtype, at, 0) - a.center[p];
      const float y = fmaf(x, a.factor[p], a.shift[p]);
      store_real(a.dst, at,
                 fmaf(y, a.weight != nullptr ? a.weight[i] : 1, a.bias != nullptr ? a.bias[i] : 0));
    }
  }
}

void blend(const BlendRow& b) {
  const int taps = 2 * b.num_lines;
  for (int64_t p = 0; p < b.pixels; ++p) {
    for (int64_t c = 0; c < b.channels; ++c) {
      float sum = 0;
      for (int k = 0; k < taps; ++k) {
        const float v = b.lines[k / 2][b.offset[2 * p + k % 2] + c];
        const float weight = b.weight[taps * p + k];
        sum = k == 0 ? weight * v : fmaf(weight, v, sum);
      }
      store_real(b.dst, p * b.channels + c, b.scale * sum);
    }
  }
}

void reduce(const ReduceRows& r) {
  for (int64_t i = 0; i < r.size; ++i) {
    int32_t result = integer_at(r.src, r.is_signed, i);
    for (int64_t row = 1; row < r.rows; ++row) {
      const int32_t q = integer_at(r.src, r.is_signed, row * r.stride + i);
      const bool better = r.alg == Reduce::max ? q > result : q < result;
      result = r.alg == Reduce::sum ? result + q : better ? q : result;
    }
    r.dst[i] = result;
  }
}

}  // namespace
