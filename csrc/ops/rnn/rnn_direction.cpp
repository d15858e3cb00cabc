// SPDX-License-Identifier: Apache-2.0
// A recurrent layer's directions: their memory, initial states, steps, last states and threads.
// Note [Recurrent layers] in rnn.h.
#include "ops/rnn/rnn_direction.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>

#include "kernels/amx/contract.h"

namespace torchq {
namespace {

int64_t whole_groups(int64_t units) { return panels_of(units) * kPanel; }

void convert_row(const Kernels& tier, const void* src, DType src_dtype, void* dst, DType dst_dtype,
                 int64_t size, float factor, int32_t zero_point) {
  const int32_t zero = 0;
  const bool quantizes = src_dtype == DType::f32;
  tier.convert({src, src_dtype, dst, dst_dtype, size, &factor, 0, quantizes ? &zero : &zero_point,
                0, quantizes ? &zero_point : &zero, 0});
}

}  // namespace

RnnDirection::RnnDirection(const RnnLayer& layer, const RnnChoice& chosen, const Kernels& table,
                           ScratchFrame& scratch, int direction)
    : l(layer),
      choice(chosen),
      tier(table),
      index(direction),
      parts(chosen.parts),
      barrier(chosen.parts) {
  padded_ = whole_groups(l.hidden);
  state_padded_ = whole_groups(l.state_units());
  groups_ = padded_ / kPanel;
  state_groups_ = state_padded_ / kPanel;
  rows_ = tier.matrix != nullptr ? std::max<int64_t>(l.batch, kUnitRows) : l.batch;
  take_weights(scratch);
  take_states(scratch);
  own_ = scratch.take<Own>(parts);
  for (int i = 0; i < parts; ++i) take_own(scratch, i, *new (own_ + i) Own());
  reset(scratch);
}

void RnnDirection::take_own(ScratchFrame& scratch, int part, Own& own) const {
  const Range groups = part_of(groups_, parts, part);
  own.streams = choice.streams_of(l.recurrent, l.gates, groups.end - groups.begin);
  if (l.projection > 0) {
    const Range states = part_of(state_groups_, parts, part);
    own.projection_streams = choice.streams_of(l.projected, 1, states.end - states.begin);
  }
  if (!multiplies_in_steps()) {
    const int chunks = looks_ahead() ? 2 : 1;
    own.inputs =
        scratch.take<float>(chunks, choice.chunk_rows, ceil_div(groups_, parts), l.gates, kPanel);
  }
  if (looks_ahead()) {
    const int64_t pieces = choice.pieces_of_tile(l, groups.end - groups.begin);
    own.lookahead.piece = ceil_div(l.input.quads, pieces);
    own.lookahead.sums = scratch.take<int32_t>(kLookaheadRows, kLookaheadPanels, kPanel);
    own.sources = scratch.take<uint8_t>(kLookaheadRows, l.input.quads, kQuad);
  }
  if (l.dynamic) {
    own.quantized = scratch.take<uint8_t>(rows_, std::max(state_padded_, padded_));
    own.scale = scratch.take<float>(l.batch);
  }
}

RnnDirection::Matrix RnnDirection::matrix(ScratchFrame& scratch, const RnnWeight& weight,
                                          int64_t panels, int32_t zero_point) {
  Matrix m{&weight, index * panels, nullptr, nullptr};
  if (tier.rnn_widening > 1 && !weight.narrow) {
    m.widened = scratch.take<int8_t>(panels, weight.panel_bytes(), tier.rnn_widening);
  }
  const int32_t tap = 0;
  int32_t* init = scratch.take<int32_t>(panels, kPanel);
  tier.compensate(weight.compensation + m.offset * kPanel, 0, &tap, 1, nullptr, zero_point,
                  panels * kPanel, init);
  m.init = init;
  return m;
}

void RnnDirection::take_weights(ScratchFrame& scratch) {
  const int32_t flip = l.state_dtype == DType::s8 ? 128 : 0;
  const int32_t state = l.dynamic ? 128 : l.state_scale.zero_point + flip;
  const int32_t hidden = l.dynamic ? 128 : l.hidden_scale.zero_point + flip;
  const int64_t panels = groups_ * l.gates;
  input_ = matrix(scratch, l.input, panels, l.dynamic ? 0 : l.src_zero_point);
  recurrent_ = matrix(scratch, l.recurrent, panels, state);
  if (l.projection > 0) projected_ = matrix(scratch, l.projected, state_groups_, hidden);
}

void RnnDirection::take_states(ScratchFrame& scratch) {
  for (int i = 0; i < 2; ++i) {
    state_[i] = scratch.take<float>(l.batch, state_padded_);
    if (!l.dynamic) quantized_[i] = scratch.take<uint8_t>(rows_, state_padded_);
  }
  if (l.cell == RnnCell::kLstm) cell_ = scratch.take<float>(l.batch, padded_);
  if (two_stages()) {
    if (l.dynamic) {
      middle_ = scratch.take<float>(l.batch, padded_);
    } else {
      middle_quantized_ = scratch.take<uint8_t>(rows_, padded_);
    }
    update_ = scratch.take<float>(l.batch, padded_);
  }
}

void RnnDirection::reset(ScratchFrame& scratch) {
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

void RnnDirection::quantize(const float* h, uint8_t* dst, int64_t units,
                            const RnnScale& scale) const {
  convert_row(tier, h, DType::f32, dst, l.state_dtype, units, 1.0f / scale.scale, scale.zero_point);
  const int lo = static_cast<int>(l.lo), hi = static_cast<int>(l.hi);
  if (hi - lo == 255) return;
  for (int64_t i = 0; i < units; ++i) {
    const int q = l.state_dtype == DType::s8 ? static_cast<int8_t>(dst[i]) : dst[i];
    dst[i] = static_cast<uint8_t>(std::clamp(q, lo, hi));
  }
}

int64_t RnnDirection::last_step(int64_t n) const {
  if (index == 1) return l.steps;
  int64_t t = l.steps;
  while (t > 0 && l.rows[t - 1] <= n) --t;
  return t;
}

void RnnDirection::widen(int part) {
  const auto own = [&](const Matrix& m, int64_t panels_per_group, int64_t all) {
    if (m.widened == nullptr) return;
    const Range range = part_of(all, parts, part);
    const int64_t first = range.begin * panels_per_group, count = range.end - range.begin;
    tier.widen(m.weight->packed + (m.offset + first) * m.weight->panel_bytes(),
               count * panels_per_group * m.weight->panel_bytes(),
               m.widened + first * m.weight->panel_bytes() * tier.rnn_widening);
  };
  own(input_, l.gates, groups_);
  own(recurrent_, l.gates, groups_);
  if (l.projection > 0) own(projected_, 1, state_groups_);
}

void RnnDirection::finish() const {
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

void RnnDirection::run(int begin, int end) {
  for (int i = begin; i < end; ++i) widen(i);
  for (int64_t step = 0; step < l.steps;) {
    const int64_t stop = chunk_end(step);
    const bool is_done = multiplies_in_steps() || (looks_ahead() && step > 0);
    for (int i = begin; i < end && !is_done; ++i) multiply_inputs(i, step, stop);
    if (looks_ahead() && stop < l.steps) begin_lookahead(begin, end, stop);
    const int64_t lowest = lowest_row(step, stop);
    for (; step < stop; ++step) run_step(begin, end, step, lowest);
  }
}

int64_t RnnDirection::chunk_end(int64_t step) const {
  int64_t rows = l.rows[time(step)], stop = step + 1;
  while (stop < l.steps && rows + l.rows[time(stop)] <= choice.chunk_rows) {
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
  const int64_t chunk = choice.chunk_rows * ceil_div(groups_, parts) * l.gates * kPanel;
  return own_[part].inputs + (looks_ahead() ? step / kLookaheadRows % 2 * chunk : 0);
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
    a.in.dst_group_stride = choice.chunk_rows * l.gates * kPanel;
    a.tile = a.k = 0;
  }
}

void RnnDirection::multiply_inputs(int part, int64_t step, int64_t stop) {
  int64_t rows = 0;
  for (int64_t s = step; s < stop; ++s) rows += l.rows[time(s)];
  RnnInput in = input_of(part, lowest_row(step, stop), rows);
  in.dst = inputs_of(part, step);
  in.dst_group_stride = choice.chunk_rows * l.gates * kPanel;
  (rows >= choice.unit_inputs ? tier.matrix->rnn_input : tier.rnn_input)(in);
}

void RnnDirection::multiply_state(const RnnStep& s, int64_t unit_rows) const {
  (s.rows >= unit_rows ? tier.matrix->rnn_step : tier.rnn_step)(s);
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
    s.streams = rows == 1 ? own_[i].streams : 0;
    RnnInput in;
    if (multiplies_in_steps()) {
      in = input_of(i, l.first[t], rows);
      s.source = &in;
    } else {
      s.input = inputs_of(i, step) + (l.first[t] - lowest) * l.gates * kPanel;
      s.lookahead = looks_ahead() ? &own_[i].lookahead : nullptr;
      s.input_group_stride = choice.chunk_rows * l.gates * kPanel;
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
    multiply_state(s, choice.unit_states);
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
  if (projects) {
    s.streams = s.rows == 1 ? own_[part].projection_streams : 0;
  } else {
    const int64_t skip = 2 * kPanel;  // the gates r and z
    s.weight += 2 * s.panel_stride * (s.narrow ? 1 : tier.rnn_widening);
    s.init += skip;
    s.multiplier += skip;
    s.input = own_[part].inputs + input + skip;
    s.input_group_stride = choice.chunk_rows * l.gates * kPanel;
    s.input_row_stride = l.gates * kPanel;
  }
  point(s, range, now, state_padded_);
  s.units = std::min(l.state_units(), range.end * kPanel) - range.begin * kPanel;
  emit_state(s, range, now ^ 1, t);
  multiply_state(s, projects ? choice.unit_projections : choice.unit_states);
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

void run_rnn(const RnnLayer& layer, const RnnChoice& choice, const Kernels& tier) {
  ScratchFrame scratch;
  const int parts = choice.parts;
  std::optional<RnnDirection> directions[2];
  for (int d = 0; d < layer.directions; ++d) {
    directions[d].emplace(layer, choice, tier, scratch, d);
  }
  // Parts of one direction follow each other, and every thread runs direction 0 first: no thread
  // waits for a part that comes after its own.
  const auto body = [&](int begin, int end) {
    for (int d = begin / parts; d * parts < end; ++d) {
      directions[d]->run(std::max(begin - d * parts, 0), std::min(end - d * parts, parts));
    }
  };
  if (choice.threads == 0) {
    body(0, parts * layer.directions);
  } else {
    parallel_team(parts * layer.directions, body);
  }
  for (int d = 0; d < layer.directions; ++d) directions[d]->finish();
}

}  // namespace torchq
