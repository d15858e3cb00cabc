// SPDX-License-Identifier: Apache-2.0
// Softmax, layer, RMS, group and batch normalization in real units (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/common.h"
#include "kernels/cpu_tuning.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

/// Parameters of a source of 8 bits, or of float32 without a scale, and of the destination.
c10::SmallVector<Real, 4> read_real_params(const char* op, const at::Tensor& src,
                                           const at::Tensor& scales, const at::Tensor& zero_points,
                                           int64_t dst_dtype) {
  if (src.scalar_type() == at::kFloat) {
    check_cpu(op, "src", src);
  } else {
    check_src(op, "src", src);
  }
  const auto params = read_params(op, scales, zero_points, {src}, dst_dtype_of(op, dst_dtype));
  TORCH_CHECK_VALUE(params[0].dtype != DType::f32 || params[0].scale == 1, "torchq.", op,
                    ": a float32 src must have scale 1, got ", params[0].scale,
                    ". Leave the scale of src out.");
  return params;
}

at::Tensor softmax(const at::Tensor& src, int64_t dim, bool logarithmic, const at::Tensor& scales,
                   const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                   std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("softmax");
  const Kernels& tier = kernels();
  trace.ran(tier, "softmax");
  const auto params = read_real_params("softmax", src, scales, zero_points, dst_dtype);
  TORCH_CHECK_VALUE(dim >= -src.dim() && dim < src.dim(), "torchq.softmax: dim must lie in [",
                    -src.dim(), ", ", src.dim() - 1, "] for src ", src.sizes(), ", got ", dim, ".");
  const bool is_last = dim == -1 || dim == src.dim() - 1;  // moving it would cost 1 us
  const at::Tensor rows = (is_last ? src : src.movedim(dim, -1)).contiguous();
  const at::Tensor dense = empty_dst(rows.sizes(), scalar_type(params[1].dtype));
  const at::Tensor dst = is_last ? dense : dense.movedim(-1, dim);
  const RealOutput out({"softmax", tier, params[1], post_ops, post_op_srcs}, dst);
  trace.describe([&] { return describe_call({src}, dst, "", post_ops); });
  if (is_done(dst)) return dst;
  const void* data = rows.const_data_ptr();
  const Real& from = params[0];
  const int64_t n = rows.size(-1);
  store_rows(out, rows.numel() / n, n, [&](const Range& range, const RealRow& to) {
    ScratchFrame frame;
    float* values = frame.take<float>(n + kPanel);
    for (int64_t r = range.begin; r < range.end; ++r) {
      tier.softmax({element(data, from.dtype, r * n), from.dtype, n, from.scale, logarithmic,
                    values, behind(to, (r - range.begin) * n)});
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

/// What `affine` makes a normalized value of:
///
///   g = scale / sqrt(scale^2 variance + eps)
///   (scale x - scale mean) / sqrt(...) = fma(x - center, float(g), float((center - mean) g))
///
/// in double, for a float32 `center` close to the mean.
struct Terms {
  float center = 0, factor = 0, shift = 0;
};
Terms terms_of(double center, double mean, double variance, double scale, double eps) {
  const double g = scale / std::sqrt(scale * scale * variance + eps);
  return {static_cast<float>(center), static_cast<float>(g),
          static_cast<float>((center - mean) * g)};
}

/// Exact sums of n integers q and of their squares; so is the numerator of the variance, n squares
/// - sum^2. The center is rne(mean).
struct Statistics {
  int64_t n = 0, sum = 0, squares = 0;

  /// Rounded once; in 64 bits where both products have at most 62.
  double spread() const {
    if (n <= int64_t{1} << 23) return static_cast<double>(n * squares - sum * sum);
    return static_cast<double>(static_cast<__int128>(n) * squares -
                               static_cast<__int128>(sum) * sum);
  }
  Terms terms(double scale, double eps) const {
    const double count = static_cast<double>(n), mean = static_cast<double>(sum) / count;
    const double whole = mean + 0x1.8p52 - 0x1.8p52;  // rne; std::nearbyint is a call
    return terms_of(whole, mean, spread() / (count * count), scale, eps);
  }
  /// RMS norm, with the zero point z in place of the mean: sum((q - z)^2) / n is the variance.
  Terms terms_about(int32_t zero_point, double scale, double eps) const {
    const int64_t z = zero_point;
    const double about = static_cast<double>(squares - 2 * z * sum + z * z * n);
    return terms_of(z, z, about / static_cast<double>(n), scale, eps);
  }
};

/// Sums, in double, of x - origin of floats x, and of their squares; the origin is the first x.
struct FloatStatistics {
  double n = 0, origin = 0, sum = 0, squares = 0;

  /// `rows` values, given the first and the sums of all others' deviations from it.
  void add(int64_t rows, float first, float deviations, float their_squares) {
    if (n == 0) origin = first;
    const double count = static_cast<double>(rows), from = first - origin;
    n += count;
    sum += count * from + deviations;
    squares += from * (count * from + 2.0 * deviations) + their_squares;
  }
  Terms terms(double scale, double eps) const {
    const double mean = sum / n, variance = squares / n - mean * mean, whole = origin + mean;
    return terms_of(static_cast<float>(whole), whole, variance < 0 ? 0 : variance, scale, eps);
  }
};

/// The last `dims` dimensions of a source.
struct LastDims {
  LastDims(const char* op, const at::Tensor& src, int64_t dims, const at::Tensor& scales,
           const at::Tensor& zero_points, int64_t dst_dtype, double eps)
      : params(read_real_params(op, src, scales, zero_points, dst_dtype)) {
    check_eps(op, eps);
    TORCH_CHECK_VALUE(dims >= 1 && dims <= src.dim(), "torchq.", op, ": dims must lie in [1, ",
                      src.dim(), "] for src ", src.sizes(), ", got ", dims, ".");
    n = product_of(src.sizes().slice(static_cast<size_t>(src.dim() - dims)));
  }
  c10::SmallVector<Real, 4> params;  // of src and dst
  int64_t n = 0;
};

/// Of one row of n values; integers have exact sums. Floats take the root in float32.
Terms terms_of_row(const Kernels& tier, const Real& from, const void* row, int64_t n, bool centered,
                   double eps) {
  if (from.dtype == DType::f32) {
    float mean, squares;
    tier.row_deviations(static_cast<const float*>(row), n, centered, &mean, &squares);
    return {mean, 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(n) + eps)), 0};
  }
  Statistics s{.n = n};
  tier.row_moments(static_cast<const uint8_t*>(row), n, from.dtype == DType::s8, &s.sum,
                   &s.squares);
  return centered ? s.terms(from.scale, eps) : s.terms_about(from.zero_point, from.scale, eps);
}

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
  const void* data = dense.const_data_ptr();
  // Rows that stay in L1, so that their divisions and roots overlap and one call writes them all.
  constexpr int64_t kMostRows = 16;
  const int64_t row_bytes = n * element_size(from.dtype);
  const int64_t group = std::clamp<int64_t>(tuning::kRowBytesInL1 / row_bytes, 1, kMostRows);
  store_rows(out, src.numel() / n, n, [&](const Range& range, const RealRow& to) {
    float center[kMostRows], factor[kMostRows], shift[kMostRows];
    for (int64_t first = range.begin; first < range.end; first += group) {
      const int64_t count = std::min(group, range.end - first);
      for (int64_t i = 0; i < count; ++i) {
        const void* row = element(data, from.dtype, (first + i) * n);
        const Terms terms = terms_of_row(tier, from, row, n, centered, eps);
        center[i] = terms.center;
        factor[i] = terms.factor;
        shift[i] = terms.shift;
      }
      tier.affine({element(data, from.dtype, first * n), from.dtype, n, count, false, center,
                   factor, shift, affine.weight, affine.bias,
                   behind(to, (first - range.begin) * n)});
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
/// destination of the same layout. A source that has its channels last in memory is read in place.
struct ByChannel {
  ByChannel(const char* op, const at::Tensor& src, c10::SmallVector<Real, 4> checked, double eps)
      : params(std::move(checked)) {
    check_eps(op, eps);
    TORCH_CHECK_VALUE(src.dim() >= 2, "torchq.", op, ": src must be (N, C, ...), got ", src.sizes(),
                      ". Add a batch dimension with unsqueeze(0).");
    dense = src.movedim(1, -1).contiguous();
    const at::Tensor last = empty_dst(dense.sizes(), scalar_type(params[1].dtype));
    dst = last.movedim(-1, 1);
    dtype = params[0].dtype;
  }
  /// The source from this pixel on.
  const void* at(int64_t pixel) const {
    return element(dense.const_data_ptr(), dtype, pixel * dense.size(-1));
  }
  c10::SmallVector<Real, 4> params;  // of src and dst
  at::Tensor dense, dst;
  DType dtype;
};

/// Images of [pixels][groups * width] values.
struct Images {
  int64_t batch, pixels, groups, width;
};

/// The statistics of each group of each image. Threads share blocks of `block` pixels:
/// sum(pixel, rows, sums, squares) gives sums by channel of those from `pixel` on, and
/// add(statistics, pixel, rows, channel, sum, squares) takes them in order of the blocks.
template <class Group, class Value, class Sum, class Add>
std::vector<Group> group_statistics(const Images& s, int64_t block, const Sum& sum,
                                    const Add& add) {
  const int64_t channels = s.groups * s.width, blocks = (s.pixels + block - 1) / block;
  ScratchFrame frame;
  Value* sums = frame.take<Value>(2, s.batch * blocks, channels);
  const auto run = [&](int64_t i, const auto& body) {  // the pixels of block i, and its sums
    const int64_t first = i % blocks * block;
    body(i / blocks * s.pixels + first, std::min(block, s.pixels - first), sums + 2 * i * channels,
         sums + (2 * i + 1) * channels);
  };
  const int threads = threads_for(s.batch * s.pixels * channels, tuning::kRealGrain);
  parallel_ranges(s.batch * blocks, threads, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; ++i) run(i, sum);
  });
  std::vector<Group> result(static_cast<size_t>(s.batch * s.groups));
  const int adders = threads_for(s.batch * blocks * channels, tuning::kRealGrain);
  parallel_ranges(s.batch * s.groups, adders, [&](Range range) {
    for (int64_t i = range.begin / s.groups * blocks; i / blocks * s.groups < range.end; ++i) {
      const int64_t image = i / blocks * s.groups;  // its first group
      const int64_t begin = std::max(range.begin - image, int64_t{0});
      const int64_t end = std::min(range.end - image, s.groups);
      run(i, [&](int64_t pixel, int64_t rows, const Value* values, const Value* squares) {
        for (int64_t g = begin; g < end; ++g) {
          for (int64_t c = g * s.width; c < (g + 1) * s.width; ++c)
            add(result[static_cast<size_t>(image + g)], pixel, rows, c, values[c], squares[c]);
        }
      });
    }
  });
  return result;
}

/// Terms by image and channel.
struct ChannelTerms {
  template <class Group>
  ChannelTerms(const std::vector<Group>& groups, int64_t width, double scale, double eps) {
    for (const Group& group : groups) {
      const Terms terms = group.terms(scale, eps);
      center.insert(center.end(), static_cast<size_t>(width), terms.center);
      factor.insert(factor.end(), static_cast<size_t>(width), terms.factor);
      shift.insert(shift.end(), static_cast<size_t>(width), terms.shift);
    }
  }
  std::vector<float> center, factor, shift;
};

ChannelTerms terms_by_channel(const Kernels& tier, const ByChannel& call, const Images& images,
                              double eps) {
  const int64_t channels = images.groups * images.width;
  const auto moments = [&](int64_t pixel, int64_t rows, void* sums, void* squares) {
    tier.moments({call.at(pixel), call.dtype, rows, channels, channels, sums, squares});
  };
  if (call.dtype == DType::f32) {
    constexpr int64_t kBlock = 64;  // few, since a first value may be far from the others
    const float* data = call.dense.const_data_ptr<float>();
    const auto groups = group_statistics<FloatStatistics, float>(
        images, kBlock, moments,
        [&](FloatStatistics& s, int64_t pixel, int64_t rows, int64_t c, float sum, float squares) {
          s.add(rows, data[pixel * channels + c], sum, squares);
        });
    return {groups, images.width, 1, eps};
  }
  constexpr int64_t kBlock = 256;  // the most that `moments` takes
  const auto groups = group_statistics<Statistics, int32_t>(
      images, kBlock, moments,
      [](Statistics& s, int64_t, int64_t rows, int64_t, int32_t sum, int32_t squares) {
        s.n += rows;
        s.sum += sum;
        s.squares += squares;
      });
  return {groups, images.width, call.params[0].scale, eps};
}

at::Tensor group_norm(const at::Tensor& src, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, const at::Tensor& scales,
                      const at::Tensor& zero_points, int64_t dst_dtype, c10::string_view post_ops,
                      std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("group_norm");
  const Kernels& tier = kernels();
  trace.ran(tier, "group_norm");
  const ByChannel call("group_norm", src,
                       read_real_params("group_norm", src, scales, zero_points, dst_dtype), eps);
  const int64_t batch = src.size(0), channels = src.size(1);
  TORCH_CHECK_VALUE(groups >= 1 && channels % groups == 0,
                    "torchq.group_norm: groups must divide the channels, ", channels, ", got ",
                    groups, ".");
  const Affine affine("group_norm", weight, bias, channels);
  const RealOutput out({"group_norm", tier, call.params[1], post_ops, post_op_srcs}, call.dst);
  trace.describe([&] { return describe_call({src}, call.dst, "", post_ops); });
  if (is_done(call.dst)) return call.dst;
  const int64_t pixels = src.numel() / (batch * channels);
  const auto terms = terms_by_channel(tier, call, {batch, pixels, groups, channels / groups}, eps);
  store_rows(out, batch * pixels, channels, [&](const Range& range, const RealRow& to) {
    for (int64_t r = range.begin; r < range.end;) {  // those of one image at a time
      const int64_t image = r / pixels, first = image * channels;
      const int64_t rows = std::min((image + 1) * pixels, range.end) - r;
      tier.affine({call.at(r), call.dtype, channels, rows, true, terms.center.data() + first,
                   terms.factor.data() + first, terms.shift.data() + first, affine.weight,
                   affine.bias, behind(to, (r - range.begin) * channels)});
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
  check_src("batch_norm", "src", src);
  const auto dtype = dst_dtype_of("batch_norm", dst_dtype);
  const ByChannel call("batch_norm", src,
                       read_params("batch_norm", scales, zero_points, {src}, dtype), eps);
  const int64_t channels = src.size(1);
  const Affine affine("batch_norm", weight, bias, channels);
  const float* means = Affine::read("batch_norm", "mean", mean, channels);
  const float* variances = Affine::read("batch_norm", "variance", variance, channels);
  const size_t count = static_cast<size_t>(channels);
  const std::vector<float> center(count, static_cast<float>(call.params[0].zero_point));
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
    tier.affine({call.at(range.begin), call.dtype, channels, range.end - range.begin, true,
                 center.data(), factor.data(), shift.data(), nullptr, nullptr, to});
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
