// SPDX-License-Identifier: Apache-2.0
// torchq::dynamic_linear and grouped_linear: float in, float out, with the source quantized to u8
// on the way by the range that it has in this call.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "epilogue/post_ops.h"
#include "kernels/cpu_tuning.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/groups.h"
#include "ops/gemm/packed_weights.h"
#include "ops/gemm/row_params.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "dynamic_linear";
constexpr const char* kGroupedOp = "grouped_linear";

/// Rows of a source.
struct Source {
  const char* op;
  const Kernels& tier;
  const float* values;
  int64_t rows, k;
};

/// The same rows as u8.
struct Quantized {
  const uint8_t* values;
  const int32_t* zero_point;  // [rows]
  const float* scale;         // [rows]
};

/// A packed weight of n channels.
struct Weight {
  const int8_t* values;
  const int32_t* compensation;
  const float* bias;  // null if there is none
  int64_t n, panels, quads;
  bool narrow;  // pairs_fit
};

/// Ranges of all rows; ValueError for what is not finite.
RowRange* ranges(ScratchFrame& scratch, const Source& src) {
  RowRange* result = scratch.take<RowRange>(src.rows);
  const int threads = threads_for(src.rows * src.k, tuning::kQuantizeRowGrain);
  parallel_ranges(src.rows, threads, [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float* row = src.values + r * src.k;
      result[r].finite = src.tier.row_range(row, src.k, &result[r].lo, &result[r].hi);
    }
  });
  for (int64_t r = 0; r < src.rows; ++r) {
    TORCH_CHECK_VALUE(result[r].finite, "torchq.", src.op, ": src must be finite, got NaN or inf ",
                      "in row ", r, ". Its range decides the scale; repair what produced it.");
  }
  return result;
}

Quantized quantize_rows(ScratchFrame& scratch, const Source& src, bool per_row) {
  RowRange* range = ranges(scratch, src);
  if (!per_row) {
    for (int64_t r = 1; r < src.rows; ++r) range[0].join(range[r]);
    std::fill_n(range, src.rows, range[0]);
  }
  int32_t* zero_point = scratch.take<int32_t>(src.rows);
  float* scale = scratch.take<float>(src.rows);
  for (int64_t r = 0; r < src.rows; ++r) {
    const RowParams own = params_of(range[r]);
    zero_point[r] = own.zero_point;
    scale[r] = own.scale;
  }
  uint8_t* values = scratch.take<uint8_t>(src.rows, src.k);
  const int threads = threads_for(src.rows * src.k, tuning::kQuantizeRowGrain);
  parallel_ranges(src.rows, threads, [&](Range rows) {
    const int32_t zero = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float factor = static_cast<float>(1 / double{scale[r]});
      src.tier.convert({src.values + r * src.k, DType::f32, values + r * src.k, DType::u8, src.k,
                        &factor, 0, &zero, 0, zero_point + r, 0});
    }
  });
  return {values, zero_point, scale};
}

/// Multiplies these rows. Each row's own zero point is multiplied with the sums of the weights, in
/// the epilogue.
void multiply(OpTrace& trace, const Source& src, const Quantized& q, Range rows, const Weight& w,
              EpilogueBuilder& epilogue) {
  ScratchFrame scratch;
  epilogue.subtract(q.zero_point + rows.begin, w.compensation, w.n, 1);
  epilogue.scale_rows(q.scale + rows.begin, w.bias, w.n);
  const int64_t padded = w.panels * kPanel;
  int32_t* init = scratch.take<int32_t>(padded);
  std::fill_n(init, padded, 0);
  const GemmRun run{0, 0, w.quads};
  GemmProblem problem;
  problem.src = q.values + rows.begin * src.k;
  problem.weight = w.values;
  problem.panel_bytes = w.quads * kPanel * kQuad;
  problem.group_channels = static_cast<int>(w.n);
  problem.panels_per_group = static_cast<int>(w.panels);
  problem.narrow = w.narrow;
  problem.add_rows(rows.end - rows.begin, src.k, run, init);
  run_gemm(problem, epilogue.get(), src.tier, &trace);
}

/// post_op_params of a chain without constants: the layout is in epilogue/post_ops.h.
at::Tensor chain_params(const Chain& chain, c10::string_view post_ops, int64_t n) {
  for (const PostOp& p : chain.ops) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !p.has_values() && !p.is(Eltwise::kLinear), "torchq.dynamic_linear: post_ops must have ",
        "sums, binaries with masks other than 0 and 2, and eltwise functions other than linear, ",
        "got '", post_ops, "'. Apply the rest to the result.");
  }
  at::Tensor params = at::detail::empty_cpu({chain.num_params(n, DType::f32)}, at::kFloat);
  float* next = params.mutable_data_ptr<float>();
  if (!chain.ops.empty()) *next++ = 0;  // the zero point of dst
  if (!chain.folds) return params;
  for (const PostOp& p : chain.ops) {
    if (p.kind == PostOp::kSum) next = std::fill_n(next, n, p.scale);
    if (p.is(Eltwise::kClip))
      next = std::fill_n(std::fill_n(next, n, p.eltwise.alpha), n, p.eltwise.beta);
  }
  return params;
}

void check_weight(const char* op, const at::Tensor& src, const at::Tensor& weight,
                  const at::Tensor& compensation, int64_t in_features) {
  check_param(op, "weight", weight, at::kChar);
  check_param(op, "compensation", compensation, at::kInt);
  TORCH_CHECK_VALUE(src.dim() >= 1 && src.size(-1) == in_features, "torchq.", op,
                    ": src must be (*, ", in_features, "), got ", src.sizes(),
                    ". Check the layer's in_features.");
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.size(1) == 1 && weight.size(3) == kPanel &&
                        weight.size(4) == kQuad && compensation.dim() == 2 &&
                        compensation.size(0) == 1 &&
                        weight.size(0) == panels_of(compensation.size(1)) &&
                        weight.size(2) == quads_of(in_features) && in_features <= kMaxReduction,
                    "torchq.", op, ": weight must be [ceil(N/16), 1, ceil(K/4), 16, 4] with ",
                    "compensation [1, N] for K = ", in_features, ", got ", weight.sizes(), " and ",
                    compensation.sizes(), ". Pack it with torch.ops.torchq.pack_linear.");
}

Weight of_tensors(const at::Tensor& weight, const at::Tensor& compensation,
                  const std::optional<at::Tensor>& bias, bool narrow) {
  return {weight.const_data_ptr<int8_t>(),
          compensation.const_data_ptr<int32_t>(),
          bias.has_value() ? bias->const_data_ptr<float>() : nullptr,
          compensation.size(1),
          weight.size(0),
          weight.size(2),
          narrow};
}

at::Tensor dynamic_linear(const at::Tensor& src_arg, const at::Tensor& weight,
                          const at::Tensor& compensation, const at::Tensor& pair_bound,
                          const at::Tensor& weight_scale, const std::optional<at::Tensor>& bias,
                          int64_t in_features, bool per_row, c10::string_view post_ops,
                          std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  check_weight(kOp, src_arg, weight, compensation, in_features);
  const int64_t n = compensation.size(1);
  check_dynamic(kOp, "linear", src_arg, weight_scale, bias, n);
  c10::SmallVector<int64_t, 5> sizes(src_arg.sizes().begin(), src_arg.sizes().end());
  sizes.back() = n;
  at::Tensor dst = empty_dst(sizes, at::kFloat);
  const Chain chain = parse_post_ops(kOp, {post_ops.data(), post_ops.size()});
  const at::Tensor params = chain_params(chain, post_ops, n);
  at::Tensor offset = at::detail::empty_cpu({n}, at::kFloat);
  std::fill_n(offset.mutable_data_ptr<float>(), n, 0.0f);
  EpilogueBuilder epilogue({.op = kOp,
                            .channels = n,
                            .multiplier = weight_scale,
                            .offset = offset,
                            .post_ops = post_ops,
                            .post_op_params = params,
                            .post_op_srcs = post_op_srcs.value_or(at::TensorList()),
                            .max_acc = max_accumulator(in_features, {}),
                            .rows = true},
                           dst);
  const bool narrow = pairs_fit(kOp, pair_bound, weight.size(0));
  if (is_done(dst)) return dst;
  trace.describe([&] {
    return describe_call({src_arg}, dst, per_row ? "range:per_row" : "range:per_tensor", post_ops);
  });
  const at::Tensor values = src_arg.contiguous();
  const Source src{kOp, tier, values.const_data_ptr<float>(), dst.numel() / n, in_features};
  ScratchFrame scratch;
  const Quantized q = quantize_rows(scratch, src, per_row);
  multiply(trace, src, q, {0, src.rows}, of_tensors(weight, compensation, bias, narrow), epilogue);
  return dst;
}

/// The weight of one group of a stack, of which these are the first n channels of its panels.
Weight group_of(const Weight& stack, int64_t group, int64_t n) {
  Weight w = stack;
  w.n = n;
  w.panels = panels_of(n);
  const int64_t panel = group * w.panels;
  w.values += panel * w.quads * kPanel * kQuad;
  w.compensation += panel * kPanel;
  if (w.bias != nullptr) w.bias += panel * kPanel;
  return w;
}

at::Tensor grouped_linear(const at::Tensor& src_arg, const at::Tensor& offsets,
                          const at::Tensor& weight, const at::Tensor& compensation,
                          const at::Tensor& pair_bound, const at::Tensor& weight_scale,
                          const std::optional<at::Tensor>& bias, int64_t in_features,
                          int64_t out_features) {
  OpTrace trace(kGroupedOp);
  const Kernels& tier = kernels();
  check_grouped(kGroupedOp, src_arg, offsets, weight, out_features);
  check_weight(kGroupedOp, src_arg, weight, compensation, in_features);
  const int64_t channels = weight.size(0) * kPanel;
  check_numel(kGroupedOp, "compensation", compensation, channels);
  check_dynamic(kGroupedOp, "linear", src_arg, weight_scale, bias, channels);
  const bool narrow = pairs_fit(kGroupedOp, pair_bound, weight.size(0));
  at::Tensor dst = empty_dst({src_arg.size(0), out_features}, at::kFloat);
  if (is_done(dst)) return dst;
  trace.describe(
      [&] { return describe_call({src_arg}, dst, c10::str("groups:", offsets.numel())); });
  const RowGroups groups(kGroupedOp, offsets, src_arg.size(0));
  zero_rest(groups, dst);
  const at::Tensor values = src_arg.contiguous();
  const Source src{kGroupedOp, tier, values.const_data_ptr<float>(), groups.rows(), in_features};
  ScratchFrame scratch;
  const Quantized q = quantize_rows(scratch, src, true);
  float* offset = scratch.take<float>(out_features);
  std::fill_n(offset, out_features, 0.0f);
  const Weight stack = of_tensors(weight, compensation, bias, narrow);
  groups.for_each([&](int64_t group, Range rows) {
    const Weight own = group_of(stack, group, out_features);
    const float* scale = weight_scale.const_data_ptr<float>() + group * own.panels * kPanel;
    float* result = dst.mutable_data_ptr<float>() + rows.begin * out_features;
    EpilogueBuilder epilogue(scale, offset, result);
    multiply(trace, src, q, rows, own, epilogue);
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::dynamic_linear>(m, "dynamic_linear");
  torchq::implement<&torchq::grouped_linear>(m, "grouped_linear");
}
