// SPDX-License-Identifier: Apache-2.0
// Dynamic layers: scale and zero point of a source that is quantized by the range it has in a call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "runtime/checks.h"

namespace torchq {

/// Smallest and largest value, 0 included, and whether all are numbers.
struct RowRange {
  float lo = 0, hi = 0;
  bool finite = true;

  void join(const RowRange& other) {
    lo = std::min(lo, other.lo);
    hi = std::max(hi, other.hi);
    finite = finite && other.finite;
  }
};

struct RowParams {
  float scale;
  int32_t zero_point;
};

/// choose_qparams for u8: affine, 0 exactly representable, scale 1 for an empty range.
inline RowParams params_of(const RowRange& range) {
  constexpr double kSmallestScale = 1.1754943508222875e-38;  // the smallest normal float32
  double span = double{range.hi} - double{range.lo};
  span = span > 0 ? std::max(span, 255 * kSmallestScale) : 255;
  const double zero_point = std::nearbyint(-double{range.lo} * 255 / span);
  return {static_cast<float>(span / 255), static_cast<int32_t>(std::clamp(zero_point, 0.0, 255.0))};
}

/// Raises unless the source of a dynamic layer is float32, and there is one scale and one bias per
/// output channel; `plain` is the op for quantized sources.
inline void check_dynamic(const char* op, const char* plain, const at::Tensor& src,
                          const at::Tensor& weight_scale, const std::optional<at::Tensor>& bias,
                          int64_t channels) {
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "torchq.", op, ": src must be float32, got ",
                   dtype_name(src.scalar_type()), ". Convert it with .float(), or use ", plain,
                   " for quantized sources.");
  check_cpu(op, "src", src);
  check_param(op, "weight_scale", weight_scale, at::kFloat);
  check_numel(op, "weight_scale", weight_scale, channels);
  if (bias.has_value()) {
    check_param(op, "bias", *bias, at::kFloat);
    check_numel(op, "bias", *bias, channels);
  }
}

}  // namespace torchq
