// SPDX-License-Identifier: Apache-2.0
// torchq._C.site(): a place in a converted model's code where one of its modules is called.
//
// site(module, *args) is module(*args). A layer's forward comes to one op, most of whose arguments
// lie in the module. On its way there nn.Module touches dozens of objects, which have left the
// caches while a network's weights went through them: 6 us a layer in MobileNet-V2. A site keeps
// the arguments, converted, and only looks whether the module still holds what it held. Anything
// out of the ordinary goes to the module: hooks, another forward, float sources, tracing,
// subclasses of Tensor, options that `_direct` excludes. What `_direct` says: torchq/nn/module.py.
#include "site.h"

#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <tuple>

#include "op.h"

namespace torchq {
namespace {

py::object interned(const std::string& name) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str()));
}

/// What nn.Module's call looks at before it comes to forward.
struct ModuleCall {
  ModuleCall() {
    const py::module_ module = py::module_::import("torch.nn.modules.module");
    call = module.attr("Module").attr("__call__");
    for (const char* when :
         {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}) {
      hooks.push_back(interned(when));
      global_hooks.push_back(module.attr((std::string("_global") + when).c_str()));
    }
  }
  py::object call, call_name = interned("__call__"), forward_name = interned("forward");
  py::object compiled = interned("_compiled_call_impl");
  py::object buffers = interned("_buffers"), modules = interned("_modules");
  std::vector<py::object> hooks, global_hooks;
};

/// Never freed: Python may be gone when static objects are.
const ModuleCall& module_call() {
  static const ModuleCall* const found = new ModuleCall;
  return *found;
}

PyObject* item(PyObject* dict, const py::object& name) { return PyDict_GetItem(dict, name.ptr()); }

bool is_empty(PyObject* dict) {
  return dict != nullptr && PyDict_Check(dict) && PyDict_GET_SIZE(dict) == 0;
}

py::object dict_of(PyObject* object) {
  PyObject* const dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(dict);
}

/// All that a dict held at one moment.
class Contents {
 public:
  explicit Contents(py::object dict) : dict_(std::move(dict)) {
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict_.ptr(), &at, &key, &value)) {
      items_.emplace_back(py::reinterpret_borrow<py::object>(key),
                          py::reinterpret_borrow<py::object>(value));
    }
  }

  bool are_those_of(const py::object& dict) const { return dict.is(dict_); }

  bool are_unchanged() const {
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    if (PyDict_GET_SIZE(dict_.ptr()) != static_cast<Py_ssize_t>(items_.size())) return false;
    return std::all_of(items_.begin(), items_.end(), [&](const auto& known) {
      return PyDict_Next(dict_.ptr(), &at, &key, &value) && key == known.first.ptr() &&
             value == known.second.ptr();
    });
  }

 private:
  py::object dict_;
  std::vector<std::pair<py::object, py::object>> items_;
};

/// An argument as `_direct` writes it: "-", "<dtype>", "[dtype]", "..." or "state".
struct Argument {
  explicit Argument(std::string text) {
    switch (text.front()) {
      case '-':
        kind = kNone;
        return;
      case '.':
        kind = kOthers;
        return;
      case '<':
      case '[':
        kind = text.front() == '<' ? kSource : kSources;
        text = text.substr(1, text.size() - 2);
        break;
      default:
        kind = kState;
    }
    std::istringstream names(text);
    for (std::string name; std::getline(names, name, '.');) path.push_back(interned(name));
  }

  enum { kState, kNone, kSource, kSources, kOthers } kind;
  std::vector<py::object> path;  // of attributes: to the state, or to what tells a source's dtype
};

/// `wanted`: a torch.dtype, or a list that tells of source after source whether it is signed.
bool has_dtype(const at::Tensor& src, PyObject* wanted, size_t index) {
  if (THPDtype_Check(wanted)) {
    return src.scalar_type() == reinterpret_cast<THPDtype*>(wanted)->scalar_type;
  }
  if (!PyList_Check(wanted) || index >= static_cast<size_t>(PyList_GET_SIZE(wanted))) return false;
  PyObject* const is_signed = PyList_GET_ITEM(wanted, static_cast<Py_ssize_t>(index));
  return src.scalar_type() == (is_signed == Py_True ? at::kChar : at::kByte);
}

class Site {
 public:
  /// The op's arguments; false where the module has to be called.
  bool push_all(PyObject* module, PyObject* const* args, size_t count, Stack& stack) {
    const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(module)));
    if (!type.is(type_)) learn(type);
    if (!op_ || !py::getattr(type, module_call().forward_name).is(forward_) ||
        !py::getattr(type, module_call().call_name).is(module_call().call)) {
      return false;
    }
    if (!is_current(module)) read(module);
    if (values_.empty() || !std::all_of(hooks_.begin(), hooks_.end(), &is_empty)) return false;
    stack = constants_;
    return push_sources(args, count, stack);
  }

  PyObject* run(Stack&& stack) const { return op_->run(std::move(stack)); }

 private:
  /// What `type._direct` says, if there is such a thing.
  void learn(py::handle type) {
    type_ = py::reinterpret_borrow<py::object>(type);
    op_.reset();
    held_.clear();
    const py::object direct = py::getattr(type, "_direct", py::none());
    if (direct.is_none()) return;
    const auto [name, arguments, excluded] =
        direct.cast<std::tuple<std::string, std::string, std::string>>();
    const auto parse = [](const std::string& text) {
      std::istringstream words(text);
      return std::vector<Argument>(std::istream_iterator<std::string>(words), {});
    };
    arguments_ = parse(arguments);
    excluded_ = parse(excluded);
    auto op = std::make_unique<Op>(("torchq::" + name).c_str());
    if (!op->served || arguments_.size() > op->parameters.size()) return;
    forward_ = py::getattr(type, module_call().forward_name);
    op_ = std::move(op);
  }

  bool is_current(PyObject* module) const {
    return !held_.empty() && held_[0].are_those_of(dict_of(module)) &&
           std::all_of(held_.begin(), held_.end(),
                       [](const Contents& contents) { return contents.are_unchanged(); });
  }

  /// Takes the constants from the module; leaves `values_` empty where it has to be called.
  void read(PyObject* module) {
    held_.clear();
    hooks_.clear();
    values_.clear();
    constants_.clear();
    const py::object dict = dict_of(module);
    if (!dict) return;
    hold(dict);
    for (const py::object& hooks : module_call().hooks) hooks_.push_back(item(dict.ptr(), hooks));
    for (const py::object& hooks : module_call().global_hooks) hooks_.push_back(hooks.ptr());
    PyObject* const compiled = item(dict.ptr(), module_call().compiled);
    if (compiled != nullptr && compiled != Py_None) return;
    if (item(dict.ptr(), module_call().forward_name) != nullptr) return;
    for (const Argument& option : excluded_) {
      PyObject* const value = find(dict, option);
      if (value == nullptr || PyObject_IsTrue(value) != 0) return PyErr_Clear();
    }
    std::vector<PyObject*> values;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const Argument& argument = arguments_[i];
      values.push_back(argument.path.empty() ? Py_None : find(dict, argument));
      if (values.back() == nullptr) return;
      if (argument.kind != Argument::kState) {
        constants_.emplace_back();
      } else if (!op_->push(i, values.back(), constants_)) {
        return;
      }
    }
    for (size_t i = arguments_.size(); i < op_->parameters.size(); ++i) {
      if (!op_->parameters[i].default_value) return;
      constants_.push_back(*op_->parameters[i].default_value);
    }
    values_ = std::move(values);
  }

  /// All that nn.Module looks a name up in.
  void hold(const py::object& dict) {
    held_.emplace_back(dict);
    for (const py::object* part : {&module_call().buffers, &module_call().modules}) {
      PyObject* const parts = item(dict.ptr(), *part);
      if (parts != nullptr && PyDict_Check(parts)) {
        held_.emplace_back(py::reinterpret_borrow<py::object>(parts));
      }
    }
  }

  /// The attribute, None where a module on the way is None, or null; borrowed from what is held.
  PyObject* find(py::object dict, const Argument& argument) {
    PyObject* value = nullptr;
    for (size_t i = 0; i < argument.path.size() && value != Py_None; ++i) {
      if (i > 0) hold(dict = dict_of(value));
      value = item(dict.ptr(), argument.path[i]);
      for (const py::object* part : {&module_call().buffers, &module_call().modules}) {
        PyObject* const parts = value == nullptr ? item(dict.ptr(), *part) : nullptr;
        if (parts != nullptr && PyDict_Check(parts)) value = item(parts, argument.path[i]);
      }
      if (value == nullptr) break;
    }
    return value;
  }

  bool push_sources(PyObject* const* args, size_t count, Stack& stack) const {
    size_t next = 0;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (arguments_[i].kind == Argument::kSource) {
        at::Tensor src;
        if (next == count || !take(args[next], src)) return false;
        if (!has_dtype(src, values_[i], next++)) return false;
        stack[i] = std::move(src);
      } else if (arguments_[i].kind == Argument::kSources) {
        c10::List<at::Tensor> srcs;
        if (next == count || !take(args[next++], srcs)) return false;
        for (size_t s = 0; s < srcs.size(); ++s) {
          if (!has_dtype(srcs.get(s), values_[i], s)) return false;
        }
        stack[i] = std::move(srcs);
      } else if (arguments_[i].kind == Argument::kOthers) {
        c10::List<at::Tensor> others;
        for (; next < count; ++next) {
          at::Tensor other;
          if (args[next] == Py_None) continue;
          if (!take(args[next], other)) return false;
          others.push_back(std::move(other));
        }
        stack[i] = std::move(others);
      }
    }
    return next == count;
  }

  // Of the modules' type; without an op the module is always called.
  py::object type_, forward_;
  std::unique_ptr<Op> op_;
  std::vector<Argument> arguments_, excluded_;
  // Of the module that was called last.
  std::vector<Contents> held_;
  std::vector<PyObject*> hooks_, values_;  // of its arguments; what is held owns them
  Stack constants_;                        // the arguments, empty where sources belong
};

PyObject* call_site(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Site& site = *static_cast<Site*>(PyCapsule_GetPointer(self, nullptr));
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "torchq: a site must be called with a module, got nothing.");
    return nullptr;
  }
  try {
    Stack stack;
    if (keywords == nullptr && !is_observed() &&
        site.push_all(args[0], args + 1, static_cast<size_t>(count - 1), stack)) {
      return site.run(std::move(stack));
    }
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
  return PyObject_Vectorcall(args[0], args + 1, static_cast<size_t>(count - 1), keywords);
}

PyMethodDef kCallSite = {"site", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_site)),
                         METH_FASTCALL | METH_KEYWORDS, nullptr};

}  // namespace

PyObject* new_site(PyObject*, PyObject*) {
  const py::capsule owner(new Site, [](void* pointer) { delete static_cast<Site*>(pointer); });
  return PyCFunction_NewEx(&kCallSite, owner.ptr(), nullptr);
}

}  // namespace torchq
