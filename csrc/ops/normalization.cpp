// SPDX-License-Identifier: Apache-2.0
// Softmax, layer, group and batch normalization of 8-bit tensors. Sums are of
// integers, or of doubles in a fixed order on one thread (Note [Real units] in
// real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "../checks.h"
#include "../kernels/math.h"
#include "../parallel.h"
#include "real.h"

namespace torchq {
namespace {

int32_t value(const uint8_t* p, const Real& from) {
  return from.dtype == DType::s8 ? static_cast<int8_t>(*p) : *p;
}

int threads_of(int64_t values, int64_t rows) {
  return static_cast<int>(std::min<int64_t>(threads_for(values, 20'000), rows));
}

at::Tensor softmax(const at::Tensor& src, int64_t dim, bool logarithmic, const at::Tensor& scales,
                   const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops) {
  OpTrace trace("softmax");
  const Kernels& tier = kernels();
  trace.ran(tier, "softmax");
  check_src("softmax", "src", src);
  const auto params =
      read_params("softmax", scales, zero_points, {src}, dst_dtype_of("softmax", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("softmax", post_ops)};
  TORCH_CHECK_VALUE(dim >= -src.dim() && dim < src.dim(), "torchq.softmax: dim must lie in [",
                    -src.dim(), ", ", src.dim() - 1, "] for src ", src.sizes(), ", got ", dim, ".");
  const at::Tensor rows = src.movedim(dim, -1).contiguous();
  const at::Tensor dense = at::detail::empty_cpu(rows.sizes(), scalar_type(out.to.dtype));
  const at::Tensor dst = dense.movedim(-1, dim);
  trace.describe([&] { return describe_call({src}, dst); });
  if (dst.numel() == 0) return dst;
  // x - max(x) of a value d steps below the largest, and its exponential: e^(r + rest) with r the
  // float32 nearest to the exact difference, and e^rest = 1 + rest within 2^-36.
  float below[256];
  double power[256];
  for (int d = 0; d < 256; ++d) {
    const double exact = -(double{out.from.scale} * d);
    below[d] = static_cast<float>(exact);
    const float e = Math<Scalar>::exp(below[d]);
    power[d] = e == 0 ? 0 : double{e} * (1 + (exact - double{below[d]}));
  }
  const uint8_t* data = static_cast<const uint8_t*>(rows.const_data_ptr());
  void* result = dense.mutable_data_ptr();
  const int64_t n = rows.size(-1), count = rows.numel() / n;
  const int parts = threads_of(rows.numel(), count);
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(count, parts, part);
    float x[kRealBlock];
    for (int64_t r = range.begin; r < range.end; ++r) {
      const uint8_t* row = data + r * n;
      int32_t largest = value(row, out.from);
      for (int64_t i = 1; i < n; ++i) largest = std::max(largest, value(row + i, out.from));
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += power[largest - value(row + i, out.from)];
      const float log_sum = Math<Scalar>::log(static_cast<float>(sum));
      for (int64_t first = 0; first < n; first += kRealBlock) {
        const int64_t block = std::min<int64_t>(kRealBlock, n - first);
        for (int64_t i = 0; i < block; ++i) {
          const int32_t d = largest - value(row + first + i, out.from);
          x[i] = logarithmic ? below[d] - log_sum : static_cast<float>(power[d] / sum);
        }
        out.store(x, block, result, r * n + first);
      }
    }
  });
  return dst;
}

/// Checked weight and bias of `n` values each.
struct Affine {
  Affine(const char* op, const std::optional<at::Tensor>& weight_arg,
         const std::optional<at::Tensor>& bias_arg, int64_t n)
      : weight(read(op, "weight", weight_arg, n)), bias(read(op, "bias", bias_arg, n)) {}
  double operator()(double y, int64_t i) const {
    if (weight != nullptr) y = y * weight[i];
    return bias == nullptr ? y : y + bias[i];
  }
  static const float* read(const char* op, const char* arg, const std::optional<at::Tensor>& t,
                           int64_t n) {
    if (!t.has_value()) return nullptr;
    check_param(op, arg, *t, at::kFloat);
    check_numel(op, arg, *t, n);
    check_no_grad(op, arg, *t);
    return t->const_data_ptr<float>();
  }
  const float* weight;
  const float* bias;
};

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0, "torchq.", op,
                    ": eps must be finite and at least 0, got ", eps, ". The usual is 1e-5.");
}

/// Exact integer sums of q - zero_point and of its square.
struct Sums {
  int64_t n = 0, sum = 0, squares = 0;
  void add(int64_t q) {
    ++n;
    sum += q;
    squares += q * q;
  }
  double mean() const { return static_cast<double>(sum) / static_cast<double>(n); }
  /// scale / sqrt(scale^2 variance + eps), the variance from an exact
  /// numerator.
  double factor(double scale, double eps) const {
    const __int128 spread = static_cast<__int128>(n) * squares - static_cast<__int128>(sum) * sum;
    const double variance =
        static_cast<double>(spread) / (static_cast<double>(n) * static_cast<double>(n));
    return scale / std::sqrt(scale * scale * variance + eps);
  }
};

/// Normalizes over `pixels` x `width` of the channels [groups, width] of a
/// dense [batch, pixels, groups, width] source, where value (p, g, i) has the
/// weight g * width + i.
void normalize(const RealOutput& out, const Affine& affine, double eps, const at::Tensor& src,
               const at::Tensor& dst, int64_t batch, int64_t pixels, int64_t groups,
               int64_t width) {
  const uint8_t* data = static_cast<const uint8_t*>(src.const_data_ptr());
  void* result = dst.mutable_data_ptr();
  const int parts = threads_of(src.numel(), batch * groups);
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(batch * groups, parts, part);
    float x[kRealBlock];
    for (int64_t r = range.begin; r < range.end; ++r) {
      const int64_t b = r / groups, g = r % groups;
      const auto offset = [&](int64_t p) { return ((b * pixels + p) * groups + g) * width; };
      Sums sums;
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t i = 0; i < width; ++i)
          sums.add(value(data + offset(p) + i, out.from) - out.from.zero_point);
      }
      const double mean = sums.mean(), factor = sums.factor(out.from.scale, eps);
      for (int64_t p = 0; p < pixels; ++p) {
        for (int64_t first = 0; first < width; first += kRealBlock) {
          const int64_t block = std::min<int64_t>(kRealBlock, width - first);
          const int64_t at = offset(p) + first;
          for (int64_t i = 0; i < block; ++i) {
            const double q = value(data + at + i, out.from) - out.from.zero_point;
            x[i] = static_cast<float>(affine((q - mean) * factor, g * width + first + i));
          }
          out.store(x, block, result, at);
        }
      }
    }
  });
}

at::Tensor layer_norm(const at::Tensor& src, int64_t dims, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops) {
  OpTrace trace("layer_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "layer_norm");
  check_src("layer_norm", "src", src);
  const auto params =
      read_params("layer_norm", scales, zero_points, {src}, dst_dtype_of("layer_norm", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("layer_norm", post_ops)};
  check_eps("layer_norm", eps);
  TORCH_CHECK_VALUE(dims >= 1 && dims <= src.dim(), "torchq.layer_norm: dims must lie in [1, ",
                    src.dim(), "] for src ", src.sizes(), ", got ", dims, ".");
  int64_t n = 1;
  for (int64_t d = 1; d <= dims; ++d) n *= src.size(-d);
  const Affine affine("layer_norm", weight, bias, n);
  const at::Tensor dense = src.contiguous();
  const at::Tensor dst = at::detail::empty_cpu(src.sizes(), scalar_type(out.to.dtype));
  trace.describe([&] { return describe_call({src}, dst); });
  if (dst.numel() != 0) normalize(out, affine, eps, dense, dst, src.numel() / n, 1, 1, n);
  return dst;
}

/// The source with its channels last, and an empty destination laid out alike.
struct ByChannel {
  ByChannel(const char* op, const at::Tensor& src, DType dst_dtype) {
    TORCH_CHECK_VALUE(src.dim() >= 2, "torchq.", op, ": src must be (N, C, ...), got ", src.sizes(),
                      ". Add a batch dimension with unsqueeze(0).");
    dense = src.movedim(1, -1).contiguous();
    result = at::detail::empty_cpu(dense.sizes(), scalar_type(dst_dtype));
    dst = result.movedim(-1, 1);
  }
  at::Tensor dense, result, dst;
};

at::Tensor group_norm(const at::Tensor& src, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops) {
  OpTrace trace("group_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "group_norm");
  check_src("group_norm", "src", src);
  const auto params =
      read_params("group_norm", scales, zero_points, {src}, dst_dtype_of("group_norm", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("group_norm", post_ops)};
  check_eps("group_norm", eps);
  const ByChannel views("group_norm", src, out.to.dtype);
  const int64_t channels = src.size(1);
  TORCH_CHECK_VALUE(groups >= 1 && channels % groups == 0,
                    "torchq.group_norm: groups must divide the channels, ", channels, ", got ",
                    groups, ".");
  const Affine affine("group_norm", weight, bias, channels);
  trace.describe([&] { return describe_call({src}, views.dst); });
  if (views.dst.numel() == 0) return views.dst;
  const int64_t batch = src.size(0);
  normalize(out, affine, eps, views.dense, views.result, batch, src.numel() / (batch * channels),
            groups, channels / groups);
  return views.dst;
}

at::Tensor batch_norm(const at::Tensor& src, const at::Tensor& mean, const at::Tensor& variance,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops) {
  OpTrace trace("batch_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "batch_norm");
  check_src("batch_norm", "src", src);
  const auto params =
      read_params("batch_norm", scales, zero_points, {src}, dst_dtype_of("batch_norm", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("batch_norm", post_ops)};
  check_eps("batch_norm", eps);
  const ByChannel views("batch_norm", src, out.to.dtype);
  const int64_t channels = src.size(1);
  const Affine affine("batch_norm", weight, bias, channels);
  const float* means = Affine::read("batch_norm", "mean", mean, channels);
  const float* variances = Affine::read("batch_norm", "variance", variance, channels);
  for (int64_t c = 0; c < channels; ++c) {
    TORCH_CHECK_VALUE(std::isfinite(variances[c]) && variances[c] >= 0,
                      "torchq.batch_norm: variance must be finite and at least 0, got ",
                      variances[c], " of channel ", c, ". Pass the running variance.");
  }
  trace.describe([&] { return describe_call({src}, views.dst); });
  if (views.dst.numel() == 0) return views.dst;
  const uint8_t* data = static_cast<const uint8_t*>(views.dense.const_data_ptr());
  void* result = views.result.mutable_data_ptr();
  const int64_t rows = src.numel() / channels;
  const int parts = threads_of(src.numel(), rows);
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(rows, parts, part);
    float x[kRealBlock];
    for (int64_t first = 0; first < channels; first += kRealBlock) {
      const int64_t block = std::min<int64_t>(kRealBlock, channels - first);
      double factor[kRealBlock];
      for (int64_t i = 0; i < block; ++i)
        factor[i] = 1 / std::sqrt(double{variances[first + i]} + eps);
      for (int64_t r = range.begin; r < range.end; ++r) {
        const int64_t at = r * channels + first;
        for (int64_t i = 0; i < block; ++i) {
          const double q = value(data + at + i, out.from) - out.from.zero_point;
          const double y = (q * out.from.scale - means[first + i]) * factor[i];
          x[i] = static_cast<float>(affine(y, first + i));
        }
        out.store(x, block, result, at);
      }
    }
  });
  return views.dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  m.impl("softmax", &torchq::softmax);
  m.impl("layer_norm", &torchq::layer_norm);
  m.impl("group_norm", &torchq::group_norm);
  m.impl("batch_norm", &torchq::batch_norm);
}
