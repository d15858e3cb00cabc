// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv/small_groups.h"

namespace {

template <class Isa>
constexpr SmallGroupKernels make_entries() {
  SmallGroupKernels k{};
  k.small_groups = &small_groups<Isa, false>;
  if constexpr (Isa::kHasNarrow) k.small_groups_narrow = &small_groups<Isa, true>;
  return k;
}

}  // namespace

namespace torchq {
template <>
constinit const SmallGroupKernels Table<TORCHQ_ISA::kTier, SmallGroupKernels>::entries =
    make_entries<TORCHQ_ISA>();
}  // namespace torchq
