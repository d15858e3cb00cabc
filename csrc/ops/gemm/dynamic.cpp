// SPDX-License-Identifier: Apache-2.0
// torchq::dynamic_linear: float in, float out, with the source quantized to u8 on the way by the
// range that it has in this call.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "epilogue/post_ops.h"
#include "kernels/cpu_tuning.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "ops/gemm/row_params.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "dynamic_linear";

struct Problem {
  const Kernels& tier;
  const float* src;
  int64_t m, n, k, panels;
  const float* bias;  // null if there is none
  bool narrow;        // pairs_fit
};

/// Ranges of all rows; ValueError for what is not finite.
RowRange* ranges(ScratchFrame& scratch, const Problem& p) {
  RowRange* result = scratch.take<RowRange>(p.m);
  parallel_ranges(p.m, threads_for(p.m * p.k, tuning::kQuantizeRowGrain), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      result[r].finite = p.tier.row_range(p.src + r * p.k, p.k, &result[r].lo, &result[r].hi);
    }
  });
  for (int64_t r = 0; r < p.m; ++r) {
    TORCH_CHECK_VALUE(result[r].finite,
                      "torchq.dynamic_linear: src must be finite, got NaN or inf ", "in row ", r,
                      ". Its range decides the scale; repair what produced it.");
  }
  return result;
}

/// src as u8.
const uint8_t* quantize_rows(ScratchFrame& scratch, const Problem& p, const RowParams* params) {
  uint8_t* q = scratch.take<uint8_t>(p.m, p.k);
  parallel_ranges(p.m, threads_for(p.m * p.k, tuning::kQuantizeRowGrain), [&](Range rows) {
    const int32_t zero = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const RowParams& own = params[r];
      const float factor = static_cast<float>(1 / double{own.scale});
      p.tier.convert({p.src + r * p.k, DType::f32, q + r * p.k, DType::u8, p.k, &factor, 0, &zero,
                      0, &own.zero_point, 0});
    }
  });
  return q;
}

GemmProblem make_gemm(const Problem& p, const uint8_t* q, const at::Tensor& weight,
                      const GemmRun& run, const int32_t* acc_init) {
  GemmProblem problem;
  problem.src = q;
  problem.weight = weight.const_data_ptr<int8_t>();
  problem.panel_bytes = weight.size(2) * kPanel * kQuad;
  problem.group_channels = static_cast<int>(p.n);
  problem.panels_per_group = static_cast<int>(p.panels);
  problem.narrow = p.narrow;
  problem.add_rows(p.m, p.k, run, acc_init);
  return problem;
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

/// Each row's own zero point is multiplied with the sums of the weights, in the epilogue.
void run(OpTrace& trace, const Problem& p, const at::Tensor& weight, const at::Tensor& compensation,
         bool per_row, EpilogueBuilder& epilogue) {
  ScratchFrame scratch;
  RowRange* range = ranges(scratch, p);
  if (!per_row) {
    for (int64_t r = 1; r < p.m; ++r) range[0].join(range[r]);
    std::fill_n(range, p.m, range[0]);
  }
  RowParams* params = scratch.take<RowParams>(p.m);
  int32_t* row_terms = scratch.take<int32_t>(p.m);
  float* row_scale = scratch.take<float>(p.m);
  for (int64_t r = 0; r < p.m; ++r) {
    params[r] = params_of(range[r]);
    row_terms[r] = params[r].zero_point;
    row_scale[r] = params[r].scale;
  }
  epilogue.subtract(row_terms, compensation.const_data_ptr<int32_t>(), p.n, 1);
  epilogue.scale_rows(row_scale, p.bias, p.n);
  const int64_t padded = p.panels * kPanel;
  int32_t* init = scratch.take<int32_t>(padded);
  std::memset(init, 0, static_cast<size_t>(padded) * sizeof(int32_t));
  const uint8_t* q = quantize_rows(scratch, p, params);
  run_gemm(make_gemm(p, q, weight, {0, 0, weight.size(2)}, init), epilogue.get(), p.tier, &trace);
}

void check_weight(const at::Tensor& src, const at::Tensor& weight, const at::Tensor& compensation,
                  int64_t in_features) {
  check_param(kOp, "weight", weight, at::kChar);
  check_param(kOp, "compensation", compensation, at::kInt);
  TORCH_CHECK_VALUE(src.dim() >= 1 && src.size(-1) == in_features,
                    "torchq.dynamic_linear: src must be (*, ", in_features, "), got ", src.sizes(),
                    ". Check the layer's in_features.");
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.size(1) == 1 && weight.size(3) == kPanel &&
                        weight.size(4) == kQuad && compensation.dim() == 2 &&
                        compensation.size(0) == 1 &&
                        weight.size(0) == panels_of(compensation.size(1)) &&
                        weight.size(2) == quads_of(in_features) && in_features <= kMaxReduction,
                    "torchq.dynamic_linear: weight must be [ceil(N/16), 1, ceil(K/4), 16, 4] with ",
                    "compensation [1, N] for K = ", in_features, ", got ", weight.sizes(), " and ",
                    compensation.sizes(), ". Pack it with torch.ops.torchq.pack_linear.");
}

at::Tensor dynamic_linear(const at::Tensor& src_arg, const at::Tensor& weight,
                          const at::Tensor& compensation, const at::Tensor& pair_bound,
                          const at::Tensor& weight_scale, const std::optional<at::Tensor>& bias,
                          int64_t in_features, bool per_row, c10::string_view post_ops,
                          std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  check_weight(src_arg, weight, compensation, in_features);
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
  const at::Tensor src = src_arg.contiguous();
  run(trace,
      {tier, src.const_data_ptr<float>(), dst.numel() / n, n, in_features, weight.size(0),
       bias.has_value() ? bias->const_data_ptr<float>() : nullptr, narrow},
      weight, compensation, per_row, epilogue);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::dynamic_linear>(m, "dynamic_linear");
}
