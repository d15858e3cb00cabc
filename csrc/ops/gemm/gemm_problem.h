// SPDX-License-Identifier: Apache-2.0
// A gemm problem, its regions, and a cursor over its rows.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "kernels/table.h"

namespace torchq {

/// Last step of an op's results: a table, or nothing.
struct LastStep {
  const uint8_t* table;  // of 256 bytes, by byte; null: nothing
  decltype(Kernels::lookup) lookup;

  /// `size` results from `dst` on.
  void apply(uint8_t* dst, int64_t size) const {
    if (table != nullptr) lookup(dst, table, dst, size);
  }
  /// `size` results from each of these offsets on; a negative one is none.
  void apply(uint8_t* dst, const int64_t* offset, int64_t rows, int64_t size) const;
};

/// Pixels with the same valid taps: a box (n, d, h, w) of destination pixels, the rows of one gemm.
/// A matrix product has one region.
struct TapRegion {
  int64_t size[4];
  int64_t src_stride[4];  // bytes
  int64_t dst_stride[4];  // elements
  int64_t src_base, dst_base;
  c10::ArrayRef<GemmRun> runs;
  const int32_t* acc_init;  // [groups][panels_per_group * 16]

  int64_t rows() const { return size[0] * size[1] * size[2] * size[3]; }
  int64_t tiles() const { return (rows() + kTileRows - 1) / kTileRows; }
  int64_t quads() const {
    int64_t sum = 0;
    for (const GemmRun& run : runs) sum += run.quads;
    return sum;
  }
};

/// Declare without {}, which zeroes the space for regions, 1.2 KB, in 40 ns.
struct GemmProblem {
  const uint8_t* src = nullptr;
  bool flip = false;
  const int8_t* weight = nullptr;
  int64_t panel_bytes = 0;
  int groups = 1;
  int64_t src_group_stride = 0;  // bytes
  int group_channels = 0;
  int panels_per_group = 0;
  /// Every pair of adjacent weights keeps 16-bit sums exact.
  bool narrow = false;
  /// Quads of a group where groups share tiles (GemmTile) and count as one group here; else 0.
  int group_quads = 0;
  LastStep last_step{};
  c10::SmallVector<TapRegion, 9> regions;

  /// The rows of a matrix, `pitch` bytes apart; those of dst lie side by side. Of `run` a pointer
  /// is kept.
  void add_rows(int64_t rows, int64_t pitch, const GemmRun& run, const int32_t* acc_init) {
    regions.push_back(
        {{1, 1, 1, rows}, {0, 0, 0, pitch}, {0, 0, 0, group_channels}, 0, 0, run, acc_init});
  }
  int64_t rows() const {
    int64_t sum = 0;
    for (const TapRegion& region : regions) sum += region.rows();
    return sum;
  }
  /// Bytes of a panel that rows meet: not all where `weight` is one group of inputs of many, and
  /// those behind the last one belong to nobody.
  int64_t used_panel_bytes() const {
    int64_t end = 0;
    for (const TapRegion& region : regions) {
      for (const GemmRun& run : region.runs) {
        end = std::max(end, run.weight_offset + run.quads * kPanel * kQuad);
      }
    }
    return end;
  }
};

/// Steps through a region's rows in order.
class RowCursor {
 public:
  RowCursor(const TapRegion& region, int64_t row) : region_(region) {
    for (int d = 3; d >= 0; --d) {
      index_[d] = row % region.size[d];
      row /= region.size[d];
      src_ += index_[d] * region.src_stride[d];
      dst_ += index_[d] * region.dst_stride[d];
    }
  }
  /// The next `rows` rows: where each starts, and where its result goes. A run of rows along the
  /// last dimension at a time, since small layers would wait for a step that looks at them all.
  void next(int64_t rows, int64_t* src_offset, int64_t* dst_offset) {
    while (rows > 0) {
      const int64_t count = std::min(rows, region_.size[3] - index_[3]);
      fill(src_offset, count, src_, region_.src_stride[3]);
      fill(dst_offset, count, region_.dst_base + dst_, region_.dst_stride[3]);
      advance(count);
      src_offset += count;
      dst_offset += count;
      rows -= count;
    }
  }

 private:
  /// first, first + step, ...
  static void fill(int64_t* values, int64_t count, int64_t first, int64_t step) {
    for (int64_t i = 0; i < count; ++i, first += step) values[i] = first;
  }
  /// `count` steps along the last dimension, which end there or before.
  void advance(int64_t count) {
    for (int d = 3; d >= 0; --d, count = 1) {
      src_ += count * region_.src_stride[d];
      dst_ += count * region_.dst_stride[d];
      index_[d] += count;
      if (index_[d] < region_.size[d]) return;
      src_ -= region_.size[d] * region_.src_stride[d];
      dst_ -= region_.size[d] * region_.dst_stride[d];
      index_[d] = 0;
    }
  }

  const TapRegion& region_;
  int64_t index_[4];
  int64_t src_ = 0, dst_ = 0;
};

}  // namespace torchq
