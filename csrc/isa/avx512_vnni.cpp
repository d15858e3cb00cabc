// SPDX-License-Identifier: Apache-2.0
#include "isa/avx512_vnni.h"

#include "kernels/kernels.h"

namespace torchq {
constinit const Kernels kAvx512VnniKernels = make_kernels<Avx512Vnni>();
}  // namespace torchq
