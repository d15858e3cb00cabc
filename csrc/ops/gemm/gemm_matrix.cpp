// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit: some rows at a time meet the weights block by block. Rows are gathered
// side by side, or read where they are, 16 after 16 along lines of evenly spaced ones.
#include "ops/gemm/gemm_matrix.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu_tuning.h"
#include "ops/gemm/choose.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace torchq {
namespace {

/// Rows read in place at a time.
constexpr int64_t kPlacedRows = 1024;
constexpr int64_t kTwoUnits = 2 * kUnitRows;
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
  MatrixWorker(const GemmProblem& problem, const GemmChoice& choice, const Epilogue& epilogue,
               const MatrixUnit& unit)
      : problem_(problem), choice_(choice), epilogue_(epilogue), unit_(unit) {}

  void run(Range tiles, Range panels) {
    int64_t first = 0;  // first tile of the region
    const Lines* lines_of_region = choice_.lines.begin();
    for (const TapRegion& region : problem_.regions) {
      const Lines& lines = *lines_of_region++;
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
    int64_t* src_offset = frame.take<int64_t>(most, kUnitRows);
    int64_t* dst_offset = frame.take<int64_t>(most, kUnitRows);
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
        (panels.end - panels.begin) * problem_.panel_bytes <= tuning::kResidentWeightBytes;
    const int64_t tiles = std::clamp<int64_t>(
        (resident ? tuning::kGatheredBytes : tuning::kManyGatheredBytes) / stride / kTwoUnits,
        resident ? 2 : 1, std::max<int64_t>(tiles_of(units_of(rows.end - rows.begin)), 2));
    const int64_t most = tiles * kTwoUnits;
    uint8_t* data = frame.take<uint8_t>(most, stride);
    int64_t* src_offset = frame.take<int64_t>(most);
    int64_t* dst_offset = frame.take<int64_t>(most);
    int64_t* data_offset = frame.take<int64_t>(most);
    for (int64_t i = 0; i < most; ++i) data_offset[i] = i * stride;
    const int chunk = static_cast<int>(std::min<int64_t>(span.quads, kChunkQuads));
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
    UnitRun* const first = frame.take<UnitRun>(2, count);
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
    int8_t* tails = frame.take<int8_t>(count, kChunkQuads, kQuadBytes);
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
        tuning::kResidentWeightBytes / problem_.panel_bytes / kSharePanels * kSharePanels;
    const int64_t block = std::max<int64_t>(fitting, kSharePanels);
    const bool is_far =
        (panels.end - panels.begin) * problem_.panel_bytes >= tuning::kFarWeightBytes &&
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
  const GemmChoice& choice_;
  const Epilogue& epilogue_;
  const MatrixUnit& unit_;
};

}  // namespace

void run_on_matrix_unit(const GemmProblem& p, const GemmChoice& choice, const Epilogue& epilogue,
                        const MatrixUnit& unit) {
  const int64_t panels = int64_t{p.groups} * p.panels_per_group;
  const int64_t shares = (panels + kSharePanels - 1) / kSharePanels;
  const int panel_parts = choice.panel_parts, row_parts = choice.row_parts;
  int64_t tiles = 0;
  for (size_t i = 0; i < p.regions.size(); ++i) tiles += tiles_of(choice.lines[i], p.regions[i]);
  parallel_parts(panel_parts * row_parts, [&](int i) {
    const Range share = part_of(shares, panel_parts, i % panel_parts);
    MatrixWorker(p, choice, epilogue, unit)
        .run(part_of(tiles, row_parts, i / panel_parts),
             {share.begin * kSharePanels, std::min(share.end * kSharePanels, panels)});
  });
}

}  // namespace torchq
