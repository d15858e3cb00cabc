// SPDX-License-Identifier: Apache-2.0
// Runs a recurrent layer: Note [Recurrent layers] in rnn.h.
#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "../team.h"
#include "rnn.h"

namespace torchq {
namespace {

/// Gates of a thread's input products that wait for their steps: half of a core's L2.
constexpr int64_t kChunkBytes = 512 * 1024;
/// Multiply-accumulates a step must have per thread to be worth a barrier.
constexpr int64_t kStepCost = 32'000;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t whole_groups(int64_t units) { return ceil_div(units, kPanel) * kPanel; }

void convert_row(const Kernels& tier, const void* src, DType src_dtype, void* dst, DType dst_dtype,
                 int64_t size, float factor, int32_t zero_point) {
  const int32_t zero = 0;
  const bool quantizes = src_dtype == DType::f32;
  tier.convert({src, src_dtype, dst, dst_dtype, size, &factor, 0, quantizes ? &zero : &zero_point,
                0, quantizes ? &zero_point : &zero, 0});
}

/// What all parts of one direction share.
class Direction {
 public:
  Direction(const RnnLayer& layer, const Kernels& table, ScratchFrame& scratch, int direction,
            int num_parts)
      : l(layer), tier(table), index(direction), parts(num_parts), barrier(num_parts) {
    padded_ = whole_groups(l.hidden);
    state_padded_ = whole_groups(l.state_units());
    groups = padded_ / kPanel;
    state_groups = state_padded_ / kPanel;
    take_weights(scratch);
    take_states(scratch);
    const int64_t part_groups = ceil_div(groups, parts);
    const int64_t row_bytes = part_groups * l.gates * kPanel * int64_t{sizeof(float)};
    chunk_rows_ = std::max(l.batch, kChunkBytes / row_bytes);
    chunk_rows_ = std::min(chunk_rows_, l.first[l.steps - 1] + l.rows[l.steps - 1]);
    own_ = scratch.take<Own>(parts);
    for (int i = 0; i < parts; ++i) {
      Own& own = *new (own_ + i) Own();
      own.inputs = scratch.take<float>(chunk_rows_ * part_groups * l.gates * kPanel);
      if (l.dynamic) {
        own.quantized = scratch.take<uint8_t>(l.batch * std::max(state_padded_, padded_));
        own.scale = scratch.take<float>(l.batch);
      }
    }
    reset(scratch);
  }

  /// Parts [begin, end), all by this thread.
  void run(int begin, int end) {
    for (int i = begin; i < end; ++i) widen(i);
    for (int64_t step = 0; step < l.steps;) {
      const int64_t stop = chunk_end(step);
      for (int i = begin; i < end; ++i) multiply_inputs(i, step, stop);
      const int64_t lowest = lowest_row(step, stop);
      for (; step < stop; ++step) run_step(begin, end, step, lowest);
    }
  }

  /// h_n and c_n, once all parts are done.
  void finish() const {
    for (int64_t n = 0; n < l.batch; ++n) {
      const int64_t units = l.state_units(), at = index * l.batch + n;
      const float* h = state_[last_step(n) & 1] + n * state_padded_;
      if (l.h_n_dtype == DType::f32) {
        std::memcpy(static_cast<float*>(l.h_n) + at * units, h, units * sizeof(float));
      } else {
        quantize(h, static_cast<uint8_t*>(l.h_n) + at * units, units, l.state_scale);
      }
      if (l.c_n != nullptr) {
        std::memcpy(l.c_n + at * l.hidden, cell_ + n * padded_, l.hidden * sizeof(float));
      }
    }
  }

  int64_t groups, state_groups;

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
    bool narrow() const { return widened == nullptr; }
  };
  /// What a part has for itself; a thread of several uses the first one's states.
  struct alignas(64) Own {
    float* inputs = nullptr;
    uint8_t* quantized = nullptr;
    float* scale = nullptr;
    int64_t phase = 0;
  };

  Matrix matrix(ScratchFrame& scratch, const RnnWeight& weight, int64_t panels,
                int32_t zero_point) {
    Matrix m{&weight, index * panels, nullptr, nullptr};
    if (tier.widen != nullptr && !weight.narrow) {
      m.widened = scratch.take<int8_t>(panels * weight.panel_bytes() * tier.widening);
    }
    const int32_t tap = 0;
    int32_t* init = scratch.take<int32_t>(panels * kPanel);
    tier.compensate(weight.compensation + m.offset * kPanel, 0, &tap, 1, nullptr, zero_point,
                    panels * kPanel, init);
    m.init = init;
    return m;
  }

  void take_weights(ScratchFrame& scratch) {
    const int32_t flip = l.state_dtype == DType::s8 ? 128 : 0;
    const int32_t state = l.dynamic ? 128 : l.state_scale.zero_point + flip;
    const int32_t hidden = l.dynamic ? 128 : l.hidden_scale.zero_point + flip;
    const int64_t panels = groups * l.gates;
    input_ = matrix(scratch, l.input, panels, l.dynamic ? 0 : l.src_zero_point);
    recurrent_ = matrix(scratch, l.recurrent, panels, state);
    if (l.projection > 0) projected_ = matrix(scratch, l.projected, state_groups, hidden);
  }

  void take_states(ScratchFrame& scratch) {
    for (int i = 0; i < 2; ++i) {
      state_[i] = scratch.take<float>(l.batch * state_padded_);
      if (!l.dynamic) quantized_[i] = scratch.take<uint8_t>(l.batch * state_padded_);
    }
    if (l.cell == RnnCell::kLstm) cell_ = scratch.take<float>(l.batch * padded_);
    if (two_stages()) {
      middle_ = scratch.take<float>(l.batch * padded_);
      if (!l.dynamic) middle_quantized_ = scratch.take<uint8_t>(l.batch * padded_);
      update_ = scratch.take<float>(l.batch * padded_);
    }
  }

  /// Initial states: both buffers, since rows of a packed sequence may begin at any step.
  void reset(ScratchFrame& scratch) {
    const int64_t units = l.state_units();
    uint8_t* row = scratch.take<uint8_t>(units);
    for (int64_t n = 0; n < l.batch; ++n) {
      float* h = state_[0] + n * state_padded_;
      std::fill_n(h, state_padded_, 0.0f);
      if (l.h0 != nullptr) {
        const int64_t at = (index * l.batch + n) * units;
        const void* from = static_cast<const char*>(l.h0) + at * (l.h0_dtype == DType::f32 ? 4 : 1);
        const bool is_float = l.h0_dtype == DType::f32;
        convert_row(tier, from, l.h0_dtype, h, DType::f32, units,
                    is_float ? 1.0f : l.state_scale.scale, is_float ? 0 : l.state_scale.zero_point);
      }
      if (!l.dynamic) {
        quantize(h, row, units, l.state_scale);
        if (l.cell == RnnCell::kGruVanilla) {
          convert_row(tier, row, l.state_dtype, h, DType::f32, units, l.state_scale.scale,
                      l.state_scale.zero_point);
        }
        uint8_t* q = quantized_[0] + n * state_padded_;
        const uint8_t flip = l.state_dtype == DType::s8 ? 0x80 : 0;
        for (int64_t i = 0; i < state_padded_; ++i) q[i] = i < units ? row[i] ^ flip : 0;
      }
      if (cell_ != nullptr) {
        float* c = cell_ + n * padded_;
        std::fill_n(c, padded_, 0.0f);
        if (l.c0 != nullptr) {
          std::copy_n(l.c0 + (index * l.batch + n) * l.hidden, l.hidden, c);
        }
      }
    }
    std::copy_n(state_[0], l.batch * state_padded_, state_[1]);
    if (!l.dynamic) std::copy_n(quantized_[0], l.batch * state_padded_, quantized_[1]);
  }

  void quantize(const float* h, uint8_t* dst, int64_t units, const RnnScale& scale) const {
    convert_row(tier, h, DType::f32, dst, l.state_dtype, units, 1.0f / scale.scale,
                scale.zero_point);
    const int lo = static_cast<int>(l.lo), hi = static_cast<int>(l.hi);
    if (hi - lo == 255) return;
    for (int64_t i = 0; i < units; ++i) {
      const int q = l.state_dtype == DType::s8 ? static_cast<int8_t>(dst[i]) : dst[i];
      dst[i] = static_cast<uint8_t>(std::clamp(q, lo, hi));
    }
  }

  bool two_stages() const { return l.projection > 0 || l.cell == RnnCell::kGruVanilla; }
  int64_t time(int64_t step) const { return index == 1 ? l.steps - 1 - step : step; }
  /// Steps of row n, which is what the parity of its last state's buffer follows.
  int64_t last_step(int64_t n) const {
    if (index == 1) return l.steps;
    int64_t t = l.steps;
    while (t > 0 && l.rows[t - 1] <= n) --t;
    return t;
  }
  int64_t lowest_row(int64_t step, int64_t stop) const {
    return l.first[std::min(time(step), time(stop - 1))];
  }
  int64_t chunk_end(int64_t step) const {
    int64_t rows = l.rows[time(step)], stop = step + 1;
    while (stop < l.steps && rows + l.rows[time(stop)] <= chunk_rows_) {
      rows += l.rows[time(stop++)];
    }
    return stop;
  }

  void widen(int part) {
    const auto own = [&](const Matrix& m, int64_t panels_per_group, int64_t all) {
      if (m.widened == nullptr) return;
      const Range range = part_of(all, parts, part);
      const int64_t first = range.begin * panels_per_group, count = range.end - range.begin;
      tier.widen(m.weight->packed + (m.offset + first) * m.weight->panel_bytes(),
                 count * panels_per_group * m.weight->panel_bytes(),
                 m.widened + first * m.weight->panel_bytes() * tier.widening);
    };
    own(input_, l.gates, groups);
    own(recurrent_, l.gates, groups);
    if (l.projection > 0) own(projected_, 1, state_groups);
  }

  void multiply_inputs(int part, int64_t step, int64_t stop) {
    const Range range = part_of(groups, parts, part);
    const int64_t lowest = lowest_row(step, stop);
    RnnInput in{};
    in.src = l.src;
    in.row_offset = l.row_offset + lowest;
    for (int64_t s = step; s < stop; ++s) in.rows += l.rows[time(s)];
    in.quads = l.input.quads;
    in.panel_stride = l.input.panel_bytes();
    in.gates = l.gates;
    in.narrow = input_.narrow();
    if (l.dynamic) {
      in.scale = l.row_scale + lowest;
      in.zero_point = l.row_zero_point + lowest;
    }
    for (int64_t group = range.begin; group < range.end; ++group) {
      const int64_t panel = group * l.gates, all = input_.offset + panel;
      in.weight = input_.panel(panel, tier.widening);
      in.init = input_.init + panel * kPanel;
      in.multiplier = l.input.multiplier + all * kPanel;
      in.bias = l.bias + all * kPanel;
      in.compensation = l.input.compensation + all * kPanel;
      in.dst = own_[part].inputs + (group - range.begin) * chunk_rows_ * l.gates * kPanel;
      tier.rnn_input(in);
    }
  }

  void run_step(int begin, int end, int64_t step, int64_t lowest) {
    Own& own = own_[begin];
    const int64_t t = time(step), rows = l.rows[t];
    const bool last_stage = !two_stages();
    const int now = step & 1, next = now ^ 1;
    const uint8_t* src = quantized_[now];
    if (l.dynamic) src = quantize_rows(own, state_[now], rows, l.state_units(), state_padded_);
    for (int i = begin; i < end; ++i) {
      const Range range = part_of(groups, parts, i);
      RnnStep s = step_of(recurrent_, l.gates, range, rows, own);
      s.cell = l.cell == RnnCell::kGruVanilla ? RnnCell::kGruGates : l.cell;
      if (l.cell == RnnCell::kGruVanilla) s.gates = 2;
      s.src = src;
      s.src_stride = state_padded_;
      s.input = own_[i].inputs + (l.first[t] - lowest) * l.gates * kPanel;
      s.input_group_stride = chunk_rows_ * l.gates * kPanel;
      s.input_row_stride = l.gates * kPanel;
      if (l.extra != nullptr) {
        const int64_t vectors = l.cell == RnnCell::kLstm ? 3 : 1;
        s.extra = l.extra + index * vectors * padded_ + range.begin * kPanel;
        s.extra_stride = padded_;
      }
      point(s, range, now, padded_);
      s.units = std::min(l.hidden, range.end * kPanel) - range.begin * kPanel;
      if (last_stage) {
        emit_state(s, range, next, t);
      } else {
        emit_middle(s, range);
      }
      tier.rnn_step(s);
    }
    barrier.meet(end - begin, own.phase);
    if (last_stage) return;
    src = middle_quantized_;
    if (l.dynamic) src = quantize_rows(own, middle_, rows, l.hidden, padded_);
    for (int i = begin; i < end; ++i) {
      second_stage(i, own, src, now, t, (l.first[t] - lowest) * l.gates * kPanel);
    }
    barrier.meet(end - begin, own.phase);
  }

  /// A projection, or the new gate of a vanilla GRU.
  void second_stage(int part, const Own& own, const uint8_t* src, int now, int64_t t,
                    int64_t input) {
    const bool projects = l.projection > 0;
    const Range range = part_of(projects ? state_groups : groups, parts, part);
    RnnStep s =
        step_of(projects ? projected_ : recurrent_, projects ? 1 : l.gates, range, l.rows[t], own);
    s.cell = projects ? RnnCell::kProjection : RnnCell::kGruNew;
    s.gates = 1;
    s.src = src;
    s.src_stride = padded_;
    if (!projects) {
      const int64_t skip = 2 * kPanel;  // the gates r and z
      s.weight += 2 * s.panel_stride * (s.narrow ? 1 : tier.widening);
      s.init += skip;
      s.multiplier += skip;
      s.input = own_[part].inputs + input + skip;
      s.input_group_stride = chunk_rows_ * l.gates * kPanel;
      s.input_row_stride = l.gates * kPanel;
    }
    point(s, range, now, state_padded_);
    s.units = std::min(l.state_units(), range.end * kPanel) - range.begin * kPanel;
    emit_state(s, range, now ^ 1, t);
    tier.rnn_step(s);
  }

  /// The weights and parameters of a range of groups with `gates` packed panels each.
  RnnStep step_of(const Matrix& m, int gates, Range range, int64_t rows, const Own& own) const {
    RnnStep s{};
    s.groups = static_cast<int>(range.end - range.begin);
    s.gates = gates;
    s.rows = rows;
    const int64_t panel = range.begin * gates;
    s.quads = m.weight->quads;
    s.weight = m.panel(panel, tier.widening);
    s.panel_stride = m.weight->panel_bytes();
    s.group_stride = gates * s.panel_stride;
    s.narrow = m.narrow();
    s.init = m.init + panel * kPanel;
    s.multiplier = m.weight->multiplier + (m.offset + panel) * kPanel;
    s.param_stride = gates * kPanel;
    s.scale = own.scale;
    return s;
  }

  void point(RnnStep& s, Range range, int now, int64_t stride) const {
    const int64_t unit = range.begin * kPanel;
    s.unit_stride = stride;
    if (cell_ != nullptr && s.cell == RnnCell::kLstm) s.cell_state = cell_ + unit;
    s.old = state_[now] + unit;
    if (update_ != nullptr) s.update = update_ + unit;
  }

  void emit_state(RnnStep& s, Range range, int next, int64_t t) const {
    const int64_t unit = range.begin * kPanel, units = l.state_units();
    s.state = state_[next] + unit;
    if (!l.dynamic) {
      s.quantized = quantized_[next] + unit;
      s.quantized_stride = state_padded_;
      quantize_with(s, l.state_scale);
      s.requantized = l.cell == RnnCell::kGruVanilla;
    }
    s.dst_dtype = l.dst_dtype;
    s.dst_stride = l.directions * units;
    const int64_t at = l.first[t] * s.dst_stride + index * units + unit;
    s.dst = static_cast<char*>(l.dst) + at * (l.dst_dtype == DType::f32 ? 4 : 1);
  }

  void emit_middle(RnnStep& s, Range range) const {
    const int64_t unit = range.begin * kPanel;
    s.state = middle_ + unit;
    if (l.dynamic) return;
    s.quantized = middle_quantized_ + unit;
    s.quantized_stride = padded_;
    quantize_with(s, l.hidden_scale);
  }

  void quantize_with(RnnStep& s, const RnnScale& scale) const {
    s.real_scale = scale.scale;
    s.inverse_scale = 1.0f / scale.scale;
    s.zero_point = static_cast<float>(scale.zero_point);
    s.lo = l.lo;
    s.hi = l.hi;
    s.flip = l.state_dtype == DType::s8 ? 128 : 0;
  }

  const uint8_t* quantize_rows(Own& own, const float* src, int64_t rows, int64_t units,
                               int64_t stride) const {
    for (int64_t n = 0; n < rows; ++n) {
      QuantizeRow q{src + n * stride, units, true, own.quantized + n * stride, 0, 0};
      tier.quantize_row(q);
      own.scale[n] = q.scale;
    }
    return own.quantized;
  }

  const RnnLayer& l;
  const Kernels& tier;
  const int index, parts;
  TeamBarrier barrier;
  int64_t padded_, state_padded_, chunk_rows_;
  Matrix input_{}, recurrent_{}, projected_{};
  float* state_[2] = {};
  uint8_t* quantized_[2] = {};
  float *cell_ = nullptr, *middle_ = nullptr, *update_ = nullptr;
  uint8_t* middle_quantized_ = nullptr;
  Own* own_;  // [parts]
};

/// Threads for each direction; 0 where one thread runs all.
int parts_per_direction(const RnnLayer& l) {
  const int64_t gates = int64_t{l.gates} * l.hidden;
  const int64_t step = l.batch * (gates * l.state_units() + l.hidden * l.projection);
  const int64_t rows = l.first[l.steps - 1] + l.rows[l.steps - 1];
  const int64_t cost = rows * gates * (l.inputs + l.state_units()) * l.directions;
  const int threads = threads_for(cost);
  if (threads < l.directions || threads == 1) return 0;
  const int64_t most = std::min(step / kStepCost, ceil_div(l.state_units(), kPanel));
  return static_cast<int>(std::clamp<int64_t>(most, 1, threads / l.directions));
}

}  // namespace

void run_rnn(const RnnLayer& layer, const Kernels& tier) {
  ScratchFrame scratch;
  const int threads = parts_per_direction(layer), parts = std::max(threads, 1);
  std::optional<Direction> directions[2];
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
