// SPDX-License-Identifier: Apache-2.0
// add, mul and concat of quantized tensors, each with its own scale and zero point.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../checks.h"
#include "../parallel.h"
#include "elementwise.h"

namespace torchq {
namespace {

constexpr int64_t kGrain = 32768;

/// Scale and zero point of each operand, then of the destination.
struct Params {
  Params(const char* op, const at::Tensor& scales, const at::Tensor& zero_points,
         at::TensorList srcs, DType dst_dtype) {
    const int64_t count = static_cast<int64_t>(srcs.size()) + 1;
    check_param(op, "scales", scales, at::kFloat);
    check_param(op, "zero_points", zero_points, at::kInt);
    check_numel(op, "scales", scales, count);
    TORCH_CHECK_VALUE(scales.dim() == 1 && zero_points.dim() == 1, "torchq.", op,
                      ": scales and zero_points must have one dimension, got ", scales.sizes(),
                      " and ", zero_points.sizes(), ". Flatten them.");
    check_numel(op, "zero_points", zero_points, count);
    scale = scales.const_data_ptr<float>();
    zero_point = zero_points.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_VALUE(std::isfinite(scale[i]) && scale[i] > 0, "torchq.", op,
                        ": scales must be finite and greater than 0, got ", scale[i], " at index ",
                        i, ". Check the calibration that produced it.");
      const DType dtype =
          i + 1 == count ? dst_dtype : check_src(op, "src", srcs[static_cast<size_t>(i)]);
      const auto [lo, hi] = zero_point_range(dtype);
      TORCH_CHECK_VALUE(zero_point[i] >= lo && zero_point[i] <= hi, "torchq.", op,
                        ": zero_points must lie in [", lo, ", ", hi,
                        "], the range of their tensor, got ", zero_point[i], " at index ", i, ".");
    }
    TORCH_CHECK_VALUE(dst_dtype != DType::f32 || scale[count - 1] == 1, "torchq.", op,
                      ": a float32 destination must have scale 1, got ", scale[count - 1], ".");
    TORCH_CHECK_NOT_IMPLEMENTED(
        dst_dtype != DType::s32, "torchq.", op,
        ": an int32 destination is not supported; use float32, int8 or uint8.");
  }
  const float* scale;
  const int32_t* zero_point;
};

using RowFn = void (*)(const BinaryRow&);

at::Tensor binary(const char* op, OpTrace& trace, RowFn run, const at::Tensor& src0,
                  const at::Tensor& src1, BinaryRow row) {
  for (const float f : {row.m0, row.m1, row.c}) {
    TORCH_CHECK_VALUE(std::isfinite(f), "torchq.", op,
                      ": the ratio of the scales is not a finite float32 (", f,
                      "). Check the calibration that produced them.");
  }
  bool fits = true;
  for (int64_t d = 1; d <= std::min(src0.dim(), src1.dim()); ++d) {
    fits = fits && (src0.size(-d) == src1.size(-d) || src0.size(-d) == 1 || src1.size(-d) == 1);
  }
  TORCH_CHECK_VALUE(fits, "torchq.", op, ": src0 and src1 must broadcast, got ", src0.sizes(),
                    " and ", src1.sizes(), ". Reshape one of them.");
  at::Tensor dst = empty_broadcast(src0, src1, scalar_type(row.dst_dtype));
  trace.describe([&] { return describe_call({src0, src1}, dst); });
  if (dst.numel() == 0) return dst;
  at::TensorIterator iter = at::TensorIteratorConfig()
                                .check_all_same_dtype(false)
                                .resize_outputs(false)
                                .add_output(dst)
                                .add_const_input(src0)
                                .add_const_input(src1)
                                .build();
  iter.for_each(
      [&](char** data, const int64_t* strides, int64_t n) {
        const FloatMode mode;
        BinaryRow part = row;
        part.dst = data[0];
        part.src0 = data[1];
        part.src1 = data[2];
        part.step0 = strides[1];
        part.step1 = strides[2];
        part.size = n;
        const auto unit = [](int64_t step) { return step == 0 || step == 1; };
        if (strides[0] == dst.element_size() && unit(strides[1]) && unit(strides[2]))
          return run(part);
        part.size = 1;
        for (int64_t i = 0; i < n; ++i) {
          part.dst = data[0] + i * strides[0];
          part.src0 = data[1] + i * strides[1];
          part.src1 = data[2] + i * strides[2];
          run(part);
        }
      },
      kGrain);
  return dst;
}

BinaryRow make_row(const char* op, const at::Tensor& src0, const at::Tensor& src1, const Params& p,
                   DType dst, bool relu) {
  BinaryRow row{};
  row.dtype0 = check_src(op, "src0", src0);
  row.dtype1 = check_src(op, "src1", src1);
  row.dst_dtype = dst;
  row.z0 = p.zero_point[0];
  row.z1 = p.zero_point[1];
  row.lo = relu ? static_cast<float>(p.zero_point[2]) : -std::numeric_limits<float>::infinity();
  return row;
}

at::Tensor add(const at::Tensor& src0, const at::Tensor& src1, const at::Tensor& scales,
               const at::Tensor& zero_points, int64_t dst_dtype, bool relu) {
  OpTrace trace("add");
  const Kernels& tier = kernels();
  trace.ran(tier, "add");
  const DType dst = dst_dtype_of("add", dst_dtype);
  const at::Tensor srcs[] = {src0, src1};
  const Params p("add", scales, zero_points, srcs, dst);
  BinaryRow row = make_row("add", src0, src1, p, dst, relu);
  const double m0 = double{p.scale[0]} / p.scale[2], m1 = double{p.scale[1]} / p.scale[2];
  row.m0 = static_cast<float>(m0);
  row.m1 = static_cast<float>(m1);
  row.c = static_cast<float>(p.zero_point[2] - p.zero_point[0] * m0 - p.zero_point[1] * m1);
  return binary("add", trace, tier.add, src0, src1, row);
}

at::Tensor mul(const at::Tensor& src0, const at::Tensor& src1, const at::Tensor& scales,
               const at::Tensor& zero_points, int64_t dst_dtype, bool relu) {
  OpTrace trace("mul");
  const Kernels& tier = kernels();
  trace.ran(tier, "mul");
  const DType dst = dst_dtype_of("mul", dst_dtype);
  const at::Tensor srcs[] = {src0, src1};
  const Params p("mul", scales, zero_points, srcs, dst);
  BinaryRow row = make_row("mul", src0, src1, p, dst, relu);
  row.m0 = static_cast<float>(double{p.scale[0]} * p.scale[1] / p.scale[2]);
  row.c = static_cast<float>(p.zero_point[2]);
  return binary("mul", trace, tier.mul, src0, src1, row);
}

/// A dense tensor whose dimensions lie in memory in the same order as those of `like`.
at::Tensor empty_in_order_of(const at::Tensor& like, c10::IntArrayRef sizes, at::ScalarType dtype) {
  c10::SmallVector<int64_t, 5> order(sizes.size()), strides(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[static_cast<size_t>(order[i])] = stride;
    stride *= std::max<int64_t>(sizes[static_cast<size_t>(order[i])], 1);
  }
  return at::detail::empty_strided_cpu(sizes, strides, dtype);
}

at::Tensor concat(at::TensorList srcs, const at::Tensor& scales, const at::Tensor& zero_points,
                  int64_t dim, int64_t dst_dtype) {
  OpTrace trace("concat");
  const Kernels& tier = kernels();
  trace.ran(tier, "convert");
  TORCH_CHECK_VALUE(!srcs.empty() && srcs[0].dim() > 0,
                    "torchq.concat: srcs must be at least one tensor with ", "dimensions, got ",
                    srcs.size(), " tensors.");
  const DType dst_type = dst_dtype_of("concat", dst_dtype);
  const Params p("concat", scales, zero_points, srcs, dst_type);
  const int64_t dims = srcs[0].dim();
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims, "torchq.concat: dim must lie in [", -dims, ", ",
                    dims - 1, "] for src ", srcs[0].sizes(), ", got ", dim, ".");
  if (dim < 0) dim += dims;
  c10::SmallVector<int64_t, 5> sizes(srcs[0].sizes().begin(), srcs[0].sizes().end());
  sizes[static_cast<size_t>(dim)] = 0;
  for (const at::Tensor& src : srcs) {
    bool fits = src.dim() == dims;
    for (int64_t d = 0; fits && d < dims; ++d)
      fits = d == dim || src.size(d) == sizes[static_cast<size_t>(d)];
    TORCH_CHECK_VALUE(fits, "torchq.concat: srcs must agree in every dimension but ", dim, ", got ",
                      srcs[0].sizes(), " and ", src.sizes(), ".");
    sizes[static_cast<size_t>(dim)] += src.size(dim);
  }
  at::Tensor dst = empty_in_order_of(srcs[0], sizes, scalar_type(dst_type));
  trace.describe([&] { return describe_call(srcs, dst); });
  const int64_t last = static_cast<int64_t>(srcs.size());
  int64_t begin = 0;
  for (int64_t i = 0; i < last; ++i) {
    const at::Tensor& src = srcs[static_cast<size_t>(i)];
    const at::Tensor part = dst.narrow(dim, begin, src.size(dim));
    begin += src.size(dim);
    const bool same = src.scalar_type() == dst.scalar_type() && p.scale[i] == p.scale[last] &&
                      p.zero_point[i] == p.zero_point[last];
    if (same) {
      part.copy_(src);
    } else {
      const at::Tensor factor = scale_ratio("concat", scales.select(0, i), scales.select(0, last));
      convert_into(tier, part, src, factor, zero_points.select(0, i), zero_points.select(0, last));
    }
  }
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  m.impl("add", &torchq::add);
  m.impl("mul", &torchq::mul);
  m.impl("concat", &torchq::concat);
}
