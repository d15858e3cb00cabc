// SPDX-License-Identifier: Apache-2.0
#include "kernels/pool/pool.h"

namespace torchq {
template <>
constinit const PoolKernels Table<TORCHQ_ISA::kTier, PoolKernels>::entries = {
    .max_pool = &max_pool<TORCHQ_ISA>,
    .avg_pool = &avg_pool<TORCHQ_ISA>,
};
}  // namespace torchq
