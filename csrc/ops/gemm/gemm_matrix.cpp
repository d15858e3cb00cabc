// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit: some rows at a time meet the weights block by block. Rows are gathered
// side by side, or read where they are, 16 after 16 along lines of evenly spaced ones.
#include "ops/gemm/gemm_matrix.h"

#include <algorithm>
#include <cstring>

#include "ops/gemm/gemm_matrix_lines.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace torchq {
namespace {

/// Fewer rows are bound by weight bandwidth, and faster without the matrix unit.
constexpr int64_t kMinRows = 8;
/// Gathering a row costs about 100 cycles and pays where it meets this many quads of weights.
/// Measured on Emerald Rapids, against VPDPBUSD: 3x3 of 64 to 64 channels, 576 quads, 2.0x; 7x7 of
/// 3 to 64, 168, 0.9x; 1x1 of 144 to 32, 72, 0.7x.
constexpr int64_t kMinGatherQuads = 256;
/// A copy with padding, of which every pixel starts a row that is read in place, pays from fewer
/// on: 3x3 of 16 to 64 channels, 144 quads, 1.6x; of groups of 32, 144, 1.2x to 1.7x, but with a
/// stride of 2 0.8x to 0.9x; of groups of 16, 36, 0.95x.
constexpr int64_t kMinAdjacentQuads = 128;
/// Panels that could multiply a row in the time that it takes to gather it.
constexpr int64_t kGatherPanels = 8;
/// Quads that VPDPBUSD multiplies in the time of a chunk, and in the time in which a unit's sums
/// pass through memory. On Emerald Rapids: 7x7 of 3 to 64 channels, 42 quads in 7 chunks, 1.6x; 3x3
/// of 3 to 32, 9 in 3, 0.9x.
constexpr int64_t kQuadsPerChunk = 2, kQuadsPerUnit = 10;
/// Units of 16 rows that could meet a chunk of a panel in the time that it takes to copy it.
constexpr int64_t kTailUnits = 3;
/// Rows gathered at a time: little enough for L1 where the weights stay in L2 anyway, else enough
/// to use each block of weights for long.
constexpr int64_t kFewBytes = 32 * 1024, kManyBytes = 512 * 1024;
/// Weights of this size are beyond L2 even after a call of the same layer. One tile of rows does
/// not prefetch them, since memory is busy anyway: 16x768->768 takes 9.2 us, with prefetches 12.4.
constexpr int64_t kFarWeightBytes = 1024 * 1024;
/// Rows read in place at a time.
constexpr int64_t kPlacedRows = 1024;
constexpr int64_t kTwoUnits = 2 * kUnitRows;
constexpr int64_t kChunkQuads = 16;
/// Granularity of a thread's share in panels: those whose epilogues the unit runs together.
constexpr int kSharePanels = 4;

/// Returns the range of a panel's quads that a region's runs meet, as one run; a region without
/// runs meets one quad, with zeros.
GemmRun span_of(const TapRegion& region) {
  constexpr int64_t kQuadBytes = kPanel * kQuad;
  if (region.runs.empty()) return {0, 0, 1};
  int64_t begin = INT64_MAX, end = 0;
  for (const GemmRun& run : region.runs) {
    begin = std::min(begin, run.weight_offset / kQuadBytes);
    end = std::max(end, run.weight_offset / kQuadBytes + run.quads);
  }
  return {0, begin * kQuadBytes, end - begin};
}

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

int64_t chunks_of(int64_t quads) { return (quads + kChunkQuads - 1) / kChunkQuads; }

/// As few chunks as possible, of one size where that goes.
int chunk_quads(int64_t quads) {
  const int64_t chunks = chunks_of(quads);
  return static_cast<int>(quads % chunks == 0 ? quads / chunks : kChunkQuads);
}

/// Returns true if the last chunk of a run overlaps the one before it.
bool has_tails(const TapRegion& region) {
  return region.runs[0].quads % chunk_quads(region.runs[0].quads) != 0;
}

/// Returns true if runs have too few quads for their chunks.
bool are_short(int64_t runs, int64_t quads) {
  return runs > 1 && runs * quads < kQuadsPerChunk * runs * chunks_of(quads) + kQuadsPerUnit;
}

/// All rows as one line, as in a linear layer or a 1x1 convolution; else one for each image or
/// volume's plane, over what lies between the ends of its rows; else one for each of those.
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
  const int64_t tails = has_tails(region) ? kTailUnits * panels * runs : 0;
  const int64_t in_place = best.units() * panels * chunks + tails;
  const int64_t gathered =
      units_of(rows) * (panels + kGatherPanels) * chunks_of(span_of(region).quads);
  return in_place <= gathered ? best : Lines{};
}

/// Work is shared in steps of two units.
int64_t tiles_of(int64_t units) { return (units + 1) / 2; }
int64_t tiles_of(const Lines& lines, const TapRegion& region) {
  return tiles_of(lines.count > 0 ? lines.units() : units_of(region.rows()));
}

/// Rows that meet the weights together: where they start, and where their results go.
struct Batch {
  const uint8_t* src;  // before the group's offset
  const int64_t *src_offset, *dst_offset;
  int64_t rows, stride;
  int chunk_quads;
  c10::ArrayRef<UnitRun> runs;  // with the weights of the worker's panels
};

/// One thread's share: tiles x panels, counted through all regions and groups.
class MatrixWorker {
 public:
  MatrixWorker(const GemmProblem& problem, const Epilogue& epilogue, const MatrixUnit& unit)
      : problem_(problem), epilogue_(epilogue), unit_(unit) {}

  void run(Range tiles, Range panels) {
    int64_t first = 0;  // first tile of the region
    for (const TapRegion& region : problem_.regions) {
      const Lines lines = lines_of(problem_, region);
      const int64_t count = tiles_of(lines, region);
      const int64_t begin = std::max(tiles.begin - first, int64_t{0});
      const int64_t end = std::min(tiles.end - first, count);
      first += count;
      if (begin >= end) continue;
      if (lines.count > 0) {
        in_place(region, lines, {2 * begin, std::min(2 * end, lines.units())}, panels);
      } else {
        gathered(region, {begin * kTwoUnits, std::min(end * kTwoUnits, region.rows())}, panels);
      }
    }
  }

 private:
  void in_place(const TapRegion& region, const Lines& lines, Range units, Range panels) {
    ScratchFrame frame;
    const int64_t most = std::min(kPlacedRows / kUnitRows, units.end - units.begin);
    int64_t* src_offset = frame.take<int64_t>(most * kUnitRows);
    int64_t* dst_offset = frame.take<int64_t>(most * kUnitRows);
    const int chunk = chunk_quads(region.runs[0].quads);
    const int8_t* tails = has_tails(region) ? copy_tails(frame, region.runs, panels) : nullptr;
    const auto runs = cut(frame, region.runs, chunk, tails, panels);
    unit_.begin(chunk);
    LineCursor cursor(region, lines, units.begin);
    for (int64_t unit = units.begin; unit < units.end; unit += most) {
      const int64_t count = std::min(most, units.end - unit);
      cursor.next(count, src_offset, dst_offset);
      multiply(region,
               {problem_.src + region.src_base, src_offset, dst_offset, count * kUnitRows,
                lines.step, chunk, runs},
               panels);
    }
    unit_.end();
  }

  void gathered(const TapRegion& region, Range rows, Range panels) {
    ScratchFrame frame;
    const GemmRun span = span_of(region);
    const int64_t stride = (span.quads + kChunkQuads - 1) / kChunkQuads * kChunkQuads * kQuad;
    const bool resident =
        (panels.end - panels.begin) * problem_.panel_bytes <= kResidentWeightBytes;
    const int64_t tiles = std::clamp<int64_t>(
        (resident ? kFewBytes : kManyBytes) / stride / kTwoUnits, resident ? 2 : 1,
        std::max<int64_t>(tiles_of(units_of(rows.end - rows.begin)), 2));
    const int64_t most = tiles * kTwoUnits;
    uint8_t* data = frame.take<uint8_t>(most * stride);
    int64_t* src_offset = frame.take<int64_t>(most);
    int64_t* dst_offset = frame.take<int64_t>(most);
    int64_t* data_offset = frame.take<int64_t>(most);
    for (int64_t i = 0; i < most; ++i) data_offset[i] = i * stride;
    const int chunk = static_cast<int>(std::min(span.quads, kChunkQuads));
    const auto runs = cut(frame, span, chunk, nullptr, panels);
    unit_.begin(chunk);
    for (int64_t row = rows.begin; row < rows.end; row += most) {
      const int64_t count = std::min(most, rows.end - row);
      RowCursor(region, row).next(count, src_offset, dst_offset);
      for_each_group(panels, [&](int group, Range part) {
        unit_.gather({problem_.src + region.src_base + group * problem_.src_group_stride,
                      src_offset, static_cast<int>(count), problem_.flip, region.runs.data(),
                      static_cast<int>(region.runs.size()), span.weight_offset / (kPanel * kQuad),
                      span.quads, data, stride});
        multiply_group(region, {data, data_offset, dst_offset, count, stride, chunk, runs}, group,
                       part, panels.begin);
      });
    }
    unit_.end();
  }

  /// Runs in chunks of `size` quads. The last one of a run ends where the run does and meets
  /// `tails`, where it overlaps the one before it; null: the rows are what `gather` writes, with
  /// zeros there.
  c10::ArrayRef<UnitRun> cut(ScratchFrame& frame, c10::ArrayRef<GemmRun> runs, int size,
                             const int8_t* tails, Range panels) {
    constexpr int64_t kQuadBytes = kPanel * kQuad, kTailBytes = kChunkQuads * kQuadBytes;
    const int64_t count = static_cast<int64_t>(runs.size()), stride = problem_.panel_bytes;
    UnitRun* const first = frame.take<UnitRun>(2 * count);
    UnitRun* end = first;
    for (const GemmRun& run : runs) {
      const int8_t* weight = problem_.weight + panels.begin * stride + run.weight_offset;
      const int64_t whole = run.quads / size, rest = run.quads % size;
      *end++ = {run.src_offset, weight, stride, static_cast<int>(whole)};
      if (rest == 0) continue;
      const int64_t last = run.src_offset + whole * size * kQuad;
      if (tails == nullptr) {
        *end++ = {last, weight + (run.quads - size) * kQuadBytes, stride, 1};
      } else {
        *end++ = {last - (size - rest) * kQuad, tails, count * kTailBytes, 1};
        tails += kTailBytes;
      }
    }
    return {first, end};
  }

  /// The weights that meet the last chunk of each run, zeros where it overlaps the one before it:
  /// [panels][runs] of 16 quads.
  const int8_t* copy_tails(ScratchFrame& frame, c10::ArrayRef<GemmRun> runs, Range panels) {
    constexpr int64_t kQuadBytes = kPanel * kQuad;
    const int64_t quads = runs[0].quads, rest = quads % kChunkQuads;
    const int64_t count = (panels.end - panels.begin) * static_cast<int64_t>(runs.size());
    int8_t* tails = frame.take<int8_t>(count * kChunkQuads * kQuadBytes);
    int8_t* dst = tails;
    for (int64_t p = panels.begin; p < panels.end; ++p) {
      for (const GemmRun& run : runs) {
        const int8_t* src = problem_.weight + p * problem_.panel_bytes + run.weight_offset;
        const int64_t overlap = (kChunkQuads - rest) * kQuadBytes;
        std::memset(dst, 0, static_cast<size_t>(overlap));
        std::memcpy(dst + overlap, src + (quads - rest) * kQuadBytes,
                    static_cast<size_t>(rest * kQuadBytes));
        dst += kChunkQuads * kQuadBytes;
      }
    }
    return tails;
  }

  /// body(group, its panels) for panels counted through all groups.
  template <class Body>
  void for_each_group(Range panels, const Body& body) {
    const int64_t per_group = problem_.panels_per_group;
    for (int64_t p = panels.begin; p < panels.end;) {
      const int64_t group = p / per_group, first = group * per_group;
      const int64_t end = std::min(panels.end, first + per_group);
      body(static_cast<int>(group), Range{p - first, end - first});
      p = end;
    }
  }

  void multiply(const TapRegion& region, Batch batch, Range panels) {
    const uint8_t* src = batch.src;
    for_each_group(panels, [&](int group, Range part) {
      batch.src = src + group * problem_.src_group_stride;
      multiply_group(region, batch, group, part, panels.begin);
    });
  }

  /// Block after block of panels that fit L2; `first_panel`, counted through all groups: the
  /// worker's.
  void multiply_group(const TapRegion& region, const Batch& batch, int group, Range panels,
                      int64_t first_panel) {
    const int64_t fitting =
        kResidentWeightBytes / problem_.panel_bytes / kSharePanels * kSharePanels;
    const int64_t block = std::max<int64_t>(fitting, kSharePanels);
    const bool is_far = (panels.end - panels.begin) * problem_.panel_bytes >= kFarWeightBytes &&
                        batch.rows > kTwoUnits && batch.rows <= kFetchRows;
    for (int64_t panel = panels.begin; panel < panels.end; panel += block) {
      const int64_t packed = int64_t{group} * problem_.panels_per_group + panel;
      const int channel = static_cast<int>(panel) * kPanel;
      GemmTile tile{};
      tile.src = batch.src;
      tile.row_offset = batch.src_offset;
      tile.dst_offset = batch.dst_offset;
      tile.rows = static_cast<int>(batch.rows);
      tile.panels = static_cast<int>(std::min(block, panels.end - panel));
      tile.channel = group * problem_.group_channels + channel;
      tile.channels = std::min(problem_.group_channels - channel, tile.panels * kPanel);
      tile.acc_init = region.acc_init + packed * kPanel;
      unit_.multiply(tile,
                     {batch.stride, batch.chunk_quads * kQuad, batch.runs.data(),
                      static_cast<int>(batch.runs.size()), packed - first_panel,
                      is_far ? panels.end - panel : 0},
                     epilogue_);
      problem_.last_step.apply(static_cast<uint8_t*>(epilogue_.dst) + tile.channel,
                               batch.dst_offset, batch.rows, tile.channels);
    }
  }

  const GemmProblem& problem_;
  const Epilogue& epilogue_;
  const MatrixUnit& unit_;
};

/// Gathering few even rows is cheap.
bool is_even(const GemmProblem& p, const TapRegion& region) {
  return !p.flip && region.runs.size() == 1 && row_step(region) > 0 &&
         (region.runs[0].quads < kChunkQuads || region.runs[0].quads % kChunkQuads == 0);
}

bool gathering_pays(const GemmProblem& p, const TapRegion& region) {
  return p.panels_per_group * region.quads() >= kMinGatherQuads;
}

}  // namespace

bool prefers_groups_apart(const Kernels& tier, int64_t rows, int64_t runs, int64_t taps,
                          int64_t tap_quads) {
  return tier.matrix != nullptr && rows >= kUnitRows && !are_short(runs, taps * tap_quads) &&
         chunks_of(taps * tap_quads) < taps * chunks_of(tap_quads);
}

bool prefers_one_region(const Kernels& tier, int64_t rows, int64_t group_quads, bool adjacent) {
  const int64_t least = adjacent ? kMinAdjacentQuads : kMinGatherQuads;
  return tier.matrix != nullptr && rows >= kMinRows && group_quads >= least;
}

const char* why_not_matrix_unit(const GemmProblem& p, const Kernels& tier) {
  if (tier.matrix == nullptr) return "the tier has none";
  if (p.group_quads > 0) return "groups of 4 or 8 channels have a kernel of their own";
  if (p.panel_bytes == 0) return "there is nothing to sum";
  if (p.rows() < kMinRows) return "fewer than 8 rows wait for the weights' way through memory";
  const bool pays = std::all_of(p.regions.begin(), p.regions.end(), [&](const TapRegion& region) {
    return is_even(p, region) || lines_of(p, region).count > 0 || gathering_pays(p, region);
  });
  return pays ? nullptr : "a row would be gathered for fewer than 256 quads of weights";
}

void run_on_matrix_unit(const GemmProblem& p, const Epilogue& epilogue, const MatrixUnit& unit) {
  int64_t tiles = 0, row_quads = 0;
  for (const TapRegion& region : p.regions) {
    tiles += tiles_of(lines_of(p, region), region);
    row_quads += region.rows() * region.quads();
  }
  const int64_t panels = int64_t{p.groups} * p.panels_per_group;
  // A matrix unit does in the time of a parallel region some ten times as much as vectors do.
  const int threads = threads_for(row_quads * kQuad * panels * kPanel, 8'000'000);
  const bool split_panels =
      threads > 1 && (panels * p.panel_bytes > kResidentWeightBytes || tiles < 4 * threads);
  const int64_t shares = (panels + kSharePanels - 1) / kSharePanels;
  const int panel_parts = split_panels ? static_cast<int>(std::min<int64_t>(threads, shares)) : 1;
  const int tile_parts = static_cast<int>(std::min<int64_t>(threads / panel_parts, tiles));
  parallel_parts(panel_parts * tile_parts, [&](int i) {
    const Range share = part_of(shares, panel_parts, i % panel_parts);
    MatrixWorker(p, epilogue, unit)
        .run(part_of(tiles, tile_parts, i / panel_parts),
             {share.begin * kSharePanels, std::min(share.end * kSharePanels, panels)});
  });
}

}  // namespace torchq
