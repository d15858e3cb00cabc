// SPDX-License-Identifier: Apache-2.0
// The border of every op: how it takes and gives bfloat16 and float16, and refuses sizes beyond 64
// bits.
#pragma once

#include <ATen/core/boxing/impl/boxing.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "runtime/sizes.h"

namespace torchq {

// Note [bfloat16]
// bfloat16 and float16 are the half types. Kernels compute in float32. An op reads an argument of
// a half type as the float32 tensor of the same values. It gives a half type as its float32 result,
// rounded to nearest even; what is beyond float16 becomes infinite. So the bits are those of the
// float32 op, on every tier. The result has the half type that dst_dtype says or, in a call without
// dst_dtype, that of the first argument. Ops with several results give none.

constexpr bool is_half_type(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

/// Returns a tensor in float32 rounded to a half type, and any other as it is.
at::Tensor rounded(const at::Tensor& t, at::ScalarType half);

namespace border {

template <class T>
bool is_half(const T&) {
  return false;
}
inline bool is_half(const at::Tensor& t) { return t.defined() && is_half_type(t.scalar_type()); }
inline bool is_half(at::TensorList list) {
  for (const at::Tensor& t : list)
    if (is_half(t)) return true;
  return false;
}
template <class T>
bool is_half(const std::optional<T>& value) {
  return value.has_value() && is_half(*value);
}

/// Of a `dst_dtype` argument, which is a ScalarType's number.
template <class T>
bool names_half(const T&) {
  return false;
}
inline bool names_half(int64_t dtype) {
  return dtype == static_cast<int64_t>(at::kBFloat16) || dtype == static_cast<int64_t>(at::kHalf);
}
inline bool names_half(std::optional<int64_t> dtype) { return dtype && names_half(*dtype); }

/// Returns the position of `dst_dtype` in the schema of an op with one result, or -1.
int find_dst_dtype(const char* op);

/// Runs the op on float32 in place of half types, as Note [bfloat16] says.
void run_in_float32(const char* op, torch::jit::Stack& stack);

/// Raises ValueError.
[[noreturn]] void refuse(const char* op, const TooLarge& error);

/// The kernel of an op as the dispatcher sees it. Other dtypes cost it a look at each argument.
template <auto* kKernel>
struct Border;
template <class Result, class... Args, Result (*kKernel)(Args...)>
struct Border<kKernel> {
  static inline const char* name = nullptr;

  static Result call(Args... args) try {
    static const int dst_dtype = find_dst_dtype(name);
    int i = 0;
    if (!((is_half(args) || (i++ == dst_dtype && names_half(args))) || ...)) [[likely]] {
      return kKernel(args...);
    }
    torch::jit::Stack stack = c10::impl::boxArgs<Args...>(args...);
    run_in_float32(name, stack);
    return c10::impl::PopResult<Result>::call(stack);
  } catch (const TooLarge& error) {
    refuse(name, error);
  }
};

}  // namespace border

/// Registers a CPU kernel behind its border.
template <auto* kKernel>
void implement(torch::Library& m, const char* op) {
  border::Border<kKernel>::name = op;
  m.impl(op, &border::Border<kKernel>::call);
}

}  // namespace torchq
