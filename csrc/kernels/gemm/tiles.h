// SPDX-License-Identifier: Apache-2.0
// Forms of the microkernel's tiles, and their table: they are compiled in objects of their own.
#pragma once

#include "kernels/common.h"
#include "kernels/gemm/contract.h"

namespace torchq {

/// Form of a tile's source dwords: four u8, four s8, or two 16-bit values (`GemmTile::widened`).
enum SrcForm : int { kUnsigned, kSigned, kWidened };

/// Form of a tile's weights. kWhole: operands of `Isa::dot`, bytes for VNNI and 16-bit copies else.
/// kNarrow: packed bytes whose pairs fit 16-bit sums. kSplit: packed bytes, widened to 16 bits in
/// registers.
enum class WeightForm { kWhole, kNarrow, kSplit };

using TileFn = void (*)(const GemmTile&, const Epilogue&, int first, int panel);

/// Most rows of a tile of any tier.
constexpr int kAnyTileRows = 12;
using TileRows = TileFn[kAnyTileRows];

/// Tiles of NP panels, by their rows - 1: of[weights][prefetch][source], and of_groups[panels of a
/// group - 1][source].
template <int NP>
struct GemmTiles {
  TileRows of[3][4][3];
  TileRows of_groups[2][3];
};

}  // namespace torchq

namespace {

/// Panels of the widest tile, where a dot product is one instruction and there are 32 registers.
constexpr int kWidePanels = 8;
template <class Isa>
constexpr bool kHasWide = Isa::kVectors == 32 && Isa::kSteps == 1;

/// Rows of the tallest tile of NP panels. On Intel 6 sums of one panel, or 12 of two, are too few
/// for the latency of VPDPBUSD, and a tile's fixed cost weighs more with few panels. There tiles of
/// three panels have 8 rows: as many sums as 6 rows of four. Wide tiles have one row or two.
template <class Isa, int NP>
constexpr int kMostRows = NP == 1                                 ? Isa::kTallestRows
                          : NP == 2                               ? Isa::kTallRows
                          : NP == 3 && Isa::kTallRows > kTileRows ? 8
                          : NP == kWidePanels                     ? 2
                                                                  : kTileRows;

TORCHQ_INLINE SrcForm src_form(const GemmTile& t) {
  return t.widened ? kWidened : t.flip ? kSigned : kUnsigned;
}

/// True for tiers that multiply s8 by s8 only: tiles multiply src - 128, and acc_init has what that
/// leaves out (gemm_s8 in gemm.h).
template <class Isa>
constexpr bool kMultipliesS8 = requires { Isa::to_s8(Isa::broadcast(nullptr)); };

/// True for tiers whose tiles span several groups. Groups of 16 or 32 channels have one panel or
/// two, and tiles of one group have few sums. Emerald Rapids, 3x3, against tiles of 10 x 1 and 6 x
/// 2: 1.31 to 1.41x faster with 16 channels, 1.10x with 32.
template <class Isa>
constexpr bool kJoinsGroups = kHasWide<Isa>;

/// The tiles of 1, 2, ... rows.
template <class Isa, int NP, WeightForm kWeights, int kGroupPanels = 0>
TORCHQ_INLINE const TileRows& tiles_of(Prefetch prefetch, SrcForm form) {
  const GemmTiles<NP>& tiles = Table<Isa::kTier, GemmTiles<NP>>::entries;
  if constexpr (kGroupPanels > 0) return tiles.of_groups[kGroupPanels - 1][form];
  return tiles.of[static_cast<int>(kWeights)][prefetch][form];
}

/// The weights of a quad's even bytes (kStep 0) or odd ones as 16-bit values: as they are, or,
/// where kSplits, of a panel's 64 packed bytes.
template <class Isa, bool kSplits, int kStep>
struct LoadHalf {
  TORCHQ_INLINE auto operator()(const int8_t* p) const {
    if constexpr (kSplits) {
      return Isa::template split_weight<kStep>(Isa::load_weight(p));
    } else {
      return Isa::load_weight(p);
    }
  }
};

/// The even bytes of a quad of the source, or the odd ones, as 16-bit values.
template <class Isa, SrcForm kForm, int kStep>
TORCHQ_INLINE auto load_src_half(const uint8_t* quad) {
  if constexpr (kForm == kWidened) {
    return Isa::broadcast(quad + kStep * kQuad);
  } else {
    const auto bytes = Isa::broadcast(quad);
    return Isa::template split_src<kStep>(kForm == kSigned ? Isa::flip_sign(bytes) : bytes);
  }
}

/// Calls body(first row, rows) for as few tiles of up to `most` rows as there can be; their sizes
/// differ by at most one: 49 rows are 6 6 6 6 5 5 5 5 5.
template <class Body>
TORCHQ_INLINE void for_each_tile(int rows, int most, const Body& body) {
  const int tiles = (rows + most - 1) / most, least = rows / tiles, larger = rows % tiles;
  for (int i = 0, first = 0; i < tiles; ++i) {
    const int count = least + (i < larger);
    body(first, count);
    first += count;
  }
}

}  // namespace
