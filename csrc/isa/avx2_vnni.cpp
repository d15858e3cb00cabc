// SPDX-License-Identifier: Apache-2.0
#include "../kernels/kernels.h"
#include "avx2.h"

namespace torchq {
constinit const Kernels kAvx2VnniKernels = make_kernels<Avx2Vnni>();
}  // namespace torchq
