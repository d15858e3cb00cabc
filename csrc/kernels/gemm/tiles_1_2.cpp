// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/gemm_tile.h"

namespace torchq {
template <>
constinit const GemmTiles<1> Table<TORCHQ_ISA::kTier, GemmTiles<1>>::entries =
    MakeTiles<TORCHQ_ISA, 1>().tiles;

template <>
constinit const GemmTiles<2> Table<TORCHQ_ISA::kTier, GemmTiles<2>>::entries =
    MakeTiles<TORCHQ_ISA, 2>().tiles;
}  // namespace torchq
