// SPDX-License-Identifier: Apache-2.0
// What AMX adds to the tier avx512_vnni, whose kernels do everything else.
#include "isa/avx512_vnni.h"
#include "kernels/amx/rnn_matrix.h"

namespace torchq {
constinit const MatrixUnit kAmx = {
    .isa = "amx",
    .gather = &gather_rows<Avx512Vnni>,
    .begin = &begin_tiles,
    .multiply = &multiply_rows<Avx512Vnni>,
    .end = &end_tiles,
    .rnn_input = &rnn_input<MatrixTiles<Avx512Vnni>>,
    .rnn_step = &rnn_step<MatrixTiles<Avx512Vnni>>,
};
}  // namespace torchq
