// SPDX-License-Identifier: Apache-2.0
// The contract between the ops (tensors, checks, threads) and the kernels
// (lanes, tiles): plain structs and function pointers, in each family's
// contract.h. Kernels allocate nothing, start no thread, throw nothing and
// include no torch header. Each family's reference.h states what its entries
// compute; every other tier returns the same bits.
#pragma once

#include "kernels/attention/contract.h"
#include "kernels/conv/contract.h"
#include "kernels/embedding/contract.h"
#include "kernels/gemm/contract.h"
#include "kernels/pointwise/contract.h"
#include "kernels/pool/contract.h"
#include "kernels/rnn/contract.h"
#include "kernels/rows/contract.h"

namespace torchq {

struct MatrixUnit;

template <class... Family>
struct Families : Family... {};

template <Tier tier, class... Family>
Families<Family...> join_tables(const Families<Family...>*) {
  return {Table<tier, Family>::entries...};
}

/// The kernels of one tier, of all families.
struct Kernels
    : Families<GemmKernels, PanelKernels, SmallGroupKernels, DepthwiseKernels, PoolKernels,
               PointwiseKernels, RnnKernels, RowKernels, AttentionKernels, EmbeddingKernels> {
  const char* isa;
  /// Matrix unit (amx/contract.h) that takes over from `gemm` where there are
  /// enough rows; or null.
  const MatrixUnit* matrix = nullptr;
};

template <Tier tier>
Kernels make_kernels(const char* isa) {
  return {join_tables<tier>(static_cast<const Kernels*>(nullptr)), isa};
}

}  // namespace torchq
