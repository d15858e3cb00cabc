// SPDX-License-Identifier: Apache-2.0
// torchq._C: a shorter way from Python into an op. torch.ops matches arguments of any kind with the
// schema and needs 3.0 us for the 13 of linear, this 1.0. It takes calls whose arguments are
// exactly what the schema says, and leaves all others, wrong ones among them, to torch.ops. Not a
// part of libtorchq.so, which programs without Python load too.
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
namespace {

using Stack = std::vector<c10::IValue>;

// take: the value of an object of exactly that type; false for others, with no Python error set.

bool take(PyObject* object, at::Tensor& value) {
  if (!THPVariable_CheckExact(object)) return false;  // a subclass may have __torch_function__
  value = THPVariable_Unpack(object);
  return true;
}

bool take(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool take(PyObject* object, double& value) {
  if (!PyFloat_CheckExact(object)) return false;
  value = PyFloat_AS_DOUBLE(object);
  return true;
}

bool take(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}

bool take(PyObject* object, std::string& value) {
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

/// Null for types that no op of torchq takes in a hot loop.
Push push_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return &push<at::Tensor>;
    case c10::TypeKind::IntType:
      return &push<int64_t>;
    case c10::TypeKind::FloatType:
      return &push<double>;
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

struct Op {
  c10::OperatorHandle handle;
  std::vector<Parameter> parameters;
  py::object ordinary;  // torch.ops' callable

  bool push_all(PyObject* const* args, size_t count, Stack& stack) const {
    if (count > parameters.size()) return false;
    stack.reserve(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& parameter = parameters[i];
      if (i >= count) {
        if (!parameter.default_value) return false;
        stack.push_back(*parameter.default_value);
      } else if (parameter.optional && args[i] == Py_None) {
        stack.emplace_back();
      } else if (!parameter.push(args[i], stack)) {
        return false;
      }
    }
    return true;
  }
};

PyObject* wrap(Stack&& results) {
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]).toTensor());
  py::tuple tuple(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    tuple[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(results[i].toTensor()));
  }
  return tuple.release().ptr();
}

/// Modes that take whole Python calls see torch.ops' own; those of the dispatcher see either.
bool is_observed() {
  return at::impl::torch_function_mode_enabled() || at::tracer::impl::is_dispatch_enabled();
}

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Op& op = *static_cast<const Op*>(PyCapsule_GetPointer(self, nullptr));
  try {
    Stack stack;
    if (names == nullptr && !is_observed() &&
        op.push_all(args, static_cast<size_t>(count), stack)) {
      {
        const py::gil_scoped_release no_gil;  // as torch.ops does
        op.handle.callBoxed(stack);
      }
      return wrap(std::move(stack));
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(op.ordinary.ptr(), args, static_cast<size_t>(count), names);
}

PyMethodDef kCall = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                     METH_FASTCALL | METH_KEYWORDS, nullptr};

/// shortcut(name, ordinary): see torchq/_library.py.
PyObject* shortcut(PyObject*, PyObject* args) {
  const char* name = nullptr;
  PyObject* ordinary = nullptr;
  if (!PyArg_ParseTuple(args, "sO", &name, &ordinary)) return nullptr;
  try {
    auto op = std::make_unique<Op>(Op{c10::Dispatcher::singleton().findSchemaOrThrow(name, ""),
                                      {},
                                      py::reinterpret_borrow<py::object>(ordinary)});
    const c10::FunctionSchema& schema = op->handle.schema();
    bool served = !schema.returns().empty();
    for (const c10::Argument& result : schema.returns()) {
      served &= result.type()->kind() == c10::TypeKind::TensorType;
    }
    for (const c10::Argument& argument : schema.arguments()) {
      const bool optional = argument.type()->kind() == c10::TypeKind::OptionalType;
      const Push push = push_of(optional ? *argument.type()->containedType(0) : *argument.type());
      served &= push != nullptr;
      op->parameters.push_back({push, optional, argument.default_value()});
    }
    if (!served) return Py_NewRef(ordinary);
    const py::capsule owner(op.release(), [](void* pointer) { delete static_cast<Op*>(pointer); });
    return PyCFunction_NewEx(&kCall, owner.ptr(), nullptr);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef kMethods[] = {{"shortcut", &shortcut, METH_VARARGS, nullptr}, {}};
PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace torchq

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&torchq::kModule); }
