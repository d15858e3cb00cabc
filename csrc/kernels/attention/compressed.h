// SPDX-License-Identifier: Apache-2.0
// Attention to keys and values as compressed rows (contract in contract.h): 16 of them at a time
// become floats in L1, which all queries then read.
#pragma once

#include "kernels/attention/contract.h"
#include "kernels/rows/rows.h"

namespace {

/// 16 rows as floats, each in whole panels, and their scales; the last of `count` rows again in
/// place of those behind it.
template <class Isa>
TORCHQ_INLINE void widen_rows(const CompressedRows& rows, int64_t first, int count, float* block,
                              float (&scale)[kPanel]) {
  const int8_t* row = rows.data + first * rows.stride;
  for (int j = 0; j < kPanel; ++j, block += whole_panels(rows.size)) {
    for_each_row_panel<Isa>(rows.size, [&](int64_t i, auto m) TORCHQ_INLINE_LAMBDA {
      Isa::store(block + i, Isa::to_float(Isa::load_s8(row + i, m)));
    });
    memcpy(scale + j, row + rows.size, sizeof(float));
    row += j + 1 < count ? rows.stride : 0;
  }
}

/// Lane j of the result is the sum of the lanes of sums[j], added as in SoftmaxRow.
template <class Isa>
TORCHQ_INLINE typename Isa::Float sum_each(typename Isa::Float (&sums)[kPanel]) {
  TORCHQ_UNROLL for (int half = kPanel / 2; half > 0; half /= 2) {
    TORCHQ_UNROLL for (int j = 0; j < half; ++j) {
      typename Isa::Float both[2];
      Isa::interleave_lanes(sums[j], sums[j + half], both);
      sums[j] = Isa::add(both[0], both[1]);
    }
  }
  return sums[0];
}

/// The products of a query with 16 rows of `size` values, whole panels.
template <class Isa>
TORCHQ_INLINE typename Isa::Float dot_rows(const float* query, const float* block, int64_t size) {
  constexpr int kRows = Isa::kVectors < kPanel ? 4 : 8;  // their sums stay in registers
  typename Isa::Float sums[kPanel];
  TORCHQ_UNROLL for (int first = 0; first < kPanel; first += kRows) {
    typename Isa::Float part[kRows];
    TORCHQ_UNROLL for (auto& sum : part) sum = Isa::set(0.0f);
    for (int64_t i = 0; i < size; i += kPanel) {
      const auto q = Isa::load(query + i);
      TORCHQ_UNROLL for (int j = 0; j < kRows; ++j) {
        part[j] = Isa::fma(q, Isa::load(block + (first + j) * size + i), part[j]);
      }
    }
    TORCHQ_UNROLL for (int j = 0; j < kRows; ++j) sums[first + j] = part[j];
  }
  return sum_each<Isa>(sums);
}

/// Adds weight[j] times row j of `count` rows to kPanels panels of sums.
template <class Isa, int kPanels>
TORCHQ_INLINE void add_weighted(const float (&weight)[kPanel], int count, const float* block,
                                int64_t size, float* sums) {
  typename Isa::Float sum[kPanels];
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) sum[p] = Isa::load(sums + p * kPanel);
  for (int j = 0; j < count; ++j, block += size) {
    const auto w = Isa::set(weight[j]);
    TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
      sum[p] = Isa::fma(w, Isa::load(block + p * kPanel), sum[p]);
    }
  }
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) Isa::store(sums + p * kPanel, sum[p]);
}

/// Zeros where all scores are -inf.
template <class Isa>
TORCHQ_INLINE void softmax_in_place(float* x, int64_t size) {
  int64_t hidden = 0;
  while (hidden < size && x[hidden] == -__builtin_inff()) ++hidden;
  if (hidden == size) {
    memset(x, 0, static_cast<size_t>(size) * sizeof(float));
  } else {
    softmax<Isa>({x, DType::f32, size, 1.0f, false, x, {x, DType::f32, 1, 0}});
  }
}

/// body(first, count) of each 16 rows of keys and values.
template <class Body>
TORCHQ_INLINE void for_each_block(const CompressedAttention& a, Body body) {
  for (int64_t first = 0; first < a.length; first += kPanel) {
    body(first, min_int(a.length - first, kPanel));
  }
}

template <class Isa>
void compressed_attention(const CompressedAttention& a) {
  const int64_t stride = whole_panels(a.length), size = whole_panels(a.keys.size);
  const int64_t value_size = whole_panels(a.values.size);
  float scale[kPanel], weight[kPanel];
  for_each_block(a, [&](int64_t first, int count) {
    widen_rows<Isa>(a.keys, first, count, a.block, scale);
    const auto factor = Isa::mul(Isa::load(scale), Isa::set(a.scale));
    const auto m = Isa::mask(count);
    for (int64_t r = 0; r < a.rows; ++r) {
      const auto mask = a.mask != nullptr ? Isa::load(a.mask[r] + first, m) : Isa::set(0.0f);
      const auto dot = dot_rows<Isa>(a.queries + r * size, a.block, size);
      Isa::store(a.scores + r * stride + first, Isa::fma(dot, factor, mask));
    }
  });
  for (int64_t r = 0; r < a.rows; ++r) softmax_in_place<Isa>(a.scores + r * stride, a.length);
  memset(a.sums, 0, static_cast<size_t>(a.rows * value_size) * sizeof(float));
  for_each_block(a, [&](int64_t first, int count) {
    widen_rows<Isa>(a.values, first, count, a.block, scale);
    for (int64_t r = 0; r < a.rows; ++r) {
      Isa::store(weight, Isa::mul(Isa::load(a.scores + r * stride + first), Isa::load(scale)));
      float* sums = a.sums + r * value_size;
      int64_t i = 0;
      for (; i + 4 * kPanel <= value_size; i += 4 * kPanel) {
        add_weighted<Isa, 4>(weight, count, a.block + i, value_size, sums + i);
      }
      for (; i < value_size; i += kPanel) {
        add_weighted<Isa, 1>(weight, count, a.block + i, value_size, sums + i);
      }
    }
  });
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* sums = a.sums + r * value_size;
    store_row_as<Isa, DType::f32>(a.dst[r], a.values.size, Isa::set(0.0f),
                                  [&](int64_t i, auto m) { return Isa::load(sums + i, m); });
  }
}

}  // namespace
