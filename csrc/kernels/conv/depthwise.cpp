// SPDX-License-Identifier: Apache-2.0
#include "kernels/conv/depthwise.h"

namespace torchq {
template <>
constinit const DepthwiseKernels Table<TORCHQ_ISA::kTier, DepthwiseKernels>::entries = {
    .why_no_slide = &why_no_slide<TORCHQ_ISA>,
    .depthwise_bytes = &depthwise_bytes<TORCHQ_ISA>,
    .depthwise = &depthwise<TORCHQ_ISA>,
};
}  // namespace torchq
