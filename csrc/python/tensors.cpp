// SPDX-License-Identifier: Apache-2.0
// torchq._C.tensors: every tensor there is. In C++, because a list of all objects must not outlive
// one step of the interpreter: it holds the unfinished tuples of other threads' `tuple(generator)`,
// which raise SystemError where anybody else has a reference to them.
#include "python/tensors.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace torchq {

PyObject* tensors(PyObject*, PyObject*) {
  // Made first: making a list may run the collector, finalizers and with them other threads.
  auto found = py::reinterpret_steal<py::object>(PyList_New(0));
  const auto gc = py::reinterpret_steal<py::object>(PyImport_ImportModule("gc"));
  if (!found || !gc) return nullptr;
  const auto all =
      py::reinterpret_steal<py::object>(PyObject_CallMethod(gc.ptr(), "get_objects", nullptr));
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all.ptr()); ++i) {
    PyObject* object = PyList_GET_ITEM(all.ptr(), i);
    if (THPVariable_CheckExact(object) && PyList_Append(found.ptr(), object) != 0) return nullptr;
  }
  return found.release().ptr();
}

}  // namespace torchq
