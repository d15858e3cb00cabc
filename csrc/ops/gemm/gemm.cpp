// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "kernels/cpu_tuning.h"
#include "ops/gemm/choose.h"
#include "ops/gemm/clipped_weights.h"
#include "ops/gemm/gemm_matrix.h"
#include "ops/gemm/widened_rows.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

/// A block of consecutive panels of one group.
struct Block {
  int group, panel, panels;
};

/// The next rows of `left`, up to `most`: full tiles of four, six or twelve rows, but the last ones
/// not far fewer than those before, if `most` is many.
int64_t rows_at_once(int64_t left, int64_t most) {
  constexpr int64_t kUnit = 12;
  static_assert(kGemmRows % kUnit == 0 && kGemmRows % 8 == 0 && kUnit % kTileRows == 0);
  if (left >= 2 * most || left <= most) return std::min(left, most);
  return std::min((left / 2 + kUnit - 1) / kUnit * kUnit, most);
}

/// One thread's share: rows x blocks.
class Worker {
 public:
  Worker(const GemmProblem& problem, const GemmChoice& choice, const Epilogue& epilogue,
         const Kernels& tier)
      : problem_(problem), choice_(choice), epilogue_(epilogue) {
    if (choice.weights == Weights::kClipped) {
      clipped_.emplace(problem, tier, choice.block_panels, scratch_);
    }
    if (choice.weights == Weights::kWidened) {
      widen_ = tier.widen;
      widening_ = tier.widening;
      widened_ = scratch_.take<int8_t>(choice.block_panels, problem.panel_bytes, widening_);
    }
    if (choice.widens_rows) widened_rows_.emplace(problem, tier, scratch_);
    tile_.row_offset = src_offset_;
    tile_.dst_offset = dst_offset_;
    tile_.flip = problem.flip;
    tile_.panel_stride = problem.panel_bytes;
    tile_.group_quads = choice.group_quads;
  }

  /// Rows outermost: those of a tile stay in L1 and the weights in L2; else blocks.
  void run(Range rows, Range blocks) {
    if (choice_.blocks_outer) {
      for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const bool has_next = b + 1 < blocks.end && !choice_.copies_weights();
        tile_.panels_behind = has_next ? block(b + 1).panels : 0;
        run_regions(rows, {b, b + 1});
      }
    } else {
      run_regions(rows, blocks);
    }
  }

 private:
  void run_regions(Range rows, Range blocks) {
    if (choice_.copies_weights()) copy(block(blocks.begin));
    int64_t first = 0;  // first row of the region
    for (const TapRegion& region : problem_.regions) {
      int64_t row = std::max(rows.begin - first, int64_t{0});
      const int64_t end = std::min(rows.end - first, region.rows());
      if (row < end) {
        tile_.runs = region.runs.data();
        tile_.num_runs = static_cast<int>(region.runs.size());
        const int64_t most = widened_rows_ ? widened_rows_->enter(region, tile_) : kGemmRows;
        if (clipped_) clipped_->enter(region, tile_);
        RowCursor cursor(region, row);
        while (row < end) {
          int64_t size = rows_at_once(end - row, most);
          if (is_small_group() && row + size < end) {  // lines that are cut begin and end twice
            const int64_t line = region.size[3], whole = (row + size) / line * line - row;
            size = whole > 0 ? whole : rows_at_once(line - row % line, most);
          }
          run_rows(region, cursor, static_cast<int>(size), blocks);
          row += size;
        }
      }
      first += region.rows();
    }
  }

  Block block(int64_t i) const {
    const int per_group = choice_.blocks_per_group, most = choice_.block_panels;
    const int group = static_cast<int>(i) / per_group;
    const int panel = static_cast<int>(i) % per_group * most;
    return {group, panel, std::min(most, choice_.panels_per_group - panel)};
  }

  bool is_small_group() const {
    return tile_.group_quads > 0 && tile_.group_quads * kQuad < kPanel;
  }

  void run_rows(const TapRegion& region, RowCursor& cursor, int rows, Range blocks) {
    cursor.next(rows, src_offset_, dst_offset_);
    GemmTile& tile = tile_;
    tile.rows = rows;
    for (int64_t i = blocks.begin; i < blocks.end; ++i) {
      const Block b = block(i);
      const int channel = b.panel * kPanel;
      tile.src = problem_.src + region.src_base + b.group * problem_.src_group_stride;
      if (tile.group_quads > 0) tile.src += channel;
      if (!choice_.copies_weights()) tile.weight = packed(b);
      tile.panels = b.panels;
      tile.channel = b.group * choice_.group_channels + channel;
      tile.channels = std::min(choice_.group_channels - channel, b.panels * kPanel);
      const int64_t first = (b.group * choice_.panels_per_group + b.panel) * kPanel;
      tile.acc_init = region.acc_init + first;
      if (widened_rows_) widened_rows_->fill(src_offset_, tile);
      if (choice_.plans_tiles) tile.plan = plan_tiles(tile, epilogue_);
      choice_.run(tile, epilogue_);
    }
    apply_last_step(rows, blocks);
  }

  /// The last step of the rows' results in these blocks.
  void apply_last_step(int rows, Range blocks) {
    if (problem_.last_step.table == nullptr || blocks.begin == blocks.end) return;
    const Block b = block(blocks.begin);
    const int64_t end = tile_.channel + tile_.channels;
    int64_t first = int64_t{b.group} * choice_.group_channels + b.panel * kPanel;
    // A panel of small groups that is not full has the channels before it once more.
    if (is_small_group()) first = std::min(first, end - kPanel);
    problem_.last_step.apply(static_cast<uint8_t*>(epilogue_.dst) + first, dst_offset_, rows,
                             end - first);
  }

  const int8_t* packed(const Block& b) const {
    return problem_.weight +
           (int64_t{b.group} * choice_.panels_per_group + b.panel) * problem_.panel_bytes;
  }

  void copy(const Block& b) {
    if (clipped_) return clipped_->fill(packed(b), b.panels);
    const int64_t stride = problem_.panel_bytes, used = problem_.used_panel_bytes();
    for (int p = 0; p < b.panels; ++p) {
      widen_(packed(b) + p * stride, used, widened_ + p * stride * widening_);
    }
    tile_.weight = widened_;
  }

  const GemmProblem& problem_;
  const GemmChoice& choice_;
  const Epilogue& epilogue_;
  void (*widen_)(const int8_t*, int64_t, int8_t*) = nullptr;
  int widening_ = 1;
  int8_t* widened_ = nullptr;
  ScratchFrame scratch_;
  std::optional<WidenedRows> widened_rows_;
  std::optional<ClippedWeights> clipped_;
  /// Fields that all rows and blocks share are set once.
  GemmTile tile_{};
  int64_t src_offset_[kGemmRows], dst_offset_[kGemmRows];
};

/// Rows of a pipelined tile (gemm_pipelined.h), and the rows of a thread from which one such tile
/// more or less is cheap.
constexpr int64_t kPipelinedRows = 4, kManyRows = 64;

/// Returns the first row after `work` quads of the problem; regions are cut at the nearest multiple
/// of `unit` rows.
int64_t row_at_work(const GemmProblem& p, int64_t work, int64_t unit) {
  int64_t first = 0;
  for (const TapRegion& region : p.regions) {
    const int64_t row_work = region.quads() + tuning::kEndQuads;
    if (work < region.rows() * row_work) {
      return first + std::min((work / row_work + unit / 2) / unit * unit, region.rows());
    }
    work -= region.rows() * row_work;
    first += region.rows();
  }
  return first;
}

void run_on_vectors(const GemmProblem& p, const GemmChoice& c, const Epilogue& epilogue,
                    const Kernels& tier) {
  // As much work for each, not as many rows: those at the border of an image meet fewer taps. With
  // two threads on Zen 4, 3x3 of 1024 channels in groups of 32 at 14x14 are 1.85 times as fast as
  // with one (as many rows: 1.56 to 1.77), of 128 channels at 28x28 1.955 times (1.90; cut within
  // tiles 1.87 to 1.94).
  int64_t work = 0;
  for (const TapRegion& region : p.regions)
    work += region.rows() * (region.quads() + tuning::kEndQuads);
  const int64_t blocks = int64_t{c.groups} * c.blocks_per_group;
  const int64_t unit = p.rows() >= c.row_parts * kManyRows ? kPipelinedRows : 1;
  parallel_parts(c.panel_parts * c.row_parts, [&](int i) {
    const Range part = part_of(work, c.row_parts, i / c.panel_parts);
    Worker worker(p, c, epilogue, tier);
    worker.run({row_at_work(p, part.begin, unit), row_at_work(p, part.end, unit)},
               part_of(blocks, c.panel_parts, i % c.panel_parts));
  });
}

}  // namespace

void LastStep::apply(uint8_t* dst, const int64_t* offset, int64_t rows, int64_t size) const {
  if (table == nullptr) return;
  for (int64_t r = 0; r < rows;) {
    const int64_t first = r++;
    if (offset[first] < 0) continue;
    while (r < rows && offset[r] == offset[r - 1] + size) ++r;  // side by side: one stretch
    lookup(dst + offset[first], table, dst + offset[first], (r - first) * size);
  }
}

void run_gemm(const GemmProblem& p, const Epilogue& epilogue, const Kernels& tier, OpTrace* trace) {
  GemmChoice choice = choose(p, tier);
  if (trace != nullptr) {
    trace->ran(tier, choice.kernel);
    if (epilogue.mode == Epilogue::kChain) {
      choice.reasons.add(
          "folded epilogue",
          "the post-ops are more than sums, linears, adds and muls and one relu or clip");
    }
    choice.log(p, epilogue);
  }
  if (choice.run == nullptr) return run_on_matrix_unit(p, choice, epilogue, *tier.matrix);
  run_on_vectors(p, choice, epilogue, tier);
}

const int32_t* make_acc_init(ScratchFrame& scratch, const Kernels& tier,
                             const int32_t* compensation, c10::ArrayRef<int32_t> taps,
                             const int32_t* bias, int32_t zero_point, int groups,
                             int group_channels, int panels_per_group) {
  const int64_t group_size = int64_t{panels_per_group} * kPanel;
  int32_t* init = scratch.take<int32_t>(groups, group_size);
  std::memset(init, 0, static_cast<size_t>(groups * group_size) * sizeof(int32_t));
  if (zero_point == 0 && bias == nullptr) return init;
  for (int g = 0; g < groups; ++g) {
    const int64_t channel = int64_t{g} * group_channels;
    tier.compensate(compensation + channel, int64_t{groups} * group_channels, taps.data(),
                    static_cast<int>(taps.size()), bias == nullptr ? nullptr : bias + channel,
                    zero_point, group_channels, init + g * group_size);
  }
  return init;
}

}  // namespace torchq
