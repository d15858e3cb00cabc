// SPDX-License-Identifier: Apache-2.0
// The contract of a matrix unit, as table.h has that of the other kernels.
#pragma once

#include "table.h"

namespace torchq {

/// Rows that `MatrixUnit::multiply` reads together.
constexpr int kUnitRows = 16;

/// dst[row] = the source bytes that meet quads [first_quad, first_quad + quads) of a packed panel,
/// side by side; zeros where no run meets them. They come in chunks of 64 bytes. With more than 16
/// quads the last chunk holds the last 16 of them, zeros in place of those that the chunk before
/// has already: so a panel, too, can be read in whole chunks without a byte behind its end.
struct GatherRows {
  const uint8_t* src;
  const int64_t* row_offset;  // [rows] bytes
  int rows;
  bool flip;
  const GemmRun* runs;
  int num_runs;
  int64_t first_quad, quads;
  uint8_t* dst;        // [rows][dst_stride]
  int64_t dst_stride;  // bytes
};

/// A unit that multiplies tiles of 16 rows by 64 bytes of K.
///
/// Between `begin` and `end`, on one thread, `multiply` does what `gemm` does on any number of
/// rows, without `flip`. Each kUnitRows of them lie `src_stride` bytes apart, and all of those are
/// read, whether they are rows or not. A run has a multiple of 16 quads; a single one may have less
/// than 16, or be what `gather` writes. `begin` takes the quads of a run. Rows whose `dst_offset`
/// is negative are not stored.
struct MatrixUnit {
  const char* isa;
  void (*gather)(const GatherRows&);
  void (*begin)(int64_t quads);
  void (*multiply)(const GemmTile&, int64_t src_stride, const Epilogue&);
  void (*end)();
  /// The kernels of recurrent cells, outside of `begin` and `end`. Quads come in chunks of 16, rows
  /// are evenly spaced, and kUnitRows of them are read where there are fewer.
  void (*rnn_input)(const RnnInput&);
  void (*rnn_step)(const RnnStep&);
};

#if defined(__x86_64__)
extern const MatrixUnit kAmx;
#endif

}  // namespace torchq
