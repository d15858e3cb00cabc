// SPDX-License-Identifier: Apache-2.0
// torchq::conv_transpose, 1 to 3 dimensions (Note [Transposed convolution] in border.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/conv/arguments.h"
#include "ops/conv/border.h"
#include "ops/gemm/gemm.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"

namespace torchq {
namespace {

constexpr const char* kOp = "conv_transpose";
/// Strides multiply to this many phases, each a convolution of its own.
constexpr int64_t kMaxPhases = 1 << 14;
constexpr int64_t kMaxValues = int64_t{1} << 46;
constexpr int64_t kMaxSize = int64_t{1} << 32;  // of a source dimension: products stay below 2^63

/// Fills the sizes of dst. geometry is [kernel..., stride..., padding_begin..., padding_end...,
/// dilation..., output_padding..., groups, in_channels].
void check_output(c10::IntArrayRef geometry, const ChannelsLast& src, const Window& w,
                  int64_t channels, int64_t (&output)[3]) {
  int64_t phases = 1, numel = 1;
  const auto grow = [&](int64_t factor) {
    TORCH_CHECK_VALUE(factor == 0 || numel <= kMaxValues / factor, "torchq.conv_transpose: src ",
                      src.tensor.sizes(), " makes a dst of more than 2^46 values, got ",
                      w.words(src.spatial_dims), ". Use a smaller stride.");
    numel *= factor;
  };
  grow(src.batch);
  grow(channels);
  for (int d = 0; d < 3; ++d) {
    const int64_t i = d - (3 - src.spatial_dims);
    const int64_t extra = i < 0 ? 0 : geometry[static_cast<size_t>(5 * src.spatial_dims + i)];
    TORCH_CHECK_VALUE(src.size[d] >= 1 && src.size[d] <= kMaxSize, "torchq.conv_transpose: src ",
                      "must have spatial sizes of 1 to 2^32, got ", src.tensor.sizes(), ".");
    TORCH_CHECK_VALUE(extra >= 0 && (extra < w.stride[d] || extra < w.dilation[d]),
                      "torchq.conv_transpose: output_padding must be at least 0 and below stride ",
                      "or dilation, got ", extra, " in dimension ", i, " of ",
                      w.words(src.spatial_dims), ". It only resolves which of `stride` source ",
                      "sizes the destination stands for.");
    const int64_t size = (src.size[d] - 1) * w.stride[d] - w.pad_begin[d] - w.pad_end[d] +
                         w.dilation[d] * (w.kernel[d] - 1) + extra + 1;
    TORCH_CHECK_VALUE(size > 0, "torchq.conv_transpose: src ", src.tensor.sizes(),
                      " leaves nothing of dst, got ", w.words(src.spatial_dims),
                      ". Use less padding.");
    grow(size);
    output[d] = size;
    phases *= std::min(w.stride[d], size);
    TORCH_CHECK_NOT_IMPLEMENTED(phases <= kMaxPhases, "torchq.conv_transpose: strides must ",
                                "multiply to at most ", kMaxPhases, ", got ",
                                w.words(src.spatial_dims),
                                ". The nearest supported form is a smaller stride, twice.");
  }
}

Window checked_window(c10::IntArrayRef geometry, const ChannelsLast& src) {
  const int64_t dims = src.spatial_dims;
  TORCH_CHECK_VALUE(static_cast<int64_t>(geometry.size()) == 6 * dims + 2,
                    "torchq.conv_transpose: geometry must be [kernel, stride, padding_begin, ",
                    "padding_end, dilation, output_padding, groups, in_channels], ", 6 * dims + 2,
                    " values for ", dims, " spatial dimensions, got ", geometry, ".");
  return parse_window(kOp, geometry.slice(0, static_cast<size_t>(5 * dims)), dims, 0);
}

at::Tensor conv_transpose(
    const at::Tensor& src_arg, const at::Tensor& weight, const at::Tensor& compensation,
    const at::Tensor& pair_bound, const at::Tensor& multiplier, const at::Tensor& offset,
    const std::optional<at::Tensor>& acc_bias, const std::optional<at::Tensor>& src_zero_point,
    c10::IntArrayRef geometry, int64_t dst_dtype, c10::string_view post_ops,
    const at::Tensor& post_op_params, std::optional<at::TensorList> post_op_srcs,
    const std::optional<at::Tensor>& weight_zero_point, const std::optional<at::Tensor>& table) {
  OpTrace trace(kOp);
  check_src(kOp, "src", src_arg);
  ChannelsLast src = to_channels_last(kOp, src_arg);
  const Window window = checked_window(geometry, src);
  const int64_t groups = checked_groups(kOp, src, geometry, compensation);
  const int64_t channels = compensation.size(1);
  const ConvPacking packing =
      dense_packing(channels, src.channels / groups, groups, {window.kernel, 3});
  check_packed(kOp, packing, src_arg, weight, compensation, geometry,
               "Pack it with torch.ops.torchq.pack_conv_transpose for these groups, stride and "
               "dilation.");
  ConvCall call{kOp, packing, window, src, 1, true};
  check_output(geometry, src, window, channels, call.output);
  for (int d = 0; d < 3; ++d) {
    call.taps *= taps_per_phase(window.kernel[d], window.stride[d], window.dilation[d]);
  }
  const std::optional<at::Tensor> no_sums;
  return run_conv(trace, call,
                  {src_arg, weight, compensation, pair_bound, multiplier, offset, acc_bias,
                   src_zero_point, geometry, dst_dtype, post_ops, post_op_params, post_op_srcs,
                   weight_zero_point, no_sums, table});
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::conv_transpose>(m, "conv_transpose");
}
