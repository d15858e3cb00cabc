// SPDX-License-Identifier: Apache-2.0
#include "kernels/rnn/rnn.h"

namespace {

template <class Isa>
constexpr RnnKernels make_entries() {
  RnnKernels k{};
  k.rnn_widening = kRnnSteps<Isa>;
  k.rnn_input = &rnn_input<VectorTiles<Isa>>;
  k.rnn_step = &rnn_step<VectorTiles<Isa>>;
  k.rnn_streams = kHasWide<Isa>;
  k.quantize_row = &quantize_row<Isa>;
  return k;
}

}  // namespace

namespace torchq {
template <>
constinit const RnnKernels Table<TORCHQ_ISA::kTier, RnnKernels>::entries =
    make_entries<TORCHQ_ISA>();
}  // namespace torchq
