// SPDX-License-Identifier: Apache-2.0
#include "isa/avx512.h"

#include "isa/isa_concept.h"
#include "kernels/kernels.h"

static_assert(Isa<Avx512>);

namespace torchq {
constinit const Kernels kAvx512Kernels = make_kernels<Avx512>();
}  // namespace torchq
