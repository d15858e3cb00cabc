// SPDX-License-Identifier: Apache-2.0
// torchq::conv_transpose, 1 to 3 dimensions: a gemm over gathered rows, as in conv.cpp, whose
// destinations interleave (Note [Transposed convolution]).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "epilogue/describe_layer.h"
#include "ops/conv/geometry.h"
#include "ops/conv/padding.h"
#include "ops/conv/transposed.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packing.h"
#include "ops/gemm/row_sums.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"

namespace torchq {
namespace {

constexpr const char* kOp = "conv_transpose";
/// Strides multiply to this many phases, each a convolution of its own.
constexpr int64_t kMaxPhases = 1 << 14;
constexpr int64_t kMaxValues = int64_t{1} << 46;
constexpr int64_t kMaxSize = int64_t{1} << 32;  // of a source dimension: products stay below 2^63

/// Destinations first_dst, first_dst + stride, ... along one dimension, which meet the same packed
/// taps; destination t reads position first_src + t - back(tap).
struct Stretch {
  int64_t first_dst, first_src, count, tap_begin, tap_end;
};

/// One dimension of the problem.
struct Axis {
  int64_t kernel, stride, dilation, padding, src_size, dst_size;
  c10::SmallVector<int64_t, 8> taps;  // in packed order

  int64_t phase(int64_t tap) const { return taps[static_cast<size_t>(tap)] * dilation % stride; }
  int64_t back(int64_t tap) const { return taps[static_cast<size_t>(tap)] * dilation / stride; }
  int64_t phases() const { return std::min(stride, dst_size); }

  /// One per phase, with all of its taps whether they meet the source or not.
  c10::SmallVector<Stretch, 8> whole() const {
    c10::SmallVector<Stretch, 8> result;
    int64_t tap = 0;
    for (int64_t r = 0; r < stride; ++r) {
      Stretch s{0, 0, 0, tap, tap};
      while (s.tap_end < kernel && phase(s.tap_end) == r) ++s.tap_end;
      tap = s.tap_end;
      s.first_src = padding > r ? (padding - r + stride - 1) / stride : 0;
      s.first_dst = r + s.first_src * stride - padding;
      if (s.first_dst >= dst_size) continue;
      s.count = (dst_size - 1 - s.first_dst) / stride + 1;
      result.push_back(s);
    }
    return result;
  }

  /// The same, cut where a tap begins or ends to meet the source.
  c10::SmallVector<Stretch, 8> valid() const {
    c10::SmallVector<Stretch, 8> result;
    for (const Stretch& s : whole()) {
      // Both ends of the valid taps only ever move down as the destination moves up.
      int64_t begin = s.tap_end, end = s.tap_end;
      for (int64_t t = 0; t < s.count; ++t) {
        const int64_t src = s.first_src + t;
        while (begin > s.tap_begin && src - back(begin - 1) >= 0) --begin;
        while (end > s.tap_begin && src - back(end - 1) >= src_size) --end;
        const int64_t first = std::min(begin, end);
        const Stretch* last = t == 0 ? nullptr : &result.back();
        if (last == nullptr || last->tap_begin != first || last->tap_end != end) {
          result.push_back({s.first_dst + t * stride, src, 0, first, end});
        }
        ++result.back().count;
      }
    }
    return result;
  }

  /// Positions that `whole` reads in front of the source and behind it.
  std::pair<int64_t, int64_t> overhang() const {
    int64_t low = 0, high = src_size - 1;
    for (const Stretch& s : whole()) {
      if (s.tap_begin == s.tap_end) continue;
      low = std::min(low, s.first_src - back(s.tap_begin));
      high = std::max(high, s.first_src + s.count - 1 - back(s.tap_end - 1));
    }
    return {-low, high - (src_size - 1)};
  }
};

struct Layer {
  const Kernels& tier;
  const ConvPacking& packing;
  const at::Tensor &weight, &compensation;
  const std::optional<at::Tensor>& acc_bias;
  int32_t zero_point;  // of src as it is stored
  bool is_signed, narrow;
  Axis axes[3];
  LastStep last_step;

  /// The term of Note [Compensation].
  int32_t effective_zero_point() const { return zero_point + (is_signed ? 128 : 0); }
};

/// Runs of one region, relative to its first tap, and their rows of the compensation.
struct TapSet {
  c10::ArrayRef<GemmRun> runs;
  c10::ArrayRef<int32_t> taps;
};

TapSet make_taps(ScratchFrame& scratch, const Layer& l, const Source& s, const Stretch (&at)[3]) {
  const Axis &h = l.axes[1], &w = l.axes[2];
  const int64_t tap_bytes = l.packing.quads * kPanel * kQuad;
  // Adjacent taps of a row are adjacent in the source and in the panel: one run.
  const bool merge = l.packing.groups == 1 && s.channels % kQuad == 0 &&
                     w.dilation == std::gcd(w.stride, w.dilation);
  int64_t count = 1;
  for (const Stretch& stretch : at) count *= stretch.tap_end - stretch.tap_begin;
  GemmRun* runs = scratch.take<GemmRun>(count);
  int32_t* taps = scratch.take<int32_t>(count);
  size_t num_runs = 0, num_taps = 0;
  const auto ahead = [&](int i, int64_t tap) {
    return (l.axes[i].back(at[i].tap_begin) - l.axes[i].back(tap)) * s.pitch(i);
  };
  for (int64_t kd = at[0].tap_begin; kd < at[0].tap_end; ++kd) {
    for (int64_t kh = at[1].tap_begin; kh < at[1].tap_end; ++kh) {
      for (int64_t kw = at[2].tap_begin; kw < at[2].tap_end; ++kw) {
        const int64_t tap = (kd * h.kernel + kh) * w.kernel + kw;
        taps[num_taps++] = static_cast<int32_t>(tap);
        if (merge && kw > at[2].tap_begin) continue;
        const int64_t width = merge ? at[2].tap_end - kw : 1;
        runs[num_runs++] = {ahead(0, kd) + ahead(1, kh) + ahead(2, kw), tap * tap_bytes,
                            width * l.packing.quads};
      }
    }
  }
  return {{runs, num_runs}, {taps, num_taps}};
}

using Stretches = c10::SmallVector<Stretch, 8>;

/// Returns true if padding in memory beats one region per set of valid taps.
bool needs_padded_copy(const Layer& l, const Source& s, const Stretches (&stretches)[3]) {
  int64_t count = 1, phases = 1, rows = s.batch;
  for (int d = 0; d < 3; ++d) {
    count *= static_cast<int64_t>(stretches[d].size());
    phases *= l.axes[d].phases();
    rows *= l.axes[d].dst_size;
  }
  return count > phases && (count > kMaxRegions || rows < kMinRowsPerRegion * count);
}

/// Puts the padding that the taps reach into memory, and shifts the axes accordingly.
Source pad_for_taps(ScratchFrame& scratch, Layer& l, Source s) {
  for (int d = 0; d < 3; ++d) {
    std::tie(s.window.pad_begin[d], s.window.pad_end[d]) = l.axes[d].overhang();
  }
  return pad(kOp, scratch, s, {static_cast<uint8_t>(l.zero_point), false, 1});
}

TapRegion make_region(const Layer& l, const Source& s, const Stretch (&at)[3],
                      const int64_t (&shift)[3], int64_t channels) {
  TapRegion g{};
  g.size[0] = s.batch;
  g.src_stride[0] = s.image_bytes();
  int64_t dst_pitch = channels;
  for (int i = 2; i >= 0; --i) {
    const Axis& axis = l.axes[i];
    g.size[i + 1] = at[i].count;
    g.src_stride[i + 1] = s.pitch(i);
    g.dst_stride[i + 1] = axis.stride * dst_pitch;
    if (at[i].tap_begin < at[i].tap_end) {
      g.src_base += (at[i].first_src + shift[i] - axis.back(at[i].tap_begin)) * s.pitch(i);
    }
    g.dst_base += at[i].first_dst * dst_pitch;
    dst_pitch *= axis.dst_size;
  }
  g.dst_stride[0] = dst_pitch;
  return g;
}

void run(Layer& l, Source s, const Epilogue& epilogue, OpTrace& trace) {
  ScratchFrame scratch;
  Stretches stretches[3];
  int64_t shift[3] = {0, 0, 0};
  for (int d = 0; d < 3; ++d) stretches[d] = l.axes[d].valid();
  if (needs_padded_copy(l, s, stretches)) {
    s = pad_for_taps(scratch, l, s);
    for (int d = 0; d < 3; ++d) {
      stretches[d] = l.axes[d].whole();
      shift[d] = l.axes[d].overhang().first;
    }
  } else if (l.packing.group_inputs % kQuad != 0) {
    s = copy_for_overread(scratch, s);
  }

  GemmProblem problem;
  problem.src = s.data;
  problem.flip = l.is_signed;
  problem.weight = l.weight.const_data_ptr<int8_t>();
  problem.panel_bytes = l.packing.taps * l.packing.quads * kPanel * kQuad;
  problem.groups = static_cast<int>(l.packing.groups);
  problem.src_group_stride = l.packing.group_inputs;
  problem.group_channels = static_cast<int>(l.packing.group_outputs);
  problem.panels_per_group = static_cast<int>(l.packing.panels_per_group());
  problem.narrow = l.narrow;
  problem.last_step = l.last_step;
  AccInits acc_inits(scratch, l.tier, l.compensation, l.acc_bias, l.effective_zero_point(),
                     problem);
  for (const Stretch& d : stretches[0]) {
    for (const Stretch& h : stretches[1]) {
      for (const Stretch& w : stretches[2]) {
        const Stretch at[3] = {d, h, w};
        TapRegion g = make_region(l, s, at, shift, l.packing.outputs());
        const TapSet set = make_taps(scratch, l, s, at);
        g.runs = set.runs;
        g.acc_init = acc_inits.of(set.taps);
        problem.regions.push_back(g);
      }
    }
  }
  run_gemm(problem, epilogue, l.tier, trace);
}

/// The list [kernel..., stride..., padding_begin..., padding_end..., dilation...,
/// output_padding..., groups, in_channels].
void fill_axes(c10::IntArrayRef geometry, const ChannelsLast& src, const Window& w, Layer* l) {
  int64_t phases = 1, numel = 1;
  const auto grow = [&](int64_t factor) {
    TORCH_CHECK_VALUE(factor == 0 || numel <= kMaxValues / factor, "torchq.conv_transpose: src ",
                      src.tensor.sizes(), " with geometry ", geometry,
                      " makes a dst of more than 2^46 values. Use a smaller stride.");
    numel *= factor;
  };
  grow(src.batch);
  grow(l->packing.outputs());
  for (int d = 0; d < 3; ++d) {
    const int64_t i = d - (3 - src.spatial_dims);
    const int64_t extra = i < 0 ? 0 : geometry[static_cast<size_t>(5 * src.spatial_dims + i)];
    TORCH_CHECK_VALUE(src.size[d] >= 1 && src.size[d] <= kMaxSize, "torchq.conv_transpose: src ",
                      "must have spatial sizes of 1 to 2^32, got ", src.tensor.sizes(), ".");
    TORCH_CHECK_VALUE(extra >= 0 && (extra < w.stride[d] || extra < w.dilation[d]),
                      "torchq.conv_transpose: output_padding must be at least 0 and below stride ",
                      "or dilation, got geometry ", geometry, ". It only resolves which of ",
                      "`stride` source sizes the destination stands for.");
    const int64_t size = (src.size[d] - 1) * w.stride[d] - w.pad_begin[d] - w.pad_end[d] +
                         w.dilation[d] * (w.kernel[d] - 1) + extra + 1;
    TORCH_CHECK_VALUE(size > 0, "torchq.conv_transpose: src ", src.tensor.sizes(),
                      " leaves nothing of dst with geometry ", geometry, ". Use less padding.");
    grow(size);
    l->axes[d] = {w.kernel[d],
                  w.stride[d],
                  w.dilation[d],
                  w.pad_begin[d],
                  src.size[d],
                  size,
                  transposed_taps(w.kernel[d], w.stride[d], w.dilation[d])};
    phases *= l->axes[d].phases();
    TORCH_CHECK_NOT_IMPLEMENTED(phases <= kMaxPhases, "torchq.conv_transpose: strides must ",
                                "multiply to at most ", kMaxPhases, ", got geometry ", geometry,
                                ". The nearest supported form is a smaller stride, twice.");
  }
}

Window checked_window(c10::IntArrayRef geometry, const ChannelsLast& src) {
  const int64_t dims = src.spatial_dims;
  TORCH_CHECK_VALUE(static_cast<int64_t>(geometry.size()) == 6 * dims + 2,
                    "torchq.conv_transpose: geometry must be [kernel, stride, padding_begin, ",
                    "padding_end, dilation, output_padding, groups, in_channels], ", 6 * dims + 2,
                    " values for ", dims, " spatial dimensions, got ", geometry, ".");
  TORCH_CHECK_VALUE(src.channels == geometry.back(), "torchq.conv_transpose: src must have ",
                    geometry.back(), " channels, the in_channels of geometry ", geometry, ", got ",
                    src.channels, " in src ", src.tensor.sizes(),
                    ". Check the layer's in_channels.");
  return parse_window(kOp, geometry.slice(0, static_cast<size_t>(5 * dims)), dims, 0);
}

/// The sums over the source that weights with zero points are multiplied by.
at::Tensor sum_rows(const Layer& l, const ChannelsLast& src, int64_t groups) {
  SumAxis axes[3];
  for (int d = 0; d < 3; ++d) {
    const Axis& a = l.axes[d];
    axes[d] = {a.kernel, a.stride, a.dilation, a.padding, a.src_size, a.dst_size, true};
  }
  const RowSource rows{bytes_of(src.tensor), groups, src.channels / groups, l.is_signed,
                       l.zero_point};
  return sum_windows(l.tier, rows, src, axes);
}

at::Tensor conv_transpose(
    const at::Tensor& src_arg, const at::Tensor& weight, const at::Tensor& compensation,
    const at::Tensor& pair_bound, const at::Tensor& multiplier, const at::Tensor& offset,
    const std::optional<at::Tensor>& acc_bias, const std::optional<at::Tensor>& src_zero_point,
    c10::IntArrayRef geometry, int64_t dst_dtype, c10::string_view post_ops,
    const at::Tensor& post_op_params, std::optional<at::TensorList> post_op_srcs,
    const std::optional<at::Tensor>& weight_zero_point, const std::optional<at::Tensor>& table) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  const DType src_dtype = check_src(kOp, "src", src_arg);
  const ChannelsLast src = to_channels_last(kOp, src_arg);
  const Window window = checked_window(geometry, src);
  const int64_t groups = geometry[geometry.size() - 2];
  check_groups(kOp, src.channels, groups, compensation);
  const int64_t channels = compensation.size(1), group_inputs = src.channels / groups;
  const ConvPacking packing = dense_packing(channels, group_inputs, groups, {window.kernel, 3});
  check_packed(kOp, packing, src_arg, weight, compensation, geometry,
               "Pack it with torch.ops.torchq.pack_conv_transpose for these groups, stride and "
               "dilation.");
  check_acc_bias(kOp, acc_bias, channels);
  const ByteTable bytes(kOp, table, dst_dtype_of(kOp, dst_dtype));
  Layer layer{tier,
              packing,
              weight,
              compensation,
              acc_bias,
              zero_point_of(kOp, "src_zero_point", src_zero_point, src_dtype),
              src_dtype == DType::s8,
              pairs_fit(kOp, pair_bound, weight.size(0)),
              {},
              bytes.last_step(tier)};
  fill_axes(geometry, src, window, &layer);
  int64_t met = 1;
  int64_t output[3];
  for (int d = 0; d < 3; ++d) {
    met *= taps_per_phase(window.kernel[d], window.stride[d], window.dilation[d]);
    output[d] = layer.axes[d].dst_size;
  }
  const int64_t most = max_reduction(weight_zero_point.has_value());
  TORCH_CHECK_VALUE(group_inputs == 0 || met <= most / group_inputs,
                    "torchq.conv_transpose: weight ", weight.sizes(), " sums more than ", most,
                    " products, which could overflow int32. Split the layer along its inputs.");
  at::Tensor dst = empty_channels_last(src, channels, output, bytes.dst_type());
  std::optional<at::Tensor> sums;
  if (weight_zero_point.has_value()) sums = sum_rows(layer, src, groups);
  const EpilogueBuilder::Args args{kOp,
                                   channels,
                                   multiplier,
                                   offset,
                                   post_ops,
                                   post_op_params,
                                   post_op_srcs.value_or(at::TensorList()),
                                   max_accumulator(group_inputs * met, acc_bias),
                                   false,
                                   pointer_to(weight_zero_point),
                                   pointer_to(sums),
                                   groups,
                                   pointer_to(table)};
  const EpilogueBuilder epilogue(args, bytes.before(dst));
  if (dst.numel() == 0) return dst;
  trace.describe([&] {
    return describe_layer(args, src_arg, src_zero_point.has_value(), bytes.before(dst), geometry);
  });
  run(layer, source_of(src, window), epilogue.get(), trace);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::conv_transpose>(m, "conv_transpose");
}
