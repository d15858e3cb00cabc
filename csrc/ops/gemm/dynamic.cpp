// SPDX-License-Identifier: Apache-2.0
// torchq::dynamic_linear: float in, float out, with the source quantized to u8 on the way by the
// range that it has in this call.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/gemm/gemm.h"
#include "ops/gemm/packing.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "dynamic_linear";
constexpr double kSmallestScale = 1.1754943508222875e-38;  // the smallest normal float32

/// Smallest and largest value of a row, 0 included, and whether all are numbers.
struct RowRange {
  float lo = 0, hi = 0;
  bool finite = true;

  void join(const RowRange& other) {
    lo = std::min(lo, other.lo);
    hi = std::max(hi, other.hi);
    finite = finite && other.finite;
  }
};

struct Params {
  float scale, factor;  // factor: 1 / scale
  int32_t zero_point;
};

/// choose_qparams for u8: affine, 0 exactly representable, scale 1 for an empty range.
Params params_of(const RowRange& range) {
  double span = double{range.hi} - double{range.lo};
  span = span > 0 ? std::max(span, 255 * kSmallestScale) : 255;
  const double zero_point = std::nearbyint(-double{range.lo} * 255 / span);
  const float scale = static_cast<float>(span / 255);
  return {scale, static_cast<float>(1 / double{scale}),
          static_cast<int32_t>(std::clamp(zero_point, 0.0, 255.0))};
}

struct Problem {
  const Kernels& tier;
  const float* src;
  int64_t m, n, k, panels;
  const float *weight_scale, *bias;  // bias: null if there is none
  float* dst;
};

/// Ranges of all rows; ValueError for what is not finite.
RowRange* ranges(ScratchFrame& scratch, const Problem& p) {
  RowRange* result = scratch.take<RowRange>(p.m);
  parallel_ranges(p.m, threads_for(p.m * p.k, 1 << 17), [&](Range rows) {
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

/// src as u8; `params` has one entry per row, or `step` 0 and one for all.
const uint8_t* quantize_rows(ScratchFrame& scratch, const Problem& p, const Params* params,
                             int64_t step) {
  uint8_t* q = scratch.take<uint8_t>(p.m * p.k);
  parallel_ranges(p.m, threads_for(p.m * p.k, 1 << 17), [&](Range rows) {
    const int32_t zero = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const Params& own = params[r * step];
      p.tier.convert({p.src + r * p.k, DType::f32, q + r * p.k, DType::u8, p.k, &own.factor, 0,
                      &zero, 0, &own.zero_point, 0});
    }
  });
  return q;
}

GemmProblem make_gemm(const Problem& p, const uint8_t* q, const at::Tensor& weight,
                      const at::Tensor& pair_bound, const GemmRun& run, const int32_t* acc_init) {
  GemmProblem problem;
  problem.src = q;
  problem.weight = weight.const_data_ptr<int8_t>();
  problem.panel_bytes = weight.size(2) * kPanel * kQuad;
  problem.group_channels = static_cast<int>(p.n);
  problem.panels_per_group = static_cast<int>(p.panels);
  problem.narrow = pairs_fit(kOp, pair_bound, p.panels);
  problem.regions.push_back({{1, 1, 1, p.m}, {0, 0, 0, p.k}, {0, 0, 0, p.n}, 0, 0, run, acc_init});
  return problem;
}

Epilogue float_epilogue(float* dst, const float* multiplier, const float* offset) {
  Epilogue e{};
  e.mode = Epilogue::kFolded;
  e.dst_dtype = DType::f32;
  e.dst = dst;
  e.multiplier = multiplier;
  e.offset = offset;
  return e;
}

void run(OpTrace& trace, const Problem& p, const at::Tensor& weight, const at::Tensor& compensation,
         const at::Tensor& pair_bound, bool per_row) {
  ScratchFrame scratch;
  RowRange* range = ranges(scratch, p);
  const GemmRun whole_row{0, 0, weight.size(2)};
  const int32_t tap = 0;
  const int64_t padded = p.panels * kPanel;
  float* offset = scratch.take<float>(p.n);
  std::memset(offset, 0, static_cast<size_t>(p.n) * sizeof(float));
  if (!per_row) {
    for (int64_t r = 1; r < p.m; ++r) range[0].join(range[r]);
    const Params params = params_of(range[0]);
    float* multiplier = scratch.take<float>(p.n);
    for (int64_t i = 0; i < p.n; ++i) {
      multiplier[i] = static_cast<float>(double{params.scale} * p.weight_scale[i]);
    }
    if (p.bias != nullptr) std::copy(p.bias, p.bias + p.n, offset);
    const uint8_t* q = quantize_rows(scratch, p, &params, 0);
    const int32_t* init = make_acc_init(scratch, p.tier, compensation, tap, {}, params.zero_point,
                                        1, static_cast<int>(p.n), static_cast<int>(p.panels));
    run_gemm(make_gemm(p, q, weight, pair_bound, whole_row, init),
             float_epilogue(p.dst, multiplier, offset), p.tier, trace);
    return;
  }
  // Each row has a zero point of its own, which the sums of the weights are multiplied with.
  Params* params = scratch.take<Params>(p.m);
  int32_t* row_terms = scratch.take<int32_t>(p.m);
  float* row_scale = scratch.take<float>(p.m);
  for (int64_t r = 0; r < p.m; ++r) {
    params[r] = params_of(range[r]);
    row_terms[r] = params[r].zero_point;
    row_scale[r] = params[r].scale;
  }
  int32_t* init = scratch.take<int32_t>(padded);
  std::memset(init, 0, static_cast<size_t>(padded) * sizeof(int32_t));
  const uint8_t* q = quantize_rows(scratch, p, params, 1);
  Epilogue epilogue = float_epilogue(p.dst, p.weight_scale, offset);
  epilogue.row_terms = row_terms;
  epilogue.channel_terms = compensation.const_data_ptr<int32_t>();
  epilogue.channels = epilogue.group_channels = static_cast<int>(p.n);
  epilogue.row_scale = row_scale;
  epilogue.row_bias = p.bias;
  run_gemm(make_gemm(p, q, weight, pair_bound, whole_row, init), epilogue, p.tier, trace);
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
                          int64_t in_features, bool per_row) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  TORCH_CHECK_TYPE(src_arg.scalar_type() == at::kFloat,
                   "torchq.dynamic_linear: src must be float32, ", "got ",
                   dtype_name(src_arg.scalar_type()),
                   ". Convert it with .float(), or use linear for quantized sources.");
  check_cpu(kOp, "src", src_arg);
  check_weight(src_arg, weight, compensation, in_features);
  const int64_t n = compensation.size(1);
  check_param(kOp, "weight_scale", weight_scale, at::kFloat);
  check_numel(kOp, "weight_scale", weight_scale, n);
  if (bias.has_value()) {
    check_param(kOp, "bias", *bias, at::kFloat);
    check_numel(kOp, "bias", *bias, n);
  }
  c10::SmallVector<int64_t, 5> sizes(src_arg.sizes().begin(), src_arg.sizes().end());
  sizes.back() = n;
  at::Tensor dst = empty_dst(sizes, at::kFloat);
  if (dst.numel() == 0) return dst;
  trace.describe([&] {
    return describe_call({src_arg}, dst, per_row ? "range:per_row" : "range:per_tensor");
  });
  const at::Tensor src = src_arg.contiguous();
  run(trace,
      {tier, src.const_data_ptr<float>(), dst.numel() / n, n, in_features, weight.size(0),
       weight_scale.const_data_ptr<float>(),
       bias.has_value() ? bias->const_data_ptr<float>() : nullptr, dst.mutable_data_ptr<float>()},
      weight, compensation, pair_bound, per_row);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::dynamic_linear>(m, "dynamic_linear");
}
