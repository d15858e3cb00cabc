// SPDX-License-Identifier: Apache-2.0
// Rows times panels of 4-bit weights: codes become bytes in registers, and each group's integer sum
// is added to a float one (contract: Int4Tile in contract.h).
#pragma once

#include "kernels/common.h"
#include "kernels/cpu_tuning.h"
#include "kernels/gemm/contract.h"

namespace {

/// Rows of a tile of NP panels: its integer and float sums stay in registers.
template <class Isa, int NP>
constexpr int kInt4Rows = Isa::kMaxPanels == 1 || NP == 4 ? 2 : kTileRows;

template <class Isa, int MR, int NP, bool kZeros>
TORCHQ_NOINLINE void int4_tile(const Int4Tile& t, int64_t first, int panel) {
  using Int = typename Isa::Int;
  const int64_t lanes = kZeros ? t.groups : (t.groups + 1) / 2;
  const int64_t weight_stride = t.k / 8 * kPanel * kQuad, param_stride = lanes * kPanel;
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
        zero = Isa::bit_and(Isa::load_int(params + p * param_stride), Isa::set_int(0xffff));
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
        if constexpr (kPrefetches) Isa::prefetch(weight + p * weight_stride + distance);
        const Int both = Isa::load_weight(weight + p * weight_stride);
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
      const Int param = Isa::load_int(params + p * param_stride);
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
    const int64_t n = int64_t{panel + p} * kPanel;
    const auto mask = Isa::mask(min_int(t.channels - n, kPanel));
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      auto y = Isa::mul(acc[r][p], Isa::set(t.src_scale[first + r]));
      if (t.bias != nullptr) y = Isa::add(y, Isa::load(t.bias + n, mask));
      y = Isa::replace_nan(y, Isa::set(__builtin_nanf("")));
      Isa::store(t.dst + (first + r) * t.dst_stride + n, y, mask);
    }
  }
}

/// Rows from `first` on, in tiles of NP panels of at most MR rows.
template <class Isa, int MR, int NP, bool kZeros>
TORCHQ_INLINE void int4_rows(const Int4Tile& t, int64_t first, int panel) {
  for (; t.rows - first >= MR; first += MR) int4_tile<Isa, MR, NP, kZeros>(t, first, panel);
  if constexpr (MR > 1) int4_rows<Isa, MR - 1, NP, kZeros>(t, first, panel);
}

template <class Isa, bool kZeros>
TORCHQ_INLINE void gemm_int4(const Int4Tile& t) {
  int panel = 0;
  if constexpr (Isa::kMaxPanels == 4) {
    if (t.rows <= kInt4Rows<Isa, 4>) {
      for (; panel + 4 <= t.panels; panel += 4)
        int4_rows<Isa, kInt4Rows<Isa, 4>, 4, kZeros>(t, 0, panel);
    }
    for (; panel + 2 <= t.panels; panel += 2)
      int4_rows<Isa, kInt4Rows<Isa, 2>, 2, kZeros>(t, 0, panel);
  }
  for (; panel < t.panels; ++panel) int4_rows<Isa, kInt4Rows<Isa, 1>, 1, kZeros>(t, 0, panel);
}

template <class Isa>
void gemm_int4(const Int4Tile& t) {
  return t.has_zeros ? gemm_int4<Isa, true>(t) : gemm_int4<Isa, false>(t);
}

}  // namespace
