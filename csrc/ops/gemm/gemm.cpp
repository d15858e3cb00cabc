// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/gemm.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "ops/gemm/clipped_weights.h"
#include "ops/gemm/gemm_matrix.h"
#include "ops/gemm/widened_rows.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/verbose.h"

namespace torchq {
namespace {

/// Panels per block: what one pass of the widest tile covers.
constexpr int kBlockPanels = 4;
/// A block of consecutive panels of one group.
struct Block {
  int group, panel, panels;
};

struct Blocking {
  int per_group;     // blocks in a group
  int block_panels;  // panels of a full block

  Block block(const GemmProblem& p, int i) const {
    const int group = i / per_group, panel = i % per_group * block_panels;
    return {group, panel, std::min(block_panels, p.panels_per_group - panel)};
  }
};

using GemmFn = void (*)(const GemmTile&, const Epilogue&);

/// Form in which a tier multiplies weights: packed bytes by one instruction, or by two where all
/// pairs fit 16 bits; clipped bytes where few pairs do not; 16-bit values, made by each tile or
/// once.
enum class Weights { kBytes, kNarrow, kClipped, kSplit, kWidened };

/// Rows up to which copies of the weights cost more than they save, clipped ones or 16-bit ones.
/// Measured on Zen 3, against the latter: linear layers of 768x768 take 0.43, 0.60, 0.76 and 0.93
/// of the time with 1, 4, 8 and 16 rows, with 128 rows 1.04; 3x3 of 512 channels, 49 rows, 0.92.
/// Against clipped ones with long tails 16 rows take 0.98 to 1.08, 8 rows 0.82 to 0.9.
constexpr int64_t kSplitBeforeClipped = 16, kSplitBeforeWidened = 64;

Weights weights_of(const GemmProblem& p, const Kernels& tier) {
  if (tier.widening == 1) return Weights::kBytes;
  if (p.narrow) return Weights::kNarrow;
  if (tier.clip == nullptr || tier.gemm_split == nullptr || p.group_quads > 0) {
    return Weights::kWidened;
  }
  const int64_t rows = p.rows();
  if (rows <= kSplitBeforeClipped) return Weights::kSplit;
  if (are_worth_clipping(p, tier)) return Weights::kClipped;
  return rows <= kSplitBeforeWidened ? Weights::kSplit : Weights::kWidened;
}

GemmFn kernel_of(const GemmProblem& p, const Kernels& tier, Weights weights) {
  const bool narrow = weights == Weights::kNarrow || weights == Weights::kClipped;
  if (weights == Weights::kSplit) return tier.gemm_split;
  if (p.group_quads == 0) return narrow ? tier.gemm_narrow : tier.gemm;
  if (p.group_quads * kQuad >= kPanel) return tier.gemm_groups;
  return narrow ? tier.small_groups_narrow : tier.small_groups;
}

const char* why_not_clipped(const GemmProblem& p, const Kernels& tier, Weights weights) {
  if (weights == Weights::kNarrow || weights == Weights::kClipped) return nullptr;
  if (tier.clip == nullptr || p.group_quads > 0) return nullptr;  // not to be had
  return p.rows() <= kSplitBeforeClipped ? "there are 16 rows or fewer"
                                         : "more than a quarter of the quads hold such weights";
}

const char* name_of(const GemmProblem& p, Weights weights) {
  const bool narrow = weights == Weights::kNarrow;
  if (weights == Weights::kClipped) return "gemm_clipped";
  if (weights == Weights::kSplit) return "gemm_split";
  if (p.group_quads == 0) return narrow ? "gemm_narrow" : "gemm";
  if (p.group_quads * kQuad >= kPanel) return "gemm_groups";
  return narrow ? "small_groups_narrow" : "small_groups";
}

/// Quads of a group whose panels `Kernels::gemm_groups` takes together with other groups', else 0.
int joined_quads(const GemmProblem& p, const Kernels& tier) {
  const int channels = p.group_channels;
  const bool joins = tier.gemm_groups != nullptr && p.groups > 1 &&
                     p.src_group_stride == channels &&
                     (channels == kPanel || channels == 2 * kPanel);
  return joins ? channels / kQuad : 0;
}

/// The same problem, its groups as one.
GemmProblem join_groups(GemmProblem p, int group_quads) {
  p.group_quads = group_quads;
  p.group_channels *= p.groups;
  p.panels_per_group *= p.groups;
  p.groups = 1;
  return p;
}

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
  Worker(const GemmProblem& problem, const Epilogue& epilogue, const Kernels& tier, Weights weights,
         const Blocking& blocking)
      : problem_(problem),
        epilogue_(epilogue),
        blocking_(blocking),
        gemm_(kernel_of(problem, tier, weights)) {
    if (weights == Weights::kClipped) {
      clipped_.emplace(problem, tier, blocking.block_panels, scratch_);
    }
    if (weights == Weights::kWidened) {
      widen_ = tier.widen;
      widening_ = tier.widening;
      widened_ = scratch_.take<int8_t>(blocking.block_panels * problem.panel_bytes * widening_);
    }
    // One panel alone would use the copies once.
    if ((weights == Weights::kWidened || weights == Weights::kSplit) && tier.widen_src != nullptr &&
        problem.group_quads == 0 && problem.panels_per_group > 1) {
      widened_rows_.emplace(problem, tier, scratch_);
    }
    tile_.row_offset = src_offset_;
    tile_.dst_offset = dst_offset_;
    tile_.flip = problem.flip;
    tile_.panel_stride = problem.panel_bytes;
    tile_.group_quads = problem.group_quads;
  }

  /// Blocks outermost where the weights of one block are worth keeping (they are large, or were
  /// copied), else rows outermost: those of a tile stay in L1 and the weights in L2.
  void run(Range rows, Range blocks, bool blocks_outer) {
    if (blocks_outer) {
      for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const bool has_next = b + 1 < blocks.end && !copies_weights();
        tile_.panels_behind =
            has_next ? blocking_.block(problem_, static_cast<int>(b + 1)).panels : 0;
        run_regions(rows, {b, b + 1});
      }
    } else {
      run_regions(rows, blocks);
    }
  }

 private:
  void run_regions(Range rows, Range blocks) {
    if (copies_weights()) copy(blocking_.block(problem_, static_cast<int>(blocks.begin)));
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

  bool is_small_group() const {
    return tile_.group_quads > 0 && tile_.group_quads * kQuad < kPanel;
  }

  void run_rows(const TapRegion& region, RowCursor& cursor, int rows, Range blocks) {
    cursor.next(rows, src_offset_, dst_offset_);
    GemmTile& tile = tile_;
    tile.rows = rows;
    for (int64_t i = blocks.begin; i < blocks.end; ++i) {
      const Block b = blocking_.block(problem_, static_cast<int>(i));
      const int channel = b.panel * kPanel;
      tile.src = problem_.src + region.src_base + b.group * problem_.src_group_stride;
      if (tile.group_quads > 0) tile.src += channel;
      if (!copies_weights()) tile.weight = packed(b);
      tile.panels = b.panels;
      tile.channel = b.group * problem_.group_channels + channel;
      tile.channels = std::min(problem_.group_channels - channel, b.panels * kPanel);
      const int64_t first = (b.group * problem_.panels_per_group + b.panel) * kPanel;
      tile.acc_init = region.acc_init + first;
      if (widened_rows_) widened_rows_->fill(src_offset_, tile);
      gemm_(tile, epilogue_);
    }
    apply_last_step(rows, blocks);
  }

  /// The last step of the rows' results in these blocks.
  void apply_last_step(int rows, Range blocks) {
    if (problem_.last_step.table == nullptr || blocks.begin == blocks.end) return;
    const auto channel_of = [&](const Block& b) {
      return int64_t{b.group} * problem_.group_channels + b.panel * kPanel;
    };
    const int64_t end = tile_.channel + tile_.channels;
    int64_t first = channel_of(blocking_.block(problem_, static_cast<int>(blocks.begin)));
    // A panel of small groups that is not full has the channels before it once more.
    if (is_small_group()) first = std::min(first, end - kPanel);
    problem_.last_step.apply(static_cast<uint8_t*>(epilogue_.dst) + first, dst_offset_, rows,
                             end - first);
  }

  const int8_t* packed(const Block& b) const {
    return problem_.weight +
           (int64_t{b.group} * problem_.panels_per_group + b.panel) * problem_.panel_bytes;
  }

  bool copies_weights() const { return widen_ != nullptr || clipped_; }
  void copy(const Block& b) {
    if (clipped_) return clipped_->fill(packed(b), b.panels);
    const int64_t stride = problem_.panel_bytes, used = problem_.used_panel_bytes();
    for (int p = 0; p < b.panels; ++p) {
      widen_(packed(b) + p * stride, used, widened_ + p * stride * widening_);
    }
    tile_.weight = widened_;
  }

  const GemmProblem& problem_;
  const Epilogue& epilogue_;
  const Blocking blocking_;
  const GemmFn gemm_;
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

/// Cost of a sum's epilogue in quads: for 4 rows x 4 panels it takes 38 cycles on Zen 4.
constexpr int64_t kEndQuads = 2;

/// Rows of a pipelined tile (gemm_pipelined.h), and the rows of a thread from which one such tile
/// more or less is cheap.
constexpr int64_t kPipelinedRows = 4, kManyRows = 64;

/// Returns the first row after `work` quads of the problem; regions are cut at the nearest multiple
/// of `unit` rows.
int64_t row_at_work(const GemmProblem& p, int64_t work, int64_t unit) {
  int64_t first = 0;
  for (const TapRegion& region : p.regions) {
    const int64_t row_work = region.quads() + kEndQuads;
    if (work < region.rows() * row_work) {
      return first + std::min((work / row_work + unit / 2) / unit * unit, region.rows());
    }
    work -= region.rows() * row_work;
    first += region.rows();
  }
  return first;
}

void run_on_vectors(const GemmProblem& p, const Epilogue& epilogue, const Kernels& tier,
                    Weights weights) {
  int64_t tiles = 0, row_quads = 0;
  for (const TapRegion& region : p.regions) {
    tiles += region.tiles();
    row_quads += region.rows() * region.quads();
  }
  const int64_t panels = int64_t{p.groups} * p.panels_per_group;
  const int threads = threads_for(row_quads * kQuad * panels * kPanel);
  const bool large_weights = panels * p.panel_bytes > kResidentWeightBytes;
  // Few rows or large weights: each thread takes its own channels, whose weights stay in its cache.
  // Not of small groups, whose last two panels may share channels.
  const int group_panels = std::max(p.group_quads * kQuad / kPanel, 1);
  const bool split_blocks =
      threads > 1 && p.group_quads * kQuad % kPanel == 0 && (large_weights || tiles < 4 * threads);
  const bool copies = weights == Weights::kWidened || weights == Weights::kClipped;
  // The kernel takes few rows through all panels itself; what a call costs is 5 % of 1x768->768.
  const bool few_rows = p.rows() <= kFewRows && !copies;
  const bool blocks_outer = copies || (large_weights && !few_rows);
  Blocking blocking{};
  blocking.block_panels = blocks_outer || split_blocks ? kBlockPanels : p.panels_per_group;
  if (split_blocks && few_rows) {  // one block a thread
    const int64_t tile_columns = (panels + kBlockPanels - 1) / kBlockPanels;
    blocking.block_panels = static_cast<int>((tile_columns + threads - 1) / threads) * kBlockPanels;
  }
  if (split_blocks && panels < int64_t{threads} * kBlockPanels) {
    blocking.block_panels =
        std::max(static_cast<int>(panels) / threads / group_panels, 1) * group_panels;
  }
  blocking.block_panels = std::min(blocking.block_panels, p.panels_per_group);
  blocking.per_group = (p.panels_per_group + blocking.block_panels - 1) / blocking.block_panels;
  const int64_t blocks = int64_t{p.groups} * blocking.per_group;

  const int block_parts = split_blocks ? static_cast<int>(std::min<int64_t>(threads, blocks)) : 1;
  // As much work for each, not as many rows: those at the border of an image meet fewer taps. With
  // two threads on Zen 4, 3x3 of 1024 channels in groups of 32 at 14x14 are 1.85 times as fast as
  // with one (as many rows: 1.56 to 1.77), of 128 channels at 28x28 1.955 times (1.90; cut within
  // tiles 1.87 to 1.94).
  const int row_parts = static_cast<int>(std::min<int64_t>(threads / block_parts, tiles));
  const int64_t work = row_quads + kEndQuads * p.rows();
  const int64_t unit = p.rows() >= row_parts * kManyRows ? kPipelinedRows : 1;
  parallel_parts(block_parts * row_parts, [&](int i) {
    const Range part = part_of(work, row_parts, i / block_parts);
    Worker worker(p, epilogue, tier, weights, blocking);
    worker.run({row_at_work(p, part.begin, unit), row_at_work(p, part.end, unit)},
               part_of(blocks, block_parts, i % block_parts), blocks_outer);
  });
}

}  // namespace

void run_gemm(const GemmProblem& p, const Epilogue& epilogue, const Kernels& tier, OpTrace& trace) {
  const char* why_not = why_not_matrix_unit(p, tier);
  const bool matrix = why_not == nullptr;
  const int joined = matrix ? 0 : joined_quads(p, tier);
  const Weights weights = matrix ? Weights::kBytes : weights_of(p, tier);
  trace.ran(tier, matrix ? "gemm_matrix" : joined > 0 ? "gemm_groups" : name_of(p, weights));
  if (logs_kernel_choice()) {
    log_rejected("gemm_matrix", why_not);
    if (tier.widening > 1 && !p.narrow) {
      log_rejected("gemm_narrow", "adjacent weights of one sign add up to more than 128");
    }
    log_rejected("gemm_clipped", why_not_clipped(p, tier, weights));
    if (epilogue.mode == Epilogue::kChain) {
      log_rejected("folded epilogue",
                   "the post-ops are more than sums, linears, adds and muls and one relu or clip");
    }
  }
  if (matrix) return run_on_matrix_unit(p, epilogue, *tier.matrix);
  if (joined > 0) return run_on_vectors(join_groups(p, joined), epilogue, tier, weights);
  run_on_vectors(p, epilogue, tier, weights);
}

void run_gemm(const GemmProblem& p, const Epilogue& epilogue, const Kernels& tier) {
  if (why_not_matrix_unit(p, tier) == nullptr) return run_on_matrix_unit(p, epilogue, *tier.matrix);
  run_on_vectors(p, epilogue, tier, weights_of(p, tier));
}

const int32_t* make_acc_init(ScratchFrame& scratch, const Kernels& tier,
                             const at::Tensor& compensation, c10::ArrayRef<int32_t> taps,
                             const std::optional<at::Tensor>& acc_bias, int32_t zero_point,
                             int groups, int group_channels, int panels_per_group) {
  const int64_t group_size = int64_t{panels_per_group} * kPanel;
  int32_t* init = scratch.take<int32_t>(groups * group_size);
  std::memset(init, 0, static_cast<size_t>(groups * group_size) * sizeof(int32_t));
  if (zero_point == 0 && !acc_bias.has_value()) return init;
  const int32_t* bias = acc_bias.has_value() ? acc_bias->const_data_ptr<int32_t>() : nullptr;
  for (int g = 0; g < groups; ++g) {
    const int64_t channel = int64_t{g} * group_channels;
    tier.compensate(compensation.const_data_ptr<int32_t>() + channel, compensation.size(1),
                    taps.data(), static_cast<int>(taps.size()),
                    bias == nullptr ? nullptr : bias + channel, zero_point, group_channels,
                    init + g * group_size);
  }
  return init;
}

const int32_t* AccInits::of(c10::ArrayRef<int32_t> taps) {
  const bool adds_nothing = zero_point_ == 0 || taps.empty();
  if (adds_nothing && bias_only_ != nullptr) return bias_only_;
  const int32_t* const init =
      make_acc_init(scratch_, tier_, compensation_, taps, acc_bias_, zero_point_, problem_.groups,
                    problem_.group_channels, problem_.panels_per_group);
  if (adds_nothing) bias_only_ = init;
  return init;
}

void check_acc_bias(const char* op, const std::optional<at::Tensor>& acc_bias, int64_t channels) {
  if (!acc_bias.has_value()) return;
  check_param(op, "acc_bias", *acc_bias, at::kInt);
  check_numel(op, "acc_bias", *acc_bias, channels);
}

double max_accumulator(int64_t reduction, const std::optional<at::Tensor>& acc_bias) {
  return acc_bias.has_value() ? 2147483648.0 : 255.0 * 128.0 * static_cast<double>(reduction);
}

bool pairs_fit(const char* op, const at::Tensor& pair_bound, int64_t panels) {
  check_param(op, "pair_bound", pair_bound, at::kInt);
  check_numel(op, "pair_bound", pair_bound, panels);
  const int32_t* bound = pair_bound.const_data_ptr<int32_t>();
  return std::all_of(bound, bound + panels, [](int32_t b) { return b <= 128; });
}

}  // namespace torchq
