// SPDX-License-Identifier: Apache-2.0
// Reorder to integers with another rounding than to nearest even (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cfenv>
#include <cmath>

#include "../checks.h"
#include "../parallel.h"
#include "real.h"

namespace torchq {
namespace {

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

at::Tensor reorder_rounded(const at::Tensor& src, const at::Tensor& scales,
                           const at::Tensor& zero_points, int64_t dst_dtype,
                           c10::string_view rounding, int64_t seed) {
  const int mode = std::fegetround();  // the caller's: OpTrace sets to-nearest
  OpTrace trace("reorder_rounded");
  const Kernels& tier = kernels();
  trace.ran(tier, "reorder_rounded");
  dtype_of("reorder_rounded", "src", src);
  check_cpu("reorder_rounded", "src", src);
  check_no_grad("reorder_rounded", "src", src);
  const auto params = read_params("reorder_rounded", scales, zero_points, {src},
                                  dst_dtype_of("reorder_rounded", dst_dtype));
  const Real &from = params[0], &to = params[1];
  TORCH_CHECK_VALUE(to.dtype != DType::f32,
                    "torchq.reorder_rounded: dst_dtype must be an integer type, got float32. ",
                    "Nothing is rounded there.");
  const bool stochastic = rounding == "stochastic";
  TORCH_CHECK_VALUE(stochastic || rounding == "environment",
                    "torchq.reorder_rounded: rounding must be environment or stochastic, got '",
                    rounding, "'. Use reorder for nearest.");
  const at::Tensor dense = src.contiguous();
  const at::Tensor dst = at::detail::empty_cpu(src.sizes(), scalar_type(to.dtype));
  trace.describe([&] { return describe_call({src}, dst, "rounding:" + std::string(rounding)); });
  const int64_t count = dst.numel();
  if (count == 0) return dst;
  const char* data = static_cast<const char*>(dense.const_data_ptr());
  char* result = static_cast<char*>(dst.mutable_data_ptr());
  const int64_t in = dense.element_size(), out = dst.element_size();
  const float inverse = static_cast<float>(1.0 / to.scale);
  const float zero_point = static_cast<float>(to.zero_point);
  const Real whole{to.dtype, 1, 0};
  const int parts = static_cast<int>(std::min<int64_t>(threads_for(count, 20'000), count));
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(count, parts, part);
    alignas(64) float x[kRealBlock];
    for (int64_t first = range.begin; first < range.end; first += kRealBlock) {
      const int64_t n = std::min<int64_t>(kRealBlock, range.end - first);
      load_real(tier, from, data + first * in, in, n, x);
      for (int64_t i = 0; i < n; ++i) {
        const float y = std::fma(x[i], inverse, zero_point);
        if (std::isnan(y)) {
          x[i] = zero_point;
        } else if (stochastic) {
          const float u = uniform(static_cast<uint64_t>(seed), static_cast<uint64_t>(first + i));
          const float down = std::floor(y);
          x[i] = y - down > u ? down + 1 : down;
        } else {
          x[i] = rounded(y, mode);
        }
      }
      store_real(tier, whole, x, result + first * out, out, n);
    }
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { m.impl("reorder_rounded", &torchq::reorder_rounded); }
