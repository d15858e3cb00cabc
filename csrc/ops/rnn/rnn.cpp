// SPDX-License-Identifier: Apache-2.0
// torchq::rnn: one recurrent layer in all its directions. Note [Recurrent layers] in rnn.h.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/aminmax.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "ops/rnn/choose.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "rnn";

/// The `geometry` argument: cell, directions, inputs, hidden, projection (0: none), and the state's
/// smallest and largest integer.
struct Geometry {
  RnnCell cell;
  int64_t directions, inputs, hidden, projection, lo, hi;
  int gates;

  explicit Geometry(c10::IntArrayRef values) {
    TORCH_CHECK_VALUE(
        values.size() == 7 && values[0] >= 0 && values[0] <= 4 && values[1] >= 1 &&
            values[1] <= 2 && values[2] >= 0 && values[2] <= kMaxReduction && values[3] >= 1 &&
            values[3] <= kMaxReduction && values[4] >= 0 && values[4] <= kMaxReduction &&
            (values[4] == 0 || values[0] == 0) && values[5] >= -128 && values[5] <= values[6] &&
            values[6] <= 255,
        "torchq.rnn: geometry must be [cell 0..4, directions 1..2, inputs, hidden, projection, ",
        "lo, hi] with at most ", kMaxReduction, " inputs and units, and a projection of an LSTM ",
        "only, got ", values, ". Build it with torchq.nn.QLSTM, QGRU or QRNN.");
    cell = static_cast<RnnCell>(values[0]);
    directions = values[1];
    inputs = values[2];
    hidden = values[3];
    projection = values[4];
    lo = values[5];
    hi = values[6];
    gates = rnn_gates(cell);
  }
  int64_t state_units() const { return projection > 0 ? projection : hidden; }
  /// Panels of the gates of all directions.
  int64_t panels() const { return directions * panels_of(hidden) * gates; }

  void fill(RnnLayer& l) const {
    l.cell = cell;
    l.directions = static_cast<int>(directions);
    l.inputs = inputs;
    l.hidden = hidden;
    l.projection = projection;
    l.gates = gates;
    l.lo = static_cast<float>(lo);
    l.hi = static_cast<float>(hi);
  }
};

void check_size(const char* arg, const at::Tensor& t, c10::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(t.sizes() == sizes, "torchq.rnn: ", arg, " must have shape ", sizes, ", got ",
                    t.sizes(), ". It belongs to another layer.");
}

RnnWeight weight_of(const char* arg, const at::Tensor& packed, const at::Tensor& compensation,
                    const at::Tensor& multiplier, const at::Tensor& pair_bound, int64_t panels,
                    int64_t k) {
  check_param(kOp, arg, packed, at::kChar);
  check_size(arg, packed, {panels, 1, quads_of(k), kPanel, kQuad});
  check_param(kOp, "compensation", compensation, at::kInt);
  check_numel(kOp, "compensation", compensation, panels * kPanel);
  check_param(kOp, "multiplier", multiplier, at::kFloat);
  check_numel(kOp, "multiplier", multiplier, panels * kPanel);
  return {packed.const_data_ptr<int8_t>(), compensation.const_data_ptr<int32_t>(),
          multiplier.const_data_ptr<float>(), packed.size(2), pairs_fit(kOp, pair_bound, panels)};
}

/// The sequences: src is [T, N, inputs], or [rows, inputs] with the batch size of every step.
struct Sequences {
  int64_t steps, batch, total = 0;
  const int64_t *rows = nullptr, *first = nullptr;

  Sequences(const at::Tensor& src, const std::optional<at::Tensor>& batch_sizes) {
    const bool is_packed = batch_sizes.has_value();
    TORCH_CHECK_VALUE(src.dim() == (is_packed ? 2 : 3), "torchq.rnn: src must be ",
                      is_packed ? "[rows, inputs] with batch_sizes" : "[T, N, inputs]", ", got ",
                      src.sizes(), ".");
    if (is_packed) {
      check_cpu(kOp, "batch_sizes", *batch_sizes);
      TORCH_CHECK_VALUE(batch_sizes->scalar_type() == at::kLong && batch_sizes->dim() == 1 &&
                            batch_sizes->is_contiguous(),
                        "torchq.rnn: batch_sizes must be a contiguous int64 vector, got ",
                        dtype_name(batch_sizes->scalar_type()), batch_sizes->sizes(), ".");
    }
    steps = is_packed ? batch_sizes->numel() : src.size(0);
    TORCH_CHECK_VALUE(steps >= 1, "torchq.rnn: src must have at least one step, got ", src.sizes(),
                      ". Skip empty sequences.");
    batch = is_packed ? *batch_sizes->const_data_ptr<int64_t>() : src.size(1);
    if (is_packed) check_packed(src.size(0), batch_sizes->const_data_ptr<int64_t>());
  }

  /// Sets total, rows and first, whose memory is taken from `scratch`: after the results', since
  /// any number of steps fits a source without values.
  void list_steps(const std::optional<at::Tensor>& batch_sizes, ScratchFrame& scratch) {
    int64_t* sizes = scratch.take<int64_t>(steps);
    int64_t* starts = scratch.take<int64_t>(steps);
    for (int64_t t = 0; t < steps; ++t) {
      sizes[t] = batch_sizes.has_value() ? batch_sizes->const_data_ptr<int64_t>()[t] : batch;
      starts[t] = total;
      total += sizes[t];
    }
    rows = sizes;
    first = starts;
  }

 private:
  void check_packed(int64_t src_rows, const int64_t* sizes) const {
    int64_t sum = 0;
    for (int64_t t = 0; t < steps; ++t) {
      TORCH_CHECK_VALUE(
          sizes[t] >= 1 && (t == 0 || sizes[t] <= sizes[t - 1]) && sizes[t] <= src_rows,
          "torchq.rnn: batch_sizes must be positive and never grow, got ", sizes[t], " in step ", t,
          ". Use torch.nn.utils.rnn.pack_padded_sequence.");
      sum += sizes[t];
    }
    TORCH_CHECK_VALUE(sum == src_rows, "torchq.rnn: batch_sizes must sum to the ", src_rows,
                      " rows of src, got ", sum, ".");
  }
};

/// The source as u8 rows that may be read in whole quads, evenly spaced for a matrix unit, and how
/// to get back to real values.
struct Source {
  const uint8_t* data;
  const int64_t* row_offset;
  const float* scale = nullptr;
  const int32_t* zero_point = nullptr;

  Source(const at::Tensor& src, DType dtype, const Sequences& sequences, const Kernels& tier,
         ScratchFrame& scratch) {
    const int64_t k = src.size(-1), rows = sequences.total;
    int64_t* offsets = scratch.take<int64_t>(rows);
    row_offset = offsets;
    const bool even =
        src.dim() == 2 || sequences.batch == 1 || src.stride(0) == sequences.batch * src.stride(1);
    const bool as_it_is = dtype == DType::u8 && k % kQuad == 0 && (even || tier.matrix == nullptr);
    const int64_t stride = quads_of(k) * kQuad;
    uint8_t* copy = as_it_is ? nullptr : scratch.take<uint8_t>(rows, stride);
    const char* bytes = static_cast<const char*>(src.const_data_ptr());
    data = as_it_is ? reinterpret_cast<const uint8_t*>(bytes) : copy;
    float* scales = dtype == DType::f32 ? scratch.take<float>(rows) : nullptr;
    int32_t* zero_points = dtype == DType::f32 ? scratch.take<int32_t>(rows) : nullptr;
    scale = scales;
    zero_point = zero_points;
    const int64_t width = dtype == DType::f32 ? 4 : 1;
    const int64_t batch = src.dim() == 3 ? src.size(1) : 1;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = src.dim() == 3 ? row / batch * src.stride(0) + row % batch * src.stride(1)
                                        : row * src.stride(0);
      offsets[row] = as_it_is ? at : row * stride;
      if (as_it_is) continue;
      uint8_t* dst = copy + row * stride;
      if (dtype == DType::f32) {
        QuantizeRow q{reinterpret_cast<const float*>(bytes + at * width), k, false, dst, 0, 0};
        tier.quantize_row(q);
        scales[row] = q.scale;
        zero_points[row] = q.zero_point;
      } else {
        const uint8_t flip = dtype == DType::s8 ? 0x80 : 0;
        const uint8_t* from = reinterpret_cast<const uint8_t*>(bytes + at);
        for (int64_t i = 0; i < k; ++i) dst[i] = from[i] ^ flip;
      }
      for (int64_t i = k; i < stride; ++i) dst[i] = 0;  // meets weights that are 0
    }
  }
};

/// Not NaN, not infinite: what comes from the caller as float.
void check_finite(const char* arg, const at::Tensor& t) {
  if (t.numel() == 0) return;
  const auto [low, high] = at::aminmax(t);
  TORCH_CHECK_VALUE(std::isfinite(low.item<float>()) && std::isfinite(high.item<float>()),
                    "torchq.rnn: ", arg, " must be finite, got ", low.item<float>(), " to ",
                    high.item<float>(), ". Remove NaN and infinities before this layer.");
}

/// An initial state, contiguous; `keep` owns it.
const void* initial_state(const char* arg, const std::optional<at::Tensor>& state,
                          c10::IntArrayRef sizes, bool may_be, at::ScalarType quantized,
                          at::Tensor& keep) {
  if (!state.has_value()) return nullptr;
  TORCH_CHECK_VALUE(may_be, "torchq.rnn: ", arg, " must be None for this cell, got a tensor ",
                    state->sizes(), ". Only an LSTM has it.");
  TORCH_CHECK_TYPE(state->scalar_type() == at::kFloat || state->scalar_type() == quantized,
                   "torchq.rnn: ", arg, " must be float32", quantized == at::kFloat ? "" : " or ",
                   quantized == at::kFloat ? "" : dtype_name(quantized), ", got ",
                   dtype_name(state->scalar_type()), ". Dequantize it first.");
  check_cpu(kOp, arg, *state);
  check_size(arg, *state, sizes);
  keep = state->contiguous();
  if (keep.scalar_type() == at::kFloat) check_finite(arg, keep);
  return keep.const_data_ptr();
}

RnnScale scale_of(const at::Tensor& scales, const at::Tensor& zero_points, int64_t i, DType dtype) {
  const RnnScale s{scales.const_data_ptr<float>()[i], zero_points.const_data_ptr<int32_t>()[i + 1]};
  const auto [lo, hi] = zero_point_range(dtype);
  TORCH_CHECK_VALUE(std::isnormal(s.scale) && s.scale > 0 && std::isfinite(1.0f / s.scale),
                    "torchq.rnn: scales must be normal numbers above 0, got ", s.scale, ".");
  TORCH_CHECK_VALUE(s.zero_point >= lo && s.zero_point <= hi,
                    "torchq.rnn: zero_points must lie in ", "[", lo, ", ", hi,
                    "], the range of the state, got ", s.zero_point, ".");
  return s;
}

/// Reads the dtypes of src, of the destination and of the states.
void read_dtypes(RnnLayer& l, DType src_dtype, int64_t dst_dtype, int64_t state_dtype,
                 int64_t h_n_dtype) {
  l.dynamic = src_dtype == DType::f32;
  l.state_dtype = l.dynamic ? DType::u8 : dst_dtype_of(kOp, state_dtype);
  l.dst_dtype = dst_dtype_of(kOp, dst_dtype);
  l.h_n_dtype = dst_dtype_of(kOp, h_n_dtype);
  for (const DType dtype : {l.dst_dtype, l.h_n_dtype}) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_int8(l.state_dtype) && (dtype == DType::f32 || (dtype == l.state_dtype && !l.dynamic)),
        "torchq.rnn: dst_dtype and h_n_dtype must be 6 (float32) or, for static layers, the "
        "state's ",
        "own type (uint8 or int8), got ", dst_dtype, " and ", h_n_dtype, " with state_dtype ",
        state_dtype, ". The nearest supported form is float32.");
  }
}

/// The op's arguments that belong to the weights.
struct WeightArgs {
  const at::Tensor &src, &compensation_src, &multiplier_src;
  const at::Tensor &state, &compensation_state, &multiplier_state;
  const at::Tensor& bias;
  const std::optional<at::Tensor>& extra;
  const std::optional<at::Tensor>&projection, &compensation_projection, &multiplier_projection;
  at::TensorList pair_bounds;
};

void read_weights(RnnLayer& l, const Geometry& g, const WeightArgs& w) {
  const int64_t panels = g.panels();
  TORCH_CHECK_VALUE(w.pair_bounds.size() == (g.projection > 0 ? 3 : 2),
                    "torchq.rnn: pair_bounds must ", "have one tensor per weight, got ",
                    w.pair_bounds.size(), ".");
  l.input = weight_of("weight_src", w.src, w.compensation_src, w.multiplier_src, w.pair_bounds[0],
                      panels, g.inputs);
  l.recurrent = weight_of("weight_state", w.state, w.compensation_state, w.multiplier_state,
                          w.pair_bounds[1], panels, g.state_units());
  TORCH_CHECK_VALUE((g.projection > 0) == w.projection.has_value() &&
                        (g.projection > 0) == w.compensation_projection.has_value() &&
                        (g.projection > 0) == w.multiplier_projection.has_value(),
                    "torchq.rnn: weight_projection must come with a projection, its compensation ",
                    "and its multiplier, or not at all.");
  if (g.projection > 0) {
    l.projected = weight_of("weight_projection", *w.projection, *w.compensation_projection,
                            *w.multiplier_projection, w.pair_bounds[2],
                            g.directions * panels_of(g.projection), g.hidden);
  }
  check_param(kOp, "bias", w.bias, at::kFloat);
  check_numel(kOp, "bias", w.bias, panels * kPanel);
  l.bias = w.bias.const_data_ptr<float>();
  TORCH_CHECK_VALUE(g.cell == RnnCell::kGru ? w.extra.has_value()
                                            : g.cell == RnnCell::kLstm || !w.extra.has_value(),
                    "torchq.rnn: extra must be the bias of the new gate's state for a GRU, the ",
                    "peephole weights or None for an LSTM, and None for other cells.");
  if (w.extra.has_value()) {
    check_param(kOp, "extra", *w.extra, at::kFloat);
    check_numel(kOp, "extra", *w.extra,
                g.directions * panels_of(g.hidden) * kPanel * (g.cell == RnnCell::kLstm ? 3 : 1));
    l.extra = w.extra->const_data_ptr<float>();
  }
}

void read_scales(RnnLayer& l, DType src_dtype, const at::Tensor& scales,
                 const at::Tensor& zero_points) {
  check_param(kOp, "scales", scales, at::kFloat);
  check_numel(kOp, "scales", scales, 2);
  check_param(kOp, "zero_points", zero_points, at::kInt);
  check_numel(kOp, "zero_points", zero_points, 3);
  l.state_scale = scale_of(scales, zero_points, 0, l.state_dtype);
  l.hidden_scale = scale_of(scales, zero_points, 1, l.state_dtype);
  const int32_t src_zero_point = *zero_points.const_data_ptr<int32_t>();
  const auto [zero_lo, zero_hi] = zero_point_range(src_dtype);
  TORCH_CHECK_VALUE(src_zero_point >= zero_lo && src_zero_point <= zero_hi,
                    "torchq.rnn: zero_points must lie in [", zero_lo, ", ", zero_hi,
                    "], the range of src, got ", src_zero_point, ".");
  l.src_zero_point = src_zero_point + (src_dtype == DType::s8 ? 128 : 0);
}

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Results rnn(const at::Tensor& src_arg, const std::optional<at::Tensor>& batch_sizes,
            const std::optional<at::Tensor>& h_0, const std::optional<at::Tensor>& c_0,
            const at::Tensor& weight_src, const at::Tensor& compensation_src,
            const at::Tensor& multiplier_src, const at::Tensor& weight_state,
            const at::Tensor& compensation_state, const at::Tensor& multiplier_state,
            const at::Tensor& bias, const std::optional<at::Tensor>& extra,
            const std::optional<at::Tensor>& weight_projection,
            const std::optional<at::Tensor>& compensation_projection,
            const std::optional<at::Tensor>& multiplier_projection, at::TensorList pair_bounds,
            const at::Tensor& scales, const at::Tensor& zero_points, c10::IntArrayRef geometry,
            int64_t dst_dtype, int64_t state_dtype, int64_t h_n_dtype) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  const Geometry g(geometry);
  const DType src_dtype = dtype_of(kOp, "src", src_arg);
  TORCH_CHECK_TYPE(src_dtype != DType::s32,
                   "torchq.rnn: src must be uint8, int8 or, for a dynamic ",
                   "layer, float32, got int32. Quantize it first.");
  check_cpu(kOp, "src", src_arg);
  RnnLayer l{};
  g.fill(l);
  read_dtypes(l, src_dtype, dst_dtype, state_dtype, h_n_dtype);
  const auto [least, most] = zero_point_range(l.state_dtype);
  TORCH_CHECK_VALUE(g.lo >= least && g.hi <= most, "torchq.rnn: geometry's lo and hi must lie in [",
                    least, ", ", most, "], the range of the state, got ", g.lo, " and ", g.hi,
                    ". Build it with torchq.nn.QLSTM, QGRU or QRNN.");
  Sequences sequences(src_arg, batch_sizes);
  TORCH_CHECK_VALUE(src_arg.size(-1) == g.inputs, "torchq.rnn: src must have ", g.inputs,
                    " features, got ", src_arg.size(-1), " in src ", src_arg.sizes(),
                    ". Check the layer's input_size.");
  read_weights(l, g,
               {weight_src, compensation_src, multiplier_src, weight_state, compensation_state,
                multiplier_state, bias, extra, weight_projection, compensation_projection,
                multiplier_projection, pair_bounds});
  read_scales(l, src_dtype, scales, zero_points);

  const at::ScalarType quantized = l.dynamic ? at::kFloat : scalar_type(l.state_dtype);
  at::Tensor h_kept, c_kept;
  const std::array<int64_t, 3> h_sizes = {g.directions, sequences.batch, g.state_units()};
  const std::array<int64_t, 3> c_sizes = {g.directions, sequences.batch, g.hidden};
  l.h0 = initial_state("h_0", h_0, h_sizes, true, quantized, h_kept);
  if (l.h0 != nullptr) l.h0_dtype = dtype_of(kOp, "h_0", h_kept);
  const bool is_lstm = g.cell == RnnCell::kLstm;
  l.c0 = static_cast<const float*>(initial_state("c_0", c_0, c_sizes, is_lstm, at::kFloat, c_kept));

  c10::SmallVector<int64_t, 3> sizes(src_arg.sizes().begin(), src_arg.sizes().end());
  sizes.back() = g.directions * g.state_units();
  at::Tensor dst = empty_dst(sizes, scalar_type(l.dst_dtype));
  at::Tensor h_n = empty_dst(h_sizes, scalar_type(l.h_n_dtype));
  at::Tensor c_n = is_lstm ? empty_dst(c_sizes, at::kFloat) : empty_dst({0}, at::kFloat);
  if (sequences.batch == 0 || only_checks()) return {dst, h_n, c_n};
  trace.describe([&] { return describe_call({src_arg}, dst, c10::str("geometry:", geometry)); });

  if (l.dynamic) check_finite("src", src_arg);
  const at::Tensor src = src_arg.stride(-1) == 1 ? src_arg : src_arg.contiguous();
  ScratchFrame scratch;
  sequences.list_steps(batch_sizes, scratch);
  const Source source(src, src_dtype, sequences, tier, scratch);
  l.src = source.data;
  l.row_offset = source.row_offset;
  l.row_scale = source.scale;
  l.row_zero_point = source.zero_point;
  l.steps = sequences.steps;
  l.batch = sequences.batch;
  l.rows = sequences.rows;
  l.first = sequences.first;
  l.dst = dst.mutable_data_ptr();
  l.h_n = h_n.mutable_data_ptr();
  l.c_n = is_lstm ? c_n.mutable_data_ptr<float>() : nullptr;
  trace.ran(tier, l.dynamic ? "rnn_dynamic" : "rnn");
  const RnnChoice choice = choose(l, tier);
  choice.log(l);
  run_rnn(l, choice, tier);
  return {dst, h_n, c_n};
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::rnn>(m, "rnn"); }
