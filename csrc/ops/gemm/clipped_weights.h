// SPDX-License-Identifier: Apache-2.0
// Clipped weights and their excess, for tiers that add pairs of products in 16 bits.
//
// Note [Clipped weights]
//
// VPMADDUBSW adds the products of two adjacent bytes in 16 bits. The sum is exact for every u8
// source if weights of one sign add up to no more than 128. Few pairs of a trained layer's 8-bit
// weights exceed that, since most weights are much smaller than the largest one, which sets the
// scale. In a copy the first weight of such a pair is clipped until both fit. The difference, its
// excess, is multiplied by VPMADDWD afterwards, for those quads of a panel that have any:
//   src0 w0 + src1 w1 = (src0 (w0 - excess) + src1 w1) + src0 excess
// Where many quads have an excess, 16-bit copies of all weights are faster.
#pragma once

#include <algorithm>

#include "kernels/table.h"
#include "ops/gemm/gemm_problem.h"
#include "runtime/scratch.h"

namespace torchq {

/// Returns true if at most a quarter of the quads have any excess, estimated from about 31 samples
/// of 4 quads, or from one in 17 quads if that is fewer. Zen 3, of the time with 16-bit weights:
/// with excess in 1, 10 and 20 % of the quads 0.80, 0.87 and 0.93, in 30 % 0.96 to 1.01.
/// Bell-shaped weights have excess in 1 % (long tails) to 50 % of the quads.
inline bool are_worth_clipping(const GemmProblem& p, const Kernels& tier) {
  constexpr int64_t kPlaces = 31, kQuads = 4, kQuadBytes = kPanel * kQuad;
  const int64_t used = p.used_panel_bytes() / kQuadBytes;
  const int64_t quads = int64_t{p.groups} * p.panels_per_group * used;
  if (quads == 0) return false;
  int8_t clipped[kQuads * kQuadBytes], excess[kQuads * kQuadBytes];
  int64_t index[kQuads], found = 0, seen = 0;
  // Odd, so that the places are not the same inputs of each panel.
  const int64_t step = std::max(quads / kPlaces, 4 * kQuads) | 1;
  for (int64_t i = 0; i < quads; i += step) {
    const int64_t panel = i / used, quad = i % used, count = std::min(kQuads, used - quad);
    const int8_t* packed = p.weight + panel * p.panel_bytes + quad * kQuadBytes;
    found += tier.clip(packed, count, clipped, excess, index);
    seen += count;
  }
  return found * 4 <= seen;
}

/// A block's panels, clipped by `Kernels::clip`, and their excess for one region.
class ClippedWeights {
 public:
  ClippedWeights(const GemmProblem& p, const Kernels& tier, int block_panels, ScratchFrame& scratch)
      : clip_(tier.clip), panel_bytes_(p.panel_bytes), quads_(p.used_panel_bytes() / kQuadBytes) {
    clipped_ = scratch.take<int8_t>(block_panels, panel_bytes_);
    excess_ = scratch.take<int8_t>(block_panels, panel_bytes_);
    index_ = scratch.take<int64_t>(block_panels, quads_);
    found_ = scratch.take<int64_t>(block_panels);
    list_ = scratch.take<GemmExcess::Quad>(block_panels, quads_);
    panels_ = scratch.take<GemmExcess>(block_panels);
  }

  void fill(const int8_t* packed, int panels) {
    for (int p = 0; p < panels; ++p) {
      const int64_t bytes = p * panel_bytes_;
      found_[p] =
          clip_(packed + bytes, quads_, clipped_ + bytes, excess_ + bytes, index_ + p * quads_);
    }
    num_panels_ = panels;
  }

  /// Sets `tile`, whose rows are of this region, to the block's panels.
  void enter(const TapRegion& region, GemmTile& tile) {
    for (int p = 0; p < num_panels_; ++p) {
      const int64_t *begin = index_ + p * quads_, *end = begin + found_[p];
      GemmExcess::Quad* const list = list_ + p * quads_;
      int64_t size = 0;
      for (const GemmRun& run : region.runs) {
        const int64_t first = run.weight_offset / kQuadBytes, behind = first + run.quads;
        for (const int64_t* i = std::lower_bound(begin, end, first); i != end && *i < behind; ++i) {
          list[size++] = {run.src_offset + (*i - first) * kQuad, (i - begin) * kQuadBytes};
        }
      }
      panels_[p] = {list, size, excess_ + p * panel_bytes_};
    }
    tile.weight = clipped_;
    tile.excess = panels_;
  }

 private:
  static constexpr int64_t kQuadBytes = kPanel * kQuad;

  int64_t (*const clip_)(const int8_t*, int64_t, int8_t*, int8_t*, int64_t*);
  const int64_t panel_bytes_, quads_;
  int num_panels_ = 0;
  int8_t *clipped_, *excess_;
  int64_t *index_, *found_;
  GemmExcess::Quad* list_;
  GemmExcess* panels_;
};

}  // namespace torchq
