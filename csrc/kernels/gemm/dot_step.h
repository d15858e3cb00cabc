// SPDX-License-Identifier: Apache-2.0
// The products of one quad: what most tiles repeat.
#pragma once

#include "kernels/common.h"
#include "kernels/gemm/contract.h"

namespace {

/// A panel's 64 bytes as they are.
template <class Isa>
struct LoadWeight {
  TORCHQ_INLINE auto operator()(const int8_t* p) const { return Isa::load_weight(p); }
};

/// One weight step (64 bytes a panel) against one source dword per row; of every kGroupPanels
/// panels, where these are groups with sources of their own, else 0.
template <class Isa, int MR, int NP, bool kNarrow, int kGroupPanels = 0, class Src,
          class Load = LoadWeight<Isa>>
TORCHQ_INLINE void dot_step(typename Isa::Int (&acc)[MR][NP], const int8_t* weight,
                            int64_t panel_stride, Src src, Load load = {}) {
  typename Isa::Int w[NP];
  const int8_t* next = weight + panel_stride;
  if constexpr (NP == 4) asm("" : "+r"(next));  // or three strides take a register of their own
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    w[p] = load(p == 0 ? weight : next + (p - 1) * panel_stride);
  }
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    auto s = src(r);
    if constexpr (kGroupPanels == 0 && requires { Isa::template dot_row<NP>(acc[r], s, w); }) {
      Isa::template dot_row<NP>(acc[r], s, w);
      continue;
    }
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      if constexpr (kGroupPanels > 0) {
        if (p > 0 && p % kGroupPanels == 0) s = src(r, p);
      }
      if constexpr (kNarrow) {
        Isa::dot_narrow(acc[r][p], s, w[p]);
      } else {
        Isa::dot(acc[r][p], s, w[p]);
      }
    }
  }
}

}  // namespace
