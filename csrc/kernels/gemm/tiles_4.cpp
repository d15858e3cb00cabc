// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/gemm_tile.h"

namespace torchq {
template <>
constinit const GemmTiles<4> Table<TORCHQ_ISA::kTier, GemmTiles<4>>::entries =
    MakeTiles<TORCHQ_ISA, 4>().tiles;
}  // namespace torchq
