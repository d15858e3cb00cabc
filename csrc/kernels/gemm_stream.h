// SPDX-License-Identifier: Apache-2.0
// One row or two and weights beyond L2: tiles that read them in the order that memory likes best.
#pragma once

#include "finish_in_registers.h"

namespace {

/// Sums of a row and panel: what the latency of VPDPBUSD asks for at one product a cycle.
constexpr int kStreamSums = 4;

/// Panels whose sums wait in L1 for their end: its loads disturb the prefetcher.
constexpr int kStreamPanels = 32;

/// How far ahead, in bytes, a stream asks for its weights. Nearer (1.5 KB) is as good from L3, but
/// takes 1.2 times as long from memory; from 12 KB on, L3 is slower.
constexpr int64_t kStreamAhead = 8 * 1024;

/// Where more weights are read in turn, some will come from memory, and bursts are faster.
constexpr int64_t kStreamBytes = int64_t{6} << 20;

/// Quads that a burst reads of each panel.
constexpr int kBurst = 4;
constexpr int kBurstPanels = 8;

template <class Isa, int MR>
struct FewRows {
  const uint8_t* row[MR];

  explicit TORCHQ_INLINE FewRows(const GemmTile& t) {
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) row[r] = t.src + t.row_offset[r];
  }
  template <bool kFlip>
  TORCHQ_INLINE typename Isa::Int quad(int r, int64_t k) const {
    const auto q = Isa::broadcast(row[r] + k);
    if constexpr (kFlip) return Isa::flip_sign(q);
    return q;
  }
};

/// kQuads of one panel from `k` on, each to its own sums.
template <class Isa, int MR, bool kFlip, int kQuads>
TORCHQ_INLINE void stream_step(typename Isa::Int (&sum)[kStreamSums][MR],
                               const FewRows<Isa, MR>& rows, int64_t k, const int8_t* weight) {
  TORCHQ_UNROLL for (int i = 0; i < kQuads; ++i) {
    const auto w = Isa::load_weight(weight + i * kPanel * kQuad);
    Isa::prefetch(weight + i * kPanel * kQuad + kStreamAhead);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      Isa::dot(sum[i][r], rows.template quad<kFlip>(r, k + i * kQuad), w);
    }
  }
}

/// The sums of `panels` panels from `panel` on, one after the other: all weights are one stream,
/// read by the same instructions.
template <class Isa, int MR, bool kFlip>
TORCHQ_NOINLINE void stream_tile(const GemmTile& t, int panel, int panels, int32_t* dst) {
  using Int = typename Isa::Int;
  const FewRows<Isa, MR> rows(t);
  for (int p = 0; p < panels; ++p) {
    Int sum[kStreamSums][MR];
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      sum[0][r] = Isa::load_int(t.acc_init + (panel + p) * kPanel);
      TORCHQ_UNROLL for (int i = 1; i < kStreamSums; ++i) sum[i][r] = Isa::zero();
    }
    const int8_t* weight = t.weight + (panel + p) * t.panel_stride;
    int64_t k = t.runs->src_offset, left = t.runs->quads;
    for (; left >= kStreamSums; left -= kStreamSums) {
      asm("" : "+r"(k));  // one index for both rows instead of a pointer each
      stream_step<Isa, MR, kFlip, kStreamSums>(sum, rows, k, weight);
      k += kStreamSums * kQuad;
      weight += kStreamSums * kPanel * kQuad;
    }
    for (; left > 0; --left, k += kQuad, weight += kPanel * kQuad) {
      stream_step<Isa, MR, kFlip, 1>(sum, rows, k, weight);
    }
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      const Int total = Isa::add(Isa::add(sum[0][r], sum[1][r]), Isa::add(sum[2][r], sum[3][r]));
      Isa::store_int(dst + (r * kStreamPanels + p) * kPanel, total);
    }
  }
}

/// The end of NP panels from `panel` on.
template <class Isa, int MR, int NP>
TORCHQ_NOINLINE void finish_stream(const GemmTile& t, const Epilogue& e, const int32_t* sums,
                                   int panel) {
  typename Isa::Int acc[MR][NP];
  TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
    TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
      acc[r][p] = Isa::load_int(sums + (r * kStreamPanels + p) * kPanel);
    }
  }
  finish_sums<Isa, MR, NP>(t, e, acc, 0, panel);
}

/// kQuads of all panels from `k` on, one panel after the other.
template <class Isa, int MR, int NP, bool kFlip, int kQuads>
TORCHQ_INLINE void burst_step(typename Isa::Int (&acc)[MR][NP], const FewRows<Isa, MR>& rows,
                              int64_t k, const int8_t* weight, int64_t panel_stride) {
  typename Isa::Int s[kQuads][MR];
  TORCHQ_UNROLL for (int i = 0; i < kQuads; ++i) {
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) {
      s[i][r] = rows.template quad<kFlip>(r, k + i * kQuad);
      Isa::pin(s[i][r]);
    }
  }
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    TORCHQ_UNROLL for (int i = 0; i < kQuads; ++i) {
      const auto w = Isa::load_weight(weight + p * panel_stride + i * kPanel * kQuad);
      TORCHQ_UNROLL for (int r = 0; r < MR; ++r) Isa::dot(acc[r][p], s[i][r], w);
    }
  }
}

/// MR rows x NP panels, several lines of each panel at a time: more streams than one bring more
/// from memory, and bursts of four more than single lines.
template <class Isa, int MR, int NP, bool kFlip>
TORCHQ_NOINLINE void burst_tile(const GemmTile& t, const Epilogue& e, int panel) {
  typename Isa::Int acc[MR][NP];
  TORCHQ_UNROLL for (int p = 0; p < NP; ++p) {
    const auto init = Isa::load_int(t.acc_init + (panel + p) * kPanel);
    TORCHQ_UNROLL for (int r = 0; r < MR; ++r) acc[r][p] = init;
  }
  const FewRows<Isa, MR> rows(t);
  const int8_t* weight = t.weight + panel * t.panel_stride;
  int64_t k = t.runs->src_offset, left = t.runs->quads;
  for (; left >= kBurst; left -= kBurst) {
    asm("" : "+r"(k));
    burst_step<Isa, MR, NP, kFlip, kBurst>(acc, rows, k, weight, t.panel_stride);
    k += kBurst * kQuad;
    weight += kBurst * kPanel * kQuad;
  }
  for (; left > 0; --left, k += kQuad, weight += kPanel * kQuad) {
    burst_step<Isa, MR, NP, kFlip, 1>(acc, rows, k, weight, t.panel_stride);
  }
  finish_sums<Isa, MR, NP>(t, e, acc, 0, panel);
}

/// As many full panels as make whole tiles; returns how many these are.
template <class Isa, int MR, bool kFlip>
int gemm_stream(const GemmTile& t, const Epilogue& e) {
  const int full = t.channels / kPanel;
  if (t.panels * t.panel_stride > kStreamBytes) {
    int panel = 0;
    for (; panel + kBurstPanels <= full; panel += kBurstPanels) {
      burst_tile<Isa, MR, kBurstPanels, kFlip>(t, e, panel);
    }
    return panel;
  }
  constexpr int kMost = Isa::kMaxPanels;
  static_assert(kStreamPanels % kMost == 0);
  alignas(64) int32_t sums[MR * kStreamPanels * kPanel];
  const int whole = full / kMost * kMost;
  for (int panel = 0; panel < whole; panel += kStreamPanels) {
    const int panels = min_int(kStreamPanels, whole - panel);
    stream_tile<Isa, MR, kFlip>(t, panel, panels, sums);
    for (int p = 0; p < panels; p += kMost) {
      finish_stream<Isa, MR, kMost>(t, e, sums + p * kPanel, panel + p);
    }
  }
  return whole;
}

/// Whether weights come from beyond L2; from there it gains nothing. Pixels at corners of images
/// leave weights out, and read those that the others have just read. Measured on Zen 5 in turns
/// with wide tiles, whole ops: 1x2048->1000 and 2x2048->1000 1.07 to 1.12 times as fast,
/// 1x4096->4096 1.04 to 1.08, 2x4096->4096 0.97 to 1.06.
template <class Isa>
TORCHQ_INLINE bool takes_streams(const GemmTile& t) {
  const bool all = t.num_runs == 1 && t.runs->quads * kPanel * kQuad == t.panel_stride;
  const bool far = t.panels * t.panel_stride > int64_t{1} << 20;
  return t.rows <= 2 && all && far && Isa::gains_from_streams();
}

template <class Isa>
int gemm_stream(const GemmTile& t, const Epilogue& e) {
  if (t.rows == 1) {
    return t.flip ? gemm_stream<Isa, 1, true>(t, e) : gemm_stream<Isa, 1, false>(t, e);
  }
  return t.flip ? gemm_stream<Isa, 2, true>(t, e) : gemm_stream<Isa, 2, false>(t, e);
}

}  // namespace
