// SPDX-License-Identifier: Apache-2.0
// Runs a recurrent layer: Note [Recurrent layers] in rnn.h.
#include <algorithm>
#include <optional>

#include "kernels/cpu_tuning.h"
#include "ops/rnn/rnn_direction.h"

namespace torchq {
namespace {

/// Threads for each direction; 0 where one thread runs all.
int parts_per_direction(const RnnLayer& l) {
  const int64_t gates = int64_t{l.gates} * l.hidden;
  const int64_t step = l.batch * (gates * l.state_units() + l.hidden * l.projection);
  const int64_t rows = l.first[l.steps - 1] + l.rows[l.steps - 1];
  const int64_t cost = rows * gates * (l.inputs + l.state_units()) * l.directions;
  const int threads = threads_for(cost);
  if (threads < l.directions || threads == 1) return 0;
  const int64_t most = std::min(step / tuning::kStepGrain, panels_of(l.state_units()));
  return static_cast<int>(std::clamp<int64_t>(most, 1, threads / l.directions));
}

}  // namespace

void run_rnn(const RnnLayer& layer, const Kernels& tier) {
  ScratchFrame scratch;
  const int threads = parts_per_direction(layer), parts = std::max(threads, 1);
  std::optional<RnnDirection> directions[2];
  for (int d = 0; d < layer.directions; ++d) {
    directions[d].emplace(layer, tier, scratch, d, parts);
  }
  // Parts of one direction follow each other, and every thread runs direction 0 first: no thread
  // waits for a part that comes after its own.
  const auto body = [&](int begin, int end) {
    for (int d = begin / parts; d * parts < end; ++d) {
      directions[d]->run(std::max(begin - d * parts, 0), std::min(end - d * parts, parts));
    }
  };
  if (threads == 0) {
    body(0, parts * layer.directions);
  } else {
    parallel_team(parts * layer.directions, body);
  }
  for (int d = 0; d < layer.directions; ++d) directions[d]->finish();
}

}  // namespace torchq
