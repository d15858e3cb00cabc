// SPDX-License-Identifier: Apache-2.0
// Contracts of recurrent layers: input products, steps, quantization of a row.
#pragma once

#include "kernels/types.h"

namespace torchq {

/// Formula of a recurrent cell; gates are in PyTorch's order (the formulas are in reference.h).
enum class RnnCell : int {
  kLstm,        // i f g o
  kGru,         // r z n, reset after the matmul (PyTorch's)
  kGruVanilla,  // r z n, reset before the matmul (oneDNN's): kGruGates, then kGruNew
  kTanh,
  kRelu,
  kGruGates,
  kGruNew,
  kProjection  // no gates: the sum itself
};

constexpr int rnn_gates(RnnCell cell) {
  switch (cell) {
    case RnnCell::kLstm:
      return 4;
    case RnnCell::kGru:
    case RnnCell::kGruVanilla:
      return 3;
    case RnnCell::kGruGates:
      return 2;
    default:
      return 1;
  }
}

/// Input products of the gates, which do not depend on the state, for groups of 16 units and any
/// rows:
///
///   dst[u][row][g] = fma(float(acc - zero_point[row] * compensation[u][g]),
///                        multiplier[u][g] * scale[row], bias[u][g])
///   acc = init[u][g] + sum over k of src[row][k] * weight[u][g][k]
///
/// With `scale` null, both per-row factors are left out.
struct RnnInput {
  const uint8_t* src;
  const int64_t* row_offset;  // [rows] bytes
  int64_t rows, quads;
  int groups, gates;
  const int8_t* weight;  // [groups][gates] panels; `rnn_widening` times as large unless `narrow`
  int64_t panel_stride;  // bytes of a packed panel (before widening)
  bool narrow;
  const int32_t* init;  // [groups][gates][16], as the next three
  const float* multiplier;
  const float* bias;
  const int32_t* compensation;
  const float* scale;         // [rows] or null
  const int32_t* zero_point;  // [rows]
  float* dst;                 // [groups] of `dst_group_stride`, [rows][gates][16] each
  int64_t dst_group_stride;
};

/// Input products of later steps, interleaved with the products of batch-1 steps a piece at a time:
/// tile i is kLookaheadRows rows with the panels 2 i and 2 i + 1, or the last two.
struct RnnLookahead {
  RnnInput in;      // of up to kLookaheadRows rows; `src` is [quads][kLookaheadRows][4]
  int64_t piece;    // quads of a tile that are done in one go
  int64_t tile, k;  // what comes next: quad k of a tile
  int32_t* sums;    // [kLookaheadRows][kLookaheadPanels][16] of the tile that is not finished
};
constexpr int kLookaheadRows = 8, kLookaheadPanels = 2;

/// One step of one cell, for `groups` groups of 16 units and any rows. Group u of row r:
///
///   a[g] = fma(float(acc[g]), multiplier[g] * scale[r], input[u][r][g])
///   acc[g] = init[g] + sum over k of src[r][k] * weight[u][g][k]
///
/// then the cell's formula. Buffers of units have rows of whole groups; only `dst` has tails.
struct RnnStep {
  RnnCell cell;
  int groups, gates;
  /// The last groups come first. Weights beyond the cache are walked back and forth, so that a step
  /// begins with those that the step before left in the cache (1024 units of an LSTM, 4 MB, on a
  /// core with 2 MB of L2: 0.72 of the time, of a GRU, 3 MB: 0.65).
  bool descending;
  /// Streams that the weights of one row, which are all of a panel's, are read as: 1, or 2 of an
  /// even number of groups. 0: tiles of panels. Where `rnn_streams`.
  int streams;
  int64_t rows;
  int64_t units;  // valid ones in these groups
  const uint8_t* src;
  int64_t src_stride, quads;
  const int8_t* weight;
  int64_t panel_stride, group_stride;  // bytes, before widening
  bool narrow;
  const int32_t* init;  // [groups] of `param_stride`, [gates][16] each, as the next one
  const float* multiplier;
  int64_t param_stride;
  const float* input;  // [groups][..rows][gates][16]; null for a projection, or with `source`
  int64_t input_group_stride, input_row_stride;
  const RnnInput* source;   // what `input` would be computed from, but for `dst`; or null
  RnnLookahead* lookahead;  // or null, as where `streams` is 0
  const float* scale;       // [rows] or null
  const float* extra;  // kGru: bias of n's matmul [groups][16]; kLstm: peephole [3][..][16] or null
  int64_t extra_stride;  // between the peephole's vectors
  float* cell_state;     // kLstm: c [rows][..], in place
  const float* old;      // the state before [rows][..] (kGru, kGruGates, kGruNew)
  float* update;         // kGruGates writes z, kGruNew reads it
  float* state;          // null, or the result [rows][..], in real units
  int64_t unit_stride;   // floats between rows of these four
  /// The quantized result, or null: clamp(rne(fma(h, inverse_scale, zero_point)), lo, hi), stored
  /// as u8 with `flip` (the sign bit of an s8) applied.
  uint8_t* quantized;
  int64_t quantized_stride;
  float inverse_scale, zero_point, lo, hi;
  /// kGruVanilla keeps what it quantized: state = real_scale * (q - zero_point).
  bool requantized;
  float real_scale;
  uint8_t flip;
  void* dst;  // null, or the result: f32, else the quantized one in its own dtype
  DType dst_dtype;
  int64_t dst_stride;  // elements
};

// clang-format off
/// dst = clamp(rne(fma(src, 1 / scale, zero_point)), 0, 255), the scale chosen from the row itself:
///
///   symmetric  scale = max|src| / 127, zero_point = 128
///   affine     scale = (max(src, 0) - min(src, 0)) / 255, zero_point = rne(-min / scale)
///
/// NaN counts as 0, infinity as the largest float.
// clang-format on
struct QuantizeRow {
  const float* src;
  int64_t size;
  bool symmetric;
  uint8_t* dst;
  float scale;         // result
  int32_t zero_point;  // result
};

/// Entries of rnn/rnn.cpp.
struct RnnKernels {
  /// As GemmKernels::widening, for `rnn_input` and `rnn_step`.
  int rnn_widening;
  /// `rnn_step` reads streams (RnnStep::streams), and runs a piece of RnnLookahead beside each
  /// panel that has no cells: `groups / streams * (gates - 1) + 1` in a step.
  bool rnn_streams = false;
  void (*rnn_input)(const RnnInput&);
  void (*rnn_step)(const RnnStep&);
  void (*quantize_row)(QuantizeRow&);
};

}  // namespace torchq
