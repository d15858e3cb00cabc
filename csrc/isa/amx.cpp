// SPDX-License-Identifier: Apache-2.0
// The matrix unit of AMX; the kernels of avx512_vnni do everything else.
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
