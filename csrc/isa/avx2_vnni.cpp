// SPDX-License-Identifier: Apache-2.0
#include "isa/avx2.h"
#include "isa/isa_concept.h"
#include "kernels/kernels.h"

static_assert(Isa<Avx2Vnni>);

namespace torchq {
constinit const Kernels kAvx2VnniKernels = make_kernels<Avx2Vnni>();
}  // namespace torchq
