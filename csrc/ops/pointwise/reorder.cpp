// SPDX-License-Identifier: Apache-2.0
// quantize, dequantize, requantize, reorder (v1 output scales) and lookup.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/cpu_tuning.h"
#include "ops/pointwise/byte_table.h"
#include "ops/pointwise/elementwise.h"
#include "ops/pointwise/quantize.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {

void check_broadcasts(const char* op, const char* arg, const at::Tensor& t, const at::Tensor& src) {
  bool fits = t.dim() <= src.dim() || t.numel() == 1;
  for (int64_t d = 1; fits && d <= std::min(t.dim(), src.dim()); ++d)
    fits = t.size(-d) == 1 || t.size(-d) == src.size(-d);
  TORCH_CHECK_VALUE(
      fits, "torchq.", op, ": ", arg, " must broadcast against src ", src.sizes(), ", got ",
      t.sizes(), ". Give one value, or one per index of the selected dimensions with 1 elsewhere.");
}

void check_scale(const char* op, const char* arg, const at::Tensor& scale, bool positive) {
  TORCH_CHECK_TYPE(scale.scalar_type() == at::kFloat, "torchq.", op, ": ", arg,
                   " must be float32, got ", dtype_name(scale.scalar_type()),
                   ". Convert it with .float().");
  check_cpu(op, arg, scale);
  const at::Tensor dense = scale.contiguous();
  const float* values = dense.const_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(values[i]) && (!positive || values[i] > 0), "torchq.", op, ": ",
                      arg, " must be ", positive ? "finite and greater than 0" : "finite", ", got ",
                      values[i], " at index ", i, ". Check the calibration that produced it.");
  }
}

void check_zero_point(const char* op, const char* arg, const at::Tensor& t, DType dtype) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt, "torchq.", op, ": ", arg, " must be int32, got ",
                   dtype_name(t.scalar_type()), ". Convert it with .int().");
  check_cpu(op, arg, t);
  const auto [lo, hi] = zero_point_range(dtype);
  const at::Tensor dense = t.contiguous();
  const int32_t* values = dense.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    TORCH_CHECK_VALUE(values[i] >= lo && values[i] <= hi, "torchq.", op, ": ", arg,
                      " must lie in [", lo, ", ", hi, "] for a tensor of ",
                      dtype_name(scalar_type(dtype)), ", got ", values[i], " at index ", i, ".");
  }
}

namespace {

at::Tensor scalar(float value) {
  at::Tensor t = at::detail::empty_cpu({}, at::kFloat);
  *t.mutable_data_ptr<float>() = value;
  return t;
}

at::Tensor scalar(int32_t value) {
  at::Tensor t = at::detail::empty_cpu({}, at::kInt);
  *t.mutable_data_ptr<int32_t>() = value;
  return t;
}

/// Raises where 1/scale or a product of scales leaves float32: results would be infinities.
void check_finite(const char* op, const at::Tensor& factor) {
  const float* values = factor.const_data_ptr<float>();
  for (int64_t i = 0; i < factor.numel(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(values[i]), "torchq.", op,
                      ": the ratio of the scales at index ", i, " is not a finite float32 (",
                      values[i], "). Check the calibration that produced them.");
  }
}

at::Tensor convert_op(const char* op, OpTrace& trace, const at::Tensor& src,
                      const at::Tensor& factor, const at::Tensor& src_zero_point,
                      const at::Tensor& dst_zero_point, DType dst_dtype) {
  const Kernels& tier = kernels();
  trace.ran(tier, "convert");
  const DType src_dtype = dtype_of(op, "src", src);
  check_cpu(op, "src", src);
  check_zero_point(op, "src_zero_point", src_zero_point, src_dtype);
  check_zero_point(op, "dst_zero_point", dst_zero_point, dst_dtype);
  check_finite(op, factor);
  check_broadcasts(op, "scale", factor, src);
  check_broadcasts(op, "src_zero_point", src_zero_point, src);
  check_broadcasts(op, "dst_zero_point", dst_zero_point, src);
  at::Tensor dst = empty_dst_like(src, scalar_type(dst_dtype));
  trace.describe([&] { return describe_call({src}, dst); });
  convert_into(tier, dst, src, factor, src_zero_point, dst_zero_point);
  return dst;
}

}  // namespace

at::Tensor quantize(const at::Tensor& src, const at::Tensor& scale, const at::Tensor& zero_point,
                    int64_t dst_dtype) {
  OpTrace trace("quantize");
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "torchq.quantize: src must be float32, got ",
                   dtype_name(src.scalar_type()),
                   ". Convert it with .float(), or use requantize for integers.");
  const DType dtype = dst_dtype_of("quantize", dst_dtype);
  TORCH_CHECK_VALUE(dtype != DType::f32,
                    "torchq.quantize: dst_dtype must be an integer type, got float32. ",
                    "Use torchq.functional.reorder to scale float tensors.");
  check_scale("quantize", "scale", scale, true);
  return convert_op("quantize", trace, src, scale_ratio("quantize", scalar(1.0f), scale), scalar(0),
                    zero_point, dtype);
}

namespace {

at::Tensor dequantize(const at::Tensor& src, const at::Tensor& scale,
                      const at::Tensor& zero_point) {
  OpTrace trace("dequantize");
  TORCH_CHECK_TYPE(src.scalar_type() != at::kFloat,
                   "torchq.dequantize: src must be uint8, int8 or int32, got ",
                   "float32. It is not quantized; use it as it is.");
  check_scale("dequantize", "scale", scale, true);
  return convert_op("dequantize", trace, src, scale.contiguous(), zero_point, scalar(0),
                    DType::f32);
}

at::Tensor requantize(const at::Tensor& src, const at::Tensor& src_scale,
                      const at::Tensor& src_zero_point, const at::Tensor& dst_scale,
                      const at::Tensor& dst_zero_point, int64_t dst_dtype) {
  OpTrace trace("requantize");
  check_scale("requantize", "src_scale", src_scale, true);
  check_scale("requantize", "dst_scale", dst_scale, true);
  check_broadcasts("requantize", "src_scale", src_scale, src);
  check_broadcasts("requantize", "dst_scale", dst_scale, src);
  return convert_op("requantize", trace, src, scale_ratio("requantize", src_scale, dst_scale),
                    src_zero_point, dst_zero_point, dst_dtype_of("requantize", dst_dtype));
}

at::Tensor reorder(const at::Tensor& src, const at::Tensor& output_scales, int64_t dst_dtype,
                   const std::optional<at::Tensor>& src_zero_point,
                   const std::optional<at::Tensor>& dst_zero_point) {
  OpTrace trace("reorder");
  const DType dtype = dst_dtype_of("reorder", dst_dtype);
  check_scale("reorder", "output_scales", output_scales, false);
  const bool shifts = src_zero_point.has_value() || dst_zero_point.has_value();
  if (output_scales.numel() == 0 && !shifts && src.scalar_type() == scalar_type(dtype)) {
    check_cpu("reorder", "src", src);
    trace.ran(kernels(), "copy");
    const at::Tensor dst = src.clone();
    trace.describe([&] { return describe_call({src}, dst); });
    return dst;
  }
  const at::Tensor factor = output_scales.numel() == 0 ? scalar(1.0f) : output_scales.contiguous();
  return convert_op("reorder", trace, src, factor, src_zero_point.value_or(scalar(0)),
                    dst_zero_point.value_or(scalar(0)), dtype);
}

at::Tensor lookup(const at::Tensor& src, const at::Tensor& table) {
  OpTrace trace("lookup");
  const Kernels& tier = kernels();
  trace.ran(tier, "lookup");
  const ByteTable bytes("lookup", table, check_src("lookup", "src", src));
  at::Tensor dst = empty_dst_like(src, table.scalar_type());
  trace.describe([&] { return describe_call({src}, dst); });
  lookup_into(tier, dst, src, bytes.bytes());
  return dst;
}

}  // namespace

void lookup_into(const Kernels& tier, const at::Tensor& dst, const at::Tensor& src,
                 const uint8_t* bytes) {
  if (is_done(src)) return;
  at::TensorIterator iter = at::TensorIteratorConfig()
                                .check_all_same_dtype(false)
                                .resize_outputs(false)
                                .add_output(dst)
                                .add_const_input(src)
                                .build();
  iter.for_each(
      [&](char** data, const int64_t* strides, int64_t n) {
        uint8_t* out = reinterpret_cast<uint8_t*>(data[0]);
        const uint8_t* in = reinterpret_cast<const uint8_t*>(data[1]);
        if (strides[0] == 1 && strides[1] == 1) return tier.lookup(in, bytes, out, n);
        for (int64_t i = 0; i < n; ++i) out[i * strides[0]] = bytes[in[i * strides[1]]];
      },
      tuning::kConvertGrain);
}

void convert_into(const Kernels& tier, const at::Tensor& dst, const at::Tensor& src,
                  const at::Tensor& factor, const at::Tensor& src_zero_point,
                  const at::Tensor& dst_zero_point) {
  if (is_done(src)) return;
  const DType src_dtype = dtype_of("convert", "src", src),
              dst_dtype = dtype_of("convert", "dst", dst);
  // one value of any rank does for any source
  const auto fit = [&](const at::Tensor& t) { return t.dim() > src.dim() ? t.reshape({}) : t; };
  const at::Tensor factors = fit(factor), src_zero_points = fit(src_zero_point),
                   dst_zero_points = fit(dst_zero_point);
  at::TensorIterator iter = at::TensorIteratorConfig()
                                .check_all_same_dtype(false)
                                .resize_outputs(false)
                                .add_output(dst)
                                .add_const_input(src)
                                .add_const_input(factors)
                                .add_const_input(src_zero_points)
                                .add_const_input(dst_zero_points)
                                .build();
  const int64_t dst_size = dst.element_size(), src_size = src.element_size();
  iter.for_each(
      [&](char** data, const int64_t* strides, int64_t n) {
        const FloatMode mode;
        ConvertRow row{data[1],
                       src_dtype,
                       data[0],
                       dst_dtype,
                       n,
                       reinterpret_cast<const float*>(data[2]),
                       strides[2] / 4,
                       reinterpret_cast<const int32_t*>(data[3]),
                       strides[3] / 4,
                       reinterpret_cast<const int32_t*>(data[4]),
                       strides[4] / 4};
        const auto unit = [](int64_t step) { return step == 0 || step == 1; };
        if (strides[0] == dst_size && strides[1] == src_size && unit(row.factor_step) &&
            unit(row.src_zero_point_step) && unit(row.dst_zero_point_step)) {
          return tier.convert(row);
        }
        row.size = 1;  // any other strides: value by value
        for (int64_t i = 0; i < n; ++i) {
          row.dst = data[0] + i * strides[0];
          row.src = data[1] + i * strides[1];
          row.factor = reinterpret_cast<const float*>(data[2] + i * strides[2]);
          row.src_zero_point = reinterpret_cast<const int32_t*>(data[3] + i * strides[3]);
          row.dst_zero_point = reinterpret_cast<const int32_t*>(data[4] + i * strides[4]);
          tier.convert(row);
        }
      },
      tuning::kConvertGrain);
}

at::Tensor scale_ratio(const char* op, const at::Tensor& numerator, const at::Tensor& denominator) {
  const FloatMode mode;
  at::Tensor ratio;
  if (numerator.numel() == 1 && denominator.numel() == 1) {
    ratio = at::detail::empty_cpu({}, at::kFloat);
    *ratio.mutable_data_ptr<float>() = static_cast<float>(
        double{*numerator.const_data_ptr<float>()} / *denominator.const_data_ptr<float>());
  } else {
    ratio = numerator.to(at::kDouble).div(denominator.to(at::kDouble)).to(at::kFloat).contiguous();
  }
  check_finite(op, ratio);
  return ratio;
}

at::Tensor empty_broadcast(const char* op, const at::Tensor& src0, const at::Tensor& src1,
                           at::ScalarType dtype) {
  bool fits = true;
  for (int64_t d = 1; d <= std::min(src0.dim(), src1.dim()); ++d) {
    fits = fits && (src0.size(-d) == src1.size(-d) || src0.size(-d) == 1 || src1.size(-d) == 1);
  }
  TORCH_CHECK_VALUE(fits, "torchq.", op, ": src0 and src1 must broadcast, got ", src0.sizes(),
                    " and ", src1.sizes(), ". Reshape one of them.");
  const auto sizes = at::infer_size_dimvector(src0.sizes(), src1.sizes());
  const c10::IntArrayRef shape(sizes.data(), sizes.size());
  if (src0.sizes() == shape) return empty_dst_like(src0, dtype);
  if (src1.sizes() == shape) return empty_dst_like(src1, dtype);
  return empty_dst(shape, dtype);
}

}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::quantize>(m, "quantize");
  torchq::implement<&torchq::dequantize>(m, "dequantize");
  torchq::implement<&torchq::requantize>(m, "requantize");
  torchq::implement<&torchq::reorder>(m, "reorder");
  torchq::implement<&torchq::lookup>(m, "lookup");
}
