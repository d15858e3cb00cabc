// SPDX-License-Identifier: Apache-2.0
// torchq::linear: a gemm whose rows are the rows of src and whose only tap is the whole row.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "epilogue/describe_layer.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "ops/gemm/row_sums.h"
#include "ops/pointwise/byte_table.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "linear";

void check_weight(const at::Tensor& src, const at::Tensor& weight, const at::Tensor& compensation,
                  int64_t in_features, int64_t most) {
  TORCH_CHECK_VALUE(src.dim() >= 1, "torchq.linear: src must have at least one dimension, got a ",
                    "scalar. Pass (*, in_features).");
  check_param(kOp, "weight", weight, at::kChar);
  check_param(kOp, "compensation", compensation, at::kInt);
  const int64_t k = src.size(-1);
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.size(1) == 1 && weight.size(3) == kPanel &&
                        weight.size(4) == kQuad && compensation.dim() == 2 &&
                        compensation.size(0) == 1 &&
                        weight.size(0) == panels_of(compensation.size(1)),
                    "torchq.linear: weight must be [ceil(N/16), 1, ceil(K/4), 16, 4] with ",
                    "compensation [1, N], got ", weight.sizes(), " and ", compensation.sizes(),
                    ". Pack it with torch.ops.torchq.pack_linear.");
  TORCH_CHECK_VALUE(k == in_features, "torchq.linear: src must have ", in_features,
                    " features, got ", k, " in src ", src.sizes(),
                    ". Check the layer's in_features.");
  TORCH_CHECK_VALUE(k <= most, "torchq.linear: weight sums ", k, " products, more than ", most,
                    ", which could overflow int32. Split the layer along its inputs.");
  TORCH_CHECK_VALUE(weight.size(2) == quads_of(k), "torchq.linear: src has ", k,
                    " features but weight was packed for ",
                    std::max<int64_t>(weight.size(2) * kQuad - 3, 0), " to ",
                    weight.size(2) * kQuad, "; got src ", src.sizes(), ", weight ", weight.sizes(),
                    ". Check the layer's in_features.");
}

/// The sums over the source that weights with zero points are multiplied by, (..., 1).
at::Tensor sum_rows(const Kernels& tier, const at::Tensor& src, int32_t zero_point,
                    bool is_signed) {
  c10::SmallVector<int64_t, 5> sizes(src.sizes().begin(), src.sizes().end());
  const int64_t k = std::exchange(sizes.back(), 1);
  at::Tensor sums = at::detail::empty_cpu(sizes, at::kInt);
  sum_groups(tier, {bytes_of(src), 1, k, is_signed, zero_point}, sums.numel(),
             sums.mutable_data_ptr<int32_t>());
  return sums;
}

at::Tensor linear(const at::Tensor& src_arg, const at::Tensor& weight,
                  const at::Tensor& compensation, const at::Tensor& pair_bound,
                  const at::Tensor& multiplier, const at::Tensor& offset,
                  const std::optional<at::Tensor>& acc_bias,
                  const std::optional<at::Tensor>& src_zero_point, int64_t in_features,
                  int64_t dst_dtype, c10::string_view post_ops, const at::Tensor& post_op_params,
                  std::optional<at::TensorList> post_op_srcs,
                  const std::optional<at::Tensor>& weight_zero_point,
                  const std::optional<at::Tensor>& row_sums,
                  const std::optional<at::Tensor>& table) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  const DType src_dtype = check_src(kOp, "src", src_arg);
  check_weight(src_arg, weight, compensation, in_features,
               max_reduction(weight_zero_point.has_value()));
  const int32_t zero_point = zero_point_of(kOp, "src_zero_point", src_zero_point, src_dtype);
  const DType dst_type = dst_dtype_of(kOp, dst_dtype);
  const ByteTable bytes(kOp, table, dst_type);
  const int64_t n = compensation.size(1), k = src_arg.size(-1);
  const int32_t* bias = checked_acc_bias(kOp, acc_bias, n);
  const at::Tensor src = src_arg.contiguous();
  c10::SmallVector<int64_t, 5> sizes(src.sizes().begin(), src.sizes().end());
  sizes.back() = n;
  at::Tensor dst = empty_dst(sizes, bytes.dst_type());
  std::optional<at::Tensor> sums = row_sums;
  if (weight_zero_point.has_value() && !sums.has_value() && !is_done(dst)) {
    sums = sum_rows(tier, src, zero_point, src_dtype == DType::s8);
  }
  const EpilogueBuilder::Args args{.op = kOp,
                                   .channels = n,
                                   .multiplier = multiplier,
                                   .offset = offset,
                                   .post_ops = post_ops,
                                   .post_op_params = post_op_params,
                                   .post_op_srcs = post_op_srcs.value_or(at::TensorList()),
                                   .max_acc = max_accumulator(k, acc_bias),
                                   .rows = true,
                                   .weight_zero_point = pointer_to(weight_zero_point),
                                   .row_sums = pointer_to(sums),
                                   .table = pointer_to(table)};
  const EpilogueBuilder epilogue(args, bytes.before(dst));
  const bool narrow = pairs_fit(kOp, pair_bound, weight.size(0));
  if (is_done(dst)) return dst;
  trace.describe(
      [&] { return describe_layer(args, src, src_zero_point.has_value(), bytes.before(dst)); });

  const int64_t m = dst.numel() / n;
  ScratchFrame scratch;
  const uint8_t* data = bytes_of(src);
  if (k % kQuad != 0) {  // the last quad of the last row may be read in full
    uint8_t* copy = scratch.take<uint8_t>(m, k);
    std::memcpy(copy, data, static_cast<size_t>(m * k));
    data = copy;
  }
  const int32_t tap = 0;
  const GemmRun run{0, 0, weight.size(2)};
  const int panels = static_cast<int>(weight.size(0));
  GemmProblem problem;
  problem.src = data;
  problem.flip = src_dtype == DType::s8;
  problem.weight = weight.const_data_ptr<int8_t>();
  problem.panel_bytes = weight.size(2) * kPanel * kQuad;
  problem.group_channels = static_cast<int>(n);
  problem.panels_per_group = panels;
  problem.narrow = narrow;
  problem.last_step = bytes.last_step(tier);
  problem.add_rows(
      m, k, run,
      make_acc_init(scratch, tier, compensation.const_data_ptr<int32_t>(), tap, bias,
                    zero_point + (problem.flip ? 128 : 0), 1, problem.group_channels, panels));
  run_gemm(problem, epilogue.get(), tier, &trace);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::linear>(m, "linear"); }
