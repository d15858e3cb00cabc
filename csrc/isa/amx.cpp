// SPDX-License-Identifier: Apache-2.0
// What AMX adds to the tier avx512_vnni, whose kernels do everything else.
#include "../kernels/matrix.h"
#include "avx512.h"

namespace torchq {
constinit const MatrixUnit kAmx = {
    .isa = "amx",
    .gather = &gather_rows<Avx512Vnni>,
    .begin = &begin_tiles,
    .multiply = &multiply_rows<Avx512Vnni>,
    .end = &end_tiles,
};
}  // namespace torchq
