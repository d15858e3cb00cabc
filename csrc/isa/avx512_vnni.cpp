// SPDX-License-Identifier: Apache-2.0
#include "../kernels/kernels.h"
#include "avx512.h"

namespace torchq {
constinit const Kernels kAvx512VnniKernels = make_kernels<Avx512Vnni>();
}  // namespace torchq
