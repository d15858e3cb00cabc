// SPDX-License-Identifier: Apache-2.0
// torchq._C.shortcut: a shorter way from Python into an op. torch.ops matches arguments of any kind
// with the schema and needs 3.0 us for the 13 of linear, this 1.0. It takes calls whose arguments
// are exactly what the schema says, and leaves all others, wrong ones among them, to torch.ops. Not
// a part of libtorchq.so, which programs without Python load too.
#include "python/op.h"
#include "python/site.h"
#include "runtime/glibc.h"

namespace torchq {
namespace {

struct Short {
  Op op;
  py::object ordinary;  // torch.ops' callable
};

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const Short& call = *static_cast<const Short*>(PyCapsule_GetPointer(self, nullptr));
  try {
    Stack stack;
    if (names == nullptr && !is_observed() &&
        call.op.push_all(args, static_cast<size_t>(count), stack)) {
      return call.op.run(std::move(stack));
    }
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(call.ordinary.ptr(), args, static_cast<size_t>(count), names);
}

PyMethodDef kCall = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)),
                     METH_FASTCALL | METH_KEYWORDS, nullptr};

/// shortcut(name, ordinary): see torchq/runtime/library.py.
PyObject* shortcut(PyObject*, PyObject* args) {
  const char* name = nullptr;
  PyObject* ordinary = nullptr;
  if (!PyArg_ParseTuple(args, "sO", &name, &ordinary)) return nullptr;
  try {
    auto made =
        std::make_unique<Short>(Short{Op(name), py::reinterpret_borrow<py::object>(ordinary)});
    if (!made->op.served) return Py_NewRef(ordinary);
    const py::capsule owner(made.release(),
                            [](void* pointer) { delete static_cast<Short*>(pointer); });
    return PyCFunction_NewEx(&kCall, owner.ptr(), nullptr);
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyMethodDef kMethods[] = {
    {"shortcut", &shortcut, METH_VARARGS, nullptr}, {"site", &new_site, METH_O, nullptr}, {}};
PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace torchq

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&torchq::kModule); }
