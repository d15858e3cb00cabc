// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/choose.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "kernels/cpu_tuning.h"
#include "ops/gemm/clipped_weights.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

/// Panels per block: those of one pass of the widest tile.
constexpr int kBlockPanels = 4;

/// Bytes from each row to the next where that is one number, else 0.
int64_t row_step(const TapRegion& region) {
  int64_t step = 0, extent = 0;
  for (int d = 3; d >= 0; --d) {
    if (region.size[d] == 1) continue;
    if (step != 0 && region.src_stride[d] != extent) return 0;
    if (step == 0) step = region.src_stride[d];
    extent = region.src_stride[d] * region.size[d];
  }
  return step;
}

/// Returns true if runs have too few quads for their chunks.
bool are_short(int64_t runs, int64_t quads) {
  return runs > 1 &&
         runs * quads < tuning::kQuadsPerChunk * runs * chunks_of(quads) + tuning::kQuadsPerUnit;
}

/// All rows as one line, as in a linear layer or a 1x1 convolution; else one for each image or
/// volume's plane, over what lies between the ends of its rows; else one for each image row.
Lines lines_of(const GemmProblem& p, const TapRegion& region) {
  if (p.flip || region.runs.empty()) return {};
  const auto is_alike = [&](const GemmRun& run) { return run.quads == region.runs[0].quads; };
  if (!std::all_of(region.runs.begin(), region.runs.end(), is_alike)) return {};
  const int64_t rows = region.rows(), width = region.size[3],
                planes = region.size[0] * region.size[1];
  Lines best;
  const auto consider = [&](const Lines& lines) {
    if (lines.length < kUnitRows) return;
    if (best.count == 0 || lines.units() < best.units()) best = lines;
  };
  if (const int64_t even = row_step(region); even > 0) consider({1, rows, rows, rows, even});
  const int64_t step = region.src_stride[3], pitch = step > 0 ? region.src_stride[2] / step : 0;
  consider({planes * region.size[2], width, width, width, step});
  if (pitch >= width && pitch * step == region.src_stride[2]) {
    consider({planes, (region.size[2] - 1) * pitch + width, pitch, width, step});
  }
  const int64_t panels = p.panels_per_group, runs = static_cast<int64_t>(region.runs.size());
  const int64_t chunks = runs * chunks_of(region.runs[0].quads);
  if (are_short(runs, region.runs[0].quads)) return {};
  const int64_t tails = has_tails(region) ? tuning::kTailUnits * panels * runs : 0;
  const int64_t in_place = best.units() * panels * chunks + tails;
  const int64_t gathered =
      units_of(rows) * (panels + tuning::kGatherPanels) * chunks_of(span_of(region).quads);
  return in_place <= gathered ? best : Lines{};
}

/// Gathering few even rows is cheap.
bool is_even(const GemmProblem& p, const TapRegion& region) {
  return !p.flip && region.runs.size() == 1 && row_step(region) > 0 &&
         (region.runs[0].quads < kChunkQuads || region.runs[0].quads % kChunkQuads == 0);
}

bool gathering_pays(const GemmProblem& p, const TapRegion& region) {
  return p.panels_per_group * region.quads() >= tuning::kMinGatherQuads;
}

/// Fills the lines and shares of a matrix unit, or returns why it does not run.
const char* choose_matrix_unit(const GemmProblem& p, const Kernels& tier, GemmChoice& c) {
  if (tier.matrix == nullptr) return "the tier has none";
  if (p.group_quads > 0) return "groups of 4 or 8 channels have a kernel of their own";
  if (p.panel_bytes == 0) return "there is nothing to sum";
  if (p.rows() < tuning::kMinUnitRows)
    return "so few rows wait for the weights' way through memory";
  int64_t tiles = 0, row_quads = 0;
  for (const TapRegion& region : p.regions) {
    const Lines lines = lines_of(p, region);
    if (lines.count == 0 && !is_even(p, region) && !gathering_pays(p, region)) {
      return "a row would be gathered for few quads of weights";
    }
    c.lines.push_back(lines);
    tiles += tiles_of(lines, region);
    row_quads += region.rows() * region.quads();
  }
  const int64_t panels = int64_t{p.groups} * p.panels_per_group;
  const int threads = threads_for(row_quads * kQuad * panels * kPanel, tuning::kMatrixGrain);
  const bool split_panels =
      threads > 1 && (panels * p.panel_bytes > tuning::kResidentWeightBytes || tiles < 4 * threads);
  const int64_t shares = (panels + kSharePanels - 1) / kSharePanels;
  c.panel_parts = split_panels ? static_cast<int>(std::min<int64_t>(threads, shares)) : 1;
  c.row_parts = static_cast<int>(std::min<int64_t>(threads / c.panel_parts, tiles));
  return nullptr;
}

Weights choose_weights(const GemmProblem& p, const Kernels& tier, Reasons& reasons) {
  if (tier.widening == 1) return Weights::kBytes;
  if (p.narrow) return Weights::kNarrow;
  reasons.add("gemm_narrow", "adjacent weights of one sign add up to more than 128");
  if (tier.gemm_split == nullptr || p.group_quads > 0) return Weights::kWidened;
  const int64_t rows = p.rows();
  if (rows <= tuning::kSplitBeforeClipped) {
    reasons.add("gemm_clipped", "there are few rows");
    return Weights::kSplit;
  }
  if (are_worth_clipping(p, tier)) return Weights::kClipped;
  reasons.add("gemm_clipped", "too many quads hold such weights");
  return rows <= tuning::kSplitBeforeWidened ? Weights::kSplit : Weights::kWidened;
}

/// Groups of one or two panels that tiles of several groups take together.
void join_groups(const GemmProblem& p, const Kernels& tier, GemmChoice& c) {
  const int channels = p.group_channels;
  if (tier.gemm_groups == nullptr || p.groups <= 1 || p.src_group_stride != channels ||
      (channels != kPanel && channels != 2 * kPanel)) {
    return;
  }
  c.group_quads = channels / kQuad;
  c.group_channels *= p.groups;
  c.panels_per_group *= p.groups;
  c.groups = 1;
}

void choose_kernel(const Kernels& tier, GemmChoice& c) {
  const bool narrow = c.weights == Weights::kNarrow || c.weights == Weights::kClipped;
  const auto take = [&](const char* name, auto* kernel) { c.kernel = name, c.run = kernel; };
  if (c.weights == Weights::kSplit) return take("gemm_split", tier.gemm_split);
  if (c.weights == Weights::kClipped) return take("gemm_clipped", tier.gemm_narrow);
  if (c.group_quads * kQuad >= kPanel) return take("gemm_groups", tier.gemm_groups);
  if (c.group_quads > 0) {
    return narrow ? take("small_groups_narrow", tier.small_groups_narrow)
                  : take("small_groups", tier.small_groups);
  }
  return narrow ? take("gemm_narrow", tier.gemm_narrow) : take("gemm", tier.gemm);
}

void choose_blocks(const GemmProblem& p, GemmChoice& c) {
  int64_t tiles = 0, row_quads = 0;
  for (const TapRegion& region : p.regions) {
    tiles += region.tiles();
    row_quads += region.rows() * region.quads();
  }
  const int64_t panels = int64_t{c.groups} * c.panels_per_group;
  const int threads = threads_for(row_quads * kQuad * panels * kPanel);
  const bool large_weights = panels * p.panel_bytes > tuning::kResidentWeightBytes;
  // Few rows or large weights: each thread takes its own channels, whose weights stay in its cache.
  // Not of small groups, whose last two panels may share channels.
  const int group_panels = std::max(c.group_quads * kQuad / kPanel, 1);
  const bool split_blocks =
      threads > 1 && c.group_quads * kQuad % kPanel == 0 && (large_weights || tiles < 4 * threads);
  // The kernel takes few rows through all panels itself; what a call costs is 5 % of 1x768->768.
  const bool few_rows = p.rows() <= kFewRows && !c.copies_weights();
  c.blocks_outer = c.copies_weights() || (large_weights && !few_rows);
  c.block_panels = c.blocks_outer || split_blocks ? kBlockPanels : c.panels_per_group;
  if (split_blocks && few_rows) {  // one block a thread
    const int64_t tile_columns = (panels + kBlockPanels - 1) / kBlockPanels;
    c.block_panels = static_cast<int>((tile_columns + threads - 1) / threads) * kBlockPanels;
  }
  if (split_blocks && panels < int64_t{threads} * kBlockPanels) {
    c.block_panels = std::max(static_cast<int>(panels) / threads / group_panels, 1) * group_panels;
  }
  c.block_panels = std::min(c.block_panels, c.panels_per_group);
  c.blocks_per_group = (c.panels_per_group + c.block_panels - 1) / c.block_panels;
  const int64_t blocks = int64_t{c.groups} * c.blocks_per_group;
  c.panel_parts = split_blocks ? static_cast<int>(std::min<int64_t>(threads, blocks)) : 1;
  c.row_parts = static_cast<int>(std::min<int64_t>(threads / c.panel_parts, tiles));
}

/// Most rows that are bound by weights rather than by products.
constexpr int kStreamedRows = 4;
/// Rows of tiles of three panels, and of four.
constexpr int kTallRows = 8, kWideRows = kTileRows;

/// Tiles of few rows. Streams serve many weights; not pixels at corners of images, which skip
/// weights, and read those that other pixels have just read. One row or two else take wide tiles:
/// on Emerald Rapids 1.02 to 1.08x faster from L2, 1.01x from L3. Tiles of three panels, which have
/// more rows than those of four, may save a pass over weights beyond L1 (up to 8 rows) or L2.
/// Emerald Rapids, M x 4096 -> 4096: with 8 rows 1.26x faster than two tiles of 4 x 4, with 16 rows
/// 1.11x. From L2 the two are equal with 8 rows, and 6 x 4 is 1.03x faster with 16.
TilePlan::FewRows few_rows(const GemmTile& t, int64_t bytes) {
  const bool all = t.num_runs == 1 && t.runs->quads * kPanel * kQuad == t.panel_stride;
  if (t.rows <= kStreamedRows && all && bytes > tuning::kStreamedMinBytes &&
      cpu_tuning->gains_from_streams) {
    const bool from_l3 = bytes > tuning::kStreamedL2Bytes && bytes <= tuning::kStreamedL3Bytes;
    const bool few = from_l3 && cpu_tuning->gains_from_few_streams;
    return few ? TilePlan::kFewStreams : TilePlan::kStreamed;
  }
  if (t.rows <= 2) return TilePlan::kWide;
  const auto tiles = [&](int rows) { return (t.rows + rows - 1) / rows; };
  const bool saves = t.rows <= kTallRows || bytes > tuning::kThreePanelBytes;
  return tiles(kTallRows) < tiles(kWideRows) && t.panels > 8 && saves ? TilePlan::kTall
                                                                      : TilePlan::kPlain;
}

/// The prefetch policy of tiles of many rows and `width` panels, of `panels`. Emerald Rapids,
/// prefetching the next panels, in MobileNet: 160 to 960 channels take 0.87 of the time, 320 to
/// 1280 0.86, 96 to 576 0.93; with hot caches 0.95 to 1. On Zen 5 prefetches displace products:
/// hot, 1x1 of 64 to 256 channels is 1.07x faster without, of 256 to 1024 1.01x. In a whole network
/// weights come from L3 and beyond, and prefetching the next panels pays: ResNet-50 takes 0.94 of
/// the time.
Prefetch prefetch_of(const GemmTile& t, int width, int panels) {
  const bool in_l1 = width * t.panel_stride <= tuning::kTileWeightBytes;
  const bool has_next = width == kBlockPanels && panels > kBlockPanels;
  if (cpu_tuning->gains_from_l1) return in_l1 && has_next ? kNextPanelsL1 : kOwnWeights;
  if (in_l1 && panels * t.panel_stride < tuning::kFewWeightBytes) return kNone;
  return has_next ? kNextPanelsL2 : kOwnWeights;
}

/// Returns true if gemm_short.h has tiles for the runs.
bool has_short_runs(const GemmTile& t) {
  const GemmRun* const run = t.runs;
  if (t.num_runs == 1) {
    return std::find(std::begin(kShortQuads), std::end(kShortQuads), run->quads) !=
           std::end(kShortQuads);
  }
  const auto follows = [&](int i) {
    return run[i].quads == kShortQuadsOfThree &&
           run[i].weight_offset == run->weight_offset + i * kShortQuadsOfThree * kPanel * kQuad;
  };
  return t.num_runs == 3 && follows(0) && follows(1) && follows(2);
}

/// Returns true if tiles of `width` full panels gain from being pipelined, for an epilogue that
/// can.
bool is_pipelined(const GemmTile& t, int width) {
  return width * t.panel_stride <= cpu_tuning->pipelined_bytes && t.num_runs > 0 &&
         t.runs->quads * ends_per_quad(width) >= pipelined_sums(width);
}

/// Prints " tiles:<name>" of the first region's first rows.
void log_tiles(const GemmProblem& p, const GemmChoice& c, const Epilogue& epilogue) {
  const TapRegion& region = p.regions[0];
  GemmTile t{};
  t.rows = static_cast<int>(std::min<int64_t>(region.rows() / c.row_parts, kGemmRows));
  t.panels = c.block_panels;
  t.panel_stride = p.panel_bytes;
  t.group_quads = c.group_quads;
  t.flip = p.flip;
  t.runs = region.runs.data();
  t.num_runs = static_cast<int>(region.runs.size());
  const TilePlan plan = plan_tiles(t, epilogue);
  constexpr const char* kFew[] = {"plain", "streamed", "few_streams", "wide", "tall"};
  const bool pipelined = plan.pipelined >> std::min(t.panels, kBlockPanels) & 1;
  const char* name = pipelined ? "pipelined" : plan.is_short ? "short" : kFew[plan.few_rows];
  constexpr const char* kPrefetch[] = {"none", "own", "next_l1", "next_l2"};
  std::printf(" tiles:%s prefetch:%s", name, kPrefetch[plan.prefetch]);
}

}  // namespace

bool prefers_groups_apart(const Kernels& tier, int64_t rows, int64_t runs, int64_t taps,
                          int64_t tap_quads) {
  return tier.matrix != nullptr && rows >= kUnitRows && !are_short(runs, taps * tap_quads) &&
         chunks_of(taps * tap_quads) < taps * chunks_of(tap_quads);
}

bool prefers_one_region(const Kernels& tier, int64_t rows, int64_t group_quads, bool adjacent) {
  const int64_t least = adjacent ? tuning::kMinAdjacentQuads : tuning::kMinGatherQuads;
  return tier.matrix != nullptr && rows >= tuning::kMinUnitRows && group_quads >= least;
}

GemmChoice choose(const GemmProblem& p, const Kernels& tier) {
  GemmChoice c;
  c.kernel = "gemm_matrix";
  c.run = nullptr;
  c.weights = Weights::kBytes;
  c.groups = p.groups;
  c.group_channels = p.group_channels;
  c.panels_per_group = p.panels_per_group;
  c.group_quads = p.group_quads;
  const char* why_not = choose_matrix_unit(p, tier, c);
  if (why_not == nullptr) return c;
  c.reasons.add("gemm_matrix", why_not);
  c.weights = choose_weights(p, tier, c.reasons);
  join_groups(p, tier, c);
  choose_kernel(tier, c);
  // One panel alone would use the copies once.
  c.widens_rows = (c.weights == Weights::kWidened || c.weights == Weights::kSplit) &&
                  tier.widen_src != nullptr && c.group_quads == 0 && c.panels_per_group > 1;
  c.plans_tiles = tier.plans_tiles && (c.group_quads == 0 || c.group_quads * kQuad >= kPanel);
  choose_blocks(p, c);
  return c;
}

TilePlan plan_tiles(const GemmTile& t, const Epilogue& e) {
  TilePlan plan{};
  const int panels = t.group_quads > 0 ? t.group_quads * kQuad / kPanel : t.panels;
  if (t.rows <= kFewRows) {
    plan.few_rows = few_rows(t, panels * t.panel_stride);
    plan.prefetch = plan.rest_prefetch = kOwnWeights;
    return plan;
  }
  plan.prefetch = prefetch_of(t, kBlockPanels, panels + t.panels_behind);
  const int rest = std::max(panels % kBlockPanels, 1);
  plan.rest_prefetch = prefetch_of(t, rest, panels + t.panels_behind);
  const bool is_byte = e.dst_dtype == DType::u8 || e.dst_dtype == DType::s8;
  if (e.mode != Epilogue::kFolded || !is_byte || e.guard || e.lo != nullptr || e.clamp) return plan;
  plan.is_short = e.num_sums == 0 && !t.flip && has_short_runs(t);
  for (int n = 2; n <= kBlockPanels && e.num_sums <= 1; ++n)
    plan.pipelined |= is_pipelined(t, n) << n;
  return plan;
}

void GemmChoice::log(const GemmProblem& p, const Epilogue& epilogue) const {
  if (!logs_kernel_choice()) return;
  reasons.log();
  constexpr const char* kForms[] = {"bytes", "narrow", "clipped", "split", "widened"};
  std::printf("torchq,choice,%s,weights:%s", kernel, kForms[static_cast<int>(weights)]);
  if (run != nullptr) {
    std::printf(" block:%d outermost:%s", block_panels, blocks_outer ? "blocks" : "rows");
    if (plans_tiles) log_tiles(p, *this, epilogue);
  }
  std::printf(" shares:%dx%d\n", panel_parts, row_parts);
}

}  // namespace torchq
