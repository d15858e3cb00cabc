// SPDX-License-Identifier: Apache-2.0
// An nn.Module as Python's dicts hold it: what its call looks at, where it finds a name, and
// whether any of that changed. Everything is borrowed and needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

namespace torchq {

inline py::object interned(const std::string& name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str()));
}

/// nn.Module's call as torch has it, and the names of what that looks at before it comes to
/// forward.
struct ModuleCall {
  ModuleCall() {
    const py::module_ module = py::module_::import("torch.nn.modules.module");
    for (const char* name : {"__call__", "_call_impl"}) {
      call_names.push_back(interned(name));
      calls.push_back(module.attr("Module").attr(name));
    }
    for (const char* when :
         {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}) {
      hooks.push_back(interned(when));
      global_hooks.push_back(module.attr((std::string("_global") + when).c_str()));
    }
  }
  py::object forward = interned("forward"), compiled = interned("_compiled_call_impl");
  py::object buffers = interned("_buffers"), modules = interned("_modules");
  std::vector<py::object> call_names, calls, hooks, global_hooks;
};

/// Never freed: Python may be gone when static objects are.
inline const ModuleCall& module_call() {
  static const ModuleCall* const found = new ModuleCall;
  return *found;
}

inline PyObject* item(PyObject* dict, const py::object& name) {
  return PyDict_GetItem(dict, name.ptr());
}

inline bool is_empty(PyObject* dict) {
  return dict != nullptr && PyDict_Check(dict) && PyDict_GET_SIZE(dict) == 0;
}

inline bool is_attribute(const py::object& object, const py::object& name,
                         const py::object& expected) {
  PyObject* const found = PyObject_GetAttr(object.ptr(), name.ptr());
  Py_XDECREF(found);  // `expected` has it, if it is that
  if (found == nullptr) PyErr_Clear();
  return found == expected.ptr();
}

/// Contents of a dict, for comparison only. Owns nothing, so that a model whose hooks refer to it
/// can be collected; readers own the values they read.
class Contents {
 public:
#if PY_VERSION_HEX < 0x030C0000
  explicit Contents(PyObject* dict) : dict_(dict), version_(version_of(dict)) {}

  /// The dict has to be alive.
  bool are_unchanged() const { return version_of(dict_) == version_; }

 private:
  /// A number that no other state of any dict has (PEP 509). Modules have left the caches when they
  /// are called: an eager MobileNet-V2 takes 2 % less than with their contents read again.
  static uint64_t version_of(PyObject* dict) {
    return dict == nullptr ? 0 : reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
  }

  PyObject* dict_;
  uint64_t version_;
#else  // versions are deprecated, then gone
  explicit Contents(PyObject* dict) : dict_(dict) {
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (dict != nullptr && PyDict_Next(dict, &at, &key, &value)) items_.emplace_back(key, value);
  }

  /// The dict has to be alive.
  bool are_unchanged() const {
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    if (dict_ == nullptr) return true;
    if (PyDict_GET_SIZE(dict_) != static_cast<Py_ssize_t>(items_.size())) return false;
    return std::all_of(items_.begin(), items_.end(), [&](const auto& known) {
      return PyDict_Next(dict_, &at, &key, &value) && key == known.first && value == known.second;
    });
  }

 private:
  using Item = std::pair<PyObject*, PyObject*>;
  PyObject* dict_;
  std::vector<Item> items_;
#endif

 public:
  bool are_those_of(PyObject* dict) const { return dict == dict_ && are_unchanged(); }
};

/// An object's own dict, borrowed; null for none.
inline PyObject* dict_of(PyObject* object) {
  PyObject* const own = PyObject_GenericGetDict(object, nullptr);
  if (own == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DECREF(own);  // the object has it
  return own;
}

/// The dicts in which nn.Module looks a name up: its own, and what that holds as buffers and
/// modules; borrowed, null where there is none.
struct Scope {
  explicit Scope(PyObject* module) {
    PyObject* const own = dict_of(module);
    if (own == nullptr) return;
    dicts = {own, part(own, module_call().buffers), part(own, module_call().modules)};
  }

  /// Borrowed; null for nothing.
  PyObject* find(const py::object& name) const {
    for (PyObject* dict : dicts) {
      if (PyObject* value = dict == nullptr ? nullptr : item(dict, name)) return value;
    }
    return nullptr;
  }

  static PyObject* part(PyObject* own, const py::object& name) {
    PyObject* const found = item(own, name);
    return found != nullptr && PyDict_Check(found) ? found : nullptr;
  }

  std::array<PyObject*, 3> dicts{};
};

}  // namespace torchq
