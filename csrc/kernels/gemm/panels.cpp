// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/panels.h"

#include "kernels/gemm/clip.h"
#include "kernels/gemm/gemm_int4.h"
#include "kernels/gemm/widen.h"

namespace {

template <class Isa>
constexpr PanelKernels make_entries() {
  PanelKernels k{};
  k.gemm_int4 = &gemm_int4<Isa>;
  if constexpr (Isa::kSteps > 1) k.widen = &widen<Isa>;
  if constexpr (Isa::kWidensSrc) {
    k.clip = &clip<Isa>;
    k.widen_src = &widen_src<Isa>;
  }
  k.compensate = &compensate<Isa>;
  k.pack_panel = &pack_panel<Isa>;
  k.sum_bytes = &sum_bytes<Isa>;
  return k;
}

}  // namespace

namespace torchq {
template <>
constinit const PanelKernels Table<TORCHQ_ISA::kTier, PanelKernels>::entries =
    make_entries<TORCHQ_ISA>();
}  // namespace torchq
