// SPDX-License-Identifier: Apache-2.0
// Rows times panels of 4-bit weights: codes become bytes in registers, and each group's integer sum
// is added to a float one (contract: Int4Tile in contract.h).
//
// A tile takes panels that are far apart, one of each NP-th part of the weights, so that memory is
// read as NP streams that continue from tile to tile. Streams of neighbouring panels end after each
// of them. One row, 896->4864, out of memory, Zen 4: 110 us with four streams, 130 with two, 135
// with one, 197 with four neighbours.
#pragma once

#include "kernels/common.h"
#include "kernels/cpu_tuning.h"
#include "kernels/gemm/contract.h"

namespace {

/// Rows from `first` on times `panel` and each `apart`-th panel after it, NP in all.
template <class Isa, int MR, int NP, bool kZeros>
TORCHQ_NOINLINE void int4_tile(const Int4Tile& t, int64_t first, int panel, int apart) {
  using Int = typename Isa::Int;
  const int64_t lanes = kZeros ? t.groups : (t.groups + 1) / 2;
  const int64_t weight_stride = t.k / 8 * kPanel * kQuad, param_stride = lanes * kPanel;
  const int64_t next_weight = apart * weight_stride, next_params = apart * param_stride;
  const int8_t* weight = t.weight + panel * weight_stride;
  const int32_t* params = t.params + panel * param_stride;
  const uint8_t* row = reinterpret_cast<const uint8_t*>(t.src + first * t.k);
  const int32_t* sums = t.sums + first * t.groups;
  const Int low_half = Isa::set_int(0x0f0f0f0f), high_bits = Isa::set_int(-0x10000);
  typename Isa::Float acc[MR][NP];
  TORCHQ_UNROLL for (auto& of_row : acc) {
    TORCHQ_UNROLL for (auto& x : of_row) x = Isa::set(0.0f);
  }
  // Zen 4, weights out of memory: 6 and 8 rows take 0.67 to 0.88 of the time, 16 rows 0.82 to 0.91.
  // 128 rows take 0.98 to 1. One row out of memory would take up to 1.4 times as long.
  constexpr bool kPrefetches = Isa::kPrefetches && MR >= 3;
  int64_t distance = 0;
  if constexpr (kPrefetches) distance = cpu_tuning->prefetch_distance;
  int64_t k = 0;
  for (int64_t g = 0; g < t.groups; ++g) {
    Int sum[MR][NP];
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      Int zero = Isa::set_int(8);
      if constexpr (kZeros) {
        zero = Isa::bit_and(Isa::load_int(params + p * next_params), Isa::set_int(0xffff));
      }
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        const int32_t of_src = sums[r * t.groups + g];
        sum[r][p] = kZeros ? Isa::mul(zero, Isa::set_int(-of_src)) : Isa::set_int(-8 * of_src);
      }
    }
    const int64_t end = k + t.group < t.k ? k + t.group : t.k;
    for (; k != end; k += 2 * kQuad, weight += kPanel * kQuad) {
      Int low[NP], high[NP];
      TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
        if constexpr (kPrefetches) Isa::prefetch(weight + p * next_weight + distance);
        const Int both = Isa::load_weight(weight + p * next_weight);
        low[p] = Isa::bit_and(both, low_half);
        high[p] = Isa::bit_and(Isa::template shift_right<4>(both), low_half);
      }
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        const auto q = Isa::broadcast(row + r * t.k + k);
        TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::dot_codes(sum[r][p], low[p], q);
        const auto next = Isa::broadcast(row + r * t.k + k + kQuad);
        TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::dot_codes(sum[r][p], high[p], next);
      }
    }
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      const Int param = Isa::load_int(params + p * next_params);
      const bool is_high = kZeros || g % 2 == 1;
      const auto scale = Isa::from_bits(is_high ? Isa::bit_and(param, high_bits)
                                                : Isa::template shift_left<16>(param));
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        acc[r][p] = Isa::fma(Isa::to_float(sum[r][p]), scale, acc[r][p]);
      }
    }
    if (kZeros || g % 2 == 1) params += kPanel;
  }
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const int64_t n = int64_t{panel + p * apart} * kPanel;
    const auto mask = Isa::mask(min_int(t.channels - n, kPanel));
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      auto y = Isa::mul(acc[r][p], Isa::set(t.src_scale[first + r]));
      if (t.bias != nullptr) y = Isa::add(y, Isa::load(t.bias + n, mask));
      y = Isa::replace_nan(y, Isa::set(__builtin_nanf("")));
      Isa::store(t.dst + (first + r) * t.dst_stride + n, y, mask);
    }
  }
}

/// Rows from `first` on, in tiles of at most MR rows.
template <class Isa, int MR, int NP, bool kZeros>
TORCHQ_INLINE void int4_rows(const Int4Tile& t, int64_t first, int panel, int apart) {
  for (; t.rows - first >= MR; first += MR) {
    int4_tile<Isa, MR, NP, kZeros>(t, first, panel, apart);
  }
  if constexpr (MR > 1) int4_rows<Isa, MR - 1, NP, kZeros>(t, first, panel, apart);
}

/// All rows, in tiles of at most MR, times as many panels from `panel` on as NP streams share
/// evenly. Returns the first panel behind them.
template <class Isa, int MR, int NP, bool kZeros>
TORCHQ_INLINE int int4_streams(const Int4Tile& t, int panel) {
  const int each = (t.panels - panel) / NP;
  for (int p = 0; p < each; ++p) int4_rows<Isa, MR, NP, kZeros>(t, 0, panel + p, each);
  return panel + each * NP;
}

/// Integer and float sums stay in registers, except for one or two rows on `avx2`, which memory
/// bounds: with four and two streams they are up to 1.4x and 1.25x faster on Zen 4, out of L2 0.9x
/// and 1.0x.
template <class Isa, bool kZeros>
TORCHQ_INLINE void gemm_int4(const Int4Tile& t) {
  constexpr bool kWide = Isa::kMaxPanels == 4;
  int panel = 0;
  if (t.rows == 1) panel = int4_streams<Isa, 1, 4, kZeros>(t, panel);
  if (t.rows <= 2) panel = int4_streams<Isa, 2, kWide ? 4 : 2, kZeros>(t, panel);
  if constexpr (kWide) panel = int4_streams<Isa, kTileRows, 2, kZeros>(t, panel);
  int4_streams<Isa, kWide ? kTileRows : 2, 1, kZeros>(t, panel);
}

template <class Isa>
void gemm_int4(const Int4Tile& t) {
  return t.has_zeros ? gemm_int4<Isa, true>(t) : gemm_int4<Isa, false>(t);
}

}  // namespace
