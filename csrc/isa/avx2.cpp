// SPDX-License-Identifier: Apache-2.0
#include "isa/avx2.h"

#include "isa/isa_concept.h"
#include "kernels/kernels.h"

static_assert(Isa<Avx2>);

namespace torchq {
constinit const Kernels kAvx2Kernels = make_kernels<Avx2>();
}  // namespace torchq
