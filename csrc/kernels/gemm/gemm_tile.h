// SPDX-License-Identifier: Apache-2.0
// The tile of the microkernel: a few rows times a few panels, in registers over all of K.
#pragma once

#include "kernels/cpu_tuning.h"
#include "kernels/epilogue/register_epilogue.h"
#include "kernels/gemm/dot_step.h"
#include "kernels/gemm/tiles.h"

namespace {

/// True for tiles that can prefetch their own weights: the dot products of a step take longer than
/// its loads, and the addresses fit the general registers.
template <class Isa, int MR>
constexpr bool kPrefetchesOwnWeights = Isa::kPrefetches && MR >= 4 && MR <= 8;

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
        if constexpr (kMultipliesS8<Isa>) {
          return Isa::to_s8(kForm == kSigned ? Isa::flip_sign(q) : q);
        } else if constexpr (kForm == kSigned) {
          return Isa::flip_sign(q);
        } else {
          return q;
        }
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
  if constexpr (kIsNarrow && Isa::kWidensSrc) {
    if (t.excess != nullptr) add_excess<Isa, MR, kForm>(t.excess[panel], row, acc);
  }
  pin_sums<Isa>(acc);

  tile_epilogue<Isa, MR, NP>(t, e, acc, first, panel);
}

/// The tiles of NP panels, for GemmTiles.
template <class Isa, int NP>
struct MakeTiles {
  GemmTiles<NP> tiles{};

  template <int MR, SrcForm kForm, WeightForm kWeights>
  constexpr void set() {
    auto& of = tiles.of[static_cast<int>(kWeights)];
    const auto tile = &gemm_tile<Isa, MR, NP, kForm, kWeights, 0, kNone>;
    of[kNone][kForm][MR - 1] = of[kOwnWeights][kForm][MR - 1] = tile;
    if constexpr (kPrefetchesOwnWeights<Isa, MR>) {
      of[kOwnWeights][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, 0, kOwnWeights>;
    }
    if constexpr (Isa::kPrefetches && NP == Isa::kMaxPanels) {
      of[kNextPanelsL1][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, 0, kNextPanelsL1>;
      of[kNextPanelsL2][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, 0, kNextPanelsL2>;
    }
    if constexpr (kJoinsGroups<Isa> && NP == Isa::kMaxPanels) {
      tiles.of_groups[0][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, 1, kNone>;
      tiles.of_groups[1][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, 2, kNone>;
    }
  }
  template <int MR, WeightForm kWeights>
  constexpr void fill() {
    set<MR, kUnsigned, kWeights>();
    set<MR, kSigned, kWeights>();
    if constexpr (Isa::kWidensSrc && kWeights != WeightForm::kNarrow) set<MR, kWidened, kWeights>();
    if constexpr (MR < kMostRows<Isa, NP>) fill<MR + 1, kWeights>();
  }
  constexpr MakeTiles() {
    if constexpr (NP <= Isa::kMaxPanels || (NP == kWidePanels && kHasWide<Isa>)) {
      fill<1, WeightForm::kWhole>();
      if constexpr (Isa::kHasNarrow) fill<1, WeightForm::kNarrow>();
      if constexpr (Isa::kWidensSrc) fill<1, WeightForm::kSplit>();
    }
  }
};

}  // namespace
