// SPDX-License-Identifier: Apache-2.0
// Few rows are bound by weight bandwidth: their tiles read weights as few long streams.
//
// Note [Streamed weights]
// Zen 5 loads weights from L2 at full speed, 45 to 62 bytes a cycle, if the same instructions read
// few streams that continue from panel to panel. So the panels of a layer are cut into three
// or four ranges, and a tile takes one panel of each. A tile of neighbouring panels starts a new
// stream for each panel: 32 to 44 bytes a cycle. A single stream is as good for one row only: a
// broadcast takes as long as a load of 64 bytes, and there are two a cycle. Zen 5, with one, two,
// three and four rows: 768 -> 768 alone in a loop 1.20x, 1.06x, 1.09x and 1.05x faster, as whole
// ops 1.07x, 1.06x, 1.05x and 1.00x; 512 -> 512 alone 1.18x, 1.06x, 1.20x and 1.02x. The placement
// of 4 KB pages in L2 makes as much difference. Zen 4, whole ops of one, two and four rows: from L2
// 1.03x, 1.02x and 1.00x faster, with weights of 2 MB 1.09x, 1.06x and 1.00x, with 16 MB 1.18x,
// 1.20x and 1.03x. All of these with three streams; a fourth one: kStreams in cpu_tuning.h.
#pragma once

#include "kernels/cpu_tuning.h"
#include "kernels/epilogue/register_epilogue.h"

namespace {

/// Panels whose sums wait in L1 for their epilogue.
constexpr int kStreamedPanels = 60;

/// Quads of a panel that are summed apart: the latency of VPDPBUSD asks for four sums of one row.
template <int kStreams>
constexpr int kStreamedQuads = kStreams == 1 ? 4 : 2;

/// kQuads of one panel of each stream, from `k` on, to the first kQuads sums of each.
template <class Isa, int MR, int kStreams, int64_t kDistance, bool kFlip, int kQuads>
TORCHQ_INLINE void streamed_step(typename Isa::Int (&sum)[kStreamedQuads<kStreams>][MR][kStreams],
                                 const uint8_t* const (&row)[MR], int64_t k, const int8_t* weight,
                                 int64_t apart) {
  TORCHQ_UNROLL for (int i = 0; i < kQuads; ++i) {
    typename Isa::Int w[kStreams];
    TORCHQ_UNROLL for (int s = 0; s < kStreams; ++s) {
      const int8_t* line = weight + s * apart + i * kPanel * kQuad;
      w[s] = Isa::load_weight(line);
      if constexpr (kDistance > 0) Isa::prefetch(line + kDistance);
    }
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      auto quad = Isa::broadcast(row[r] + k + i * kQuad);
      if constexpr (kFlip) quad = Isa::flip_sign(quad);
      TORCHQ_UNROLL for (int s = 0; s < kStreams; ++s) Isa::dot(sum[i][r][s], quad, w[s]);
    }
  }
}

/// The sums of kStreams * `panels` panels from `panel` on, each stream `panels` of them.
template <class Isa, int MR, int kStreams, int64_t kDistance, bool kFlip>
TORCHQ_NOINLINE void streamed_tile(const GemmTile& t, int panel, int panels, int32_t* dst) {
  using Int = typename Isa::Int;
  const uint8_t* row[MR];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = t.src + t.row_offset[r];
  constexpr int kSums = kStreamedQuads<kStreams>;
  const int64_t apart = panels * t.panel_stride;
  for (int p = 0; p < panels; ++p) {
    Int sum[kSums][MR][kStreams];
    TORCHQ_UNROLL for (int s = 0; s < kStreams; ++s) {
      const Int init = Isa::load_int(t.acc_init + (panel + p + s * panels) * kPanel);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
        sum[0][r][s] = init;
        TORCHQ_UNROLL for (int i = 1; i < kSums; ++i) sum[i][r][s] = Isa::zero();
      }
    }
    const int8_t* weight = t.weight + (panel + p) * t.panel_stride;
    int64_t k = t.runs->src_offset, left = t.runs->quads;
    for (; left >= kSums; left -= kSums) {
      asm("" : "+r"(k));  // one index for all rows instead of a pointer each
      streamed_step<Isa, MR, kStreams, kDistance, kFlip, kSums>(sum, row, k, weight, apart);
      k += kSums * kQuad;
      weight += kSums * kPanel * kQuad;
    }
    for (; left > 0; --left, k += kQuad, weight += kPanel * kQuad) {
      streamed_step<Isa, MR, kStreams, kDistance, kFlip, 1>(sum, row, k, weight, apart);
    }
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      TORCHQ_UNROLL for (int s = 0; s < kStreams; ++s) {
        TORCHQ_UNROLL for (int i = 1; i < kSums; ++i) {
          sum[0][r][s] = Isa::add(sum[0][r][s], sum[i][r][s]);
        }
        Isa::store_int(dst + (r * kStreamedPanels + p + s * panels) * kPanel, sum[0][r][s]);
      }
    }
  }
}

/// Epilogue of NP panels from `panel` on.
template <class Isa, int MR, int NP>
TORCHQ_NOINLINE void streamed_epilogue(const GemmTile& t, const Epilogue& e, const int32_t* sums,
                                       int panel) {
  typename Isa::Int acc[MR][NP];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      acc[r][p] = Isa::load_int(sums + (r * kStreamedPanels + p) * kPanel);
    }
  }
  tile_epilogue<Isa, MR, NP>(t, e, acc, 0, panel);
}

/// As many full panels as the streams share evenly, and never all panels but one: alone that one
/// has too few sums. Returns their number.
template <class Isa, int MR, int kStreams, int64_t kDistance, bool kFlip>
int gemm_streamed(const GemmTile& t, const Epilogue& e) {
  constexpr int kMost = Isa::kMaxPanels;
  static_assert(kStreamedPanels % kStreams == 0 && kStreamedPanels % kMost == 0);
  alignas(64) int32_t sums[MR * kStreamedPanels * kPanel];
  int whole = t.channels / kPanel / kStreams * kStreams;
  if (kStreams > 1 && whole > 0 && whole + 1 == t.panels) whole -= kStreams;
  for (int panel = 0; panel < whole; panel += kStreamedPanels) {
    const int panels = min_int(kStreamedPanels, whole - panel);
    streamed_tile<Isa, MR, kStreams, kDistance, kFlip>(t, panel, panels / kStreams, sums);
    int p = 0;
    for (; p + kMost <= panels; p += kMost) {
      streamed_epilogue<Isa, MR, kMost>(t, e, sums + p * kPanel, panel + p);
    }
    for (; p < panels; ++p) streamed_epilogue<Isa, MR, 1>(t, e, sums + p * kPanel, panel + p);
  }
  return whole;
}

template <class Isa, int MR, int kStreams, int64_t kDistance>
int gemm_streamed(const GemmTile& t, const Epilogue& e) {
  return t.flip ? gemm_streamed<Isa, MR, kStreams, kDistance, true>(t, e)
                : gemm_streamed<Isa, MR, kStreams, kDistance, false>(t, e);
}

template <class Isa, int MR>
int gemm_streamed(const GemmTile& t, const Epilogue& e) {
  constexpr int i = MR > 2;
  if (t.plan.few_rows == TilePlan::kStreamed) {
    return gemm_streamed<Isa, MR, tuning::kStreams[i], 0>(t, e);
  }
  return gemm_streamed<Isa, MR, tuning::kFewStreams[i], tuning::kFewStreamsDistance[i]>(t, e);
}

template <class Isa>
int gemm_streamed(const GemmTile& t, const Epilogue& e) {
  switch (t.rows) {
    case 1:
      return gemm_streamed<Isa, 1>(t, e);
    case 2:
      return gemm_streamed<Isa, 2>(t, e);
    case 3:
      return gemm_streamed<Isa, 3>(t, e);
    default:
      return gemm_streamed<Isa, 4>(t, e);
  }
}

}  // namespace
