// SPDX-License-Identifier: Apache-2.0
// The contract between the ops (tensors, checks, threads) and the kernels
// (lanes, tiles): plain structs and function pointers, in each family's
// contract.h. Kernels allocate nothing, start no thread, throw nothing and
// include no torch header. Each family's reference.h states what its entries
// compute; every other tier returns the same bits.
#pragma once

#include <type_traits>

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

/// The tier without its instruction for products of bytes.
constexpr Tier without_products(Tier tier) {
  switch (tier) {
    case Tier::avx2_vnni:
      return Tier::avx2;
    case Tier::avx512_vnni:
      return Tier::avx512;
    case Tier::neon_dotprod:
    case Tier::neon_i8mm:
      return Tier::neon;
    default:
      return tier;
  }
}

template <class T, class... Others>
constexpr bool kIsOneOf = (std::is_same_v<T, Others> || ...);

/// The tier that a tier's kernels of a family are compiled for: families that use no such
/// instruction share theirs (SHARED in setup.py).
template <Tier tier, class Family>
constexpr Tier kCompiledFor =
    kIsOneOf<Family, AttentionKernels, EmbeddingKernels, PoolKernels, RowKernels>
        ? without_products(tier)
        : tier;

template <Tier tier, class... Family>
Families<Family...> join_tables(const Families<Family...>*) {
  return {Table<kCompiledFor<tier, Family>, Family>::entries...};
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
