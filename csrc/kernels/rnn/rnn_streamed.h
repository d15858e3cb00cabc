// SPDX-License-Identifier: Apache-2.0
// Batch-1 recurrent layers are bound by weight bandwidth: cell arithmetic and later steps' input
// products hide behind the current products.
//
// Note [Streamed cells]
// Weights are streamed as Note [Streamed weights] in gemm_streamed.h says: as two streams, one for
// each half of the groups, or as one. A CPU looks some 100 vector instructions ahead, and a cell
// has as many. After its products it costs its full time, although products that wait for L2 leave
// the multipliers idle every other cycle. So the sums of a stream's group wait in L1 until the next
// group is multiplied, and the steps of the cell's formula alternate with those products. Beside
// the other panels the multipliers have time for the inputs of the next eight steps, a piece of a
// tile each: eight rows, so that these weights are read once in eight steps. Time of whole layers
// of 32 steps on Zen 4, relative to cells after the products of 16 groups: with interleaved cells,
// then with interleaved inputs, too.
//
//   units           256          512          1024        256, two threads  512, two threads
//   LSTM          0.98 0.93    0.97 0.91    1.00 0.91        0.95 0.89         0.98 0.89
//   GRU           0.93 0.87    0.97 0.91    1.00 0.93        0.91 0.88         0.95 0.88
#pragma once

#include "kernels/gemm/gemm_streamed.h"
#include "kernels/rnn/rnn_epilogue.h"
#include "kernels/rnn/rnn_input.h"

namespace {

/// Products of one row with a panel of each stream.
template <class Isa, int kStreams>
struct RnnStreams {
  static constexpr int kQuads = kStreamedQuads<kStreams>;
  typename Isa::Int sum[kQuads][kStreams];
  const uint8_t* src;
  const int8_t* weight;
  int64_t apart, rounds;  // rounds: of kQuads quads, those to do
  /// A single stream of a descending step goes all the way back, the last quads first: weights that
  /// come from L3 take 1.05 of the time where it jumps from panel to panel. Two streams begin with
  /// the first quads, which do not wait for the units that the step before has just finished.
  bool back;

  TORCHQ_INLINE RnnStreams(const RnnStep& s, int64_t panel, int64_t panels_apart)
      : apart(panels_apart * s.panel_stride),
        rounds(s.quads / kQuads),
        back(kStreams == 1 && s.descending) {
    TORCHQ_UNROLL for (int i = 0; i < kStreams; ++i) {
      sum[0][i] = Isa::load_int(s.init + (panel + i * panels_apart) * kPanel);
      TORCHQ_UNROLL for (int q = 1; q < kQuads; ++q) sum[q][i] = Isa::zero();
    }
    const int64_t first = back ? (rounds - 1) * kQuads : 0;
    src = s.src + first * kQuad;
    weight = s.weight + panel * s.panel_stride + first * kPanel * kQuad;
  }

  /// kCount quads from quad `k` on.
  template <int kCount>
  TORCHQ_INLINE void dot(int64_t k) {
    TORCHQ_UNROLL for (int q = 0; q < kCount; ++q) {
      const auto quad = Isa::broadcast(src + (k + q) * kQuad);
      TORCHQ_UNROLL for (int i = 0; i < kStreams; ++i) {
        auto acc = sum[q][i];  // an array that inline assembly writes to would lie in memory
        Isa::dot(acc, quad, Isa::load_weight(weight + i * apart + (k + q) * kPanel * kQuad));
        sum[q][i] = acc;
      }
    }
  }

  TORCHQ_INLINE void multiply(int64_t count) {
    const int64_t on = back ? -kQuads : kQuads;
    count = count < rounds ? count : rounds;
    rounds -= count;
    for (int64_t i = 0; i < count; ++i) {
      dot<kQuads>(0);
      src += on * kQuad;
      weight += on * kPanel * kQuad;
    }
  }

  /// All that is left, and the sums to dst, those of streams `dst_apart` from each other.
  TORCHQ_INLINE void end(const RnnStep& s, int32_t* dst, int64_t dst_apart) {
    multiply(rounds);
    const int64_t whole = s.quads / kQuads * kQuads, at = back ? whole + kQuads : 0;
    for (int64_t k = 0; k < s.quads - whole; ++k) dot<1>(at + k);
    TORCHQ_UNROLL for (int i = 0; i < kStreams; ++i) {
      auto all = sum[0][i];
      TORCHQ_UNROLL for (int q = 1; q < kQuads; ++q) all = Isa::add(all, sum[q][i]);
      Isa::store_int(dst + i * dst_apart, all);
    }
  }
};

/// The next piece of the inputs among the products of `stream`.
template <class Isa, int kStreams>
TORCHQ_INLINE void rnn_piece(RnnLookahead& a, int panels, RnnStreams<Isa, kStreams>& stream) {
  constexpr int kRows = kLookaheadRows, kPanels = kLookaheadPanels;
  const RnnInput& in = a.in;
  const int panel = min_int(a.tile * kPanels, panels - kPanels);
  const int64_t stride = in.panel_stride, quads = min_int(in.quads - a.k, a.piece);
  const uint8_t* src = in.src + a.k * kRows * kQuad;
  const uint8_t* const end = src + quads * kRows * kQuad;
  const int8_t* weight = in.weight + panel * stride + a.k * kPanel * kQuad;
  typename Isa::Int acc[kRows][kPanels];
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      acc[r][p] = Isa::load_int(a.k == 0 ? in.init + (panel + p) * kPanel
                                         : a.sums + (r * kPanels + p) * kPanel);
    }
  }
  const int64_t each = (stream.rounds + quads - 1) / quads;
  while (src != end) {
    asm("" : "+r"(src), "+r"(weight));  // as in gemm_tile
    dot_step<Isa, kRows, kPanels, false>(acc, weight, stride,
                                         [&](int r) { return Isa::broadcast(src + r * kQuad); });
    src += kRows * kQuad;
    weight += kPanel * kQuad;
    stream.multiply(each);
  }
  TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      Isa::store_int(a.sums + (r * kPanels + p) * kPanel, acc[r][p]);
    }
  }
  a.k += quads;
  if (a.k < in.quads) return;
  a.k = 0;
  a.tile += 1;
  for (int p = 0; p < kPanels; ++p) {
    const int group = (panel + p) / in.gates, gate = (panel + p) % in.gates;
    rnn_scale_input<Isa>(in, panel + p, 0, static_cast<int>(in.rows), a.sums + p * kPanel,
                         kPanels * kPanel, in.dst + group * in.dst_group_stride + gate * kPanel,
                         in.gates * kPanel);
  }
}

/// The sums of a panel of each stream, `apart` panels from each other, and a piece of the inputs
/// ahead if there are any left.
template <class Isa, int kStreams>
TORCHQ_NOINLINE void rnn_streamed_panel(const RnnStep& s, int64_t panel, int64_t apart,
                                        int32_t* dst) {
  RnnStreams<Isa, kStreams> stream(s, panel, apart);
  if (s.lookahead != nullptr) {
    const int panels = s.groups * s.gates;
    if (s.lookahead->tile * kLookaheadPanels < panels) rnn_piece<Isa>(*s.lookahead, panels, stream);
  }
  stream.end(s, dst, s.gates * kPanel);
}

/// The same with cells in place of inputs: those whose sums are `before`.
template <class Isa, RnnCell kCell, bool kPlain, int kStreams>
TORCHQ_NOINLINE void rnn_streamed_cells(const RnnStep& s, int64_t panel, int64_t apart,
                                        int32_t* dst, const RnnSums* before) {
  using V = Cells<Isa, kStreams>;
  constexpr int kParts = rnn_pauses(kCell) + rnn_stages(kCell) + 1;
  RnnStreams<Isa, kStreams> stream(s, panel, apart);
  const int64_t part = stream.rounds / kParts;
  const auto between = [&]() TORCHQ_INLINE_LAMBDA { stream.multiply(part); };
  between();
  rnn_epilogue<Isa, V, kCell, 0, kPlain>(s, before, between);
  if constexpr (rnn_stages(kCell) > 1) {
    between();
    rnn_epilogue<Isa, V, kCell, 1, kPlain>(s, before, between);
  }
  stream.end(s, dst, s.gates * kPanel);
}

template <class Isa, RnnCell kCell, bool kPlain, int kStreams>
void rnn_streamed_groups(const RnnStep& s) {
  using V = Cells<Isa, kStreams>;
  constexpr int kGates = rnn_gates(kCell), kGroup = kGates * kPanel;
  alignas(64) int32_t acc[2][kStreams * kGroup];
  RnnSums before[kStreams]{};
  const int each = s.groups / kStreams;
  for (int i = 0; i < each; ++i) {
    const int first = s.descending ? each - 1 - i : i;
    for (int g = 0; g < kGates; ++g) {
      const int gate = s.descending ? kGates - 1 - g : g;
      const int64_t panel = first * kGates + gate, apart = each * kGates;
      int32_t* const dst = acc[i & 1] + gate * kPanel;
      if (i > 0 && g == 0) {
        rnn_streamed_cells<Isa, kCell, kPlain, kStreams>(s, panel, apart, dst, before);
      } else {
        rnn_streamed_panel<Isa, kStreams>(s, panel, apart, dst);
      }
    }
    for (int j = 0; j < kStreams; ++j) {
      const int group = first + j * each;
      const int64_t unit = int64_t{group} * kPanel;
      const float* input = s.input == nullptr ? nullptr : s.input + group * s.input_group_stride;
      before[j] = {
          acc[i & 1] + j * kGroup, input, 0, unit, unit, s.multiplier + group * s.param_stride};
    }
  }
  rnn_epilogue<Isa, V, kCell, 0, kPlain>(s, before);
  if constexpr (rnn_stages(kCell) > 1) rnn_epilogue<Isa, V, kCell, 1, kPlain>(s, before);
}

template <class Isa, RnnCell kCell, bool kPlain>
void rnn_streamed(const RnnStep& s) {
  (s.streams == 1 ? &rnn_streamed_groups<Isa, kCell, kPlain, 1>
                  : &rnn_streamed_groups<Isa, kCell, kPlain, 2>)(s);
}

template <class Isa, RnnCell kCell>
void rnn_streamed(const RnnStep& s) {
  if constexpr (rnn_stages(kCell) > 1) {
    if (rnn_is_plain(s)) return rnn_streamed<Isa, kCell, true>(s);
  }
  rnn_streamed<Isa, kCell, false>(s);
}

}  // namespace
