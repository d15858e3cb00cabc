// SPDX-License-Identifier: Apache-2.0
// Rows of attention in plain loops.
#pragma once

#include "kernels/attention/contract.h"
#include "kernels/rows/reference.h"

namespace {

/// The scale of values up to `largest`, which is NaN where they are not finite.
float symmetric_scale(float largest) { return (largest < 1e-30f ? 1e-30f : largest) / 127.0f; }

float largest_magnitude(const float* src, int64_t size) {
  float largest = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    if (src[i] - src[i] != 0.0f) return __builtin_nanf("");
    largest = max_float(largest, fabsf(src[i]));
  }
  return largest;
}

void quantize_symmetric(const SymmetricRows& s) {
  float largest = 0.0f;
  for (int64_t r = 0; s.shared && r < s.rows; ++r) {
    const float own = largest_magnitude(s.src + r * s.stride, s.size);
    largest = own > largest || own != own ? own : largest;
    if (largest != largest) break;
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* src = s.src + r * s.stride;
    if (!s.shared) largest = largest_magnitude(src, s.size);
    const float scale = symmetric_scale(largest), factor = 1.0f / scale;
    s.scale[s.shared ? 0 : r] = scale;
    for (int64_t i = 0; i < s.size; ++i) {
      const float y = scale == scale ? fmaf(src[i], factor, 128.0f) : 0.0f;
      s.dst[r * s.dst_stride + i] = static_cast<uint8_t>(nearbyintf(y));
    }
  }
}

void attention_weights(const AttentionRows& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t n = a.visible + r < a.keys ? a.visible + r : a.keys;
    float* x = a.scores + r * a.stride;
    uint8_t* dst = a.dst + r * a.stride;
    memset(dst, 0, static_cast<size_t>(a.stride));
    float largest = -__builtin_inff();
    bool valid = true;
    for (int64_t j = 0; j < n; ++j) {
      if (a.mask != nullptr) x[j] += a.mask[r * a.mask_stride + j];
      largest = x[j] > largest ? x[j] : largest;
      valid = valid && x[j] == x[j];
    }
    valid = valid && largest != __builtin_inff();
    a.total[r] = valid ? 0.0f : __builtin_nanf("");
    if (!valid || largest == -__builtin_inff()) continue;
    float sum[kPanel] = {};
    for (int64_t j = 0; j < n; ++j) {
      float& lane = sum[j % kPanel];
      const float t = (x[j] - largest) * a.unit, before = nearbyintf(lane);
      lane = fmaf(Math<Scalar>::exp2_coarse(t), kFullWeight, lane);
      dst[j] = static_cast<uint8_t>(nearbyintf(lane) - before);
      a.total[r] += dst[j];
    }
  }
}

void attention_means(const AttentionMeans& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const bool any = a.total[r] != 0.0f;
    for (int64_t i = 0; i < a.size; ++i) {
      const float factor = any ? a.scale / a.total[r] : 0.0f, shift = any ? a.shift : 0.0f;
      store_real(a.dst, r * a.dst_stride + i, fmaf(a.sums[r * a.size + i], factor, shift));
    }
  }
}

float scale_of(const CompressedRows& rows, int64_t j) {
  float scale;
  memcpy(&scale, rows.data + j * rows.stride + rows.size, sizeof scale);
  return scale;
}

float dot_row(const float* query, const CompressedRows& keys, int64_t j) {
  float lanes[kPanel] = {};
  for (int64_t i = 0; i < keys.size; ++i) {
    float& lane = lanes[i % kPanel];
    lane = fmaf(query[i], keys.data[j * keys.stride + i], lane);
  }
  return sum_lanes(lanes);
}

void compressed_attention(const CompressedAttention& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* query = a.queries + r * whole_panels(a.keys.size);
    float* x = a.scores;
    bool sees = false;
    for (int64_t j = 0; j < a.length; ++j) {
      const float scale = scale_of(a.keys, j) * a.scale;
      x[j] = fmaf(dot_row(query, a.keys, j), scale, a.mask != nullptr ? a.mask[r][j] : 0.0f);
      sees = sees || x[j] != -__builtin_inff();
    }
    if (sees) softmax({x, DType::f32, a.length, 1.0f, false, x, {x, DType::f32, 1, 0}});
    for (int64_t j = 0; j < a.length; ++j) x[j] = (sees ? x[j] : 0.0f) * scale_of(a.values, j);
    for (int64_t i = 0; i < a.values.size; ++i) {
      float sum = 0;
      for (int64_t j = 0; j < a.length; ++j) {
        sum = fmaf(x[j], a.values.data[j * a.values.stride + i], sum);
      }
      store_value(a.dst[r], DType::f32, i, sum, 0);
    }
  }
}

}  // namespace
