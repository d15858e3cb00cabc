// SPDX-License-Identifier: Apache-2.0
// One recurrent layer, all directions: `rnn.cpp` fills it from a call's arguments, `choose.cpp`
// says how it runs, `rnn_direction.cpp` runs it.
//
// Note [Recurrent layers]
// Products with the source do not depend on the state: they are one matmul over many steps. With a
// large batch they run tile by tile within the steps, and their results stay in cache. With a
// single sequence, on CPUs that gain from it, they are interleaved with the products of earlier
// steps (Note [Streamed cells] in kernels/rnn/rnn_streamed.h). Every step multiplies the state and
// applies the cell. The units are split among the threads, which keep their weights in their own
// caches. They meet at a barrier after each step, since each needs the whole state. No thread waits
// for another's input products.
//
// The state, and the intermediate values of a projection or a vanilla GRU, are u8 inside (an s8
// state with its sign bit flipped). Static layers quantize them with given scales, each thread its
// own units. Dynamic layers keep them in float. After the barrier each thread quantizes all rows
// for itself, each row with the scale of its largest value, so that results depend neither on the
// batch nor on the threads.
//
// Packed weights have the gates of 16 units side by side: rows (unit group, gate, unit), padded to
// whole groups, then packed like a linear layer's. Parameters are in the same order. Directions
// follow each other.
#pragma once

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

/// Scale and zero point of a quantized state.
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
  /// Rows of all steps.
  int64_t source_rows() const { return first[steps - 1] + rows[steps - 1]; }
};

struct RnnChoice;
void run_rnn(const RnnLayer& layer, const RnnChoice& choice, const Kernels& tier);

}  // namespace torchq
