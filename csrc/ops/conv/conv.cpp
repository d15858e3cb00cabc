// SPDX-License-Identifier: Apache-2.0
// torchq::conv, 1 to 3 dimensions: dense and grouped as a gemm over gathered rows, depthwise by its
// own kernel.
#include "ops/conv/conv.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "epilogue/describe_layer.h"
#include "ops/conv/padding.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_matrix.h"
#include "ops/gemm/packing.h"
#include "ops/gemm/row_sums.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/verbose.h"

namespace torchq {
namespace {

constexpr const char* kOp = "conv";

/// Runs and rows of the compensation of one set of valid taps.
struct TapSet {
  c10::SmallVector<GemmRun, 64> runs;
  c10::SmallVector<int32_t, 64> taps;
};

TapSet make_taps(const Conv& c, const Source& s, const Interval (&valid)[3]) {
  TapSet set;
  const Window& w = s.window;
  const int64_t tap_bytes = c.packing.quads * kPanel * kQuad;
  const bool row_runs = c.packing.form == ConvPacking::kRowRuns;
  // Adjacent taps of a row are adjacent in the source and in the panel: one run.
  const bool merge =
      c.packing.group_inputs == s.channels && s.channels % kQuad == 0 && w.dilation[2] == 1;
  const int64_t width = valid[2].tap_end - valid[2].tap_begin;
  for (int64_t kd = valid[0].tap_begin; kd < valid[0].tap_end; ++kd) {
    for (int64_t kh = valid[1].tap_begin; kh < valid[1].tap_end; ++kh) {
      const int64_t row = kd * w.dilation[0] * s.pitch(0) + kh * w.dilation[1] * s.pitch(1);
      if (row_runs) {
        const int64_t tap = kd * w.kernel[1] + kh;
        set.runs.push_back({row, tap * tap_bytes, c.packing.quads});
        set.taps.push_back(static_cast<int32_t>(tap));
        continue;
      }
      for (int64_t kw = valid[2].tap_begin; kw < valid[2].tap_end; ++kw) {
        const int64_t tap = (kd * w.kernel[1] + kh) * w.kernel[2] + kw;
        set.taps.push_back(static_cast<int32_t>(tap));
        if (merge && kw > valid[2].tap_begin) continue;
        set.runs.push_back({row + kw * w.dilation[2] * s.pitch(2), tap * tap_bytes,
                            merge ? width * c.packing.quads : c.packing.quads});
      }
    }
  }
  return set;
}

using Intervals = c10::SmallVector<Interval, 8>;

/// Returns true if the channels of each group are to be copied side by side.
bool copies_groups_apart(const Conv& c, const Source& s) {
  const ConvPacking& p = c.packing;
  return p.form == ConvPacking::kDense && p.groups > 1 && p.group_inputs % kQuad == 0 &&
         s.window.dilation[2] == 1 &&
         prefers_groups_apart(c.tier, c.output[1] * c.output[2],
                              s.window.kernel[0] * s.window.kernel[1], s.window.kernel[2], p.quads);
}

/// Fixed cost of a region in vpdpbusd: 80 ns on Zen 5.
constexpr double kRegionProducts = 400;

/// Returns true if products with padding, and its copy, take less time than `count` regions: 0.5 us
/// less for 3x3 16->16 of 7x7 pixels, 2.5 us less for 5x5 of 10x10.
bool padding_is_cheaper(const Conv& c, const Source& s, const Intervals (&axes)[3], int64_t count) {
  double all = static_cast<double>(s.batch), valid = all;  // taps of all pixels
  double bytes = all * static_cast<double>(s.channels);
  for (int d = 0; d < 3; ++d) {
    int64_t met = 0;
    for (const Interval& i : axes[d]) met += (i.end - i.begin) * (i.tap_end - i.tap_begin);
    const Window& w = s.window;
    all *= static_cast<double>(c.output[d] * w.kernel[d]);
    valid *= static_cast<double>(met);
    bytes *= static_cast<double>(s.size[d] + w.pad_begin[d] + w.pad_end[d]);
  }
  const int64_t without_vnni = c.tier.widening > 1 ? 4 : 1;
  const int64_t tap_products = c.packing.quads * c.packing.panels() * without_vnni;
  const double copy = bytes / 16;
  return (all - valid) * static_cast<double>(tap_products) + copy <
         kRegionProducts * static_cast<double>(count - 1);
}

/// Returns the reason why the source cannot be read in place, or null.
const char* why_padded_copy(const Conv& c, const Source& s, const Intervals (&axes)[3]) {
  if (c.packing.form == ConvPacking::kRowRuns) return "a row of the kernel is read in one go";
  if (copies_groups_apart(c, s)) return "a matrix unit wants groups with few channels apart";
  const int64_t count = static_cast<int64_t>(axes[0].size() * axes[1].size() * axes[2].size());
  const int64_t rows = s.batch * c.output[0] * c.output[1] * c.output[2];
  const int64_t group_quads = c.packing.taps * c.packing.quads * c.packing.panels_per_group();
  if (count == 1) return nullptr;
  if (count > kMaxRegions) return "pixels meet more than 64 sets of valid taps";
  const int64_t* stride = s.window.stride;
  const bool adjacent = stride[0] * stride[1] * stride[2] == 1;
  if (prefers_one_region(c.tier, rows, group_quads, adjacent)) {
    return "a matrix unit wants whole tiles";
  }
  if (rows < kMinRowsPerRegion * count) return "fewer than 3 pixels meet the same valid taps";
  return padding_is_cheaper(c, s, axes, count) ? "so few products with padding take less time"
                                               : nullptr;
}

/// Logs why a grouped layer takes neither the depthwise nor the small-groups kernel.
void log_grouping_choice(const Conv& c, int64_t groups) {
  if (c.packing.form == ConvPacking::kDepthwise) return;
  log_rejected("depthwise", "a group does not have one input and one output");
  if (c.packing.form == ConvPacking::kSmallGroups) return;
  const int64_t inputs = c.packing.group_inputs / c.packing.merged;
  log_rejected("small_groups",
               c.packing.outputs() != groups * inputs
                   ? "groups have more outputs than inputs, or fewer"
               : inputs == 2 || inputs == 4 || inputs == 8
                   ? "there are fewer than 16 channels, or an odd number of groups of 2"
                   : "groups do not have 2, 4 or 8 channels");
}

/// Returns the problem without its regions. `s` is the source to read; `flip`: it is still s8.
GemmProblem make_problem(const Conv& c, const Source& s, bool flip) {
  const ConvPacking& p = c.packing;
  GemmProblem problem;
  problem.src = s.data;
  problem.flip = flip;
  problem.weight = c.weight.const_data_ptr<int8_t>();
  problem.panel_bytes = p.taps * p.quads * kPanel * kQuad;
  if (p.form == ConvPacking::kSmallGroups) {
    problem.groups = 1;
    problem.group_channels = static_cast<int>(p.outputs());
    problem.panels_per_group = static_cast<int>(p.panels());
    problem.group_quads = static_cast<int>(p.quads);
  } else {
    problem.groups = static_cast<int>(p.groups);
    const bool apart = s.channels == p.group_inputs;
    problem.src_group_stride = apart ? s.batch * s.image_bytes() : p.group_inputs;
    problem.group_channels = static_cast<int>(p.group_outputs);
    problem.panels_per_group = static_cast<int>(p.panels_per_group());
  }
  problem.narrow = c.narrow;
  problem.last_step = c.last_step;
  return problem;
}

/// Returns the position in src and dst of the pixels with the same valid taps.
TapRegion make_region(const Conv& c, const Source& s, const Interval (&at)[3]) {
  const Window& w = s.window;
  TapRegion g{};
  g.size[0] = s.batch;
  g.src_stride[0] = s.image_bytes();
  g.dst_stride[0] = c.packing.outputs() * c.output[0] * c.output[1] * c.output[2];
  for (int i = 2; i >= 0; --i) {
    g.size[i + 1] = at[i].end - at[i].begin;
    g.src_stride[i + 1] = w.stride[i] * s.pitch(i);
    g.dst_stride[i + 1] = c.dst_pitch[i];
    g.src_base += (at[i].begin * w.stride[i] - w.pad_begin[i]) * s.pitch(i);
    g.dst_base += at[i].begin * c.dst_pitch[i];
  }
  return g;
}

/// Runs follow the last dimension of the source. Where the kernel has one tap there, such as k x 1
/// over a single column, the dimension of its rows takes that place.
void follow_rows(ScratchFrame& scratch, Conv& c, Source& s) {
  const int d = run_dimension({s.window.kernel, 3});
  const bool moves_nothing = s.pitch(d) == s.channels;
  if (d == 2 || (!moves_nothing && c.packing.form != ConvPacking::kRowRuns)) return;
  s = move_last(scratch, s, d);
  move_last(c.output, d);
  move_last(c.dst_pitch, d);
}

void run_dense(Conv c, Source s, const Epilogue& epilogue, OpTrace& trace) {
  ScratchFrame scratch;
  follow_rows(scratch, c, s);
  Intervals axes[3];
  const auto split = [&] {
    for (int d = 0; d < 3; ++d) axes[d] = intervals(s.window, d, s.size[d], c.output[d]);
  };
  split();
  const char* padded_copy = why_padded_copy(c, s, axes);
  log_rejected("in place", padded_copy);
  if (padded_copy != nullptr) {
    const int64_t groups = copies_groups_apart(c, s) ? c.packing.groups : 1;
    s = pad(kOp, scratch, s, {static_cast<uint8_t>(c.effective_zero_point()), c.is_signed, groups});
    split();
  } else if (c.packing.group_inputs % kQuad != 0) {  // the last quad may be read in full
    s = copy_for_overread(scratch, s);
  }

  GemmProblem problem = make_problem(c, s, c.is_signed && padded_copy == nullptr);
  AccInits acc_inits(scratch, c.tier, c.compensation, c.acc_bias, c.effective_zero_point(),
                     problem);
  c10::SmallVector<TapSet, 9> tap_sets;
  tap_sets.reserve(axes[0].size() * axes[1].size() * axes[2].size());  // runs are referred to
  for (const Interval& d : axes[0]) {
    for (const Interval& h : axes[1]) {
      for (const Interval& w : axes[2]) {
        const Interval at[3] = {d, h, w};
        tap_sets.push_back(make_taps(c, s, at));
        TapRegion g = make_region(c, s, at);
        g.runs = tap_sets.back().runs;
        g.acc_init = acc_inits.of(tap_sets.back().taps);
        problem.regions.push_back(g);
      }
    }
  }
  // Weights that no cache holds arrive during the first region: put the largest one there.
  std::iter_swap(
      problem.regions.begin(),
      std::max_element(problem.regions.begin(), problem.regions.end(),
                       [](const TapRegion& a, const TapRegion& b) { return a.rows() < b.rows(); }));
  run_gemm(problem, epilogue, c.tier, trace);
}

/// The sums over the source that weights with zero points are multiplied by.
at::Tensor sum_rows(const Conv& c, const ChannelsLast& src, int64_t groups) {
  SumAxis axes[3];
  for (int d = 0; d < 3; ++d) {
    const Window& w = c.window;
    axes[d] = {w.kernel[d], w.stride[d], w.dilation[d], w.pad_begin[d],
               src.size[d], c.output[d], false};
  }
  const RowSource rows{bytes_of(src.tensor), groups, src.channels / groups, c.is_signed,
                       c.zero_point};
  return sum_windows(c.tier, rows, src, axes);
}

/// Returns the packing of the weight, after checking that src, geometry and weight fit one another.
ConvPacking checked_packing(const ChannelsLast& src, const Window& window,
                            c10::IntArrayRef geometry, const at::Tensor& weight,
                            const at::Tensor& compensation, bool has_weight_zero_point) {
  const int64_t groups = geometry[geometry.size() - 2];
  TORCH_CHECK_VALUE(src.channels == geometry.back(), "torchq.conv: src must have ", geometry.back(),
                    " channels, the in_channels of geometry ", geometry, ", got ", src.channels,
                    " in src ", src.tensor.sizes(), ". Check the layer's in_channels.");
  check_groups(kOp, src.channels, groups, compensation);
  const int64_t group_inputs = src.channels / groups;
  const ConvPacking packing = conv_packing(compensation.size(1), group_inputs, groups,
                                           {window.kernel, 3}, {window.dilation, 3});
  check_packed(kOp, packing, src.tensor, weight, compensation, geometry,
               "Pack it with torch.ops.torchq.pack_conv for these groups and dilation.");
  const int64_t most = max_reduction(has_weight_zero_point);
  TORCH_CHECK_VALUE(group_inputs * window.taps() <= most, "torchq.conv: weight ", weight.sizes(),
                    " sums more than ", most,
                    " products, which could overflow int32. Split the layer along its inputs.");
  return packing;
}

at::Tensor conv(const at::Tensor& src_arg, const at::Tensor& weight, const at::Tensor& compensation,
                const at::Tensor& pair_bound, const at::Tensor& multiplier,
                const at::Tensor& offset, const std::optional<at::Tensor>& acc_bias,
                const std::optional<at::Tensor>& src_zero_point, c10::IntArrayRef geometry,
                int64_t dst_dtype, c10::string_view post_ops, const at::Tensor& post_op_params,
                std::optional<at::TensorList> post_op_srcs,
                const std::optional<at::Tensor>& weight_zero_point,
                const std::optional<at::Tensor>& row_sums, const std::optional<at::Tensor>& table) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  const DType src_dtype = check_src(kOp, "src", src_arg);
  const ChannelsLast src = to_channels_last(kOp, src_arg);
  const Window window = parse_window(kOp, geometry, src.spatial_dims, 2);
  const int64_t groups = geometry[geometry.size() - 2];
  const ConvPacking packing =
      checked_packing(src, window, geometry, weight, compensation, weight_zero_point.has_value());
  const int64_t channels = compensation.size(1);
  check_acc_bias(kOp, acc_bias, channels);

  const ByteTable bytes(kOp, table, dst_dtype_of(kOp, dst_dtype));
  Conv c{tier,
         packing,
         window,
         weight,
         compensation,
         acc_bias,
         zero_point_of(kOp, "src_zero_point", src_zero_point, src_dtype),
         src_dtype == DType::s8,
         pairs_fit(kOp, pair_bound, weight.size(0)),
         nullptr,
         {},
         {},
         bytes.last_step(tier)};
  for (int d = 0; d < 3; ++d) {
    c.output[d] = window.output(d, src.size[d]);
    TORCH_CHECK_VALUE(c.output[d] > 0, "torchq.conv: src ", src_arg.sizes(),
                      " is smaller than the kernel ", "with geometry ", geometry,
                      ". Enlarge the input or its padding.");
  }
  for (int d = 2; d >= 0; --d) {
    c.dst_pitch[d] = d == 2 ? channels : c.dst_pitch[d + 1] * c.output[d + 1];
  }
  at::Tensor dst = empty_channels_last(src, channels, c.output, bytes.dst_type());
  const Source s = source_of(src, window);
  const bool depthwise = packing.form == ConvPacking::kDepthwise;
  std::optional<at::Tensor> sums = row_sums;
  const bool shifts = weight_zero_point.has_value() && !sums.has_value();
  if (shifts && !depthwise) sums = sum_rows(c, src, groups);
  // Differences of two s8 have twice their range.
  const int64_t reduction = src.channels / groups * window.taps() * (shifts ? 2 : 1);
  const EpilogueBuilder::Args args{kOp,
                                   channels,
                                   multiplier,
                                   offset,
                                   post_ops,
                                   post_op_params,
                                   post_op_srcs.value_or(at::TensorList()),
                                   max_accumulator(reduction, acc_bias),
                                   false,
                                   pointer_to(weight_zero_point),
                                   pointer_to(sums),
                                   groups,
                                   pointer_to(table)};
  const EpilogueBuilder epilogue(args, bytes.before(dst));
  if (dst.numel() == 0) return dst;
  if (shifts && depthwise) c.weight_zero_point = weight_zero_point->const_data_ptr<int32_t>();
  trace.describe([&] {
    return describe_layer(args, src_arg, src_zero_point.has_value(), bytes.before(dst), geometry);
  });
  if (logs_kernel_choice() && groups > 1) log_grouping_choice(c, groups);
  if (depthwise) {
    run_depthwise(c, s, epilogue.get(), trace);
  } else {
    run_dense(c, s, epilogue.get(), trace);
  }
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::conv>(m, "conv"); }
