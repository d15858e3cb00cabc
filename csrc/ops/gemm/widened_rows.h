// SPDX-License-Identifier: Apache-2.0
// Sources of tiers that multiply 16 bits: rows copied once for all panels of a block.
#pragma once

#include <algorithm>

#include "kernels/cpu_tuning.h"
#include "kernels/table.h"
#include "ops/gemm/gemm_problem.h"
#include "runtime/scratch.h"

namespace torchq {

/// The rows of a kernel's call, their runs side by side, as `Kernels::widen_src` makes them.
/// Measured on Zen 5 with AVX2, against quads split in each tile: linear layers and 3x3 of 128
/// channels 1.17 times as fast, 64 to 64 channels 1.05; one panel alone, 3x3 of 16 to 16, 0.82.
class WidenedRows {
 public:
  WidenedRows(const GemmProblem& problem, const Kernels& tier, ScratchFrame& scratch)
      : widen_src_(tier.widen_src) {
    raw_.flip = problem.flip;
    int64_t quads = 0;
    size_t runs = 0;
    for (const TapRegion& region : problem.regions) {
      quads = std::max(quads, region.quads());
      runs = std::max(runs, region.runs.size());
    }
    runs_ = scratch.take<GemmRun>(static_cast<int64_t>(runs));
    rows_ =
        scratch.take<uint8_t>(std::max(tuning::kWidenedRowBytes, kLeastRows * quads * kWideQuad));
  }

  /// Sets `tile` to the region's runs, joined where their weights are side by side, too; returns
  /// how many rows a call may have.
  int64_t enter(const TapRegion& region, GemmTile& tile) {
    raw_.runs = region.runs.data();
    raw_.num_runs = static_cast<int>(region.runs.size());
    int64_t row_bytes = 0, weight_end = -1;
    tile.num_runs = 0;
    for (const GemmRun& run : region.runs) {
      if (run.weight_offset == weight_end) {
        runs_[tile.num_runs - 1].quads += run.quads;
      } else {
        runs_[tile.num_runs++] = {row_bytes, run.weight_offset, run.quads};
      }
      row_bytes += run.quads * kWideQuad;
      weight_end = run.weight_offset + run.quads * kQuad * kPanel;
    }
    for (int r = 0; r < kMostRows; ++r) offset_[r] = r * row_bytes;
    tile.runs = runs_;
    tile.row_offset = offset_;
    tile.flip = false;
    tile.widened = true;
    return most_ = most_rows(region.quads());
  }

  /// Copies the tile's rows, which begin at its src + src_offset[row], and makes them its src.
  void fill(const int64_t* src_offset, GemmTile& tile) {
    TORCH_INTERNAL_ASSERT(tile.rows <= most_, "a call of ", tile.rows, " rows overwrites scratch");
    raw_.src = tile.src;
    raw_.row_offset = src_offset;
    raw_.rows = tile.rows;
    widen_src_(raw_, rows_);
    tile.src = rows_;
  }

 private:
  static constexpr int64_t kWideQuad = 2 * kQuad;  // bytes
  static constexpr int64_t kMostRows = 8 * kTileRows;
  /// Few rows pass at once: with all weights, which more than one pass would read again.
  static constexpr int64_t kLeastRows = 3 * kTileRows;
  static_assert(kLeastRows >= kFewRows);
  /// Rows that stay in L2 beside the weights of a block.
  static int64_t most_rows(int64_t quads) {
    const int64_t tiles =
        tuning::kWidenedRowBytes / (std::max<int64_t>(quads, 1) * kWideQuad * kTileRows);
    return std::clamp<int64_t>(tiles * kTileRows, kLeastRows, kMostRows);
  }

  void (*const widen_src_)(const GemmTile&, uint8_t*);
  GemmTile raw_{};  // the rows as they were
  GemmRun* runs_;
  uint8_t* rows_;
  int64_t most_ = 0;
  int64_t offset_[kMostRows];
};

}  // namespace torchq
