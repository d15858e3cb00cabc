// SPDX-License-Identifier: Apache-2.0
// Reading, computing and writing blocks in real units (Note [Real units] in
// real.h).
#include "real.h"

#include <cmath>
#include <cstring>

#include "../checks.h"
#include "../kernels/eltwise.h"
#include "../post_ops.h"

namespace torchq {

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

void store_real(const Kernels& tier, const Real& dst, const float* x, void* data, int64_t stride,
                int64_t n) {
  const int size = element_size(dst.dtype);
  alignas(64) char converted[kRealBlock * 4];
  const bool scattered = stride != size && n > 1;
  const float factor = static_cast<float>(1.0 / dst.scale);
  const int32_t none = 0;
  tier.convert({.src = x,
                .src_dtype = DType::f32,
                .dst = scattered ? converted : data,
                .dst_dtype = dst.dtype,
                .size = n,
                .factor = &factor,
                .factor_step = 0,
                .src_zero_point = &none,
                .src_zero_point_step = 0,
                .dst_zero_point = &dst.zero_point,
                .dst_zero_point_step = 0});
  for (int64_t i = 0; scattered && i < n; ++i)
    memcpy(static_cast<char*>(data) + i * stride, converted + i * size, size);
}

c10::SmallVector<Eltwise, 4> parse_eltwise(const char* op, std::string_view post_ops) {
  c10::SmallVector<Eltwise, 4> result;
  for (const PostOp& post_op : parse_post_ops(op, post_ops).ops) {
    TORCH_CHECK_NOT_IMPLEMENTED(post_op.kind == PostOp::kEltwise, "torchq.", op,
                                ": post_ops must be eltwise ones, got '", post_ops,
                                "'. Apply the others with torchq.functional.binary.");
    result.push_back(post_op.eltwise);
  }
  return result;
}

void apply_eltwise(const c10::SmallVector<Eltwise, 4>& chain, float* x, int64_t n) {
  for (const Eltwise& eltwise : chain) {
    with_eltwise<Scalar>(eltwise, [&](auto f) {
      for (int64_t i = 0; i < n; ++i) x[i] = f(x[i]);
    });
  }
}

void RealOutput::store(float* x, int64_t n, void* dst, int64_t first) const {
  apply_eltwise(chain, x, n);
  store_real(tier, to, x, element(dst, to.dtype, first), element_size(to.dtype), n);
}

}  // namespace torchq
