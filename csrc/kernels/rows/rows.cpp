// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/rows.h"

namespace torchq {
template <>
constinit const RowKernels Table<TORCHQ_ISA::kTier, RowKernels>::entries = {
    .epilogue_row = &epilogue_row<TORCHQ_ISA>,
    .row_range = &row_range<TORCHQ_ISA>,
    .softmax = &softmax<TORCHQ_ISA>,
    .row_deviations = &row_deviations<TORCHQ_ISA>,
    .moments = &moments<TORCHQ_ISA>,
    .row_moments = &row_moments<TORCHQ_ISA>,
    .affine = &affine<TORCHQ_ISA>,
    .blend = &blend<TORCHQ_ISA>,
    .reduce = &reduce<TORCHQ_ISA>,
};
}  // namespace torchq
