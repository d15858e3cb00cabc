// SPDX-License-Identifier: Apache-2.0
// torchq::conv, 1 to 3 dimensions.
#include "ops/conv/conv.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>

#include "epilogue/describe_layer.h"
#include "ops/conv/arguments.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/row_sums.h"
#include "ops/pointwise/byte_table.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"

namespace torchq {

int64_t checked_groups(const char* op, const ChannelsLast& src, c10::IntArrayRef geometry,
                       const at::Tensor& compensation) {
  const int64_t groups = geometry[geometry.size() - 2];
  TORCH_CHECK_VALUE(src.channels == geometry.back(), "torchq.", op, ": src must have ",
                    geometry.back(), " channels, as many as the layer's in_channels, got ",
                    src.channels, " in src ", src.tensor.sizes(),
                    ". Check the order of its dimensions, (N, C, spatial...).");
  check_groups(op, src.channels, groups, compensation);
  return groups;
}

at::Tensor run_conv(OpTrace& trace, const ConvCall& call, const ConvArgs& args) {
  const char* op = call.op;
  const ConvPacking& packing = call.packing;
  ChannelsLast& src = call.src;
  const int64_t channels = packing.outputs(), groups = packing.groups * packing.merged;
  const int64_t group_inputs = src.channels / groups;
  const int64_t most = max_reduction(args.weight_zero_point.has_value());
  TORCH_CHECK_VALUE(group_inputs == 0 || call.taps <= most / group_inputs, "torchq.", op,
                    ": weight ", args.weight.sizes(), " sums more than ", most,
                    " products, which could overflow int32. Split the layer along its inputs.");
  const Kernels& tier = kernels();
  const int32_t* acc_bias = checked_acc_bias(op, args.acc_bias, channels);
  const ByteTable bytes(op, args.table, dst_dtype_of(op, args.dst_dtype));
  const DType src_dtype = dtype_of(op, "src", args.src);
  Conv c{.op = op,
         .tier = tier,
         .packing = packing,
         .weight = args.weight.const_data_ptr<int8_t>(),
         .compensation = args.compensation.const_data_ptr<int32_t>(),
         .acc_bias = acc_bias,
         .zero_point = zero_point_of(op, "src_zero_point", args.src_zero_point, src_dtype),
         .is_signed = src_dtype == DType::s8,
         .narrow = pairs_fit(op, args.pair_bound, args.weight.size(0)),
         .last_step = bytes.last_step(tier)};
  // No tap meets a source without values, whose other sizes may be anything.
  if (src.tensor.numel() == 0) std::fill_n(src.size, 3, 0);
  for (int d = 2; d >= 0; --d) {
    c.axes[d] = {call.window, d, src.size[d], call.output[d], call.transposed};
    c.dst_pitch[d] = d == 2 ? channels : c.dst_pitch[d + 1] * call.output[d + 1];
  }
  at::Tensor dst = empty_channels_last(src, channels, call.output, bytes.dst_type());
  const bool depthwise = packing.form == ConvPacking::kDepthwise;
  std::optional<at::Tensor> sums = args.row_sums;
  const bool shifts = args.weight_zero_point.has_value() && !sums.has_value();
  if (shifts && !depthwise && !is_done(dst)) {
    const RowSource rows{bytes_of(src.tensor), groups, group_inputs, c.is_signed, c.zero_point};
    sums = sum_windows(tier, rows, src, c.axes);
  }
  // Differences of two s8 have twice their range.
  const int64_t reduction = group_inputs * call.taps * (shifts ? 2 : 1);
  const EpilogueBuilder::Args epilogue_args{
      .op = op,
      .channels = channels,
      .multiplier = args.multiplier,
      .offset = args.offset,
      .post_ops = args.post_ops,
      .post_op_params = args.post_op_params,
      .post_op_srcs = args.post_op_srcs.value_or(at::TensorList()),
      .max_acc = max_accumulator(reduction, args.acc_bias),
      .weight_zero_point = pointer_to(args.weight_zero_point),
      .row_sums = pointer_to(sums),
      .groups = groups,
      .table = pointer_to(args.table)};
  const EpilogueBuilder epilogue(epilogue_args, bytes.before(dst));
  if (is_done(dst)) return dst;
  if (shifts && depthwise) c.weight_zero_point = args.weight_zero_point->const_data_ptr<int32_t>();
  trace.describe([&] {
    return describe_layer(epilogue_args, args.src, args.src_zero_point.has_value(),
                          bytes.before(dst), args.geometry);
  });
  const auto run = depthwise ? run_depthwise : run_dense;
  const Source source{
      bytes_of(src.tensor), src.batch, src.channels, {src.size[0], src.size[1], src.size[2]}};
  run(c, source, epilogue.get(), trace);
  return dst;
}

namespace {

constexpr const char* kOp = "conv";

/// Returns the packing of the weight, after checking that src, geometry and weight fit one another.
ConvPacking checked_packing(const ChannelsLast& src, const Window& window,
                            c10::IntArrayRef geometry, const at::Tensor& weight,
                            const at::Tensor& compensation) {
  const int64_t groups = checked_groups(kOp, src, geometry, compensation);
  const ConvPacking packing = conv_packing(compensation.size(1), src.channels / groups, groups,
                                           {window.kernel, 3}, {window.dilation, 3});
  check_packed(kOp, packing, src.tensor, weight, compensation, geometry,
               "Pack it with torch.ops.torchq.pack_conv for these groups and dilation.");
  return packing;
}

}  // namespace

at::Tensor conv(const ConvArgs& args) {
  OpTrace trace(kOp);
  check_src(kOp, "src", args.src);
  ChannelsLast src = to_channels_last(kOp, args.src);
  const Window window = parse_window(kOp, args.geometry, src.spatial_dims, 2);
  const ConvPacking packing =
      checked_packing(src, window, args.geometry, args.weight, args.compensation);
  ConvCall call{kOp, packing, window, src, window.taps(), false};
  for (int d = 0; d < 3; ++d) {
    call.output[d] = window.output(d, src.size[d]);
    TORCH_CHECK_VALUE(call.output[d] > 0, "torchq.conv: src ", args.src.sizes(),
                      " is smaller than the kernel with its padding and dilation, got ",
                      window.words(src.spatial_dims), ". Enlarge the input or its padding.");
  }
  return run_conv(trace, call, args);
}

namespace {

at::Tensor conv_op(const at::Tensor& src, const at::Tensor& weight, const at::Tensor& compensation,
                   const at::Tensor& pair_bound, const at::Tensor& multiplier,
                   const at::Tensor& offset, const std::optional<at::Tensor>& acc_bias,
                   const std::optional<at::Tensor>& src_zero_point, c10::IntArrayRef geometry,
                   int64_t dst_dtype, c10::string_view post_ops, const at::Tensor& post_op_params,
                   std::optional<at::TensorList> post_op_srcs,
                   const std::optional<at::Tensor>& weight_zero_point,
                   const std::optional<at::Tensor>& row_sums,
                   const std::optional<at::Tensor>& table) {
  return conv({src, weight, compensation, pair_bound, multiplier, offset, acc_bias, src_zero_point,
               geometry, dst_dtype, post_ops, post_op_params, post_op_srcs, weight_zero_point,
               row_sums, table});
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::conv_op>(m, "conv"); }
