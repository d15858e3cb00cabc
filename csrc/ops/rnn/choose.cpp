// SPDX-License-Identifier: Apache-2.0
#include "ops/rnn/choose.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "kernels/amx/contract.h"
#include "kernels/cpu_tuning.h"
#include "ops/gemm/packing.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

/// Threads for each direction; 0 where one thread runs all.
int threads_of_direction(const RnnLayer& l) {
  const int64_t gates = int64_t{l.gates} * l.hidden;
  const int64_t step = l.batch * (gates * l.state_units() + l.hidden * l.projection);
  const int64_t cost = l.source_rows() * gates * (l.inputs + l.state_units()) * l.directions;
  const int threads = threads_for(cost);
  if (threads < l.directions || threads == 1) return 0;
  const int64_t most = std::min(step / tuning::kStepGrain, panels_of(l.state_units()));
  return static_cast<int>(std::clamp<int64_t>(most, 1, threads / l.directions));
}

bool fits_unit(const RnnWeight& weight) {
  return weight.quads > 0 && weight.quads % kChunkQuads == 0;
}

/// Fills the rows from which on a matrix unit runs, or returns why it does not.
const char* choose_matrix_unit(const RnnLayer& l, const Kernels& tier, RnnChoice& c) {
  c.unit_inputs = c.unit_states = c.unit_projections = kNever;
  if (tier.matrix == nullptr) return "the tier has none";
  if (fits_unit(l.input)) c.unit_inputs = kUnitRows;
  if (fits_unit(l.projected)) c.unit_projections = tuning::kMinUnitStates;
  if (!fits_unit(l.recurrent)) return "the units do not fill whole chunks";
  const int64_t least = tuning::kMinUnitStates;
  c.unit_states = c.inputs == RnnChoice::kInSteps ? std::max(c.unit_inputs, least) : least;
  if (c.unit_states == kNever) return "the inputs do not fill whole chunks";
  return l.batch < c.unit_states ? "there are few rows" : nullptr;
}

/// Of steps with one row.
const char* why_no_streams(const RnnLayer& l, const Kernels& tier) {
  if (!tier.rnn_streams) return "the tier has none";
  if (!cpu_tuning->gains_from_streams) return "this CPU does not gain";
  return l.cell == RnnCell::kGruVanilla ? "a step reads its weights in two stages" : nullptr;
}

const char* why_no_lookahead(const RnnLayer& l, const RnnChoice& c) {
  if (l.cell != RnnCell::kLstm && l.cell != RnnCell::kGru) return "the cell has one gate";
  if (l.steps <= kLookaheadRows) return "there are few steps";
  const int64_t units = l.state_units();
  if (tuning::kMinInputsOfUnits * l.inputs < units) return "there are few inputs";
  if (l.inputs > tuning::kMaxInputsPerUnit * units) return "there are many inputs";
  for (int i = 0; i < c.parts; ++i) {
    const Range part = part_of(panels_of(l.hidden), c.parts, i);
    if (c.pieces_of_tile(l, part.end - part.begin) == 0) return "steps have few weights";
  }
  return nullptr;
}

}  // namespace

int RnnChoice::streams_of(const RnnWeight& weight, int gates, int64_t groups) const {
  if (!streams) return 0;
  const int count = weight.panel_bytes() >= tuning::kRnnLongPanelBytes || groups % 2 != 0 ? 1 : 2;
  const int64_t bytes = groups * gates * weight.panel_bytes();
  return bytes > tuning::kRnnStreamedMinBytes[count - 1] ? count : 0;
}

int64_t RnnChoice::pieces_of_tile(const RnnLayer& l, int64_t groups) const {
  const int count = streams_of(l.recurrent, l.gates, groups);
  if (count == 0) return 0;
  const int64_t panels = groups / count * (l.gates - 1) + 1;  // of each stream, without cells
  return kLookaheadRows * panels / ceil_div(groups * l.gates, kLookaheadPanels);
}

RnnChoice choose(const RnnLayer& l, const Kernels& tier) {
  RnnChoice c{};
  c.threads = threads_of_direction(l);
  c.parts = std::max(c.threads, 1);
  const bool in_steps = l.cell != RnnCell::kGruVanilla && l.batch >= tuning::kMinRowsInSteps;
  c.inputs = in_steps ? RnnChoice::kInSteps : RnnChoice::kAhead;
  c.reasons.add("rnn_matrix", choose_matrix_unit(l, tier, c));
  const char* why = why_no_streams(l, tier);
  c.streams = why == nullptr && !in_steps;
  if (why == nullptr && l.batch > 1)
    why = "there are several rows";  // but later steps may have one
  c.reasons.add("rnn_streamed", why);
  const int64_t row_bytes =
      ceil_div(panels_of(l.hidden), c.parts) * l.gates * kPanel * int64_t{sizeof(float)};
  c.chunk_rows = std::max(l.batch, tuning::kRnnInputBytes / row_bytes);
  c.chunk_rows = std::min(c.chunk_rows, l.source_rows());
  if (why != nullptr) return c;
  why = why_no_lookahead(l, c);
  c.reasons.add("rnn_lookahead", why);
  if (why == nullptr) {
    c.inputs = RnnChoice::kLookahead;
    c.chunk_rows = kLookaheadRows;
  }
  return c;
}

void RnnChoice::log(const RnnLayer& l) const {
  if (!logs_kernel_choice()) return;
  reasons.log();
  constexpr const char* kInputs[] = {"ahead", "in_steps", "lookahead"};
  constexpr const char* kStates[] = {"tiles", "one_stream", "two_streams"};
  const Range part = part_of(panels_of(l.hidden), parts, 0);
  const char* states = l.batch >= unit_states ? "matrix_unit"
                       : l.batch > 1
                           ? kStates[0]
                           : kStates[streams_of(l.recurrent, l.gates, part.end - part.begin)];
  std::printf("torchq,choice,rnn,inputs:%s states:%s shares:%dx%d\n", kInputs[inputs], states,
              threads == 0 ? 1 : l.directions, parts);
}

}  // namespace torchq
