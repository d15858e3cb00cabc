// SPDX-License-Identifier: Apache-2.0
// Argument checks. Every message says op, argument, what it got, what was expected and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "kernels/table.h"
#include "runtime/dispatch.h"

namespace torchq {

/// As Python spells it, for the types torchq knows.
inline const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kInt:
      return "int32";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    default:
      return c10::toString(type);
  }
}

inline at::ScalarType scalar_type(DType dtype) {
  constexpr at::ScalarType types[] = {at::kByte, at::kChar, at::kInt, at::kFloat};
  return types[static_cast<int>(dtype)];
}

/// DType of a tensor; TypeError for anything but uint8, int8, int32, float32.
inline DType dtype_of(const char* op, const char* arg, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kByte:
      return DType::u8;
    case at::kChar:
      return DType::s8;
    case at::kInt:
      return DType::s32;
    case at::kFloat:
      return DType::f32;
    default:
      TORCH_CHECK_TYPE(false, "torchq.", op, ": ", arg,
                       " must be uint8, int8, int32 or float32, got ", dtype_name(t.scalar_type()),
                       ". Convert it first.");
  }
}

/// DType of a `dst_dtype` argument, which is a ScalarType's number.
inline DType dst_dtype_of(const char* op, int64_t dst_dtype) {
  switch (dst_dtype) {
    case static_cast<int64_t>(at::kByte):
      return DType::u8;
    case static_cast<int64_t>(at::kChar):
      return DType::s8;
    case static_cast<int64_t>(at::kInt):
      return DType::s32;
    case static_cast<int64_t>(at::kFloat):
      return DType::f32;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "torchq.", op,
          ": dst_dtype must be 0 (uint8), 1 (int8), 3 (int32), 6 (float32) or, of an op with one ",
          "result, 15 (bfloat16) or 5 (float16), got ", dst_dtype, ". The nearest supported ",
          "destination is float32.");
  }
}

/// Returns true where an op has nothing more to do than to return dst.
inline bool is_done(const at::Tensor& dst) { return dst.numel() == 0 || only_checks(); }

/// The bytes of a quantized tensor.
inline const uint8_t* bytes_of(const at::Tensor& t) {
  return static_cast<const uint8_t*>(t.const_data_ptr());
}

inline bool is_int8(DType dtype) { return dtype == DType::u8 || dtype == DType::s8; }

inline void check_cpu(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.device().is_cpu() && t.layout() == at::kStrided, "torchq.", op, ": ", arg,
      " must be a dense CPU tensor, got a ", t.layout(), " tensor on ", t.device(),
      ". Move it with .cpu(), or fill it with .to_dense(); torchq runs on CPUs only.");
  // torch resolves these before an op runs, except in lists that may be None.
  TORCH_CHECK_VALUE(!t._is_zerotensor() && !t.is_neg(), "torchq.", op, ": ", arg,
                    " must hold its values, got a tensor that torch computes when it is read ",
                    "(zero tensor or negated view). Copy it with .clone().");
}

/// A quantized source: dense, on the CPU, uint8 or int8.
inline DType check_src(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kByte || t.scalar_type() == at::kChar, "torchq.", op,
                   ": ", arg, " must be uint8 or int8, got ", dtype_name(t.scalar_type()),
                   ". Quantize it first: torchq.functional.quantize(x, scale, zero_point).");
  check_cpu(op, arg, t);
  return t.scalar_type() == at::kByte ? DType::u8 : DType::s8;
}

/// A parameter tensor: dtype, contiguous, on the CPU.
inline void check_param(const char* op, const char* arg, const at::Tensor& t, at::ScalarType type) {
  TORCH_CHECK_TYPE(t.scalar_type() == type, "torchq.", op, ": ", arg, " must be ", dtype_name(type),
                   ", got ", dtype_name(t.scalar_type()), ". Pass what fold/pack returned.");
  check_cpu(op, arg, t);
  TORCH_CHECK_VALUE(t.is_contiguous(), "torchq.", op, ": ", arg,
                    " must be contiguous, got strides ", t.strides(), ". Call .contiguous().");
}

inline void check_numel(const char* op, const char* arg, const at::Tensor& t, int64_t numel) {
  TORCH_CHECK_VALUE(t.numel() == numel, "torchq.", op, ": ", arg, " must have ", numel,
                    " values, got ", t.numel(), " (shape ", t.sizes(),
                    "). It belongs to another layer or was folded for other channels.");
}

/// Valid zero points: any int32 for int32 tensors, 0 for float32.
struct ZeroPointRange {
  int32_t lo, hi;
};
inline ZeroPointRange zero_point_range(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return {0, 255};
    case DType::s8:
      return {-128, 127};
    case DType::s32:
      return {INT32_MIN, INT32_MAX};
    default:
      return {0, 0};
  }
}

/// The scalar zero point of a tensor, checked against its dtype; absent means 0.
inline int32_t zero_point_of(const char* op, const char* arg, const std::optional<at::Tensor>& t,
                             DType dtype) {
  if (!t.has_value()) return 0;
  check_param(op, arg, *t, at::kInt);
  check_numel(op, arg, *t, 1);
  const int32_t value = *t->const_data_ptr<int32_t>();
  const auto [lo, hi] = zero_point_range(dtype);
  TORCH_CHECK_VALUE(value >= lo && value <= hi, "torchq.", op, ": ", arg, " must lie in [", lo,
                    ", ", hi, "], the range of its tensor, got ", value, ".");
  return value;
}

/// "uint8[8, 64] -> float32[8, 10] post_ops:eltwise_relu" for the verbose line.
inline std::string describe_call(at::TensorList srcs, const at::Tensor& dst,
                                 const std::string& attributes = "",
                                 c10::string_view post_ops = {}) {
  std::string text;
  for (const at::Tensor& src : srcs) {
    text += (text.empty() ? "" : " ") + c10::str(dtype_name(src.scalar_type()), src.sizes());
  }
  return c10::str(text, " -> ", dtype_name(dst.scalar_type()), dst.sizes(),
                  attributes.empty() ? "" : " ", attributes,
                  post_ops.empty() ? "" : " post_ops:", post_ops);
}

}  // namespace torchq
