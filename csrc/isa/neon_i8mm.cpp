// SPDX-License-Identifier: Apache-2.0
#include "isa/isa_concept.h"
#include "isa/neon.h"
#include "kernels/kernels.h"

static_assert(Isa<NeonI8mm>);

namespace torchq {
constinit const Kernels kNeonI8mmKernels = make_kernels<NeonI8mm>();
}  // namespace torchq
