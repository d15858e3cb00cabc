// SPDX-License-Identifier: Apache-2.0
// The choices that a recurrent layer makes once for all of its steps: how inputs and states are
// multiplied, and by how many threads.
#pragma once

#include "ops/rnn/rnn.h"
#include "runtime/verbose.h"

namespace torchq {

struct RnnChoice {
  /// Products of the inputs: of many steps before the first of them; within each step; or of later
  /// steps among the products of a step (RnnLookahead).
  enum Inputs { kAhead, kInSteps, kLookahead };
  Inputs inputs;
  /// Threads of each direction; 0: one thread runs all. Each has one part of the units.
  int threads;
  int parts;
  /// Most rows of inputs whose products wait for their steps.
  int64_t chunk_rows;
  /// Rows from which on a matrix unit multiplies the inputs, the states and a projection.
  int64_t unit_inputs, unit_states, unit_projections;
  /// A step of one row may read its weights as streams (Note [Streamed weights]).
  bool streams;
  Reasons reasons;

  /// Streams of `groups` groups' weights in a step of one row; 0: tiles of panels.
  int streams_of(const RnnWeight& weight, int gates, int64_t groups) const;
  /// Pieces into which a chunk's steps cut a tile of the next chunk's inputs, for a part of
  /// `groups` groups; 0: no lookahead. All chunks but the last have kLookaheadRows steps, so all
  /// tiles are done when a chunk ends.
  int64_t pieces_of_tile(const RnnLayer& l, int64_t groups) const;
  /// Prints "torchq,choice,..." and the reasons if they are logged.
  void log(const RnnLayer& l) const;
};
RnnChoice choose(const RnnLayer& l, const Kernels& tier);

}  // namespace torchq
