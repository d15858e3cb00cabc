// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/attention.h"

#include "kernels/attention/compressed.h"

namespace torchq {
template <>
constinit const AttentionKernels Table<TORCHQ_ISA::kTier, AttentionKernels>::entries = {
    .quantize_symmetric = &quantize_symmetric<TORCHQ_ISA>,
    .attention_weights = &attention_weights<TORCHQ_ISA>,
    .attention_means = &attention_means<TORCHQ_ISA>,
    .compressed_attention = &compressed_attention<TORCHQ_ISA>,
};
}  // namespace torchq
