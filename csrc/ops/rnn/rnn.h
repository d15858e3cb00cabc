// SPDX-License-Identifier: Apache-2.0
// One recurrent layer, all directions: what `rnn.cpp` reads from a call's arguments, and what
// `rnn_layer.cpp` runs.
//
// Note [Recurrent layers]
// All that a step does not need the state for, the products with the source, is one matmul over
// many steps; with a large batch it is done tile by tile within the steps, where its results need
// no way through memory; with a single sequence, where the CPU gains from it, among the products of
// the steps before (Note [Streamed cells] in kernels/rnn/rnn_streamed.h). Every step multiplies the
// state and applies the cell. The units are split among the threads, who keep their weights in
// their own caches; they meet at a barrier after each step, since each needs the whole state. No
// thread waits for another's input products.
//
// The state and what a projection or a vanilla GRU multiplies in between are u8 inside (an s8 state
// with its sign bit flipped). Static layers quantize them with scales of their own, each thread its
// units. Dynamic layers keep them in float; after the barrier each thread quantizes all rows for
// itself, each row with the scale of its own largest value, so that neither the batch nor the
// threads change a bit.
//
// Packed weights have the gates of 16 units side by side: rows (unit group, gate, unit), padded to
// whole groups, then packed like a linear layer's. Parameters are in the same order. Directions
// follow each other.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/table.h"
#include "runtime/scratch.h"

namespace torchq {

/// A packed matrix with its int32 sums and scales, for all directions.
struct RnnWeight {
  const int8_t* packed;
  const int32_t* compensation;
  const float* multiplier;
  int64_t quads;
  bool narrow;

  int64_t panel_bytes() const { return quads * kPanel * kQuad; }
};

/// How a float becomes a quantized state.
struct RnnScale {
  float scale;
  int32_t zero_point;
};

struct RnnLayer {
  RnnCell cell;
  int directions;
  int64_t inputs, hidden, projection;  // projection 0: none
  int gates;
  bool dynamic;
  // the source: row i at src + row_offset[i]
  const uint8_t* src;
  const int64_t* row_offset;
  const float* row_scale;         // dynamic
  const int32_t* row_zero_point;  // dynamic
  int32_t src_zero_point;         // static, of the source as u8
  // sequences: step t has rows[t] rows of the batch, from first[t] on
  int64_t steps, batch;
  const int64_t *rows, *first;
  RnnWeight input, recurrent, projected;
  const float* bias;   // [directions][groups][gates][16]
  const float* extra;  // [directions][groups * 16] (GRU) or [directions][3][groups * 16] (peephole)
  RnnScale state_scale, hidden_scale;
  DType state_dtype;
  float lo, hi;  // of the state, as integers
  // initial states: contiguous [directions][batch][..] or null
  const void* h0;
  DType h0_dtype;
  const float* c0;
  // results
  void* dst;
  DType dst_dtype;
  void* h_n;
  DType h_n_dtype;
  float* c_n;

  int64_t state_units() const { return projection > 0 ? projection : hidden; }
};

void run_rnn(const RnnLayer& layer, const Kernels& tier);

}  // namespace torchq
