// SPDX-License-Identifier: Apache-2.0
// The one microkernel of linear and of every dense convolution (contract: GemmTile in contract.h):
// which tiles a call is cut into, and in which order they run.
#pragma once

#include "kernels/gemm/gemm_pipelined.h"
#include "kernels/gemm/gemm_short.h"
#include "kernels/gemm/gemm_streamed.h"
#include "kernels/gemm/tiles.h"

namespace {

/// Returns the prefetch policy of tiles of NP panels from `panel` on: the last ones have none next.
template <class Isa, int NP>
TORCHQ_INLINE Prefetch prefetch_of(const GemmTile& t, int panel) {
  if constexpr (Isa::kPrefetches) {
    if (NP != Isa::kMaxPanels) return t.plan.rest_prefetch;
    const bool is_last = panel + NP >= t.panels + t.panels_behind;
    return is_last && t.plan.prefetch > kOwnWeights ? kOwnWeights : t.plan.prefetch;
  }
  return kNone;
}

/// The rows from `begin` on x NP panels from `panel` on.
template <class Isa, int NP, WeightForm kWeights, int kGroupPanels = 0>
TORCHQ_INLINE void gemm_panels(const GemmTile& t, const Epilogue& e, int panel, int begin = 0) {
  const Prefetch prefetch = kGroupPanels > 0 ? kNone : prefetch_of<Isa, NP>(t, panel);
  if constexpr (kHasWide<Isa> && kGroupPanels == 0 && NP > 1 && NP <= Isa::kMaxPanels) {
    if (begin == 0 && (panel + NP) * kPanel <= t.channels && is_pipelined(t, NP)) {
      begin = gemm_pipelined<Isa, NP>(t, e, panel, prefetch == kNextPanelsL2);
      if (begin == t.rows) return;
    }
  }
  const auto& tiles = tiles_of<Isa, NP, kWeights, kGroupPanels>(prefetch, src_form(t));
  for_each_tile(t.rows - begin, kMostRows<Isa, NP>,
                [&](int first, int rows) { tiles[rows - 1](t, e, begin + first, panel); });
}

/// Returns true if the last panel is partial.
TORCHQ_INLINE bool has_tail(const GemmTile& t) { return t.channels % kPanel != 0; }

/// The panels from `panel` on, of which there are at most NP.
template <class Isa, int NP, WeightForm kWeights>
TORCHQ_INLINE void gemm_rest(const GemmTile& t, const Epilogue& e, int panel) {
  if constexpr (Isa::kMasksTails && NP == Isa::kMaxPanels) {
    if (t.panels - panel == NP && has_tail(t)) {  // the widest tiles leave tails to memory
      gemm_panels<Isa, NP - 1, kWeights>(t, e, panel);
      return gemm_panels<Isa, 1, kWeights>(t, e, panel + NP - 1);
    }
  }
  if (t.panels - panel == NP) return gemm_panels<Isa, NP, kWeights>(t, e, panel);
  if constexpr (NP > 1) gemm_rest<Isa, NP - 1, kWeights>(t, e, panel);
}

/// Up to kFewRows rows: panels outermost.
template <class Isa, WeightForm kWeights>
void gemm_few_rows(const GemmTile& t, const Epilogue& e) {
  constexpr int kMost = Isa::kMaxPanels;
  int panel = 0;
  if constexpr (kHasWide<Isa>) {
    if (t.plan.few_rows == TilePlan::kStreamed || t.plan.few_rows == TilePlan::kFewStreams) {
      panel = gemm_streamed<Isa>(t, e);
    } else if (t.plan.few_rows == TilePlan::kWide) {
      constexpr int kWide = kWidePanels;
      for (; panel + kWide <= t.panels; panel += kWide) {
        gemm_panels<Isa, kWide, kWeights>(t, e, panel);
      }
    } else if (t.plan.few_rows == TilePlan::kTall) {
      for (; panel + 3 <= t.panels; panel += 3) gemm_panels<Isa, 3, kWeights>(t, e, panel);
    }
  }
  // One panel at a time is one stream of weights. Out of memory, Zen 3: 4096->4096 takes 0.94 of
  // the time of tiles of two panels with one row, 0.80 with two; 896->4864 0.88 and 0.99.
  if constexpr (kMost == 2 && kWeights == WeightForm::kSplit) {
    for (; t.rows <= 2 && panel < t.panels; ++panel) gemm_panels<Isa, 1, kWeights>(t, e, panel);
  }
  for (; panel + kMost <= t.panels; panel += kMost) gemm_panels<Isa, kMost, kWeights>(t, e, panel);
  if (panel < t.panels) gemm_rest<Isa, kMost, kWeights>(t, e, panel);
}

/// NP full panels from `panel` on.
template <class Isa, int NP, int kRuns, int kQuads>
TORCHQ_INLINE void gemm_short_panels(const GemmTile& t, const Epilogue& e, int panel) {
  const int done = gemm_short<Isa, NP, kRuns, kQuads>(t, e, panel);
  if (done < t.rows) gemm_panels<Isa, NP, WeightForm::kWhole>(t, e, panel, done);
}

/// The full panels from `panel` on; returns the first that is left. One or two full panels before a
/// partial one share its tile: a tile of their own is 10 % slower.
template <class Isa, int kRuns, int kQuads>
int gemm_short_rows(const GemmTile& t, const Epilogue& e, int panel) {
  const int whole = t.channels / kPanel;
  for (; panel + 4 <= whole; panel += 4) gemm_short_panels<Isa, 4, kRuns, kQuads>(t, e, panel);
  const int rest = whole - panel;
  if (rest < 3 && has_tail(t)) return panel;
  if (rest == 3) gemm_short_panels<Isa, 3, kRuns, kQuads>(t, e, panel);
  if (rest == 2) gemm_short_panels<Isa, 2, kRuns, kQuads>(t, e, panel);
  if (rest == 1) gemm_short_panels<Isa, 1, kRuns, kQuads>(t, e, panel);
  return whole;
}

/// The panels from `panel` on that `gemm_short` has a tile for, of run lengths from the i-th on;
/// returns the first that is left.
template <class Isa, int i = 0>
TORCHQ_INLINE int gemm_if_short(const GemmTile& t, const Epilogue& e, int panel) {
  if (!t.plan.is_short) return panel;
  if (t.num_runs == 3) return gemm_short_rows<Isa, 3, kShortQuadsOfThree>(t, e, panel);
  if constexpr (i + 1 < sizeof kShortQuads / sizeof *kShortQuads) {
    if (t.runs->quads != kShortQuads[i]) return gemm_if_short<Isa, i + 1>(t, e, panel);
  }
  return gemm_short_rows<Isa, 1, kShortQuads[i]>(t, e, panel);
}

/// All panels of the tile, as wide as the registers allow; the last chunk takes the rest. Panels
/// are outermost where tiles prefetch the next ones: the prefetches then spread over all rows. With
/// the first rows alone, L3 would be too slow.
template <class Isa, WeightForm kWeights>
void gemm(const GemmTile& t, const Epilogue& e) {
  if (t.rows <= kFewRows) return gemm_few_rows<Isa, kWeights>(t, e);
  constexpr int kMost = Isa::kMaxPanels;
  int panel = 0;
  if constexpr (kHasWide<Isa>) {
    if (is_pipelined(t, kMost)) {
      const int whole = t.channels / kPanel;
      for (; panel + kMost <= whole; panel += kMost) gemm_panels<Isa, kMost, kWeights>(t, e, panel);
    }
    const int rest = t.panels - panel;
    const bool rest_is_pipelined = (rest == 2 || rest == 3) && is_pipelined(t, rest);
    if (!rest_is_pipelined) panel = gemm_if_short<Isa>(t, e, panel);
  }
  const int whole = Isa::kMasksTails ? t.channels / kPanel : t.panels;
  const Prefetch prefetch = prefetch_of<Isa, kMost>(t, panel);
  if (prefetch == kNextPanelsL1 || prefetch == kNextPanelsL2) {
    for (; panel + kMost <= whole; panel += kMost) gemm_panels<Isa, kMost, kWeights>(t, e, panel);
  } else if (t.panels - panel > kMost) {
    const auto& tiles = tiles_of<Isa, kMost, kWeights>(prefetch, src_form(t));
    const int begin = panel, end = begin + (whole - begin) / kMost * kMost;
    for_each_tile(t.rows, kMostRows<Isa, kMost>, [&](int first, int rows) {
      for (panel = begin; panel < end; panel += kMost) tiles[rows - 1](t, e, first, panel);
    });
  }
  if (panel < t.panels) gemm_rest<Isa, kMost, kWeights>(t, e, panel);
}

/// Panels that gemm_s8 takes many rows through at a time: their acc_init is 1 KB of the stack.
constexpr int kS8Panels = 16;

/// `gemm` where tiles multiply src - 128 (kMultipliesS8): adds 128 times the sum of each channel's
/// weights to acc_init, once for all rows of a call. A source of zeros makes -128 times that sum.
template <class Isa>
void gemm_s8(const GemmTile& t, const Epilogue& e) {
  const uint8_t zeros[kQuad] = {};
  const auto src = Isa::to_s8(Isa::broadcast(zeros));
  alignas(64) int32_t acc_init[kS8Panels * kPanel];
  GemmTile part = t;
  part.acc_init = acc_init;
  // Few rows take one panel at a time, while its weights are in L1 from being summed.
  const int most = t.rows <= kFewRows ? 1 : kS8Panels;
  for (int panel = 0; panel < t.panels; panel += most) {
    part.weight = t.weight + panel * t.panel_stride;
    part.panels = min_int(t.panels - panel, most);
    part.channel = t.channel + panel * kPanel;
    part.channels = min_int(t.channels - panel * kPanel, part.panels * kPanel);
    for (int p = 0; p < part.panels; ++p) {
      auto sum = Isa::zero();
      for (const GemmRun* run = t.runs; run != t.runs + t.num_runs; ++run) {
        const int8_t* weight = part.weight + p * t.panel_stride + run->weight_offset;
        for (int64_t q = 0; q < run->quads; ++q, weight += kPanel * kQuad) {
          Isa::dot(sum, src, Isa::load_weight(weight));
        }
      }
      const auto init = Isa::load_int(t.acc_init + (panel + p) * kPanel);
      Isa::store_int(acc_init + p * kPanel, Isa::sub(init, sum));
    }
    gemm<Isa, WeightForm::kWhole>(part, e);
  }
}

/// Four panels of one or two channels' groups at a time, the groups that are left one by one.
template <class Isa>
void gemm_groups(const GemmTile& t, const Epilogue& e) {
  constexpr int kMost = Isa::kMaxPanels;
  const int group_panels = t.group_quads * kQuad / kPanel;
  int panel = 0;
  for (; panel + kMost <= t.panels; panel += kMost) {
    if (group_panels == 1) {
      gemm_panels<Isa, kMost, WeightForm::kWhole, 1>(t, e, panel);
    } else {
      gemm_panels<Isa, kMost, WeightForm::kWhole, 2>(t, e, panel);
    }
  }
  GemmTile group = t;
  group.panels = group_panels;
  group.channels = group_panels * kPanel;
  group.panels_behind = 0;
  for (; panel < t.panels; panel += group_panels) {
    group.src = t.src + panel * kPanel;
    group.weight = t.weight + panel * t.panel_stride;
    group.channel = t.channel + panel * kPanel;
    group.acc_init = t.acc_init + panel * kPanel;
    gemm<Isa, WeightForm::kWhole>(group, e);
  }
}

}  // namespace
