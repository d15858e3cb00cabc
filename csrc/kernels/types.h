// SPDX-License-Identifier: Apache-2.0
// Terms that all contracts share: panels, quads, dtypes and tiers.
#pragma once

#include <cstdint>

namespace torchq {

/// Output channels of one packed panel: 16 int32 lanes, one to four registers.
constexpr int kPanel = 16;
/// Consecutive k that one 32-bit lane holds (what VPDPBUSD sums).
constexpr int kQuad = 4;

/// Destination rows of one tile of 4 panels. 6 rows x 4 panels keep 24 accumulators, 4 weights and
/// 1 broadcast in the 32 registers of AVX-512; 6 x 1 fits the 16 of AVX2. Measured: 99 % of peak on
/// Zen 4.
constexpr int kTileRows = 6;

enum class DType : int { u8, s8, s32, f32 };

enum class Tier : int {
  reference,
  avx2,
  avx2_vnni,
  avx512,
  avx512_vnni,
  neon,
  neon_dotprod,
  neon_i8mm
};

/// A tier's kernels of one family, such as PoolKernels (contract.h of each family). Each is defined
/// in an object of its own: <family>.cpp is compiled once for each tier, whose trait is TORCHQ_ISA.
template <Tier tier, class Family>
struct Table {
  static const Family entries;
};

}  // namespace torchq
