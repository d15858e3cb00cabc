// SPDX-License-Identifier: Apache-2.0
// One direction of a recurrent layer while it runs: Note [Recurrent layers] in rnn.h.
#pragma once

#include <algorithm>

#include "ops/gemm/packing.h"
#include "ops/rnn/choose.h"
#include "runtime/thread_team.h"

namespace torchq {

/// One direction, shared by all of its parts.
class RnnDirection {
 public:
  RnnDirection(const RnnLayer& layer, const RnnChoice& choice, const Kernels& table,
               ScratchFrame& scratch, int direction);

  /// Parts [begin, end), all by this thread.
  void run(int begin, int end);

  /// h_n and c_n, once all parts are done.
  void finish() const;

 private:
  struct Matrix {
    const RnnWeight* weight;
    int64_t offset;   // of this direction, in panels
    int8_t* widened;  // or null
    const int32_t* init;

    const int8_t* panel(int64_t p, int widening) const {
      if (widened != nullptr) return widened + p * weight->panel_bytes() * widening;
      return weight->packed + (offset + p) * weight->panel_bytes();
    }
  };
  /// State of one part; a thread with several parts uses the quantized states of the first.
  struct alignas(64) Own {
    int streams = 0, projection_streams = 0;  // of weights, in steps of one row
    float* inputs = nullptr;                  // of two chunks with `lookahead`
    RnnLookahead lookahead{};
    uint8_t* sources = nullptr;  // of `lookahead` in all parts of a thread
    uint8_t* quantized = nullptr;
    float* scale = nullptr;
    int64_t phase = 0;
  };

  Matrix matrix(ScratchFrame& scratch, const RnnWeight& weight, int64_t panels, int32_t zero_point);
  void take_weights(ScratchFrame& scratch);
  void take_states(ScratchFrame& scratch);
  void take_own(ScratchFrame& scratch, int part, Own& own) const;
  /// Initial states: both buffers, since rows of a packed sequence may begin at any step.
  void reset(ScratchFrame& scratch);
  void quantize(const float* h, uint8_t* dst, int64_t units, const RnnScale& scale) const;
  /// Steps of row n, which is what the parity of its last state's buffer follows.
  int64_t last_step(int64_t n) const;
  void widen(int part);

  bool two_stages() const { return l.projection > 0 || l.cell == RnnCell::kGruVanilla; }
  int64_t time(int64_t step) const { return index == 1 ? l.steps - 1 - step : step; }
  int64_t lowest_row(int64_t step, int64_t stop) const {
    return l.first[std::min(time(step), time(stop - 1))];
  }

  bool looks_ahead() const { return choice.inputs == RnnChoice::kLookahead; }
  bool multiplies_in_steps() const { return choice.inputs == RnnChoice::kInSteps; }
  /// Prepares the lookahead of parts [begin, end) for the chunk that begins with `step`.
  void begin_lookahead(int begin, int end, int64_t step);
  int64_t chunk_end(int64_t step) const;
  /// The input products of a part's groups for rows [first, first + rows) of the source.
  RnnInput input_of(int part, int64_t first, int64_t rows) const;
  float* inputs_of(int part, int64_t step) const;
  void multiply_inputs(int part, int64_t step, int64_t stop);
  /// A step whose rows are those of a matrix unit from `unit_rows` on.
  void multiply_state(const RnnStep& s, int64_t unit_rows) const;
  void run_step(int begin, int end, int64_t step, int64_t lowest);
  /// A projection, or the new gate of a vanilla GRU.
  void second_stage(int part, const Own& own, const uint8_t* src, int now, int64_t t,
                    int64_t input);
  /// The weights and parameters of a range of groups with `gates` packed panels each.
  RnnStep step_of(const Matrix& m, int gates, Range range, int64_t rows, const Own& own) const;
  void point(RnnStep& s, Range range, int now, int64_t stride) const;
  void emit_state(RnnStep& s, Range range, int next, int64_t t) const;
  /// Returns true if the next step or h_n reads the floats of step t's states.
  bool reads_state(int64_t t) const;
  void emit_middle(RnnStep& s, Range range) const;
  void quantize_with(RnnStep& s, const RnnScale& scale) const;
  const uint8_t* quantize_rows(Own& own, const float* src, int64_t rows, int64_t units,
                               int64_t stride) const;

  const RnnLayer& l;
  const RnnChoice& choice;
  const Kernels& tier;
  const int index, parts;
  TeamBarrier barrier;
  int64_t groups_, state_groups_, padded_, state_padded_;
  int64_t rows_;  // of buffers of quantized states: what a matrix unit reads
  Matrix input_{}, recurrent_{}, projected_{};
  float* state_[2] = {};
  uint8_t* quantized_[2] = {};
  float *cell_ = nullptr, *middle_ = nullptr, *update_ = nullptr;
  uint8_t* middle_quantized_ = nullptr;
  Own* own_;  // [parts]
};

}  // namespace torchq
