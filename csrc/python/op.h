// SPDX-License-Identifier: Apache-2.0
// An op as torch._C sees it: how Python objects become its arguments and its results.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torchq {

using Stack = std::vector<c10::IValue>;

// take: the value of an object of exactly that type; false for others, with no Python error set.

inline bool take(PyObject* object, at::Tensor& value) {
  if (!THPVariable_CheckExact(object)) return false;  // a subclass may have __torch_function__
  value = THPVariable_Unpack(object);
  return true;
}

inline bool take(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

inline bool take(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}

inline bool take(PyObject* object, std::string& value) {
  if (!PyUnicode_CheckExact(object)) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {  // a lone surrogate
    PyErr_Clear();
    return false;
  }
  value.assign(text, static_cast<size_t>(size));
  return true;
}

template <class T>
bool take(PyObject* object, c10::List<T>& value) {
  if (!PyList_CheckExact(object)) return false;
  const Py_ssize_t size = PyList_GET_SIZE(object);
  value.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    T item{};
    if (!take(PyList_GET_ITEM(object, i), item)) return false;
    value.push_back(std::move(item));
  }
  return true;
}

/// Appends the object's value to the stack if it has one of this type.
using Push = bool (*)(PyObject* object, Stack& stack);

template <class T>
bool push(PyObject* object, Stack& stack) {
  T value{};
  if (!take(object, value)) return false;
  stack.emplace_back(std::move(value));
  return true;
}

/// Null for types that no layer's op takes.
inline Push push_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return &push<at::Tensor>;
    case c10::TypeKind::IntType:
      return &push<int64_t>;
    case c10::TypeKind::BoolType:
      return &push<bool>;
    case c10::TypeKind::StringType:
      return &push<std::string>;
    case c10::TypeKind::ListType:
      switch (type.containedType(0)->kind()) {
        case c10::TypeKind::TensorType:
          return &push<c10::List<at::Tensor>>;
        case c10::TypeKind::IntType:
          return &push<c10::List<int64_t>>;
        default:
          return nullptr;
      }
    default:
      return nullptr;
  }
}

struct Parameter {
  Push push;
  bool optional;
  std::optional<c10::IValue> default_value;
};

/// `served`: whether the result is one tensor, and all arguments are of types that take knows.
struct Op {
  explicit Op(const char* name) : handle(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {
    const c10::FunctionSchema& schema = handle.schema();
    served = schema.returns().size() == 1 &&
             schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
    for (const c10::Argument& argument : schema.arguments()) {
      const bool optional = argument.type()->kind() == c10::TypeKind::OptionalType;
      const Push typed = push_of(optional ? *argument.type()->containedType(0) : *argument.type());
      served &= typed != nullptr;
      parameters.push_back({typed, optional, argument.default_value()});
    }
  }

  /// Appends the value of argument `index`.
  bool push(size_t index, PyObject* object, Stack& stack) const {
    const Parameter& parameter = parameters[index];
    if (!parameter.optional || object != Py_None) return parameter.push(object, stack);
    stack.emplace_back();
    return true;
  }

  /// Consumes the arguments; throws what the op throws.
  PyObject* run(Stack&& stack) const {
    // A tensor that only Python owns takes the GIL when the last other owner lets go of it. The op
    // lets go of its arguments one by one while others may hold the GIL: each could wait for it.
    const Stack held = stack;
    {
      const py::gil_scoped_release no_gil;  // as torch.ops does
      handle.callBoxed(stack);
    }
    return THPVariable_Wrap(std::move(stack[0]).toTensor());
  }

  c10::OperatorHandle handle;
  std::vector<Parameter> parameters;
  bool served;
};

/// Modes that take whole Python calls see torch.ops' own; those of the dispatcher see either.
inline bool is_observed() {
  return at::impl::torch_function_mode_enabled() || at::tracer::impl::is_dispatch_enabled();
}

}  // namespace torchq
