// SPDX-License-Identifier: Apache-2.0
// The tile of the microkernel: a few rows times a few panels, in registers over all of K.
#pragma once

#include "kernels/cpu_tuning.h"
#include "kernels/epilogue/register_epilogue.h"
#include "kernels/gemm/clip.h"
#include "kernels/gemm/dot_step.h"

namespace {

/// Panels of the widest tile, where a dot product is one instruction and there are 32 registers.
constexpr int kWidePanels = 8;
template <class Isa>
constexpr bool kHasWide = Isa::kMaxPanels == 4 && Isa::kSteps == 1;

/// Rows of the tallest tile of NP panels. On Intel 6 sums of one panel, or 12 of two, are too few
/// for the latency of VPDPBUSD, and a tile's fixed cost weighs more with few panels. There tiles of
/// three panels have 8 rows: as many sums as 6 rows of four. Wide tiles have one row or two.
template <class Isa, int NP>
constexpr int kMostRows = NP == 1                                 ? Isa::kTallestRows
                          : NP == 2                               ? Isa::kTallRows
                          : NP == 3 && Isa::kTallRows > kTileRows ? 8
                          : NP == kWidePanels                     ? 2
                                                                  : kTileRows;

/// Software-prefetch policy of a tile: nothing, or its own weights ahead of their use.
/// kNextPanelsL1/L2: tile n of the row loop prefetches panel n of the next NP panels.
enum Prefetch : int { kNone, kOwnWeights, kNextPanelsL1, kNextPanelsL2 };

/// True for tiles that can prefetch their own weights: the dot products of a step take longer than
/// its loads, and the addresses fit the general registers.
template <class Isa, int MR, int kGroupPanels>
constexpr bool kPrefetchesOwnWeights = Isa::kPrefetches && kGroupPanels == 0 && MR >= 4 && MR <= 8;

/// Form of a tile's source dwords: four u8, four s8, or two 16-bit values (`GemmTile::widened`).
enum SrcForm : int { kUnsigned, kSigned, kWidened };

TORCHQ_INLINE SrcForm src_form(const GemmTile& t) {
  return t.widened ? kWidened : t.flip ? kSigned : kUnsigned;
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

/// Adds the products of the excess of a panel's clipped weights: of the even bytes of some quads.
template <class Isa, int MR, SrcForm kForm>
TORCHQ_INLINE void add_excess(const GemmExcess& x, const uint8_t* const (&row)[MR],
                              typename Isa::Int (&acc)[MR][1]) {
  for (const auto *q = x.quads, *end = q + x.num_quads; q != end; ++q) {
    const int64_t k = q->src_offset;
    dot_step<Isa, MR, 1, false>(acc, x.weight + q->weight_offset, 0,
                                [&](int r) { return load_src_half<Isa, kForm, 0>(row[r] + k); });
  }
}

/// Form of a tile's weights. kWhole: operands of `Isa::dot`, bytes for VNNI and 16-bit copies else.
/// kNarrow: packed bytes whose pairs fit 16-bit sums. kSplit: packed bytes, widened to 16 bits in
/// registers.
enum class WeightForm { kWhole, kNarrow, kSplit };

/// MR rows x NP panels; `first` and `panel` count from the first of `t`. kGroupPanels: panels of a
/// group, of as many inputs as outputs, that does not share its source.
template <class Isa, int MR, int NP, SrcForm kForm, WeightForm kWeights, int kGroupPanels,
          Prefetch kPrefetch>
TORCHQ_NOINLINE void gemm_tile(const GemmTile& t, const Epilogue& e, int first, int panel) {
  constexpr bool kIsNarrow = kWeights == WeightForm::kNarrow;
  constexpr bool kSplits = kWeights == WeightForm::kSplit;
  constexpr int kSteps = kWeights == WeightForm::kWhole ? Isa::kSteps : 1;  // vectors a quad
  constexpr int kSrcQuad = kForm == kWidened ? 2 * kQuad : kQuad;           // bytes
  // The products of a quad's even bytes, then those of the odd ones; not where a dword of the
  // source has its own vector of weights.
  constexpr bool kHalves = kSplits || (kSteps == 2 && kForm != kWidened);
  using Int = typename Isa::Int;
  // A spilled accumulator costs half the speed; tests/kernels/test_disassembly.py looks for them.
  static_assert(MR <= kMostRows<Isa, NP>);
  static_assert(NP <= Isa::kMaxPanels || (NP == kWidePanels && kHasWide<Isa>));

  const uint8_t* row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    row[r] = t.src + t.row_offset[first + r] + (kGroupPanels > 0 ? panel * kPanel : 0);
    asm("" : "+r"(row[r]));
  }
  Int acc[MR][NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const Int init = Isa::load_int(t.acc_init + (panel + p) * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
  }
  const int64_t panel_stride = t.panel_stride * kSteps;
  const int8_t* panels = t.weight + panel * panel_stride;
  const GemmRun* runs_end = t.runs + t.num_runs;
  int64_t distance = 0;
  if constexpr (kPrefetch == kNextPanelsL1 || kPrefetch == kNextPanelsL2) {
    distance = min_int(NP + min_int(first / MR, NP - 1), t.panels + t.panels_behind - 1 - panel) *
               panel_stride;
  } else if constexpr (kPrefetch == kOwnWeights) {
    distance = cpu_tuning->prefetch_distance;
  }
  for (const GemmRun* run = t.runs; run != runs_end; ++run) {
    // Pointers of runs stay in memory: GCC would keep them in vector registers, and moves from
    // there wait for the dot products before them (7x7 of 3 to 64 channels: 1.2 times as slow).
    asm("" : "+m"(panels), "+m"(runs_end));
    int64_t k = run->src_offset;
    int64_t end = k + run->quads * kSrcQuad;
    const int8_t* weight = panels + run->weight_offset * kSteps;
    while (k != end) {
      asm("" : "+r"(k));  // one index for all rows instead of a pointer each
      if constexpr (MR > kTileRows) asm("" : "+m"(end));  // no general register is left
      const auto quad = [&](int r, int p = 0) {
        const auto q = Isa::broadcast(row[r] + k + p * kPanel);
        if constexpr (kForm == kSigned) return Isa::flip_sign(q);
        return q;
      };
      if constexpr (kPrefetch == kNextPanelsL2) {
        Isa::prefetch_l2(weight + distance);
      } else if constexpr (kPrefetch == kNextPanelsL1) {
        Isa::prefetch(weight + distance);
      } else if constexpr (kPrefetch == kOwnWeights) {
        const int8_t* next = weight + distance;
        asm("" : "+r"(next));  // one register for all panels' addresses
        TORCHQ_UNROLL for (int p = 0; p < NP; ++p) Isa::prefetch(next + p * panel_stride);
      }
      if constexpr (kHalves) {
        dot_step<Isa, MR, NP, false>(
            acc, weight, panel_stride,
            [&](int r) { return load_src_half<Isa, kForm, 0>(row[r] + k); },
            LoadHalf<Isa, kSplits, 0>());
        // Load everything anew: keeping MR quads or the next weights across the steps spills.
        asm("" : "+r"(k), "+r"(weight));
        dot_step<Isa, MR, NP, false>(
            acc, weight + (kSplits ? 0 : kPanel * kQuad), panel_stride,
            [&](int r) { return load_src_half<Isa, kForm, 1>(row[r] + k); },
            LoadHalf<Isa, kSplits, 1>());
      } else {
        dot_step<Isa, MR, NP, kIsNarrow, kGroupPanels>(acc, weight, panel_stride, quad);
      }
      k += kSplits ? kSrcQuad : kQuad;
      weight += (kHalves ? kSteps : 1) * kPanel * kQuad;
    }
  }
  if constexpr (kIsNarrow && kHasExcess<Isa>) {
    if (t.excess != nullptr) add_excess<Isa, MR, kForm>(t.excess[panel], row, acc);
  }
  pin_sums<Isa>(acc);

  tile_epilogue<Isa, MR, NP>(t, e, acc, first, panel);
}

using TileFn = void (*)(const GemmTile&, const Epilogue&, int first, int panel);

/// The tiles of NP panels, fn[prefetch][form][rows - 1].
template <class Isa, int NP, WeightForm kWeights, int kGroupPanels>
struct TileTable {
  TileFn fn[4][3][kMostRows<Isa, NP>];

  template <int MR, SrcForm kForm, Prefetch kPrefetch>
  constexpr void set() {
    fn[kPrefetch][kForm][MR - 1] =
        &gemm_tile<Isa, MR, NP, kForm, kWeights, kGroupPanels, kPrefetch>;
  }
  template <int MR, SrcForm kForm>
  constexpr void set() {
    constexpr bool kOwn = kPrefetchesOwnWeights<Isa, MR, kGroupPanels>;
    set<MR, kForm, kNone>();
    if constexpr (kOwn) set<MR, kForm, kOwnWeights>();
    if constexpr (!kOwn) fn[kOwnWeights][kForm][MR - 1] = fn[kNone][kForm][MR - 1];
    if constexpr (Isa::kPrefetches && NP == Isa::kMaxPanels && kGroupPanels == 0) {
      set<MR, kForm, kNextPanelsL1>();
      set<MR, kForm, kNextPanelsL2>();
    }
  }
  template <int MR>
  constexpr void fill() {
    set<MR, kUnsigned>();
    set<MR, kSigned>();
    if constexpr (Isa::kWidensSrc && kWeights != WeightForm::kNarrow) set<MR, kWidened>();
    if constexpr (MR < kMostRows<Isa, NP>) fill<MR + 1>();
  }
  constexpr TileTable() : fn() { fill<1>(); }
};

template <class Isa, int NP, WeightForm kWeights, int kGroupPanels = 0>
constexpr TileTable<Isa, NP, kWeights, kGroupPanels> kTiles;

}  // namespace
