// SPDX-License-Identifier: Apache-2.0
#include "runtime/bfloat16.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

c10::OperatorHandle find_op(const char* op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("torchq::") + op).c_str(), "");
}

/// Returns the float32 tensor of the same values, where `t` is of a half type.
at::Tensor widened(const char* op, const std::string& argument, const at::Tensor& t) {
  if (!border::is_half(t)) return t;
  check_cpu(op, argument.c_str(), t);
  return empty_dst_like(t, at::kFloat).copy_(t);
}

}  // namespace

at::Tensor rounded(const at::Tensor& t, at::ScalarType half) {
  if (t.scalar_type() != at::kFloat) return t;
  return empty_dst_like(t, half).copy_(t);
}

namespace border {

int find_dst_dtype(const char* op) {
  const c10::OperatorHandle handle = find_op(op);
  const c10::FunctionSchema& schema = handle.schema();
  if (schema.returns().size() != 1) return -1;
  return schema.argumentIndexWithName("dst_dtype").value_or(-1);
}

void run_in_float32(const char* op, torch::jit::Stack& stack) {
  const c10::OperatorHandle handle = find_op(op);
  const c10::FunctionSchema& schema = handle.schema();
  const bool one_result = schema.returns().size() == 1;
  const int at = find_dst_dtype(op);
  const bool follows = at < 0 || stack[at].isNone();
  at::ScalarType given = at::kFloat;
  if (follows && one_result && stack[0].isTensor()) {
    given = stack[0].toTensor().scalar_type();
  } else if (!follows && names_half(stack[at].toInt())) {
    given = static_cast<at::ScalarType>(stack[at].toInt());
    stack[at] = static_cast<int64_t>(at::kFloat);
  }
  for (size_t i = 0; i < stack.size(); ++i) {
    const std::string& argument = schema.arguments()[i].name();
    if (stack[i].isTensor()) {
      stack[i] = widened(op, argument, stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      c10::List<at::Tensor> wide;
      for (const at::Tensor& t : stack[i].toTensorVector())
        wide.push_back(widened(op, argument, t));
      stack[i] = std::move(wide);
    }
  }
  handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  if (is_half_type(given) && !only_checks()) stack.back() = rounded(stack.back().toTensor(), given);
}

void refuse(const char* op, const TooLarge& error) {
  TORCH_CHECK_VALUE(false, "torchq.", op, ": ", error.what());
}

}  // namespace border
}  // namespace torchq
