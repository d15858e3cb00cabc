// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit: its rows are gathered side by side, some at a time, and meet the weights
// block by block. Rows that lie evenly spaced in the source are read where they are.
#include <algorithm>

#include "../parallel.h"
#include "gemm.h"
#include "gemm_rows.h"

namespace torchq {
namespace {

/// Fewer rows are bound by the weights' way through memory, and faster without.
constexpr int64_t kMinRows = 8;
/// Rows that two tiles of the unit make.
constexpr int64_t kTwoUnits = 2 * kUnitRows;
/// Rows gathered at a time: little enough for L1 where the weights stay in L2 anyway, else enough
/// to use each block of weights for long.
constexpr int64_t kFewBytes = 32 * 1024, kManyBytes = 256 * 1024;
constexpr int64_t kChunkQuads = 16;
/// Panels a thread's share is cut by: what the unit finishes together.
constexpr int kSharePanels = 4;

/// The range of a panel's quads that a class's runs meet, as one run; a class without runs meets
/// one quad, with zeros.
GemmRun span_of(const GemmClass& c) {
  constexpr int64_t kQuadBytes = kPanel * kQuad;
  if (c.runs.empty()) return {0, 0, 1};
  int64_t begin = INT64_MAX, end = 0;
  for (const GemmRun& run : c.runs) {
    begin = std::min(begin, run.weight_offset / kQuadBytes);
    end = std::max(end, run.weight_offset / kQuadBytes + run.quads);
  }
  return {0, begin * kQuadBytes, end - begin};
}

/// Bytes from each row to the next where that is one number, else 0.
int64_t row_step(const GemmClass& c) {
  int64_t step = 0, extent = 0;
  for (int d = 3; d >= 0; --d) {
    if (c.size[d] == 1) continue;
    if (step != 0 && c.src_stride[d] != extent) return 0;
    if (step == 0) step = c.src_stride[d];
    extent = c.src_stride[d] * c.size[d];
  }
  return step;
}

/// One thread's share: tiles x panels, counted through all classes and groups.
class MatrixWorker {
 public:
  MatrixWorker(const GemmProblem& problem, const Epilogue& epilogue, const MatrixUnit& unit)
      : problem_(problem), epilogue_(epilogue), unit_(unit) {}

  void run(Range tiles, Range panels) {
    int64_t first = 0;  // first tile of the class
    for (const GemmClass& c : problem_.classes) {
      const int64_t rows = c.rows(), count = tiles_of(rows);
      const int64_t begin = std::max(tiles.begin - first, int64_t{0});
      const int64_t end = std::min(tiles.end - first, count);
      if (begin < end) {
        run_class(c, {begin * kTwoUnits, std::min(end * kTwoUnits, rows)}, panels);
      }
      first += count;
    }
  }

  static int64_t tiles_of(int64_t rows) { return (rows + kTwoUnits - 1) / kTwoUnits; }

 private:
  void run_class(const GemmClass& c, Range rows, Range panels) {
    ScratchFrame frame;
    span_ = span_of(c);
    const int64_t quads = span_.quads;
    step_ = row_step(c);
    direct_ = step_ > 0 && c.runs.size() == 1 && !problem_.flip &&
              (quads <= kChunkQuads || quads % kChunkQuads == 0);
    stride_ = (quads + kChunkQuads - 1) / kChunkQuads * kChunkQuads * kQuad;
    const bool resident =
        (panels.end - panels.begin) * problem_.panel_bytes <= kResidentWeightBytes;
    const int64_t bytes = resident ? kFewBytes : kManyBytes;
    const int64_t fitting = bytes / stride_ / kTwoUnits;
    chunk_rows_ =
        std::min(std::max<int64_t>(fitting, resident ? 2 : 1), tiles_of(rows.end - rows.begin)) *
        kTwoUnits;
    gathered_ = frame.take<uint8_t>(chunk_rows_ * stride_);
    src_offset_ = frame.take<int64_t>(chunk_rows_);
    dst_offset_ = frame.take<int64_t>(chunk_rows_);
    unit_.begin(quads);
    for (int64_t row = rows.begin; row < rows.end; row += chunk_rows_) {
      const int64_t count = std::min(chunk_rows_, rows.end - row);
      RowCursor cursor(c, row);
      for (int64_t i = 0; i < count; ++i, cursor.next()) {
        src_offset_[i] = cursor.src();
        dst_offset_[i] = c.dst_base + cursor.dst();
      }
      const int per_group = problem_.panels_per_group;
      for (int64_t p = panels.begin; p < panels.end;) {
        const int group = static_cast<int>(p / per_group), panel = static_cast<int>(p % per_group);
        const int64_t end = std::min(panels.end, p + per_group - panel);
        run_group(c, group, panel, static_cast<int>(end - p), {row, row + count});
        p = end;
      }
    }
    unit_.end();
  }

  void run_group(const GemmClass& c, int group, int panel, int panels, Range rows) {
    const uint8_t* src = problem_.src + c.src_base + group * problem_.src_group_stride;
    const int64_t size = rows.end - rows.begin;
    // In place only whole tiles: the last one might read behind the source.
    const int64_t in_place = direct_ ? size / kUnitRows * kUnitRows : 0;
    if (in_place < size) {
      unit_.gather({src, src_offset_ + in_place, static_cast<int>(size - in_place), problem_.flip,
                    c.runs.data(), static_cast<int>(c.runs.size()),
                    span_.weight_offset / (kPanel * kQuad), span_.quads, gathered_, stride_});
    }
    const int64_t panel_bytes = span_.quads * kPanel * kQuad;
    const int64_t fitting = kResidentWeightBytes / panel_bytes / kSharePanels * kSharePanels;
    const int block = static_cast<int>(
        std::clamp<int64_t>(fitting, kSharePanels, std::max(panels, kSharePanels)));
    for (int b = 0; b < panels; b += block) {
      GemmTile tile{};
      const int first_panel = panel + b, channel = first_panel * kPanel;
      const int64_t packed = int64_t{group} * problem_.panels_per_group + first_panel;
      tile.runs = &span_;
      tile.num_runs = 1;
      tile.weight = problem_.weight + packed * problem_.panel_bytes;
      tile.panel_stride = problem_.panel_bytes;
      tile.panels = std::min(block, panels - b);
      tile.channel = group * problem_.group_channels + channel;
      tile.channels = std::min(problem_.group_channels - channel, tile.panels * kPanel);
      tile.acc_init = c.acc_init + packed * kPanel;
      const auto multiply = [&](const uint8_t* from, int64_t stride, int64_t begin, int64_t end) {
        if (begin == end) return;
        tile.src = from;
        tile.dst_offset = dst_offset_ + begin;
        tile.rows = static_cast<int>(end - begin);
        unit_.multiply(tile, stride, epilogue_);
      };
      if (in_place > 0) multiply(src + c.runs[0].src_offset + src_offset_[0], step_, 0, in_place);
      multiply(gathered_, stride_, in_place, size);
    }
  }

  const GemmProblem& problem_;
  const Epilogue& epilogue_;
  const MatrixUnit& unit_;
  GemmRun span_{};
  int64_t step_ = 0, stride_ = 0, chunk_rows_ = 0;
  bool direct_ = false;
  uint8_t* gathered_ = nullptr;
  int64_t *src_offset_ = nullptr, *dst_offset_ = nullptr;
};

}  // namespace

bool uses_matrix_unit(const Kernels& tier, int64_t rows, int64_t panel_bytes) {
  return tier.matrix != nullptr && rows >= kMinRows && panel_bytes > 0;
}

void run_on_matrix_unit(const GemmProblem& p, const Epilogue& epilogue, const MatrixUnit& unit) {
  int64_t tiles = 0, row_quads = 0;
  for (const GemmClass& c : p.classes) {
    tiles += MatrixWorker::tiles_of(c.rows());
    row_quads += c.rows() * c.quads();
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
