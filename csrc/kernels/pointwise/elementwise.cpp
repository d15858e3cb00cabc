// SPDX-License-Identifier: Apache-2.0
#include "kernels/pointwise/elementwise.h"

namespace torchq {
template <>
constinit const PointwiseKernels Table<TORCHQ_ISA::kTier, PointwiseKernels>::entries = {
    .convert = &convert<TORCHQ_ISA>,
    .add = &add_rows<TORCHQ_ISA>,
    .mul = &mul_rows<TORCHQ_ISA>,
    .lookup = &lookup<TORCHQ_ISA>,
};
}  // namespace torchq
