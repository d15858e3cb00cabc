// SPDX-License-Identifier: Apache-2.0
// Recurrent layers in plain loops. The cells' formulas are in rnn_cell.h.
#pragma once

#include "kernels/epilogue/reference.h"
#include "kernels/rnn/contract.h"
#include "kernels/rnn/rnn_cell.h"

namespace {

int32_t rnn_sum(const uint8_t* src, int64_t quads, const int8_t* panel, int n, int32_t init) {
  uint32_t acc = static_cast<uint32_t>(init);
  for (int64_t k = 0; k < quads * kQuad; ++k) {
    const int32_t w = panel[(k / kQuad * kPanel + n) * kQuad + k % kQuad];
    acc += static_cast<uint32_t>(int32_t{src[k]} * w);
  }
  return static_cast<int32_t>(acc);
}

/// Returns dst[group][row][i], i counting [gates][16].
float rnn_input_value(const RnnInput& in, int64_t group, int64_t row, int64_t i) {
  const int64_t all = group * in.gates * kPanel + i;
  const int8_t* panel = in.weight + all / kPanel * in.panel_stride;
  const uint8_t* src = in.src + in.row_offset[row];
  int32_t sum = rnn_sum(src, in.quads, panel, static_cast<int>(i % kPanel), in.init[all]);
  float factor = in.multiplier[all];
  if (in.scale != nullptr) {
    sum -= in.zero_point[row] * in.compensation[all];
    factor *= in.scale[row];
  }
  return fmaf(static_cast<float>(sum), factor, in.bias[all]);
}

void rnn_input(const RnnInput& in) {
  const int64_t width = int64_t{in.gates} * kPanel;
  for (int64_t group = 0; group < in.groups; ++group) {
    for (int64_t r = 0; r < in.rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        in.dst[group * in.dst_group_stride + r * width + i] = rnn_input_value(in, group, r, i);
      }
    }
  }
}

/// One unit of one row: h, and what it leaves in the cell's other buffers.
float rnn_unit(const RnnStep& s, const float (&a)[4], int64_t unit, int64_t at) {
  using Cell = RnnFormula<Scalar>;
  switch (s.cell) {
    case RnnCell::kLstm: {
      // A peephole shows i and f the old c, and o the new one.
      float& c = s.cell_state[at];
      const auto peephole = [&](int vector, float gate) {
        if (s.extra == nullptr) return gate;
        return fmaf(s.extra[vector * s.extra_stride + unit], c, gate);
      };
      c = Cell::next_cell(peephole(0, a[0]), peephole(1, a[1]), a[2], c);
      return Cell::logistic_tanh(peephole(2, a[3]), c);
    }
    case RnnCell::kGru:  // a[3]: the input of n, which does not pass the reset gate
      return Cell::mix(Cell::logistic(a[1]), s.old[at],
                       Cell::tanh(fmaf(Cell::logistic(a[0]), a[2], a[3])));
    case RnnCell::kGruGates:
      s.update[at] = Cell::logistic(a[1]);
      return s.old[at] * Cell::logistic(a[0]);
    case RnnCell::kGruNew:
      return Cell::mix(s.update[at], s.old[at], Cell::tanh(a[0]));
    case RnnCell::kTanh:
      return Cell::tanh(a[0]);
    case RnnCell::kRelu:
      return a[0] > 0.0f ? a[0] : 0.0f;
    default:
      return a[0];
  }
}

void rnn_emit(const RnnStep& s, int64_t row, int64_t unit, float h) {
  int32_t q = 0;
  if (s.quantized != nullptr) {
    float y = fmaf(h, s.inverse_scale, s.zero_point);
    if (y != y) y = s.zero_point;
    q = static_cast<int32_t>(nearbyintf(min_float(max_float(y, s.lo), s.hi)));
    s.quantized[row * s.quantized_stride + unit] = static_cast<uint8_t>(q + s.flip);
    if (s.requantized) h = s.real_scale * (static_cast<float>(q) - s.zero_point);
  }
  if (s.state != nullptr) s.state[row * s.unit_stride + unit] = h;
  if (s.dst == nullptr || unit >= s.units) return;
  const int64_t at = row * s.dst_stride + unit;
  if (s.dst_dtype == DType::f32) {
    static_cast<float*>(s.dst)[at] = h;
  } else {
    static_cast<uint8_t*>(s.dst)[at] = static_cast<uint8_t>(q);
  }
}

void rnn_step(const RnnStep& s) {
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t unit = 0; unit < int64_t{s.groups} * kPanel; ++unit) {
      const int64_t group = unit / kPanel;
      const int n = static_cast<int>(unit % kPanel);
      const bool has_input = s.input != nullptr || s.source != nullptr;
      const auto input = [&](int g) {
        if (s.source != nullptr) return rnn_input_value(*s.source, group, r, g * kPanel + n);
        return s.input[group * s.input_group_stride + r * s.input_row_stride + g * kPanel + n];
      };
      float a[4] = {};
      for (int g = 0; g < s.gates; ++g) {
        const int64_t param = group * s.param_stride + g * kPanel + n;
        const int8_t* panel = s.weight + group * s.group_stride + g * s.panel_stride;
        const int32_t sum = rnn_sum(s.src + r * s.src_stride, s.quads, panel, n, s.init[param]);
        float factor = s.multiplier[param];
        if (s.scale != nullptr) factor *= s.scale[r];
        const bool reset_later = s.cell == RnnCell::kGru && g == 2;
        const float x = reset_later ? s.extra[unit] : has_input ? input(g) : 0.0f;
        a[g] = fmaf(static_cast<float>(sum), factor, x);
      }
      if (s.cell == RnnCell::kGru) a[3] = input(2);
      rnn_emit(s, r, unit, rnn_unit(s, a, unit, r * s.unit_stride + unit));
    }
  }
}

void quantize_row(QuantizeRow& q) {
  float low = 0.0f, high = 0.0f;
  for (int64_t i = 0; i < q.size; ++i) {
    const float x = rnn_finite<Scalar>(q.src[i]);
    low = min_float(low, x);
    high = max_float(high, x);
  }
  const RowScale row = rnn_row_scale(q, low, high);
  for (int64_t i = 0; i < q.size; ++i) {
    const float y = fmaf(rnn_finite<Scalar>(q.src[i]), row.inverse, row.zero_point);
    q.dst[i] = static_cast<uint8_t>(nearbyintf(min_float(max_float(y, 0.0f), 255.0f)));
  }
}

}  // namespace
