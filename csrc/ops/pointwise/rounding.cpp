// SPDX-License-Identifier: Apache-2.0
// Reorder to integers with another rounding than to nearest even (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cfenv>
#include <cmath>

#include "kernels/cpu_tuning.h"
#include "ops/pointwise/elementwise.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "reorder_rounded";

/// Uniform in [0, 1): the upper 24 bits of splitmix64's value number `index` + 1 from `seed`.
float uniform(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-24f;
}

float rounded(float y, int mode) {
  switch (mode) {
    case FE_DOWNWARD:
      return std::floor(y);
    case FE_UPWARD:
      return std::ceil(y);
    case FE_TOWARDZERO:
      return std::trunc(y);
    default:
      return std::nearbyint(y);
  }
}

/// Value before it is rounded: fma(x, 1 / dst_scale, dst_zero_point).
struct DstUnits {
  at::Tensor x;                    // src_scale * (src - src_zero_point), contiguous float32
  at::Tensor inverse, zero_point;  // one value, or as many as x
  int64_t inverse_step, zero_point_step;
};

/// Parameters are [2, ...]: src's, then dst's, each of which broadcasts against src.
DstUnits in_dst_units(const Kernels& tier, const at::Tensor& src, const at::Tensor& scales,
                      const at::Tensor& zero_points, DType dst) {
  TORCH_CHECK_VALUE(scales.dim() >= 1 && zero_points.dim() >= 1 && scales.size(0) == 2 &&
                        zero_points.size(0) == 2,
                    "torchq.", kOp, ": scales and zero_points must be [2, ...], one for src and ",
                    "one for dst, got ", scales.sizes(), " and ", zero_points.sizes(), ".");
  check_scale(kOp, "scales", scales, true);
  check_zero_point(kOp, "zero_points", zero_points[0], dtype_of(kOp, "src", src));
  check_zero_point(kOp, "zero_points", zero_points[1], dst);
  check_broadcasts(kOp, "scales", scales[0], src);
  check_broadcasts(kOp, "zero_points", zero_points[0], src);
  const at::Tensor x = empty_dst(src.sizes(), at::kFloat);
  convert_into(tier, x, src, scales[0].contiguous(), zero_points[0].contiguous(),
               at::zeros({}, at::kInt));
  const auto spread = [&](const at::Tensor& t) {
    return t.numel() == 1 ? t.contiguous() : t.expand(src.sizes()).contiguous();
  };
  const at::Tensor inverse = scale_ratio(kOp, at::ones({}, at::kFloat), scales[1].contiguous());
  const at::Tensor zero_point = zero_points[1];
  return {x, spread(inverse), spread(zero_point), inverse.numel() > 1, zero_point.numel() > 1};
}

at::Tensor reorder_rounded(const at::Tensor& src, const at::Tensor& scales,
                           const at::Tensor& zero_points, int64_t dst_dtype,
                           c10::string_view rounding, int64_t seed) {
  const int mode = std::fegetround();  // the caller's: OpTrace sets to-nearest
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  trace.ran(tier, kOp);
  dtype_of(kOp, "src", src);
  check_cpu(kOp, "src", src);
  const DType dtype = dst_dtype_of(kOp, dst_dtype);
  TORCH_CHECK_VALUE(dtype != DType::f32, "torchq.", kOp,
                    ": dst_dtype must be an integer type, got float32. Nothing is rounded there.");
  const bool stochastic = rounding == "stochastic";
  TORCH_CHECK_VALUE(stochastic || rounding == "environment", "torchq.", kOp,
                    ": rounding must be environment or stochastic, got '", rounding,
                    "'. Use reorder for nearest.");
  const DstUnits units = in_dst_units(tier, src, scales, zero_points, dtype);
  const at::Tensor dst = empty_dst(src.sizes(), scalar_type(dtype));
  trace.describe([&] { return describe_call({src}, dst, "rounding:" + std::string(rounding)); });
  if (is_done(dst)) return dst;
  const int64_t count = dst.numel();
  const float* real = units.x.const_data_ptr<float>();
  const float* inverse = units.inverse.const_data_ptr<float>();
  const int32_t* zero_point = units.zero_point.const_data_ptr<int32_t>();
  char* result = static_cast<char*>(dst.mutable_data_ptr());
  const int64_t out = dst.element_size();
  const Real whole{dtype, 1, 0};
  parallel_ranges(count, threads_for(count, tuning::kRoundGrain), [&](Range range) {
    alignas(64) float x[kRealBlock];
    for (int64_t first = range.begin; first < range.end; first += kRealBlock) {
      const int64_t n = std::min<int64_t>(kRealBlock, range.end - first);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t index = first + i;
        const float zero = static_cast<float>(zero_point[index * units.zero_point_step]);
        const float y = std::fma(real[index], inverse[index * units.inverse_step], zero);
        if (std::isnan(y)) {
          x[i] = zero;
        } else if (stochastic) {
          const float u = uniform(static_cast<uint64_t>(seed), static_cast<uint64_t>(index));
          const float down = std::floor(y);
          x[i] = y - down > u ? down + 1 : down;
        } else {
          x[i] = rounded(y, mode);
        }
      }
      store_real(tier, whole, x, result + first * out, n);
    }
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::reorder_rounded>(m, "reorder_rounded");
}
