// SPDX-License-Identifier: Apache-2.0
// Many rows with two to four panels: the epilogue of a tile overlaps the products of the next one.
//
// Note [Pipelined tiles]
// The epilogue is software-pipelined: converting and storing tile i is interleaved with the dot
// products of tile i + 1. Zen multiplies with two of its four vector units; conversions, maxima and
// packing run on the other two. In one block after the last product they fill the queue of those
// two units, and the next tile waits: the epilogue of 24 sums in registers takes 60 cycles, with a
// residual 85. 12 sums wait in registers. Of 16 sums the compiler keeps six there and stores the
// others between products: a store waits for its sum, so 16 stores in a row cost 8 cycles and 24
// cost 30. With all 16 sums stored at once, 64 inputs take 1.05 of the time.
//
// Pipelined tiles read weights 1.5 to 2 times as often as others, so L1 or a fast L2 must hold
// them. Zen 5, against tiles that are not pipelined, with 64, 128, 256 and 768 inputs: 1.09x,
// 1.08x, 1.045x and 1.02x faster, with 1024 inputs 1.015x, with 2048 and more 1.00x; with a
// residual 1.15x, 1.13x and 1.06x. Zen 4, without a residual: 1.04x, 1.07x, 1.02x and 1.015x, with
// 512 inputs 1.02x, with 1024 1.01x.
#pragma once

#include "kernels/epilogue/register_epilogue.h"
#include "kernels/gemm/dot_step.h"

namespace {

/// Tiles of kPanels full panels. kResidual: the epilogue has one sum. kPrefetchNext: tile n
/// prefetches panel n of the next kPanels panels into L2.
template <class Isa, int kPanels, bool kFlip, bool kResidual, bool kPrefetchNext>
class PipelinedTiles {
 public:
  static constexpr int kSums = pipelined_sums(kPanels), kRows = kSums / kPanels;
  using Sums = typename Isa::Int[kRows][kPanels];

  PipelinedTiles(const GemmTile& tile, const Epilogue& epilogue, int panel)
      : t_(tile),
        e_(epilogue),
        last_panel_(tile.panels + tile.panels_behind - 1 - panel),
        channel_(tile.channel + panel * kPanel),
        dst_(static_cast<uint8_t*>(epilogue.dst) + channel_),
        is_signed_(epilogue.dst_dtype == DType::s8),
        multiplier_(epilogue.multiplier + channel_),
        offset_(epilogue.offset + channel_),
        acc_init_(tile.acc_init + panel * kPanel),
        panels_(tile.weight + panel * tile.panel_stride),
        panel_stride_(tile.panel_stride) {
    if constexpr (kResidual) {
      factor_ = epilogue.sums->scale + channel_;
      residual_ = static_cast<const uint8_t*>(epilogue.sums->data) + channel_;
      residual_is_signed_ = epilogue.sums->dtype == DType::s8;
    }
  }

  /// The rows from `first` on and before `end`, in whole tiles; returns the first that is left.
  TORCHQ_INLINE int run(int first, int end) {
    Sums acc;
    begin(acc, first);
    multiply_runs(acc, t_.runs);
    for (first += kRows; first + kRows <= end; first += kRows) {
      TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
        TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
          Isa::store_int(done_ + (r * kPanels + p) * kPanel, acc[r][p]);
        }
      }
      begin(acc, first);
      enter(*t_.runs);
      multiply_with_epilogue<0>(acc, t_.dst_offset + first - kRows);
      multiply(acc);
      multiply_runs(acc, t_.runs + 1);
    }
    pin_sums<Isa>(acc);
    register_epilogue<Isa, kRows, kPanels>(e_, acc, t_.dst_offset + first - kRows, channel_);
    return first;
  }

 private:
  TORCHQ_INLINE void begin(Sums& acc, int first) {
    asm("" : "+r"(acc_init_));  // from memory for each tile: registers are for sums
    TORCHQ_UNROLL for (int p = 0; p < kPanels; ++p) {
      const auto init = Isa::load_int(acc_init_ + p * kPanel);
      TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) acc[r][p] = init;
    }
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) row_[r] = t_.src + t_.row_offset[first + r];
    if constexpr (kPrefetchNext) {
      distance_ = min_int(kPanels + first / kRows, last_panel_) * panel_stride_;
    }
  }

  TORCHQ_INLINE void enter(const GemmRun& run) {
    k_ = run.src_offset;
    end_ = k_ + run.quads * kQuad;
    weight_ = panels_ + run.weight_offset;
  }

  TORCHQ_INLINE void multiply_quad(Sums& acc) {
    asm("" : "+r"(k_), "+r"(weight_));
    if constexpr (kPrefetchNext) Isa::prefetch_l2(weight_ + distance_);
    dot_step<Isa, kRows, kPanels, false>(acc, weight_, panel_stride_, [&](int r) {
      const auto quad = Isa::broadcast(row_[r] + k_);
      if constexpr (kFlip) return Isa::flip_sign(quad);
      return quad;
    });
    k_ += kQuad;
    weight_ += kPanel * kQuad;
  }

  /// Multiplies the rest of the run.
  TORCHQ_INLINE void multiply(Sums& acc) {
    while (k_ != end_) multiply_quad(acc);
  }

  TORCHQ_INLINE void multiply_runs(Sums& acc, const GemmRun* run) {
    for (; run != t_.runs + t_.num_runs; ++run) {
      enter(*run);
      multiply(acc);
    }
  }

  /// Sum i of the tile before and those behind it.
  template <int i>
  TORCHQ_INLINE void multiply_with_epilogue(Sums& acc, const int64_t* dst_offset) {
    if constexpr (i < kSums) {
      typename Isa::Int panels[Isa::kStoredPanels];
      multiply_with_epilogue<i, 0>(acc, panels, dst_offset);
      store<i>(panels, dst_offset);
      multiply_with_epilogue<i + Isa::kStoredPanels>(acc, dst_offset);
    }
  }

  /// Sum first + i and those behind it that are stored with it.
  template <int first, int i>
  TORCHQ_INLINE void multiply_with_epilogue(Sums& acc,
                                            typename Isa::Int (&panels)[Isa::kStoredPanels],
                                            const int64_t* dst_offset) {
    if constexpr (i < Isa::kStoredPanels) {
      constexpr int r = (first + i) / kPanels, p = (first + i) % kPanels;
      if constexpr (i % ends_per_quad(kPanels) == 0) multiply_quad(acc);
      panels[i] = epilogue(Isa::load_int(done_ + (first + i) * kPanel), p, dst_offset[r]);
      multiply_with_epilogue<first, i + 1>(acc, panels, dst_offset);
    }
  }

  /// Sums from `first` on, saturated.
  template <int first>
  TORCHQ_INLINE void store(const typename Isa::Int (&panels)[Isa::kStoredPanels],
                           const int64_t* dst_offset) {
    uint8_t* places[Isa::kStoredPanels];
    TORCHQ_UNROLL for (int i = 0; i < Isa::kStoredPanels; ++i) {
      const int r = (first + i) / kPanels, p = (first + i) % kPanels;
      places[i] = dst_ + dst_offset[r] + p * kPanel;
    }
    Isa::store_panels(places, panels, is_signed_);
  }

  TORCHQ_INLINE typename Isa::Int epilogue(typename Isa::Int sum, int p, int64_t dst_offset) {
    asm("" : "+r"(multiplier_), "+r"(offset_));  // from memory for each sum
    auto y = scaled<Isa>(sum, Isa::load(multiplier_ + p * kPanel), Isa::load(offset_ + p * kPanel));
    if constexpr (kResidual) {
      asm("" : "+r"(factor_));
      const uint8_t* from = residual_ + dst_offset + p * kPanel;
      const auto old = residual_is_signed_ ? Isa::load_s8(from) : Isa::load_u8(from);
      y = Isa::fma(Isa::to_float(old), Isa::load(factor_ + p * kPanel), y);
    }
    sum = Isa::to_int(y);
    Isa::pin(sum);
    return sum;
  }

  const GemmTile& t_;
  const Epilogue& e_;
  const int last_panel_;  // that there are weights of, counted from the tiles' first
  const int channel_;
  uint8_t* const dst_;
  const bool is_signed_;
  const float *multiplier_, *offset_;
  const float* factor_ = nullptr;
  const uint8_t* residual_ = nullptr;
  bool residual_is_signed_ = false;
  const int32_t* acc_init_;
  const int8_t* const panels_;
  const int64_t panel_stride_;
  int64_t distance_ = 0;

  const uint8_t* row_[kRows];
  int64_t k_, end_;
  const int8_t* weight_;
  alignas(64) int32_t done_[kSums * kPanel];  // the sums of the tile before
};

template <class Isa, int kPanels, bool kFlip, bool kResidual, bool kPrefetchNext>
TORCHQ_NOINLINE int pipelined_tiles(const GemmTile& t, const Epilogue& e, int panel, int first,
                                    int end) {
  return PipelinedTiles<Isa, kPanels, kFlip, kResidual, kPrefetchNext>(t, e, panel).run(first, end);
}

TORCHQ_INLINE bool is_pipelined(const GemmTile& t, int panels) {
  return t.plan.pipelined >> panels & 1;
}

/// kPanels full panels from `panel` on, where `is_pipelined`; returns the first row that is left.
/// With `prefetch_next` the first tiles prefetch the next panels.
template <class Isa, int kPanels>
TORCHQ_INLINE int gemm_pipelined(const GemmTile& t, const Epilogue& e, int panel,
                                 bool prefetch_next) {
  using Tiles = int (*)(const GemmTile&, const Epilogue&, int panel, int first, int end);
  static constexpr Tiles kPipelined[2][2] = {{&pipelined_tiles<Isa, kPanels, false, false, false>,
                                              &pipelined_tiles<Isa, kPanels, false, true, false>},
                                             {&pipelined_tiles<Isa, kPanels, true, false, false>,
                                              &pipelined_tiles<Isa, kPanels, true, true, false>}};
  constexpr int kRows = pipelined_sums(kPanels) / kPanels;
  static_assert(kFewRows >= kRows + 2, "`end` would be none, but a run is a tile or more");
  // A tile of one row or two would wait for L2, or for its sums.
  const int rest = t.rows % kRows, end = t.rows - (rest == 1 || rest == 2 ? kRows + rest : rest);
  int first = 0;
  if constexpr (kPanels == Isa::kMaxPanels) {
    static constexpr Tiles kPrefetching[2][2] = {
        {&pipelined_tiles<Isa, kPanels, false, false, true>,
         &pipelined_tiles<Isa, kPanels, false, true, true>},
        {&pipelined_tiles<Isa, kPanels, true, false, true>,
         &pipelined_tiles<Isa, kPanels, true, true, true>}};
    if (prefetch_next)
      first = kPrefetching[t.flip][e.num_sums](t, e, panel, 0, min_int(kPanels * kRows, end));
  }
  return first == end ? end : kPipelined[t.flip][e.num_sums](t, e, panel, first, end);
}

}  // namespace
