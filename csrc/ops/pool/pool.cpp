// SPDX-License-Identifier: Apache-2.0
// Max, average and adaptive average pooling; the destination keeps the source's scale and zero
// point, unless scales, post-ops and a dtype of its own make it one in real units. Bytes by the
// tier's kernels, int32 and float32 in code that all tiers share.
// Padding is never picked by max, and counts as real zero (the zero point) in an average that
// includes it.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu_tuning.h"
#include "ops/conv/border.h"
#include "ops/conv/geometry.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/dispatch.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

/// Source positions [begin, end) of one window along one dimension, with the step between them, and
/// how many positions the window has when padding counts.
struct Span {
  int64_t begin, end, step, counted;
};
using Spans = c10::SmallVector<Span, 64>;

int64_t span_size(const Span& s) { return (s.end - s.begin + s.step - 1) / s.step; }

struct Pooling {
  const char* kernel;
  bool average;
  bool count_include_pad = false;
  int64_t divisor_override = 0;
  int32_t zero_point = 0;
};

/// Arguments of a pool in real units: all or none are given.
struct RealArgs {
  const std::optional<at::Tensor>&scales, &zero_points;
  std::optional<int64_t> dst_dtype;
  c10::string_view post_ops;
  const std::optional<at::TensorList>& post_op_srcs;

  /// Returns the parameters of the source and the destination; empty: dst has those of the source.
  c10::SmallVector<Real, 4> params(const char* op, const at::Tensor& src) const {
    const bool any = scales.has_value() || zero_points.has_value() || dst_dtype.has_value();
    const bool all = scales.has_value() && zero_points.has_value() && dst_dtype.has_value();
    const bool chain = !post_ops.empty() || post_op_srcs.has_value();
    TORCH_CHECK_VALUE(all || !(any || chain), "torchq.", op,
                      ": scales, zero_points and dst_dtype must come together, and with post_ops, "
                      "got only some. Pass all of them, or none.");
    if (!all) return {};
    return read_params(op, *scales, *zero_points, {src}, dst_dtype_of(op, *dst_dtype));
  }
};

Spans window_spans(const TapAxis& axis) {
  Spans spans;
  const TapAxis padded = axis.padded();
  for (int64_t o = 0; o < axis.dst_size; ++o) {
    const TapRange taps = axis.valid_taps(o);
    const int64_t start = o * axis.stride - axis.padding, step = axis.dilation;
    spans.push_back(
        {start + taps.begin * step, start + taps.end * step, step, padded.valid_taps(o).end});
  }
  return spans;
}

Spans adaptive_spans(int64_t input, int64_t output) {
  Spans spans;
  for (int64_t o = 0; o < output; ++o) {
    const int64_t begin = o * input / output, end = ((o + 1) * input + output - 1) / output;
    spans.push_back({begin, end, 1, end - begin});
  }
  return spans;
}

/// Positions of the largest window.
int64_t largest_window(const Spans (&spans)[3]) {
  int64_t positions = 1;
  for (const Spans& dim : spans) {
    int64_t widest = 0;
    for (const Span& s : dim) widest = std::max(widest, span_size(s));
    positions *= widest;
  }
  return positions;
}

/// Fills the addresses of a window's pixels in an image; returns their number.
int64_t gather_taps(const ChannelsLast& src, const uint8_t* image, const Span& d, const Span& h,
                    const Span& w, const uint8_t** taps) {
  const int64_t pixel = src.channels * src.tensor.element_size();
  int64_t count = 0;
  for (int64_t id = d.begin; id < d.end; id += d.step) {
    for (int64_t ih = h.begin; ih < h.end; ih += h.step) {
      const int64_t line = (id * src.size[1] + ih) * src.size[2];
      for (int64_t iw = w.begin; iw < w.end; iw += w.step)
        taps[count++] = image + (line + iw) * pixel;
    }
  }
  return count;
}

/// Adjacent destination positions whose windows have one shape, `step` source positions apart.
struct Run {
  int64_t first, count, step;
};
using Runs = c10::SmallVector<Run, 8>;

Runs runs_of(const Spans& spans) {
  Runs runs;
  for (size_t o = 0; o < spans.size(); ++o) {
    const Span& s = spans[o];
    if (!runs.empty()) {
      Run& run = runs.back();
      const Span& before = spans[o - 1];
      const int64_t step = s.begin - before.begin;
      if (span_size(s) == span_size(before) && s.counted == before.counted &&
          (run.count == 1 || step == run.step)) {
        run.step = step;
        ++run.count;
        continue;
      }
    }
    runs.push_back({static_cast<int64_t>(o), 1, 0});
  }
  return runs;
}

at::Tensor make_dst(const ChannelsLast& src, const int64_t (&output)[3],
                    const c10::SmallVector<Real, 4>& params) {
  return empty_channels_last(
      src, src.channels, output,
      params.empty() ? src.tensor.scalar_type() : scalar_type(params[1].dtype));
}

/// take(i, (max or sum - shift) / divisor), in double, for each value i of the destination. Sums of
/// int32 are exact, those of float32 in double, in the order of the taps.
template <class T, class Take>
void wide_windows(const PoolRow& p, Reduce alg, int64_t shift, const Take& take) {
  ScratchFrame frame;
  Reduced<T>* result = frame.take<Reduced<T>>(p.channels);
  for (int64_t x = 0; x < p.windows; ++x) {
    for (int t = 0; t < p.num_taps; ++t) {
      const T* src = reinterpret_cast<const T*>(p.taps[t] + x * p.step);
      for (int64_t c = 0; c < p.channels; ++c) {
        const Reduced<T> value{src[c]};
        result[c] = t == 0 ? value : combine(alg, result[c], value);
      }
    }
    for (int64_t c = 0; c < p.channels; ++c) {
      take(x * p.channels + c, static_cast<double>(result[c] - shift) / double{p.divisor});
    }
  }
}

template <class Take>
void wide_windows(const PoolRow& p, bool average, int64_t shift, const Take& take) {
  const Reduce alg = average ? Reduce::sum : Reduce::max;
  p.dst_dtype == DType::s32 ? wide_windows<int32_t>(p, alg, shift, take)
                            : wide_windows<float>(p, alg, shift, take);
}

/// A destination of the source's dtype.
void plain_windows(const Kernels& tier, const PoolRow& p, bool average, int64_t shift) {
  if (is_int8(p.dst_dtype)) return average ? tier.avg_pool(p) : tier.max_pool(p);
  wide_windows(p, average, shift, [&](int64_t i, double y) {
    if (p.dst_dtype == DType::f32) {
      static_cast<float*>(p.dst)[i] = with_one_nan(static_cast<float>(y));
    } else {
      using Limits = std::numeric_limits<int32_t>;
      const double q = std::clamp<double>(std::nearbyint(y), Limits::min(), Limits::max());
      static_cast<int32_t*>(p.dst)[i] = static_cast<int32_t>(q);
    }
  });
}

/// Destination pixels in real units: scale * float(max - zero_point), or scale * (float(sum of q -
/// zero_point) / float(n)), of wider values scale * float(that sum / n), then the post-ops.
void finish_windows(const Kernels& tier, PoolRow row, bool average, int64_t shift, const Real& from,
                    const RealOutput& out, int64_t first) {
  const int64_t n = row.windows * row.channels;
  ScratchFrame frame;
  float* x = frame.take<float>(n + kPanel);
  if (!is_int8(from.dtype)) {
    wide_windows(row, average, shift,
                 [&](int64_t i, double y) { x[i] = from.scale * static_cast<float>(y); });
  } else if (average) {
    row.dst = x;
    row.dst_dtype = DType::f32;
    tier.avg_pool(row);
    for (int64_t i = 0; i < n; ++i) x[i] *= from.scale;
  } else {
    uint8_t* best = frame.take<uint8_t>(n);
    row.dst = best;
    tier.max_pool(row);
    load_real(tier, from, best, 1, n, x);
  }
  for (int64_t i = 0; i < n; i += kRealBlock)
    out.store(x + i, std::min<int64_t>(kRealBlock, n - i), first + i);
}

void pool(OpTrace& trace, const Kernels& tier, const ChannelsLast& src, const Spans (&spans)[3],
          const Pooling& pooling, const c10::SmallVector<Real, 4>& params, const RealArgs& real,
          const at::Tensor& dst) {
  trace.ran(tier, pooling.kernel);
  trace.describe([&] { return describe_call({src.tensor}, dst, "", real.post_ops); });
  std::optional<RealOutput> out;
  if (!params.empty()) {
    out.emplace(RealOutput::Args{pooling.kernel, tier, params[1], real.post_ops, real.post_op_srcs},
                dst);
  }
  const int64_t window = largest_window(spans);
  TORCH_CHECK_VALUE(window <= kMaxTaps, "torchq.", pooling.kernel, ": a window must have at most ",
                    kMaxTaps, " positions, got ", window, " on src ", src.tensor.sizes(),
                    ". Pool in two steps.");
  if (is_done(dst)) return;
  const DType dtype = dtype_of(pooling.kernel, "src", src.tensor);
  const uint8_t* data = bytes_of(src.tensor);
  uint8_t* result = static_cast<uint8_t*>(dst.mutable_data_ptr());
  const Runs runs = runs_of(spans[2]);
  const int64_t depth = static_cast<int64_t>(spans[0].size());
  const int64_t height = static_cast<int64_t>(spans[1].size());
  const int64_t width = static_cast<int64_t>(spans[2].size());
  const int64_t c = src.channels, rows = src.batch * depth * height;
  const int64_t size = src.tensor.element_size();
  const int64_t image_bytes = src.size[0] * src.size[1] * src.size[2] * c * size;
  parallel_ranges(rows, threads_for(dst.numel() * window, tuning::kPoolGrain), [&](Range range) {
    ScratchFrame frame;
    const uint8_t** taps = frame.take<const uint8_t*>(window);
    for (int64_t r = range.begin; r < range.end; ++r) {
      const uint8_t* image = data + r / (depth * height) * image_bytes;
      const Span& d = spans[0][static_cast<size_t>(r / height % depth)];
      const Span& h = spans[1][static_cast<size_t>(r % height)];
      for (const Run& run : runs) {
        const Span& w = spans[2][static_cast<size_t>(run.first)];
        const int64_t valid = gather_taps(src, image, d, h, w, taps);
        int64_t counted = pooling.count_include_pad ? d.counted * h.counted * w.counted : valid;
        const int64_t shift = out.has_value() ? (pooling.average ? valid : 1) * params[0].zero_point
                                              : (valid - counted) * pooling.zero_point;
        if (pooling.divisor_override != 0) counted = pooling.divisor_override;
        const int64_t first = (r * width + run.first) * c;
        const PoolRow row{taps,
                          static_cast<int>(valid),
                          run.count,
                          run.step * c * size,
                          c,
                          result + first * size,
                          static_cast<int32_t>(-shift),
                          pooling.average ? static_cast<float>(counted) : 1.0f,
                          dtype == DType::s8,
                          dtype};
        if (out.has_value()) {
          finish_windows(tier, row, pooling.average, shift, params[0], *out, first);
        } else {
          plain_windows(tier, row, pooling.average, shift);
        }
      }
    }
  });
}

at::Tensor windowed(const char* op, OpTrace& trace, const Kernels& tier, const at::Tensor& src_arg,
                    c10::IntArrayRef geometry, bool ceil_mode, const Pooling& pooling,
                    const RealArgs& real) {
  const auto params = real.params(op, src_arg);
  const ChannelsLast src = to_channels_last(op, src_arg);
  const Window w = parse_window(op, geometry, src.spatial_dims, 0);
  int64_t output[3];
  for (int d = 0; d < 3; ++d) {
    const int64_t extent = (w.kernel[d] - 1) * w.dilation[d] + 1;
    TORCH_CHECK_VALUE(2 * std::max(w.pad_begin[d], w.pad_end[d]) <= extent, "torchq.", op,
                      ": padding must be at most half of the kernel, got ",
                      w.words(src.spatial_dims),
                      ". Pad with torchq.functional.pad in front instead.");
    output[d] = w.output(d, src.size[d], ceil_mode);
    TORCH_CHECK_VALUE(output[d] > 0, "torchq.", op, ": src ", src_arg.sizes(),
                      " is smaller than the window with its padding and dilation, got ",
                      w.words(src.spatial_dims), ". Enlarge the input or its padding.");
  }
  const at::Tensor dst = make_dst(src, output, params);
  const auto check_meets = [&](bool meets) {
    TORCH_CHECK_VALUE(meets, "torchq.", op, ": a window meets only padding on src ",
                      src_arg.sizes(), ", got ", w.words(src.spatial_dims),
                      ". Use less padding or dilation.");
  };
  check_meets(dst.numel() == 0 || src_arg.numel() > 0);
  Spans spans[3];
  for (int d = 0; d < 3 && dst.numel() > 0; ++d) {
    spans[d] = window_spans({w, d, src.size[d], output[d]});
    for (const Span& span : spans[d]) check_meets(span.begin < span.end);
  }
  pool(trace, tier, src, spans, pooling, params, real, dst);
  return dst;
}

at::Tensor max_pool(const at::Tensor& src, c10::IntArrayRef geometry, bool ceil_mode,
                    const std::optional<at::Tensor>& scales,
                    const std::optional<at::Tensor>& zero_points, std::optional<int64_t> dst_dtype,
                    c10::string_view post_ops, std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("max_pool");
  const Kernels& tier = kernels();
  check_source("max_pool", "src", src);
  return windowed("max_pool", trace, tier, src, geometry, ceil_mode, {"max_pool", false},
                  {scales, zero_points, dst_dtype, post_ops, post_op_srcs});
}

at::Tensor avg_pool(const at::Tensor& src, const at::Tensor& zero_point, c10::IntArrayRef geometry,
                    bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override,
                    const std::optional<at::Tensor>& scales,
                    const std::optional<at::Tensor>& zero_points, std::optional<int64_t> dst_dtype,
                    c10::string_view post_ops, std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("avg_pool");
  const Kernels& tier = kernels();
  const DType dtype = check_source("avg_pool", "src", src);
  const int32_t zero = zero_point_of("avg_pool", "zero_point", zero_point, dtype);
  TORCH_CHECK_VALUE(!divisor_override.has_value() || *divisor_override > 0,
                    "torchq.avg_pool: divisor_override must be at least 1, got ",
                    divisor_override.value_or(0), ".");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !divisor_override.has_value() || zero == 0 || scales.has_value(),
      "torchq.avg_pool: divisor_override needs a zero point of 0: an average that is no ",
      "average does not keep the zero point. Pass scales, or pool without it and rescale.");
  return windowed("avg_pool", trace, tier, src, geometry, ceil_mode,
                  {"avg_pool", true, count_include_pad, divisor_override.value_or(0), zero},
                  {scales, zero_points, dst_dtype, post_ops, post_op_srcs});
}

at::Tensor adaptive_avg_pool(const at::Tensor& src_arg, c10::IntArrayRef output_size,
                             const std::optional<at::Tensor>& scales,
                             const std::optional<at::Tensor>& zero_points,
                             std::optional<int64_t> dst_dtype, c10::string_view post_ops,
                             std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("adaptive_avg_pool");
  const Kernels& tier = kernels();
  check_source("adaptive_avg_pool", "src", src_arg);
  const ChannelsLast src = to_channels_last("adaptive_avg_pool", src_arg);
  TORCH_CHECK_VALUE(static_cast<int64_t>(output_size.size()) == src.spatial_dims &&
                        *std::min_element(output_size.begin(), output_size.end()) >= 1,
                    "torchq.adaptive_avg_pool: output_size must have ", src.spatial_dims,
                    " values of at least 1 for src ", src_arg.sizes(), ", got ", output_size, ".");
  int64_t output[3];
  for (int64_t d = 0; d < 3; ++d) {
    const int64_t i = d - (3 - src.spatial_dims);
    TORCH_CHECK_VALUE(src.size[d] > 0,
                      "torchq.adaptive_avg_pool: src must not be empty in space, got ",
                      src_arg.sizes(), ". Give it at least one position.");
    output[d] = i < 0 ? 1 : output_size[static_cast<size_t>(i)];
  }
  const RealArgs real{scales, zero_points, dst_dtype, post_ops, post_op_srcs};
  const auto params = real.params("adaptive_avg_pool", src_arg);
  const at::Tensor dst = make_dst(src, output, params);
  Spans spans[3];
  for (int d = 0; d < 3 && dst.numel() > 0; ++d) {
    spans[d] = adaptive_spans(src.size[d], output[d]);
  }
  pool(trace, tier, src, spans, {"avg_pool", true}, params, real, dst);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::max_pool>(m, "max_pool");
  torchq::implement<&torchq::avg_pool>(m, "avg_pool");
  torchq::implement<&torchq::adaptive_avg_pool>(m, "adaptive_avg_pool");
}
