// SPDX-License-Identifier: Apache-2.0
// The one microkernel of linear and of every dense convolution (contract: GemmTile in table.h).
#pragma once

#include "clip.h"
#include "dot_step.h"
#include "gemm_overlap.h"
#include "gemm_short.h"
#include "gemm_stream.h"

namespace {

/// Panels of the widest tile, where a dot product is one instruction and there are 32 registers.
constexpr int kWidePanels = 8;
template <class Isa>
constexpr bool kHasWide = Isa::kMaxPanels == 4 && Isa::kSteps == 1;

/// Rows of the tallest tile of NP panels. 6 sums of one panel, or 12 of two, are too few for the
/// latency of VPDPBUSD on Intel, and what a tile costs once weighs more where it has few panels.
/// Where that is so, tiles of three panels have 8 rows: as many sums as 6 rows of four.
/// Wide tiles have one row or two.
template <class Isa, int NP>
constexpr int kMostRows = NP == 1                                 ? Isa::kTallestRows
                          : NP == 2                               ? Isa::kTallRows
                          : NP == 3 && Isa::kTallRows > kTileRows ? 8
                          : NP == kWidePanels                     ? 2
                                                                  : kTileRows;

/// What a tile asks for while it runs: nothing, its own weights ahead of their use, or those of the
/// next NP panels, into L1 or L2, the n-th tile of rows for the n-th panel.
enum Ahead : int { kNothing, kOwnWeights, kNextInL1, kNextInL2 };

/// Whether a tile can ask for its own weights: where the dot products of a step take longer than
/// its loads, and the addresses fit the general registers.
template <class Isa, int MR, int kGroupPanels>
constexpr bool kPrefetches = Isa::kPrefetches && kGroupPanels == 0 && MR >= 4 && MR <= 8;

/// What a tile's source dwords are: four u8, four s8, or two 16-bit values (`GemmTile::widened`).
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

/// The products that a panel of clipped weights lacks: of the even bytes of some quads.
template <class Isa, int MR, SrcForm kForm>
TORCHQ_INLINE void add_excess(const GemmExcess& x, const uint8_t* const (&row)[MR],
                              typename Isa::Int (&acc)[MR][1]) {
  for (const auto *q = x.quads, *end = q + x.num_quads; q != end; ++q) {
    const int64_t k = q->src_offset;
    dot_step<Isa, MR, 1, false>(acc, x.weight + q->weight_offset, 0,
                                [&](int r) { return load_src_half<Isa, kForm, 0>(row[r] + k); });
  }
}

/// What a tile's weights are: what `Isa::dot` takes, bytes for VNNI and 16-bit copies else; packed
/// bytes whose pairs fit 16-bit sums; packed bytes that become 16-bit values in registers.
enum class WeightForm { kWhole, kNarrow, kSplit };

/// MR rows x NP panels; `first` and `panel` count from the first of `t`. kGroupPanels: panels of a
/// group, of as many inputs as outputs, that does not share its source.
template <class Isa, int MR, int NP, SrcForm kForm, WeightForm kWeights, int kGroupPanels,
          Ahead kAhead>
TORCHQ_NOINLINE void gemm_tile(const GemmTile& t, const Epilogue& e, int first, int panel) {
  constexpr bool kIsNarrow = kWeights == WeightForm::kNarrow;
  constexpr bool kSplits = kWeights == WeightForm::kSplit;
  constexpr int kSteps = kWeights == WeightForm::kWhole ? Isa::kSteps : 1;  // vectors a quad
  constexpr int kSrcQuad = kForm == kWidened ? 2 * kQuad : kQuad;           // bytes
  // The products of a quad's even bytes, then those of the odd ones; not where a dword of the
  // source has its own vector of weights.
  constexpr bool kHalves = kSplits || (kSteps == 2 && kForm != kWidened);
  using Int = typename Isa::Int;
  // A spilled accumulator costs half the speed; tests/test_disassembly.py looks for them.
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
  int64_t ahead = 0;
  if constexpr (kAhead == kNextInL1 || kAhead == kNextInL2) {
    ahead = min_int(NP + min_int(first / MR, NP - 1), t.panels + t.panels_behind - 1 - panel) *
            panel_stride;
  } else if constexpr (kAhead == kOwnWeights) {
    ahead = Isa::weights_ahead();
  }
  for (const GemmRun* run = t.runs; run != runs_end; ++run) {
    // What only runs need stays in memory: GCC would keep it in vector registers, and moves from
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
      if constexpr (kAhead == kNextInL2) {
        Isa::prefetch_l2(weight + ahead);
      } else if constexpr (kAhead == kNextInL1) {
        Isa::prefetch(weight + ahead);
      } else if constexpr (kAhead == kOwnWeights) {
        const int8_t* next = weight + ahead;
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

  finish_sums<Isa, MR, NP>(t, e, acc, first, panel);
}

using TileFn = void (*)(const GemmTile&, const Epilogue&, int first, int panel);

/// The tiles of NP panels, fn[ahead][form][rows - 1].
template <class Isa, int NP, WeightForm kWeights, int kGroupPanels>
struct TileTable {
  TileFn fn[4][3][kMostRows<Isa, NP>];

  template <int MR, SrcForm kForm, Ahead kAhead>
  constexpr void set() {
    fn[kAhead][kForm][MR - 1] = &gemm_tile<Isa, MR, NP, kForm, kWeights, kGroupPanels, kAhead>;
  }
  template <int MR, SrcForm kForm>
  constexpr void set() {
    constexpr bool kAsks = kPrefetches<Isa, MR, kGroupPanels>;
    set<MR, kForm, kNothing>();
    if constexpr (kAsks) set<MR, kForm, kOwnWeights>();
    if constexpr (!kAsks) fn[kOwnWeights][kForm][MR - 1] = fn[kNothing][kForm][MR - 1];
    if constexpr (Isa::kPrefetches && NP == Isa::kMaxPanels && kGroupPanels == 0) {
      set<MR, kForm, kNextInL1>();
      set<MR, kForm, kNextInL2>();
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

/// Bytes of the weights of a tile that stay in L1 while all rows pass, and the next ones come.
constexpr int64_t kTileWeightBytes = 24 * 1024;

/// Layers with fewer bytes of weights do not wait for them, wherever they are.
constexpr int64_t kFewWeightBytes = 64 * 1024;

/// What tiles of NP panels from `panel` on ask for. Measured on Emerald Rapids, in MobileNet: 160
/// to 960 channels take 0.87 of the time with the next panels, 320 to 1280 0.86, 96 to 576 0.93;
/// hot 0.95 to 1. On Zen 5 requests take the place of products: 1x1 of 64 to 256 channels is 1.07
/// times as fast without, of 256 to 1024 1.01, hot. In a whole network, where weights come from L3
/// and beyond, those of the next panels are worth it: ResNet-50 takes 0.94 of the time.
template <class Isa, int NP>
TORCHQ_INLINE Ahead choose_ahead(const GemmTile& t, int panel) {
  if constexpr (Isa::kPrefetches) {
    if (t.rows <= kFewRows) return kOwnWeights;
    const bool in_l1 = NP * t.panel_stride <= kTileWeightBytes;
    const int panels = t.panels + t.panels_behind;
    const bool has_next = NP == Isa::kMaxPanels && panel + NP < panels;
    if (Isa::gains_from_l1()) return in_l1 && has_next ? kNextInL1 : kOwnWeights;
    if (in_l1 && panels * t.panel_stride < kFewWeightBytes) return kNothing;
    return has_next ? kNextInL2 : kOwnWeights;
  }
  return kNothing;
}

/// The rows from `begin` on x NP panels from `panel` on.
template <class Isa, int NP, WeightForm kWeights, int kGroupPanels = 0>
TORCHQ_INLINE void gemm_panels(const GemmTile& t, const Epilogue& e, int panel, int begin = 0) {
  const Ahead ahead = kGroupPanels > 0 ? kNothing : choose_ahead<Isa, NP>(t, panel);
  if constexpr (kHasWide<Isa> && kGroupPanels == 0 && NP > 1 && NP <= Isa::kMaxPanels) {
    if (begin == 0 && (panel + NP) * kPanel <= t.channels && overlaps<Isa, NP>(t, e)) {
      begin = gemm_overlapped<Isa, NP>(t, e, panel, ahead == kNextInL2);
      if (begin == t.rows) return;
    }
  }
  const auto& tiles = kTiles<Isa, NP, kWeights, kGroupPanels>.fn[ahead][src_form(t)];
  for_each_tile(t.rows - begin, kMostRows<Isa, NP>,
                [&](int first, int rows) { tiles[rows - 1](t, e, begin + first, panel); });
}

/// Whether the last panel is not full.
TORCHQ_INLINE bool has_tail(const GemmTile& t) { return t.channels % kPanel != 0; }

/// The panels from `panel` on, of which there are at most NP.
template <class Isa, int NP, WeightForm kWeights>
TORCHQ_INLINE void gemm_rest(const GemmTile& t, const Epilogue& e, int panel) {
  if constexpr (Isa::kFinishesTails && NP == Isa::kMaxPanels) {
    if (t.panels - panel == NP && has_tail(t)) {  // the widest tiles leave tails to memory
      gemm_panels<Isa, NP - 1, kWeights>(t, e, panel);
      return gemm_panels<Isa, 1, kWeights>(t, e, panel + NP - 1);
    }
  }
  if (t.panels - panel == NP) return gemm_panels<Isa, NP, kWeights>(t, e, panel);
  if constexpr (NP > 1) gemm_rest<Isa, NP - 1, kWeights>(t, e, panel);
}

/// Whether few rows take tiles of three panels, which have more rows than those of four: where that
/// saves a pass over weights that are beyond L1 (up to 8 rows) or L2. Measured on Emerald Rapids,
/// M x 4096 -> 4096: 1.26 times as fast with 8 rows as two tiles of 4 x 4, 1.11 with 16; from L2
/// both are as fast with 8 rows, and 6 x 4 is with 16 (1.03).
template <class Isa>
TORCHQ_INLINE bool takes_three_panels(const GemmTile& t) {
  constexpr int kTall = kMostRows<Isa, 3>, kWide = kMostRows<Isa, Isa::kMaxPanels>;
  const bool fewer_tiles = (t.rows + kTall - 1) / kTall < (t.rows + kWide - 1) / kWide;
  const int64_t bytes = t.panels * t.panel_stride;
  return fewer_tiles && t.panels > 8 && (t.rows <= kTall || bytes > int64_t{1} << 20);
}

/// Up to kFewRows rows: panels outermost. One row or two take wide tiles where they do not take
/// streams: measured on Emerald Rapids, 1.02 to 1.08 times as fast from L2, 1.01 from L3.
template <class Isa, WeightForm kWeights>
void gemm_few_rows(const GemmTile& t, const Epilogue& e) {
  constexpr int kMost = Isa::kMaxPanels;
  int panel = 0;
  if constexpr (kHasWide<Isa>) {
    if (takes_streams<Isa>(t)) {
      panel = gemm_stream<Isa>(t, e);
    } else if (t.rows <= 2) {
      constexpr int kWide = kWidePanels;
      for (; panel + kWide <= t.panels; panel += kWide) {
        gemm_panels<Isa, kWide, kWeights>(t, e, panel);
      }
    }
  }
  if constexpr (kMost > 3) {
    if (takes_three_panels<Isa>(t)) {
      for (; panel + 3 <= t.panels; panel += 3) gemm_panels<Isa, 3, kWeights>(t, e, panel);
    }
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

/// The full panels from `panel` on; returns the first that is left. One or two in front of one that
/// is not full are left to a tile of all of them: with their own they take 1.1 times as long.
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

/// The panels from `panel` on that `gemm_short` has a tile for; returns the first that is left.
template <class Isa>
TORCHQ_INLINE int gemm_if_short(const GemmTile& t, const Epilogue& e, int panel) {
  if (t.flip || !finishes_to_bytes(e) || !is_plain(e)) return panel;
  if (has_runs<1, 4>(t)) return gemm_short_rows<Isa, 1, 4>(t, e, panel);
  if (has_runs<1, 6>(t)) return gemm_short_rows<Isa, 1, 6>(t, e, panel);
  if (has_runs<1, 8>(t)) return gemm_short_rows<Isa, 1, 8>(t, e, panel);
  if (has_runs<1, 10>(t)) return gemm_short_rows<Isa, 1, 10>(t, e, panel);
  if (has_runs<1, 12>(t)) return gemm_short_rows<Isa, 1, 12>(t, e, panel);
  if (has_runs<1, 16>(t)) return gemm_short_rows<Isa, 1, 16>(t, e, panel);
  if (has_runs<1, 24>(t)) return gemm_short_rows<Isa, 1, 24>(t, e, panel);
  if (has_runs<3, 3>(t)) return gemm_short_rows<Isa, 3, 3>(t, e, panel);
  return panel;
}

/// All panels of the tile, as wide as the registers allow; the last chunk takes what is left.
/// Panels are outermost where tiles ask for the next ones: these come while all rows pass, not all
/// of them with the first rows, which L3 is too slow for.
template <class Isa, WeightForm kWeights>
void gemm(const GemmTile& t, const Epilogue& e) {
  if (t.rows <= kFewRows) return gemm_few_rows<Isa, kWeights>(t, e);
  constexpr int kMost = Isa::kMaxPanels;
  int panel = 0;
  if constexpr (kHasWide<Isa>) {
    if (overlaps<Isa, kMost>(t, e)) {
      const int whole = t.channels / kPanel;
      for (; panel + kMost <= whole; panel += kMost) gemm_panels<Isa, kMost, kWeights>(t, e, panel);
    }
    if (!rest_overlaps<Isa>(t, e, t.panels - panel)) panel = gemm_if_short<Isa>(t, e, panel);
  }
  const int whole = Isa::kFinishesTails ? t.channels / kPanel : t.panels;
  const Ahead ahead = choose_ahead<Isa, kMost>(t, panel);
  if (ahead == kNextInL1 || ahead == kNextInL2) {
    for (; panel + kMost <= whole; panel += kMost) gemm_panels<Isa, kMost, kWeights>(t, e, panel);
  } else if (t.panels - panel > kMost) {
    const auto& tiles = kTiles<Isa, kMost, kWeights>.fn[ahead][src_form(t)];
    const int begin = panel, end = begin + (whole - begin) / kMost * kMost;
    for_each_tile(t.rows, kMostRows<Isa, kMost>, [&](int first, int rows) {
      for (panel = begin; panel < end; panel += kMost) tiles[rows - 1](t, e, first, panel);
    });
  }
  if (panel < t.panels) gemm_rest<Isa, kMost, kWeights>(t, e, panel);
}

/// Whether tiles have panels of several groups. With all 16 or 32 channels of a group in one panel
/// or two, tiles of one group have few sums. Measured on Emerald Rapids, 3x3, against tiles of 10 x
/// 1 and 6 x 2: 1.31 to 1.41 times as fast with 16 channels, 1.10 with 32.
template <class Isa>
constexpr bool kJoinsGroups = kHasWide<Isa>;

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

template <class Isa>
void compensate(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init) {
  for (int64_t i = 0; i < n; i += kPanel) {
    const auto m = Isa::mask(min_int(n - i, kPanel));
    auto sum = Isa::zero();
    for (int t = 0; t < num_taps; ++t) {
      sum = Isa::add(sum, Isa::load_int(compensation + taps[t] * stride + i, m));
    }
    auto init = bias == nullptr ? Isa::zero() : Isa::load_int(bias + i, m);
    Isa::store_int(acc_init + i, Isa::sub(init, Isa::mul(sum, Isa::set_int(zero_point))), m);
  }
}

}  // namespace
