// SPDX-License-Identifier: Apache-2.0
#include "isa/avx512_vnni.h"

#include "isa/isa_concept.h"
#include "kernels/kernels.h"

static_assert(Isa<Avx512Vnni>);

namespace torchq {
constinit const Kernels kAvx512VnniKernels = make_kernels<Avx512Vnni>();
}  // namespace torchq
