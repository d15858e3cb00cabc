// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/gemm.h"

namespace {

template <class Isa>
constexpr GemmKernels make_entries() {
  GemmKernels k{};
  k.widening = Isa::kSteps;
  k.plans_tiles = kHasWide<Isa>;
  if constexpr (kMultipliesS8<Isa>) {
    k.gemm = &gemm_s8<Isa>;
  } else {
    k.gemm = &gemm<Isa, WeightForm::kWhole>;
  }
  if constexpr (Isa::kHasNarrow) k.gemm_narrow = &gemm<Isa, WeightForm::kNarrow>;
  if constexpr (Isa::kWidensSrc) k.gemm_split = &gemm<Isa, WeightForm::kSplit>;
  if constexpr (kJoinsGroups<Isa>) k.gemm_groups = &gemm_groups<Isa>;
  return k;
}

}  // namespace

namespace torchq {
template <>
constinit const GemmKernels Table<TORCHQ_ISA::kTier, GemmKernels>::entries =
    make_entries<TORCHQ_ISA>();
}  // namespace torchq
