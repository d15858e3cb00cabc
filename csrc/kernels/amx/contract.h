// SPDX-License-Identifier: Apache-2.0
// Contract of a matrix unit, beside the table of the other kernels.
#pragma once

#include "kernels/gemm/contract.h"
#include "kernels/rnn/contract.h"

namespace torchq {

/// Rows that `MatrixUnit::multiply` reads together.
constexpr int kUnitRows = 16;
/// Quads of a chunk, 64 bytes: a row of a tile register.
constexpr int kChunkQuads = 16;

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

/// Rows that all meet some panels before the next ones come from beyond L2.
constexpr int kFetchRows = 256;

/// Chunks of a row, side by side as their weights are.
struct UnitRun {
  int64_t src_offset;    // bytes
  const int8_t* weight;  // of the panel that UnitRows::first_panel counts from
  int64_t panel_stride;  // bytes from one panel's weights to the next one's
  int chunks;
};

/// Rows of a GemmTile as `MatrixUnit::multiply` reads them, in place of the tile's own runs and
/// weights.
struct UnitRows {
  int64_t stride;       // bytes from each of kUnitRows rows to the next
  int64_t chunk_bytes;  // of a row
  const UnitRun* runs;
  int num_runs;
  int64_t first_panel;  // the tile's
  /// Panels from the tile's first on whose weights wait beyond L2, to be fetched ahead; 0: they are
  /// near, or read too often for that to matter. Up to kFetchRows rows.
  int64_t far_panels;
};

/// A unit that multiplies tiles of 16 rows by 64 bytes of K.
///
/// Between `begin` and `end`, on one thread, `multiply` does what `gemm` does on any number of
/// rows, without `flip`. Of each kUnitRows rows all are read, whether they are rows or not. Rows
/// whose `dst_offset` is negative are not stored. `begin` takes the quads of a chunk, up to 16.
struct MatrixUnit {
  void (*gather)(const GatherRows&);
  void (*begin)(int64_t chunk_quads);
  void (*multiply)(const GemmTile&, const UnitRows&, const Epilogue&);
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
