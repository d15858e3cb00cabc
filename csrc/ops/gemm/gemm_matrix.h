// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit. Rows that it reads in place are units of 16 along lines of evenly spaced
// positions.
#pragma once

#include <algorithm>

#include "kernels/amx/contract.h"
#include "ops/gemm/gemm_problem.h"

namespace torchq {

inline int64_t units_of(int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows; }
/// Granularity of a thread's share in panels: those whose epilogues the unit runs together.
constexpr int kSharePanels = 4;

/// Returns the range of a panel's quads that a region's runs meet, as one run; a region without
/// runs meets one quad, with zeros.
inline GemmRun span_of(const TapRegion& region) {
  constexpr int64_t kQuadBytes = kPanel * kQuad;
  if (region.runs.empty()) return {0, 0, 1};
  int64_t begin = INT64_MAX, end = 0;
  for (const GemmRun& run : region.runs) {
    begin = std::min(begin, run.weight_offset / kQuadBytes);
    end = std::max(end, run.weight_offset / kQuadBytes + run.quads);
  }
  return {0, begin * kQuadBytes, end - begin};
}

inline int64_t chunks_of(int64_t quads) { return (quads + kChunkQuads - 1) / kChunkQuads; }

/// As few chunks as possible, of one size where that goes.
inline int chunk_quads(int64_t quads) {
  const int64_t chunks = chunks_of(quads);
  return static_cast<int>(quads % chunks == 0 ? quads / chunks : kChunkQuads);
}

/// Returns true if the last chunk of a run overlaps the one before it.
inline bool has_tails(const TapRegion& region) {
  return region.runs[0].quads % chunk_quads(region.runs[0].quads) != 0;
}

/// Positions `step` bytes apart, of every `pitch` of which the first `width` are rows. The last 16
/// of a line end with it: no byte behind it is read.
struct Lines {
  int64_t count = 0;  // 0: rows are to be gathered
  int64_t length = 0, pitch = 0, width = 0, step = 0;

  int64_t units() const { return count * units_of(length); }
};

/// Work is shared in steps of two units.
inline int64_t tiles_of(int64_t units) { return (units + 1) / 2; }
inline int64_t tiles_of(const Lines& lines, const TapRegion& region) {
  return tiles_of(lines.count > 0 ? lines.units() : units_of(region.rows()));
}

/// Steps through the units of lines in order.
class LineCursor {
 public:
  LineCursor(const TapRegion& region, const Lines& lines, int64_t unit)
      : region_(region),
        lines_(lines),
        line_(unit / units_of(lines.length)),
        position_(unit % units_of(lines.length) * kUnitRows),
        x_(position_ % lines.pitch),
        rows_(region, first_row()),
        line_start_(start_of_line()) {}

  /// Fills the source offsets of the next units' positions, and the offsets of their results: -1
  /// for positions that are no row, or a row of the unit before. Handles many units at a time: one
  /// by one they took 2 us of the 32 of a 1x1 of 64 to 64 channels.
  void next(int64_t units, int64_t* src_offset, int64_t* dst_offset) {
    while (units > 0) {
      const int64_t left = lines_.length - position_;
      const int64_t count = std::clamp<int64_t>(left / kUnitRows, 1, units);
      if (left < kUnitRows) {
        skip(lines_.length - kUnitRows, kUnitRows - left, src_offset, dst_offset);
      }
      const int64_t end = std::min(position_ + count * kUnitRows, lines_.length);
      while (position_ < end) {
        const bool is_row = x_ < lines_.width;
        const int64_t run = std::min(end - position_, (is_row ? lines_.width : lines_.pitch) - x_);
        if (is_row) {
          rows_.next(run, src_offset, dst_offset);
          src_offset += run;
          dst_offset += run;
        } else {
          skip(position_, run, src_offset, dst_offset);
        }
        position_ += run;
        x_ = (x_ + run) == lines_.pitch ? 0 : x_ + run;
      }
      units -= count;
      if (position_ == lines_.length) {
        position_ = x_ = 0;
        ++line_;
        line_start_ = start_of_line();
      }
    }
  }

 private:
  /// Positions from `first` on that have no results.
  void skip(int64_t first, int64_t count, int64_t*& src_offset, int64_t*& dst_offset) const {
    for (; count > 0; --count, ++first) {
      *src_offset++ = line_start_ + first * lines_.step;
      *dst_offset++ = -1;
    }
  }
  int64_t rows_of_line() const { return region_.rows() / lines_.count; }
  int64_t first_row() const {
    return line_ * rows_of_line() + position_ / lines_.pitch * lines_.width +
           std::min(x_, lines_.width);
  }
  int64_t start_of_line() const {
    int64_t src_offset, dst_offset;
    RowCursor(region_, line_ * rows_of_line()).next(1, &src_offset, &dst_offset);
    return src_offset;
  }

  const TapRegion& region_;
  const Lines& lines_;
  int64_t line_, position_, x_;  // x_: position_ within lines_.pitch
  RowCursor rows_;
  int64_t line_start_;
};

struct GemmChoice;
/// Runs a problem for which `choose` took the matrix unit.
void run_on_matrix_unit(const GemmProblem& problem, const GemmChoice& choice,
                        const Epilogue& epilogue, const MatrixUnit& unit);

}  // namespace torchq
