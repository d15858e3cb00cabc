// SPDX-License-Identifier: Apache-2.0
// One row of a recurrent layer, which waits for weights: cells among the products of later ones.
//
// Note [Streams of cells]
// Weights come as Note [Streams] in gemm_stream.h says: as two streams, one for each half of the
// groups, or as one. A CPU looks some 100 vector instructions ahead, and a cell has as many: behind
// its products it costs all it takes, though products that wait for L2 leave the multipliers idle
// every other cycle. So the sums of a stream's group wait in L1 until the next group is multiplied,
// whose products part the steps of the cell's formula. Whole layers beside cells behind the
// products of 16 groups, in turns on Zen 4, one thread and two: an LSTM of 256 units takes 0.975
// and 0.95 of the time, a GRU 0.94 and 0.91; of 512 units 0.99 and 0.97, 0.96 and 0.95.
#pragma once

#include "gemm_stream.h"
#include "rnn_finish.h"

namespace {

/// Panels as large as those of 1024 units are one stream on Zen 4: an LSTM takes 0.96 to 0.98 of
/// the time.
constexpr int64_t kRnnLongPanelBytes = 16 * 1024;

/// Weights that gain, as one stream and as two. A GRU of 128 units, 48 KB, takes 0.93 of the time
/// as two; an LSTM of 96, 36 KB, all of it; one of 80, as one stream of 50 KB in each of two
/// threads, 1.04.
constexpr int64_t kRnnStreamLeastBytes[] = {64 * 1024, 40 * 1024};

/// The products of one row with a panel of each stream.
template <class Isa, int kStreams>
struct RnnStream {
  static constexpr int kQuads = kStreamQuads<kStreams>;
  typename Isa::Int sum[kQuads][kStreams];
  const uint8_t* src;
  const int8_t* weight;
  int64_t apart, steps;  // steps of kQuads quads
  /// A single stream of a descending step goes all the way back, the last quads first: weights that
  /// come from L3 take 1.05 of the time where it jumps from panel to panel. Two streams begin with
  /// the first quads, which do not wait for the units that the step before has just finished.
  bool back;

  TORCHQ_INLINE RnnStream(const RnnStep& s, int64_t panel, int64_t panels_apart)
      : apart(panels_apart * s.panel_stride),
        steps(s.quads / kQuads),
        back(kStreams == 1 && s.descending) {
    TORCHQ_UNROLL for (int i = 0; i < kStreams; ++i) {
      sum[0][i] = Isa::load_int(s.init + (panel + i * panels_apart) * kPanel);
      TORCHQ_UNROLL for (int q = 1; q < kQuads; ++q) sum[q][i] = Isa::zero();
    }
    const int64_t first = back ? (steps - 1) * kQuads : 0;
    src = s.src + first * kQuad;
    weight = s.weight + panel * s.panel_stride + first * kPanel * kQuad;
  }

  /// kCount quads from quad `k` on.
  template <int kCount>
  TORCHQ_INLINE void step(int64_t k) {
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
    steps -= count;
    for (int64_t i = 0; i < count; ++i) {
      step<kQuads>(0);
      src += on * kQuad;
      weight += on * kPanel * kQuad;
    }
  }

  /// All that is left, and the sums to dst, those of streams `dst_apart` from each other.
  TORCHQ_INLINE void end(const RnnStep& s, int32_t* dst, int64_t dst_apart) {
    multiply(steps);
    const int64_t whole = s.quads / kQuads * kQuads, at = back ? whole + kQuads : 0;
    for (int64_t k = 0; k < s.quads - whole; ++k) step<1>(at + k);
    TORCHQ_UNROLL for (int i = 0; i < kStreams; ++i) {
      auto all = sum[0][i];
      TORCHQ_UNROLL for (int q = 1; q < kQuads; ++q) all = Isa::add(all, sum[q][i]);
      Isa::store_int(dst + i * dst_apart, all);
    }
  }
};

/// The sums of a panel of each stream, `apart` panels from each other.
template <class Isa, int kStreams>
TORCHQ_NOINLINE void rnn_stream_panel(const RnnStep& s, int64_t panel, int64_t apart,
                                      int32_t* dst) {
  RnnStream<Isa, kStreams>(s, panel, apart).end(s, dst, s.gates * kPanel);
}

/// The same, and meanwhile the cells whose sums are `before`.
template <class Isa, RnnCell kCell, bool kPlain, int kStreams>
TORCHQ_NOINLINE void rnn_stream_cells(const RnnStep& s, int64_t panel, int64_t apart, int32_t* dst,
                                      const RnnSums* before) {
  using V = Cells<Isa, kStreams>;
  constexpr int kPauses = kCell == RnnCell::kLstm ? 9 : kCell == RnnCell::kGru ? 12 : 4;
  RnnStream<Isa, kStreams> stream(s, panel, apart);
  const int64_t part = stream.steps / (kPauses + 1);
  const auto between = [&]() __attribute__((always_inline)) { stream.multiply(part); };
  between();
  rnn_finish<Isa, V, kCell, 0, kPlain>(s, before, between);
  if constexpr (rnn_stages(kCell) > 1) {
    between();
    rnn_finish<Isa, V, kCell, 1, kPlain>(s, before, between);
  }
  stream.end(s, dst, s.gates * kPanel);
}

template <class Isa, RnnCell kCell, bool kPlain, int kStreams>
void rnn_stream_groups(const RnnStep& s) {
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
        rnn_stream_cells<Isa, kCell, kPlain, kStreams>(s, panel, apart, dst, before);
      } else {
        rnn_stream_panel<Isa, kStreams>(s, panel, apart, dst);
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
  rnn_finish<Isa, V, kCell, 0, kPlain>(s, before);
  if constexpr (rnn_stages(kCell) > 1) rnn_finish<Isa, V, kCell, 1, kPlain>(s, before);
}

inline int rnn_streams(const RnnStep& s) {
  return s.panel_stride >= kRnnLongPanelBytes || s.groups % 2 != 0 ? 1 : 2;
}

/// Whether one row reads all of its weights, and these are many enough.
template <class Isa>
inline bool rnn_takes_streams(const RnnStep& s) {
  return s.rows == 1 && s.source == nullptr && s.group_stride == s.gates * s.panel_stride &&
         s.groups * s.group_stride > kRnnStreamLeastBytes[rnn_streams(s) - 1] &&
         Isa::gains_from_streams();
}

template <class Isa, RnnCell kCell, bool kPlain>
void rnn_stream(const RnnStep& s) {
  (rnn_streams(s) == 1 ? &rnn_stream_groups<Isa, kCell, kPlain, 1>
                       : &rnn_stream_groups<Isa, kCell, kPlain, 2>)(s);
}

template <class Isa, RnnCell kCell>
void rnn_stream(const RnnStep& s) {
  if constexpr (rnn_stages(kCell) > 1) {
    if (rnn_is_plain(s)) return rnn_stream<Isa, kCell, true>(s);
  }
  rnn_stream<Isa, kCell, false>(s);
}

}  // namespace
