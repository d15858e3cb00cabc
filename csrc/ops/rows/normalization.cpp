// SPDX-License-Identifier: Apache-2.0
// Softmax, layer, RMS, group and batch normalization in real units (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu_tuning.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

at::Tensor softmax(const at::Tensor& src, int64_t dim, bool logarithmic, const at::Tensor& scales,
                   const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                   std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("softmax");
  const Kernels& tier = kernels();
  trace.ran(tier, "softmax");
  check_src("softmax", "src", src);
  const auto params =
      read_params("softmax", scales, zero_points, {src}, dst_dtype_of("softmax", dst_dtype));
  TORCH_CHECK_VALUE(dim >= -src.dim() && dim < src.dim(), "torchq.softmax: dim must lie in [",
                    -src.dim(), ", ", src.dim() - 1, "] for src ", src.sizes(), ", got ", dim, ".");
  const bool is_last = dim == -1 || dim == src.dim() - 1;  // moving it would cost 1 us
  const at::Tensor rows = (is_last ? src : src.movedim(dim, -1)).contiguous();
  const at::Tensor dense = empty_dst(rows.sizes(), scalar_type(params[1].dtype));
  const at::Tensor dst = is_last ? dense : dense.movedim(-1, dim);
  const RealOutput out({"softmax", tier, params[1], post_ops, post_op_srcs}, dst);
  trace.describe([&] { return describe_call({src}, dst, "", post_ops); });
  if (is_done(dst)) return dst;
  const uint8_t* data = bytes_of(rows);
  const bool is_signed = params[0].dtype == DType::s8;
  const int64_t n = rows.size(-1);
  store_rows(out, rows.numel() / n, n, [&](const Range& range, const RealRow& to) {
    ScratchFrame frame;
    float* values = frame.take<float>(n + kPanel);
    for (int64_t r = range.begin; r < range.end; ++r) {
      tier.softmax({data + r * n, is_signed, n, params[0].scale, logarithmic, values,
                    behind(to, (r - range.begin) * n)});
    }
  });
  return dst;
}

/// Checked weight and bias of `n` values each.
struct Affine {
  Affine(const char* op, const std::optional<at::Tensor>& weight_arg,
         const std::optional<at::Tensor>& bias_arg, int64_t n)
      : weight(read(op, "weight", weight_arg, n)), bias(read(op, "bias", bias_arg, n)) {}
  static const float* read(const char* op, const char* arg, const std::optional<at::Tensor>& t,
                           int64_t n) {
    if (!t.has_value()) return nullptr;
    check_param(op, arg, *t, at::kFloat);
    check_numel(op, arg, *t, n);
    return t->const_data_ptr<float>();
  }
  const float* weight;
  const float* bias;
};

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0, "torchq.", op,
                    ": eps must be finite and at least 0, got ", eps, ". The usual is 1e-5.");
}

/// Exact sums of n integers q and of their squares. Layer and group norm make of them
///
///   m = sum / n, center = rne(m), g = scale / sqrt(scale^2 variance + eps)
///   (scale q - scale m) / sqrt(...) = fma(float(q - center), float(g), float((center - m) g))
///
/// in double; the numerator of the variance, n squares - sum^2, is exact.
struct Statistics {
  int64_t n = 0, sum = 0, squares = 0;
  int32_t center = 0;
  float factor = 0, shift = 0;

  /// Rounded once; in 64 bits where both products have at most 62.
  double spread() const {
    if (n <= int64_t{1} << 23) return static_cast<double>(n * squares - sum * sum);
    return static_cast<double>(static_cast<__int128>(n) * squares -
                               static_cast<__int128>(sum) * sum);
  }
  void finish(double scale, double eps) {
    const double count = static_cast<double>(n), mean = static_cast<double>(sum) / count;
    const double variance = spread() / (count * count);
    const double g = scale / std::sqrt(scale * scale * variance + eps);
    const double whole = mean + 0x1.8p52 - 0x1.8p52;  // rne; std::nearbyint is a call
    center = static_cast<int32_t>(whole);
    factor = static_cast<float>(g);
    shift = static_cast<float>((whole - mean) * g);
  }
  /// RMS norm, with the zero point z in place of the mean and no shift:
  ///
  ///   g = scale / sqrt(scale^2 sum((q - z)^2) / n + eps)
  void finish_about(int32_t zero_point, double scale, double eps) {
    const int64_t z = zero_point;
    const double about = static_cast<double>(squares - 2 * z * sum + z * z * n);
    const double square = about / static_cast<double>(n);
    center = zero_point;
    factor = static_cast<float>(scale / std::sqrt(scale * scale * square + eps));
    shift = 0;
  }
};

/// The last `dims` dimensions of a source of 8 bits or float32, the latter without scale.
struct LastDims {
  LastDims(const char* op, const at::Tensor& src, int64_t dims, const at::Tensor& scales,
           const at::Tensor& zero_points, int64_t dst_dtype, double eps) {
    if (src.scalar_type() == at::kFloat) {
      check_cpu(op, "src", src);
    } else {
      check_src(op, "src", src);
    }
    params = read_params(op, scales, zero_points, {src}, dst_dtype_of(op, dst_dtype));
    TORCH_CHECK_VALUE(params[0].dtype != DType::f32 || params[0].scale == 1, "torchq.", op,
                      ": a float32 src must have scale 1, got ", params[0].scale,
                      ". Leave the scale of src out.");
    check_eps(op, eps);
    TORCH_CHECK_VALUE(dims >= 1 && dims <= src.dim(), "torchq.", op, ": dims must lie in [1, ",
                      src.dim(), "] for src ", src.sizes(), ", got ", dims, ".");
    n = product_of(src.sizes().slice(static_cast<size_t>(src.dim() - dims)));
  }
  c10::SmallVector<Real, 4> params;  // of src and dst
  int64_t n = 0;
};

/// Layer norm if `centered`, else RMS norm, of each n values of src.
at::Tensor norm_rows(OpTrace& trace, const Kernels& tier, const char* op, const LastDims& call,
                     const at::Tensor& src, bool centered, const Affine& affine, double eps,
                     c10::string_view post_ops, const std::optional<at::TensorList>& srcs) {
  const Real& from = call.params[0];
  const int64_t n = call.n;
  const at::Tensor dense = src.contiguous();
  const at::Tensor dst = empty_dst(src.sizes(), scalar_type(call.params[1].dtype));
  const RealOutput out({op, tier, call.params[1], post_ops, srcs}, dst);
  trace.describe([&] { return describe_call({src}, dst, "", post_ops); });
  if (is_done(dst)) return dst;
  if (from.dtype == DType::f32) {
    const float* values = dense.const_data_ptr<float>();
    store_rows(out, src.numel() / n, n, [&](const Range& range, const RealRow& to) {
      for (int64_t r = range.begin; r < range.end; ++r) {
        tier.normalize({values + r * n, n, centered, eps, affine.weight, affine.bias,
                        behind(to, (r - range.begin) * n)});
      }
    });
    return dst;
  }
  const uint8_t* data = bytes_of(dense);
  const bool is_signed = from.dtype == DType::s8;
  // Rows that stay in L1, so that their divisions and roots overlap and one call writes them all.
  constexpr int64_t kMostRows = 16;
  const int64_t group = std::clamp<int64_t>(tuning::kRowBytesInL1 / n, 1, kMostRows);
  store_rows(out, src.numel() / n, n, [&](const Range& range, const RealRow& to) {
    int32_t center[kMostRows];
    float factor[kMostRows], shift[kMostRows];
    for (int64_t first = range.begin; first < range.end; first += group) {
      const int64_t count = std::min(group, range.end - first);
      for (int64_t i = 0; i < count; ++i) {
        Statistics s{.n = n};
        tier.row_moments(data + (first + i) * n, n, is_signed, &s.sum, &s.squares);
        centered ? s.finish(from.scale, eps) : s.finish_about(from.zero_point, from.scale, eps);
        center[i] = s.center;
        factor[i] = s.factor;
        shift[i] = s.shift;
      }
      tier.affine({data + first * n, is_signed, n, count, false, center, factor, shift,
                   affine.weight, affine.bias, behind(to, (first - range.begin) * n)});
    }
  });
  return dst;
}

at::Tensor layer_norm(const at::Tensor& src, int64_t dims, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                      std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("layer_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "layer_norm");
  const LastDims call("layer_norm", src, dims, scales, zero_points, dst_dtype, eps);
  const Affine affine("layer_norm", weight, bias, call.n);
  return norm_rows(trace, tier, "layer_norm", call, src, true, affine, eps, post_ops, post_op_srcs);
}

at::Tensor rms_norm(const at::Tensor& src, int64_t dims, const std::optional<at::Tensor>& weight,
                    double eps, const at::Tensor& scales, const at::Tensor& zero_points,
                    int64_t dst_dtype, c10::string_view post_ops,
                    std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("rms_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "rms_norm");
  const LastDims call("rms_norm", src, dims, scales, zero_points, dst_dtype, eps);
  const Affine affine("rms_norm", weight, {}, call.n);
  return norm_rows(trace, tier, "rms_norm", call, src, false, affine, eps, post_ops, post_op_srcs);
}

/// Checked arguments of group and batch norm, the source with its channels last, and an empty
/// destination of the same layout.
struct ByChannel {
  ByChannel(const char* op, const at::Tensor& src, const at::Tensor& scales,
            const at::Tensor& zero_points, int64_t dst_dtype, double eps) {
    check_src(op, "src", src);
    params = read_params(op, scales, zero_points, {src}, dst_dtype_of(op, dst_dtype));
    check_eps(op, eps);
    TORCH_CHECK_VALUE(src.dim() >= 2, "torchq.", op, ": src must be (N, C, ...), got ", src.sizes(),
                      ". Add a batch dimension with unsqueeze(0).");
    dense = src.movedim(1, -1).contiguous();
    const at::Tensor last = empty_dst(dense.sizes(), scalar_type(params[1].dtype));
    dst = last.movedim(-1, 1);
    data = bytes_of(dense);
    is_signed = params[0].dtype == DType::s8;
  }
  c10::SmallVector<Real, 4> params;  // of src and dst
  at::Tensor dense, dst;
  const uint8_t* data;
  bool is_signed;
};

/// The statistics of each group of each image: dense is [batch, pixels, groups * width].
std::vector<Statistics> group_statistics(const Kernels& tier, const uint8_t* data, bool is_signed,
                                         int64_t batch, int64_t pixels, int64_t groups,
                                         int64_t width) {
  constexpr int64_t kRows = 256, kColumns = 512;
  std::vector<Statistics> result(static_cast<size_t>(batch * groups));
  const int64_t channels = groups * width;
  const int threads = threads_for(batch * pixels * channels, tuning::kRealGrain);
  parallel_ranges(batch * groups, threads, [&](Range range) {
    int32_t sums[kColumns], squares[kColumns];
    for (int64_t b = range.begin / groups; b * groups < range.end; ++b) {
      // the channels of this part's groups in image b
      const int64_t begin = std::max(range.begin - b * groups, int64_t{0}) * width;
      const int64_t end = std::min(range.end - b * groups, groups) * width;
      for (int64_t c = begin; c < end; c += kColumns) {
        const int64_t columns = std::min(end - c, kColumns);
        for (int64_t p = 0; p < pixels; p += kRows) {
          const int64_t rows = std::min(pixels - p, kRows);
          tier.moments({data + (b * pixels + p) * channels + c, is_signed, rows, channels, columns,
                        sums, squares});
          for (int64_t i = 0; i < columns; ++i) {
            Statistics& s = result[static_cast<size_t>(b * groups + (c + i) / width)];
            s.n += rows;
            s.sum += sums[i];
            s.squares += squares[i];
          }
        }
      }
    }
  });
  return result;
}

at::Tensor group_norm(const at::Tensor& src, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                      std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("group_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "group_norm");
  const ByChannel call("group_norm", src, scales, zero_points, dst_dtype, eps);
  const int64_t batch = src.size(0), channels = src.size(1);
  TORCH_CHECK_VALUE(groups >= 1 && channels % groups == 0,
                    "torchq.group_norm: groups must divide the channels, ", channels, ", got ",
                    groups, ".");
  const Affine affine("group_norm", weight, bias, channels);
  const RealOutput out({"group_norm", tier, call.params[1], post_ops, post_op_srcs}, call.dst);
  trace.describe([&] { return describe_call({src}, call.dst, "", post_ops); });
  if (is_done(call.dst)) return call.dst;
  const int64_t pixels = src.numel() / (batch * channels), width = channels / groups;
  auto statistics = group_statistics(tier, call.data, call.is_signed, batch, pixels, groups, width);
  const size_t count = static_cast<size_t>(batch * channels);
  std::vector<int32_t> center(count);
  std::vector<float> factor(count), shift(count);
  for (size_t i = 0; i < count; ++i) {  // by image and channel
    Statistics& s = statistics[i / static_cast<size_t>(width)];
    if (i % static_cast<size_t>(width) == 0) s.finish(call.params[0].scale, eps);
    center[i] = s.center;
    factor[i] = s.factor;
    shift[i] = s.shift;
  }
  store_rows(out, batch * pixels, channels, [&](const Range& range, const RealRow& to) {
    for (int64_t r = range.begin; r < range.end;) {  // those of one image at a time
      const int64_t image = r / pixels, first = image * channels;
      const int64_t rows = std::min((image + 1) * pixels, range.end) - r;
      tier.affine({call.data + r * channels, call.is_signed, channels, rows, true,
                   center.data() + first, factor.data() + first, shift.data() + first,
                   affine.weight, affine.bias, behind(to, (r - range.begin) * channels)});
      r += rows;
    }
  });
  return call.dst;
}

at::Tensor batch_norm(const at::Tensor& src, const at::Tensor& mean, const at::Tensor& variance,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                      std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("batch_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "batch_norm");
  const ByChannel call("batch_norm", src, scales, zero_points, dst_dtype, eps);
  const int64_t channels = src.size(1);
  const Affine affine("batch_norm", weight, bias, channels);
  const float* means = Affine::read("batch_norm", "mean", mean, channels);
  const float* variances = Affine::read("batch_norm", "variance", variance, channels);
  const size_t count = static_cast<size_t>(channels);
  const std::vector<int32_t> center(count, call.params[0].zero_point);
  std::vector<float> factor(count), shift(count);
  for (size_t c = 0; c < count; ++c) {
    TORCH_CHECK_VALUE(std::isfinite(variances[c]) && variances[c] >= 0,
                      "torchq.batch_norm: variance must be finite and at least 0, got ",
                      variances[c], " of channel ", c, ". Pass the running variance.");
    const double w = affine.weight != nullptr ? affine.weight[c] : 1.0;
    const double g = w / std::sqrt(double{variances[c]} + eps);
    factor[c] = static_cast<float>(call.params[0].scale * g);
    shift[c] = static_cast<float>((affine.bias != nullptr ? affine.bias[c] : 0.0) - means[c] * g);
  }
  const RealOutput out({"batch_norm", tier, call.params[1], post_ops, post_op_srcs}, call.dst);
  trace.describe([&] { return describe_call({src}, call.dst, "", post_ops); });
  if (is_done(call.dst)) return call.dst;
  store_rows(out, src.numel() / channels, channels, [&](const Range& range, const RealRow& to) {
    tier.affine({call.data + range.begin * channels, call.is_signed, channels,
                 range.end - range.begin, true, center.data(), factor.data(), shift.data(), nullptr,
                 nullptr, to});
  });
  return call.dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::softmax>(m, "softmax");
  torchq::implement<&torchq::layer_norm>(m, "layer_norm");
  torchq::implement<&torchq::rms_norm>(m, "rms_norm");
  torchq::implement<&torchq::group_norm>(m, "group_norm");
  torchq::implement<&torchq::batch_norm>(m, "batch_norm");
}
