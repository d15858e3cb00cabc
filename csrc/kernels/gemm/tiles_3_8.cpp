// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/gemm_tile.h"

namespace torchq {
template <>
constinit const GemmTiles<3> Table<TORCHQ_ISA::kTier, GemmTiles<3>>::entries =
    MakeTiles<TORCHQ_ISA, 3>().tiles;

template <>
constinit const GemmTiles<8> Table<TORCHQ_ISA::kTier, GemmTiles<8>>::entries =
    MakeTiles<TORCHQ_ISA, 8>().tiles;
}  // namespace torchq
