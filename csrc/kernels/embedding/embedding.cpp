// SPDX-License-Identifier: Apache-2.0
#include "kernels/embedding/embedding.h"

namespace torchq {
template <>
constinit const EmbeddingKernels Table<TORCHQ_ISA::kTier, EmbeddingKernels>::entries = {
    .embedding = &embedding<TORCHQ_ISA>,
    .embedding_bag = &embedding_bag<TORCHQ_ISA>,
};
}  // namespace torchq
