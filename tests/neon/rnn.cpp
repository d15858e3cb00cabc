// SPDX-License-Identifier: Apache-2.0
// Recurrent cells: input products, steps, quantized rows.
#include "check.h"

namespace torchq {
namespace {

/// Weights and parameters of `groups` groups of 16 units, and sources of `rows` rows.
struct Products {
  int groups, gates;
  int64_t rows, quads, panel = quads * kPanel * kQuad, lanes = int64_t{groups} * gates * kPanel;
  Buffer<int8_t> weight = random_weights(groups * gates * panel);
  Buffer<int8_t> wide{};
  Buffer<uint8_t> src = random_bytes(rows * quads * kQuad);
  Buffer<int32_t> init = random_ints(lanes, 1 << 15), compensation = random_ints(lanes, 1 << 12);
  Buffer<float> multiplier = random_floats(lanes, 1e-5f), bias = random_floats(lanes, 1.0f);
  Buffer<float> scale = random_floats(rows, 2.0f);
  Buffer<int32_t> zero_point = random_ints(rows, 128);
  Buffer<int64_t> row_offset{rows};
  bool scaled = chance(50);

  Products(const Kernels& k, int num_groups, int num_gates, int64_t num_rows)
      : groups(num_groups), gates(num_gates), rows(num_rows), quads(between(1, 20)) {
    wide = widened(k, k.rnn_widening, weight);
    for (int64_t r = 0; r < rows; ++r) row_offset[r] = r * quads * kQuad;
  }
  RnnInput input(bool for_reference) const {
    RnnInput in{};
    in.src = src.data();
    in.row_offset = row_offset.data();
    in.rows = rows;
    in.quads = quads;
    in.groups = groups;
    in.gates = gates;
    in.weight = (for_reference ? weight : wide).data();
    in.panel_stride = panel;
    in.init = init.data();
    in.multiplier = multiplier.data();
    in.bias = bias.data();
    in.compensation = compensation.data();
    in.scale = scaled ? scale.data() : nullptr;
    in.zero_point = zero_point.data();
    in.dst_group_stride = rows * gates * kPanel;
    return in;
  }
};

void check_input(const Kernels& k) {
  const Products p(k, static_cast<int>(between(1, 3)), static_cast<int>(between(1, 4)),
                   between(1, 15));
  begin_case("rnn_input", text("groups", p.groups, "gates", p.gates, "rows", p.rows, "quads",
                               p.quads, "scaled", p.scaled));
  Buffer<float> reference(p.rows * p.lanes), tested = reference;
  RnnInput in = p.input(true);
  in.dst = reference.data();
  kReferenceKernels.rnn_input(in);
  in = p.input(false);
  in.dst = tested.data();
  k.rnn_input(in);
  expect_same("dst", reference, tested);
}

int gates_of(RnnCell cell) {
  return cell == RnnCell::kLstm       ? 4
         : cell == RnnCell::kGru      ? 3
         : cell == RnnCell::kGruGates ? 2
                                      : 1;
}

/// Buffers that a step writes.
struct Results {
  Buffer<float> cell_state, update, state;
  Buffer<uint8_t> quantized, dst;
};

void check_step(const Kernels& k) {
  RnnStep s{};
  s.cell = pick({RnnCell::kLstm, RnnCell::kLstm, RnnCell::kGru, RnnCell::kGruGates,
                 RnnCell::kGruNew, RnnCell::kTanh, RnnCell::kRelu, RnnCell::kProjection});
  s.gates = gates_of(s.cell);
  s.groups = static_cast<int>(between(1, 5));
  s.rows = chance(40) ? 1 : between(1, 15);
  s.descending = chance(50);
  const int64_t width = s.groups * kPanel, values = s.rows * width;
  s.units = width - (chance(50) ? 0 : between(0, 15));
  const Products own(k, s.groups, s.gates, s.rows), source(k, s.groups, s.gates, s.rows);
  s.src = own.src.data();
  s.src_stride = own.quads * kQuad;
  s.quads = own.quads;
  s.panel_stride = own.panel;
  s.group_stride = s.gates * own.panel;
  s.init = own.init.data();
  s.multiplier = own.multiplier.data();
  s.param_stride = s.gates * kPanel;
  s.scale = own.scaled ? own.scale.data() : nullptr;
  const Buffer<float> input = random_floats(s.rows * own.lanes, 4.0f);
  s.input_row_stride = s.gates * kPanel;
  s.input_group_stride = s.rows * s.input_row_stride;
  const bool has_input = s.cell != RnnCell::kProjection, has_source = has_input && chance(30);
  if (has_input && !has_source) s.input = input.data();
  const Buffer<float> extra = random_floats(3 * width, 1.0f), old = random_floats(values, 1.0f);
  s.extra_stride = width;
  if (s.cell == RnnCell::kGru || (s.cell == RnnCell::kLstm && chance(50))) s.extra = extra.data();
  s.old = old.data();
  s.unit_stride = width;
  s.quantized_stride = width;
  s.dst_stride = s.units + between(0, 3);
  const bool is_signed = chance(50), quantizes = chance(80), has_state = chance(60);
  s.inverse_scale = 100.0f;
  s.zero_point = static_cast<float>(is_signed ? between(-20, 20) : between(100, 150));
  s.lo = is_signed ? -128.0f : 0.0f;
  s.hi = is_signed ? 127.0f : 255.0f;
  s.flip = is_signed ? 128 : 0;
  s.requantized = quantizes && chance(30);
  s.real_scale = 0.01f;
  s.dst_dtype = !quantizes || chance(40) ? DType::f32 : is_signed ? DType::s8 : DType::u8;
  const bool has_dst = chance(80);
  begin_case(
      "rnn_step",
      text("cell", static_cast<int>(s.cell), "groups", s.groups, "rows", s.rows, "units", s.units,
           "quads", s.quads, "descending", s.descending, "source", has_source, "scaled", own.scaled,
           "extra", s.extra != nullptr, "quantized", quantizes, "requantized", s.requantized,
           "signed", is_signed, "state", has_state, "dst", s.dst_dtype, "has_dst", has_dst));
  Results reference{
      random_floats(values, 2.0f), random_floats(values, 1.0f), Buffer<float>(values),
      Buffer<uint8_t>(values),
      Buffer<uint8_t>(((s.rows - 1) * s.dst_stride + s.units) * size_of(s.dst_dtype))};
  Results tested = reference;
  const auto run = [&](const Kernels& kernels, bool is_reference, Results& results) {
    const RnnInput in = source.input(is_reference);
    s.source = has_source ? &in : nullptr;
    s.weight = (is_reference ? own.weight : own.wide).data();
    s.cell_state = results.cell_state.data();
    s.update = results.update.data();
    s.state = has_state ? results.state.data() : nullptr;
    s.quantized = quantizes ? results.quantized.data() : nullptr;
    s.dst = has_dst ? results.dst.data() : nullptr;
    kernels.rnn_step(s);
  };
  run(kReferenceKernels, true, reference), run(k, false, tested);
  expect_same("cell_state", reference.cell_state, tested.cell_state);
  expect_same("update", reference.update, tested.update);
  expect_same("state", reference.state, tested.state);
  expect_same("quantized", reference.quantized, tested.quantized);
  expect_same("dst", reference.dst, tested.dst);
}

void check_quantize_row(const Kernels& k) {
  QuantizeRow q{};
  q.size = between(0, 100);
  q.symmetric = chance(50);
  const Buffer<float> src = chance(40) ? any_floats(q.size, 10.0f) : random_floats(q.size, 10.0f);
  q.src = src.data();
  begin_case("quantize_row", text("size", q.size, "symmetric", q.symmetric));
  Buffer<uint8_t> reference(q.size), tested(q.size);
  QuantizeRow again = q;
  q.dst = reference.data();
  kReferenceKernels.quantize_row(q);
  again.dst = tested.data();
  k.quantize_row(again);
  expect_same("dst", reference, tested);
  expect_same("scale", &q.scale, &again.scale, sizeof q.scale);
  expect_same("zero_point", &q.zero_point, &again.zero_point, sizeof q.zero_point);
}

}  // namespace

void check_rnn(const Kernels& k) {
  for (int i = 0; i < 300; ++i) check_input(k);
  for (int i = 0; i < 1200; ++i) check_step(k);
  for (int i = 0; i < 300; ++i) check_quantize_row(k);
}

}  // namespace torchq
