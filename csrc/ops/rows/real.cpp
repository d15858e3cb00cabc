// SPDX-License-Identifier: Apache-2.0
// Reading, computing and writing blocks in real units (Note [Real units] in real.h).
#include "ops/rows/real.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/common.h"
#include "runtime/checks.h"

namespace torchq {

DType check_source(const char* op, const char* arg, const at::Tensor& src) {
  const DType dtype = dtype_of(op, arg, src);
  check_cpu(op, arg, src);
  return dtype;
}

c10::SmallVector<Real, 4> read_params(const char* op, const at::Tensor& scales,
                                      const at::Tensor& zero_points, at::TensorList srcs,
                                      DType dst_dtype, bool any_sign) {
  const int64_t count = static_cast<int64_t>(srcs.size()) + 1;
  check_param(op, "scales", scales, at::kFloat);
  check_param(op, "zero_points", zero_points, at::kInt);
  check_numel(op, "scales", scales, count);
  check_numel(op, "zero_points", zero_points, count);
  const float* scale = scales.const_data_ptr<float>();
  const int32_t* zero_point = zero_points.const_data_ptr<int32_t>();
  c10::SmallVector<Real, 4> params;
  for (int64_t i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const bool positive = last || !any_sign;
    TORCH_CHECK_VALUE(std::isfinite(scale[i]) && (!positive || scale[i] > 0), "torchq.", op,
                      ": scales must be finite", positive ? " and greater than 0" : "", ", got ",
                      scale[i], " at index ", i, ". Check the calibration that produced it.");
    const DType dtype = last ? dst_dtype : dtype_of(op, "src", srcs[static_cast<size_t>(i)]);
    const auto [lo, hi] = zero_point_range(dtype);
    TORCH_CHECK_VALUE(zero_point[i] >= lo && zero_point[i] <= hi, "torchq.", op,
                      ": zero_points must lie in [", lo, ", ", hi,
                      "], the range of their tensor, got ", zero_point[i], " at index ", i, ".");
    params.push_back({dtype, scale[i], zero_point[i]});
  }
  const Real& dst = params.back();
  TORCH_CHECK_VALUE(dst.dtype != DType::f32 || dst.scale == 1, "torchq.", op,
                    ": a float32 destination must have scale 1, got ", dst.scale, ".");
  TORCH_CHECK_VALUE(std::isfinite(1 / dst.scale), "torchq.", op,
                    ": 1 / scale of the destination must be a finite float32, got scale ",
                    dst.scale, ". Check the calibration that produced it.");
  return params;
}

void load_real(const Kernels& tier, const Real& src, const void* data, int64_t stride, int64_t n,
               float* x) {
  const int size = element_size(src.dtype);
  alignas(64) char gathered[kRealBlock * 4];
  if (stride != size && n > 1) {
    const int64_t distinct = stride == 0 ? 1 : n;
    for (int64_t i = 0; i < distinct; ++i)
      memcpy(gathered + i * size, static_cast<const char*>(data) + i * stride, size);
    data = gathered;
    if (distinct < n) {
      load_real(tier, src, data, size, 1, x);
      for (int64_t i = 1; i < n; ++i) x[i] = x[0];
      return;
    }
  }
  const int32_t none = 0;
  tier.convert({.src = data,
                .src_dtype = src.dtype,
                .dst = x,
                .dst_dtype = DType::f32,
                .size = n,
                .factor = &src.scale,
                .factor_step = 0,
                .src_zero_point = &src.zero_point,
                .src_zero_point_step = 0,
                .dst_zero_point = &none,
                .dst_zero_point_step = 0});
}

void store_real(const Kernels& tier, const Real& dst, const float* x, void* data, int64_t n) {
  const float factor = static_cast<float>(1.0 / dst.scale);
  const int32_t none = 0;
  tier.convert({.src = x,
                .src_dtype = DType::f32,
                .dst = data,
                .dst_dtype = dst.dtype,
                .size = n,
                .factor = &factor,
                .factor_step = 0,
                .src_zero_point = &none,
                .src_zero_point_step = 0,
                .dst_zero_point = &dst.zero_point,
                .dst_zero_point_step = 0});
}

RealOutput::RealOutput(const Args& args, const at::Tensor& dst, std::optional<Binary> first)
    : tier_(args.tier), to_(args.to), dst_(dst.data_ptr()) {
  int next = 0;  // of the sources: those of `first`, then those of the chain
  const auto take = [&](ChainOp& op, bool has_condition) {
    op.src = next++;
    if (has_condition) op.condition = next++;
  };
  if (first.has_value()) {
    ChainOp op{};
    op.kind = ChainOp::kBinary;
    op.binary = *first;
    take(op, *first == Binary::select);
    ops_.push_back(op);
  }
  const Chain chain = parse_post_ops(args.op, {args.post_ops.data(), args.post_ops.size()});
  const at::TensorList srcs = args.srcs.has_value() ? *args.srcs : at::TensorList();
  size_t needed = 0;
  for (const PostOp& p : chain.ops) needed += static_cast<size_t>(p.operands());
  TORCH_CHECK_VALUE(srcs.size() == needed, "torchq.", args.op, ": post_ops '", args.post_ops,
                    "' needs ", needed, " tensors, got ", srcs.size(),
                    ". Pass one in post_op_srcs per sum, per operand of a binary or prelu, and per "
                    "condition of a select.");
  for (const PostOp& p : chain.ops) {
    ChainOp op{};
    op.kind = static_cast<ChainOp::Kind>(p.kind);
    op.eltwise = p.eltwise;
    op.binary = p.binary;
    if (p.kind != PostOp::kEltwise) {
      const size_t i = operands_.size();
      const at::Tensor& src = srcs[i];
      const auto sizes = p.kind == PostOp::kSum
                             ? c10::SmallVector<int64_t, 5>(dst.sizes().begin(), dst.sizes().end())
                             : operand_sizes(args.op, args.post_ops, p, dst, false);
      check_post_op_src(args.op, args.post_ops, i, src, p.dtype.value_or(to_.dtype), sizes, dst,
                        p.zero_point);
      add_operand(src, dst, p);
      if (p.is(Binary::select)) {
        const at::Tensor& condition = srcs[i + 1];
        check_post_op_src(args.op, args.post_ops, i + 1, condition,
                          dtype_of(args.op, "post_op_srcs", condition), dst.sizes(), dst, 0);
        add_operand(condition, dst, PostOp{});
      }
      take(op, p.is(Binary::select));
    }
    ops_.push_back(op);
  }
  if (!is_plain()) std::fill_n(inverse_, kRealBlock, inverse_scale());
}

RealRow RealOutput::row(int64_t first) const {
  return behind({dst_, to_.dtype, inverse_scale(), static_cast<float>(to_.zero_point)}, first);
}

void RealOutput::add_operand(const at::Tensor& src, const at::Tensor& dst, const PostOp& p) {
  if (is_done(dst)) {  // what nothing reads is not copied: it may have more values than dst
    is_map_ = false;
    operands_.push_back({src, 1, {}});
    return;
  }
  c10::SmallVector<int64_t, 5> order;  // of the dimensions in dst's memory
  for (int64_t d = 0; d < dst.dim(); ++d) order.push_back(d);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return dst.stride(a) > dst.stride(b); });
  // Periodic: it has the innermost dimensions and no others.
  bool periodic = true, inside = true;
  for (size_t i = order.size(); i-- > 0;) {
    if (dst.size(order[i]) == 1) continue;
    const bool has = src.size(order[i]) != 1;
    periodic = periodic && (inside || !has);
    inside = inside && has;
  }
  at::Tensor data = (periodic ? src : src.expand(dst.sizes())).permute(order).contiguous().view(-1);
  const int64_t period = data.numel();
  is_map_ = is_map_ && period == 1;
  if (period == 1 || (period != 0 && period < dst.numel())) {
    at::Tensor repeated = at::detail::empty_cpu({period + kRealBlock}, src.scalar_type());
    const size_t size = static_cast<size_t>(repeated.element_size());
    const char* values = static_cast<const char*>(data.const_data_ptr());
    char* out = static_cast<char*>(repeated.mutable_data_ptr());
    for (int64_t i = 0; i < repeated.numel(); i += period) {
      const int64_t count = std::min(period, repeated.numel() - i);
      memcpy(out + static_cast<size_t>(i) * size, values, static_cast<size_t>(count) * size);
    }
    data = repeated;
  }
  const DType dtype = dtype_of("post_op", "src", src);
  operands_.push_back(
      {data, period, {data.const_data_ptr(), dtype, nullptr, p.scale, p.zero_point}});
}

void RealOutput::store(float* x, int64_t n, int64_t first, c10::ArrayRef<SumSrc> operands) const {
  finish(x, n, element(dst_, to_.dtype, first), first, operands);
}

void RealOutput::finish(float* x, int64_t n, void* dst, int64_t first,
                        c10::ArrayRef<SumSrc> operands) const {
  if (is_plain()) return store_real(tier_, to_, x, dst, n);
  c10::SmallVector<SumSrc, 4> sources(operands.begin(), operands.end());
  for (const Operand& operand : operands_) {
    sources.push_back(operand.src);
    sources.back().data = element(operand.src.data, operand.src.dtype, first % operand.period);
  }
  Epilogue e{};
  e.mode = Epilogue::kChain;
  e.dst_dtype = to_.dtype;
  e.dst = dst;
  e.zero_point = static_cast<float>(to_.zero_point);
  e.num_sums = static_cast<int>(sources.size());
  e.sums = sources.data();
  e.num_ops = static_cast<int>(ops_.size());
  e.ops = ops_.data();
  e.inv_scale = inverse_;
  tier_.epilogue_row(x, n, e);
}

}  // namespace torchq
