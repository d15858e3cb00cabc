// SPDX-License-Identifier: Apache-2.0
// torchq::dynamic_conv: float in, float out, with each sample quantized to u8 on the way by the
// range that it has in this call.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "kernels/cpu_tuning.h"
#include "ops/conv/arguments.h"
#include "ops/conv/border.h"
#include "ops/gemm/row_params.h"
#include "ops/pointwise/quantize.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

constexpr const char* kOp = "dynamic_conv";

RowParams sample_params(const Kernels& tier, const at::Tensor& sample, int64_t index) {
  const float* data = sample.const_data_ptr<float>();
  const int64_t size = sample.numel();
  const int threads = threads_for(size, tuning::kQuantizeRowGrain);
  std::vector<RowRange> parts(static_cast<size_t>(threads));
  parallel_ranges(threads, threads, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t begin = size * i / threads, end = size * (i + 1) / threads;
      RowRange& part = parts[static_cast<size_t>(i)];
      part.finite = tier.row_range(data + begin, end - begin, &part.lo, &part.hi);
    }
  });
  for (const RowRange& part : parts) parts[0].join(part);
  TORCH_CHECK_VALUE(parts[0].finite,
                    "torchq.dynamic_conv: src must be finite, got NaN or inf in sample ", index,
                    ". Its range decides the scale; repair what produced it.");
  return params_of(parts[0]);
}

at::Tensor dynamic_conv(const at::Tensor& src_arg, const at::Tensor& weight,
                        const at::Tensor& compensation, const at::Tensor& pair_bound,
                        const at::Tensor& weight_scale, const std::optional<at::Tensor>& bias,
                        c10::IntArrayRef geometry) {
  check_param(kOp, "compensation", compensation, at::kInt);
  TORCH_CHECK_VALUE(src_arg.dim() >= 3 && compensation.dim() == 2,
                    "torchq.dynamic_conv: src must be (N, C, spatial...) with compensation "
                    "[rows, OC], got ",
                    src_arg.sizes(), " and ", compensation.sizes(),
                    ". Pack the weight with torch.ops.torchq.pack_conv.");
  const int64_t channels = compensation.size(1);
  check_dynamic(kOp, "conv", src_arg, weight_scale, bias, channels);
  const float* scales = weight_scale.const_data_ptr<float>();
  const at::Tensor offset = bias.has_value() ? *bias : at::zeros({channels}, at::kFloat);
  const at::Tensor none = at::detail::empty_cpu({0}, at::kFloat);
  const int64_t samples = std::max<int64_t>(src_arg.size(0), 1);
  const bool alike = src_arg.numel() == 0 || channels == 0 || only_checks();
  at::Tensor dst;
  for (int64_t i = 0; i < (alike ? 1 : samples); ++i) {
    at::Tensor sample = samples > 1 ? src_arg.narrow(0, i, 1) : src_arg;
    if (!sample.is_non_overlapping_and_dense()) sample = sample.contiguous();
    const RowParams params = only_checks() ? RowParams{1, 0} : sample_params(kernels(), sample, i);
    at::Tensor multiplier = at::detail::empty_cpu({channels}, at::kFloat);
    for (int64_t n = 0; n < channels; ++n) {
      multiplier.mutable_data_ptr<float>()[n] =
          static_cast<float>(double{params.scale} * scales[n]);
    }
    const at::Tensor zero_point = at::scalar_tensor(params.zero_point, at::kInt);
    const at::Tensor q = quantize(sample, at::scalar_tensor(params.scale, at::kFloat), zero_point,
                                  static_cast<int64_t>(at::kByte));
    const std::optional<at::Tensor> point = zero_point, absent;
    const at::Tensor one = conv({q,
                                 weight,
                                 compensation,
                                 pair_bound,
                                 multiplier,
                                 offset,
                                 absent,
                                 point,
                                 geometry,
                                 static_cast<int64_t>(at::kFloat),
                                 "",
                                 none,
                                 {},
                                 absent,
                                 absent,
                                 absent});
    if (i == 0) {
      dst = samples == 1 ? one
                         : empty_channels_last(samples, channels, one.sizes().slice(2), at::kFloat);
    }
    if (samples > 1 && !is_done(dst)) (alike ? dst : dst.narrow(0, i, 1)).copy_(one);
  }
  return src_arg.is_contiguous() && !only_checks() ? dst.contiguous() : dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::dynamic_conv>(m, "dynamic_conv"); }
