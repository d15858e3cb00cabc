// SPDX-License-Identifier: Apache-2.0
// The memory of a recurrent layer's direction, its initial states and its last ones.
#include "ops/rnn/rnn_direction.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "kernels/amx/contract.h"
#include "kernels/cpu_tuning.h"

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

RnnDirection::RnnDirection(const RnnLayer& layer, const Kernels& table, ScratchFrame& scratch,
                           int direction, int num_parts)
    : l(layer), tier(table), index(direction), parts(num_parts), barrier(num_parts) {
  padded_ = whole_groups(l.hidden);
  state_padded_ = whole_groups(l.state_units());
  groups_ = padded_ / kPanel;
  state_groups_ = state_padded_ / kPanel;
  rows_ = tier.matrix != nullptr ? std::max<int64_t>(l.batch, kUnitRows) : l.batch;
  take_weights(scratch);
  take_states(scratch);
  inputs_in_steps_ = l.cell != RnnCell::kGruVanilla && l.batch >= tuning::kMinRowsInSteps;
  const int64_t part_groups = ceil_div(groups_, parts);
  const int64_t row_bytes = part_groups * l.gates * kPanel * int64_t{sizeof(float)};
  chunk_rows_ = std::max(l.batch, tuning::kRnnInputBytes / row_bytes);
  chunk_rows_ = std::min(chunk_rows_, l.first[l.steps - 1] + l.rows[l.steps - 1]);
  uses_lookahead_ = gains_from_lookahead();
  if (uses_lookahead_) chunk_rows_ = kLookaheadRows;
  own_ = scratch.take<Own>(parts);
  for (int i = 0; i < parts; ++i) {
    Own& own = *new (own_ + i) Own();
    if (!inputs_in_steps_) {
      const int chunks = uses_lookahead_ ? 2 : 1;
      own.inputs = scratch.take<float>(chunks, chunk_rows_, part_groups, l.gates, kPanel);
    }
    if (uses_lookahead_) {
      own.lookahead.piece = ceil_div(l.input.quads, pieces_of_tile(i));
      own.lookahead.sums = scratch.take<int32_t>(kLookaheadRows, kLookaheadPanels, kPanel);
      own.sources = scratch.take<uint8_t>(kLookaheadRows, l.input.quads, kQuad);
    }
    if (l.dynamic) {
      own.quantized = scratch.take<uint8_t>(rows_, std::max(state_padded_, padded_));
      own.scale = scratch.take<float>(l.batch);
    }
  }
  reset(scratch);
}

int64_t RnnDirection::pieces_of_tile(int part) const {
  const Range range = part_of(groups_, parts, part);
  if (range.begin == range.end) return 0;
  const int64_t pieces = tier.rnn_pieces(step_of(recurrent_, l.gates, range, 1, Own()));
  return kLookaheadRows * pieces / ceil_div((range.end - range.begin) * l.gates, kLookaheadPanels);
}

bool RnnDirection::gains_from_lookahead() const {
  const bool has_gates = l.cell == RnnCell::kLstm || l.cell == RnnCell::kGru;
  if (tier.rnn_pieces == nullptr || !has_gates) return false;
  if (l.batch > 1 || l.steps <= kLookaheadRows) return false;
  const int64_t units = l.state_units();
  if (tuning::kMinInputsOfUnits * l.inputs < units) return false;
  if (l.inputs > tuning::kMaxInputsPerUnit * units) return false;
  for (int i = 0; i < parts; ++i) {
    if (pieces_of_tile(i) == 0) return false;
  }
  return true;
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

}  // namespace torchq
