// SPDX-License-Identifier: Apache-2.0
// The steps of a recurrent layer's direction: Note [Recurrent layers] in rnn.h.
#include <algorithm>
#include <cstring>

#include "kernels/amx/contract.h"
#include "kernels/cpu_tuning.h"
#include "ops/rnn/rnn_direction.h"

namespace torchq {

void RnnDirection::run(int begin, int end) {
  for (int i = begin; i < end; ++i) widen(i);
  for (int64_t step = 0; step < l.steps;) {
    const int64_t stop = chunk_end(step);
    const bool is_done = inputs_in_steps_ || (uses_lookahead_ && step > 0);
    for (int i = begin; i < end && !is_done; ++i) multiply_inputs(i, step, stop);
    if (uses_lookahead_ && stop < l.steps) begin_lookahead(begin, end, stop);
    const int64_t lowest = lowest_row(step, stop);
    for (; step < stop; ++step) run_step(begin, end, step, lowest);
  }
}

int64_t RnnDirection::chunk_end(int64_t step) const {
  int64_t rows = l.rows[time(step)], stop = step + 1;
  while (stop < l.steps && rows + l.rows[time(stop)] <= chunk_rows_) {
    rows += l.rows[time(stop++)];
  }
  return stop;
}

RnnInput RnnDirection::input_of(int part, int64_t first, int64_t rows) const {
  const Range range = part_of(groups_, parts, part);
  const int64_t panel = range.begin * l.gates, all = (input_.offset + panel) * kPanel;
  RnnInput in{};
  in.src = l.src;
  in.row_offset = l.row_offset + first;
  in.rows = rows;
  in.quads = l.input.quads;
  in.groups = static_cast<int>(range.end - range.begin);
  in.gates = l.gates;
  in.weight = input_.panel(panel, tier.rnn_widening);
  in.panel_stride = l.input.panel_bytes();
  in.narrow = l.input.narrow;
  in.init = input_.init + panel * kPanel;
  in.multiplier = l.input.multiplier + all;
  in.bias = l.bias + all;
  in.compensation = l.input.compensation + all;
  if (l.dynamic) {
    in.scale = l.row_scale + first;
    in.zero_point = l.row_zero_point + first;
  }
  return in;
}

float* RnnDirection::inputs_of(int part, int64_t step) const {
  const int64_t chunk = chunk_rows_ * ceil_div(groups_, parts) * l.gates * kPanel;
  return own_[part].inputs + (uses_lookahead_ ? step / kLookaheadRows % 2 * chunk : 0);
}

void RnnDirection::begin_lookahead(int begin, int end, int64_t step) {
  const int64_t stop = chunk_end(step), first = lowest_row(step, stop), rows = stop - step;
  uint8_t* const sources = own_[begin].sources;
  for (int64_t r = 0; r < kLookaheadRows; ++r) {  // the last one again where there are fewer
    const uint8_t* row = l.src + l.row_offset[first + std::min(r, rows - 1)];
    for (int64_t k = 0; k < l.input.quads; ++k) {
      std::memcpy(sources + (k * kLookaheadRows + r) * kQuad, row + k * kQuad, kQuad);
    }
  }
  for (int i = begin; i < end; ++i) {
    RnnLookahead& a = own_[i].lookahead;
    a.in = input_of(i, first, rows);
    a.in.src = sources;
    a.in.dst = inputs_of(i, step);
    a.in.dst_group_stride = chunk_rows_ * l.gates * kPanel;
    a.tile = a.k = 0;
  }
}

void RnnDirection::multiply_inputs(int part, int64_t step, int64_t stop) {
  int64_t rows = 0;
  for (int64_t s = step; s < stop; ++s) rows += l.rows[time(s)];
  RnnInput in = input_of(part, lowest_row(step, stop), rows);
  in.dst = inputs_of(part, step);
  in.dst_group_stride = chunk_rows_ * l.gates * kPanel;
  const bool on_unit = rows >= kUnitRows && fits_unit(l.input);
  (on_unit ? tier.matrix->rnn_input : tier.rnn_input)(in);
}

void RnnDirection::multiply_state(const RnnStep& s, const RnnWeight& weight) const {
  const bool inputs_fit = s.source == nullptr || (s.rows >= kUnitRows && fits_unit(l.input));
  const bool on_unit = s.rows >= tuning::kMinUnitStates && fits_unit(weight) && inputs_fit;
  (on_unit ? tier.matrix->rnn_step : tier.rnn_step)(s);
}

void RnnDirection::run_step(int begin, int end, int64_t step, int64_t lowest) {
  Own& own = own_[begin];
  const int64_t t = time(step), rows = l.rows[t];
  const bool last_stage = !two_stages();
  const int now = step & 1, next = now ^ 1;
  const uint8_t* src = quantized_[now];
  if (l.dynamic) src = quantize_rows(own, state_[now], rows, l.state_units(), state_padded_);
  for (int i = begin; i < end; ++i) {
    const Range range = part_of(groups_, parts, i);
    RnnStep s = step_of(recurrent_, l.gates, range, rows, own);
    s.descending = now != 0;
    s.cell = l.cell == RnnCell::kGruVanilla ? RnnCell::kGruGates : l.cell;
    if (l.cell == RnnCell::kGruVanilla) s.gates = 2;
    s.src = src;
    s.src_stride = state_padded_;
    RnnInput in;
    if (inputs_in_steps_) {
      in = input_of(i, l.first[t], rows);
      s.source = &in;
    } else {
      s.input = inputs_of(i, step) + (l.first[t] - lowest) * l.gates * kPanel;
      s.lookahead = uses_lookahead_ ? &own_[i].lookahead : nullptr;
      s.input_group_stride = chunk_rows_ * l.gates * kPanel;
      s.input_row_stride = l.gates * kPanel;
    }
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
    multiply_state(s, l.recurrent);
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

void RnnDirection::second_stage(int part, const Own& own, const uint8_t* src, int now, int64_t t,
                                int64_t input) {
  const bool projects = l.projection > 0;
  const Range range = part_of(projects ? state_groups_ : groups_, parts, part);
  RnnStep s =
      step_of(projects ? projected_ : recurrent_, projects ? 1 : l.gates, range, l.rows[t], own);
  s.cell = projects ? RnnCell::kProjection : RnnCell::kGruNew;
  s.gates = 1;
  s.src = src;
  s.src_stride = padded_;
  if (!projects) {
    const int64_t skip = 2 * kPanel;  // the gates r and z
    s.weight += 2 * s.panel_stride * (s.narrow ? 1 : tier.rnn_widening);
    s.init += skip;
    s.multiplier += skip;
    s.input = own_[part].inputs + input + skip;
    s.input_group_stride = chunk_rows_ * l.gates * kPanel;
    s.input_row_stride = l.gates * kPanel;
  }
  point(s, range, now, state_padded_);
  s.units = std::min(l.state_units(), range.end * kPanel) - range.begin * kPanel;
  emit_state(s, range, now ^ 1, t);
  multiply_state(s, projects ? l.projected : l.recurrent);
}

RnnStep RnnDirection::step_of(const Matrix& m, int gates, Range range, int64_t rows,
                              const Own& own) const {
  RnnStep s{};
  s.groups = static_cast<int>(range.end - range.begin);
  s.gates = gates;
  s.rows = rows;
  const int64_t panel = range.begin * gates;
  s.quads = m.weight->quads;
  s.weight = m.panel(panel, tier.rnn_widening);
  s.panel_stride = m.weight->panel_bytes();
  s.group_stride = gates * s.panel_stride;
  s.narrow = m.weight->narrow;
  s.init = m.init + panel * kPanel;
  s.multiplier = m.weight->multiplier + (m.offset + panel) * kPanel;
  s.param_stride = gates * kPanel;
  s.scale = own.scale;
  return s;
}

void RnnDirection::point(RnnStep& s, Range range, int now, int64_t stride) const {
  const int64_t unit = range.begin * kPanel;
  s.unit_stride = stride;
  if (cell_ != nullptr && s.cell == RnnCell::kLstm) s.cell_state = cell_ + unit;
  s.old = state_[now] + unit;
  if (update_ != nullptr) s.update = update_ + unit;
}

void RnnDirection::emit_state(RnnStep& s, Range range, int next, int64_t t) const {
  const int64_t unit = range.begin * kPanel, units = l.state_units();
  if (reads_state(t)) s.state = state_[next] + unit;
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

bool RnnDirection::reads_state(int64_t t) const {
  const bool has_old = l.cell == RnnCell::kGru || l.cell == RnnCell::kGruVanilla;
  const int64_t next = index == 1 ? t - 1 : t + 1;
  return has_old || l.dynamic || next < 0 || next == l.steps || l.rows[next] < l.rows[t];
}

void RnnDirection::emit_middle(RnnStep& s, Range range) const {
  const int64_t unit = range.begin * kPanel;
  if (l.dynamic) {
    s.state = middle_ + unit;
    return;
  }
  s.quantized = middle_quantized_ + unit;
  s.quantized_stride = padded_;
  quantize_with(s, l.hidden_scale);
}

void RnnDirection::quantize_with(RnnStep& s, const RnnScale& scale) const {
  s.real_scale = scale.scale;
  s.inverse_scale = 1.0f / scale.scale;
  s.zero_point = static_cast<float>(scale.zero_point);
  s.lo = l.lo;
  s.hi = l.hi;
  s.flip = l.state_dtype == DType::s8 ? 128 : 0;
}

const uint8_t* RnnDirection::quantize_rows(Own& own, const float* src, int64_t rows, int64_t units,
                                           int64_t stride) const {
  for (int64_t n = 0; n < rows; ++n) {
    QuantizeRow q{src + n * stride, units, true, own.quantized + n * stride, 0, 0};
    tier.quantize_row(q);
    own.scale[n] = q.scale;
  }
  return own.quantized;
}

}  // namespace torchq
