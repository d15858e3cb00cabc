// SPDX-License-Identifier: Apache-2.0
// The matrix unit of AMX; the kernels of avx512_vnni do everything else.
#include "kernels/amx/rnn_matrix.h"

namespace torchq {
constinit const MatrixUnit kAmx = {
    .gather = &gather_rows<TORCHQ_ISA>,
    .begin = &begin_tiles,
    .multiply = &multiply_rows<TORCHQ_ISA>,
    .end = &end_tiles,
    .rnn_input = &rnn_input<MatrixTiles<TORCHQ_ISA>>,
    .rnn_step = &rnn_step<MatrixTiles<TORCHQ_ISA>>,
};
}  // namespace torchq
