// SPDX-License-Identifier: Apache-2.0
#include "isa/neon.h"

#include "isa/isa_concept.h"
#include "kernels/kernels.h"

static_assert(Isa<Neon>);

namespace torchq {
constinit const Kernels kNeonKernels = make_kernels<Neon>();
}  // namespace torchq
