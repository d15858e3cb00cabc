// SPDX-License-Identifier: Apache-2.0
// torchq._C.site(): a place in a converted model's code where one of its modules is called.
//
// site(module, *args) is module(*args). A layer's forward comes to one op, most of whose arguments
// lie in the module. On its way there nn.Module touches dozens of objects, which have left the
// caches while a network's weights went through them: 6 us a layer in MobileNet-V2. A site keeps
// the arguments and only looks whether the module still holds the same. Anything out of the
// ordinary goes to the module: hooks, another forward, sources of other dtypes, tracing, subclasses
// of Tensor, options that `_direct` excludes. What `_direct` says: torchq/nn/direct_call.py. Not a
// part of libtorchq.so, which programs without Python load too.
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "python/module_state.h"
#include "python/op.h"
#include "runtime/glibc.h"

namespace torchq {
namespace {

/// None, False or 0, without running anyone's code.
bool is_unset(PyObject* value) {
  if (value == nullptr || value == Py_None || value == Py_False) return value != nullptr;
  int overflow = 0;
  return PyLong_CheckExact(value) && PyLong_AsLongAndOverflow(value, &overflow) == 0 &&
         overflow == 0;
}

/// An argument of torchq/nn/direct_call.py, whose kinds these are.
struct Argument {
  explicit Argument(const py::tuple& direct) : kind(static_cast<Kind>(direct[0].cast<int>())) {
    for (const py::handle name : direct[1].cast<py::tuple>()) {
      path.push_back(interned(name.cast<std::string>()));
    }
  }

  enum Kind { kState, kNone, kSource, kSources, kOthers, kGiven } kind;
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

/// A list that was read. Code may replace its items.
struct List {
  explicit List(PyObject* value) : object(py::reinterpret_borrow<py::object>(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      items.push_back(py::reinterpret_borrow<py::object>(PyList_GET_ITEM(value, i)));
    }
  }

  bool is_unchanged() const {
    PyObject* const list = object.ptr();
    if (PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(items.size())) return false;
    for (size_t i = 0; i < items.size(); ++i) {
      if (PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)) != items[i].ptr()) return false;
    }
    return true;
  }

  py::object object;
  std::vector<py::object> items;
};

/// Ops by name, never freed: a call may run while nobody else knows its op any more.
const Op& op_of(const std::string& name) {
  static auto* const ops = new std::unordered_map<std::string, std::unique_ptr<const Op>>;
  std::unique_ptr<const Op>& op = (*ops)[name];
  if (op == nullptr) op = std::make_unique<const Op>(("torchq::" + name).c_str());
  return *op;
}

/// `_direct` of a type.
struct Recipe {
  explicit Recipe(const py::tuple& direct)
      : op(op_of(direct[0].cast<std::string>())), forward(direct[3]) {
    for (const py::handle argument : direct[1].cast<py::tuple>()) {
      arguments.emplace_back(py::reinterpret_borrow<py::tuple>(argument));
    }
    for (const py::handle name : direct[2].cast<py::tuple>()) {
      excluded.push_back(interned(name.cast<std::string>()));
    }
  }

  const Op& op;
  std::vector<Argument> arguments;
  std::vector<py::object> excluded;
  py::object forward;
};

/// A module as it was at one moment, and the call of its op. Nothing changes it: dropping a
/// reference may let other threads run, into the same site.
class State {
 public:
  State(PyObject* module, PyTypeObject* base)
      : type_(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(module)))) {
    if (!PyType_IsSubtype(Py_TYPE(module), base)) return;
    const py::object direct = py::getattr(type_, "_direct", py::none());
    if (!PyTuple_Check(direct.ptr())) return;
    recipe_.emplace(py::reinterpret_borrow<py::tuple>(direct));
    const Scope scope(module);
    if (scope.dicts[0] == nullptr) return;
    hold(nullptr, scope);
    for (const py::object& hooks : module_call().hooks)
      hooks_.push_back(item(scope.dicts[0], hooks));
    for (const py::object& hooks : module_call().global_hooks) hooks_.push_back(hooks.ptr());
    suits_ = only_forwards(scope.dicts[0]) && read(scope);
  }

  bool is_of(PyObject* module) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(module)) != type_.ptr()) return false;
    if (!recipe_) return true;
    // a module inside is alive if the one around it still holds it, dicts if the module's own does
    for (const auto& [inner, contents] : held_) {
      const auto& [own, buffers, modules] = contents;
      if (!own.are_those_of(dict_of(inner == nullptr ? module : inner))) return false;
      if (!buffers.are_unchanged() || !modules.are_unchanged()) return false;
    }
    return std::all_of(lists_.begin(), lists_.end(),
                       [](const List& list) { return list.is_unchanged(); });
  }

  /// The op's arguments; false where the module has to be called.
  bool push_all(PyObject* const* args, size_t count, Stack& stack) const {
    if (!suits_ || !is_attribute(type_, module_call().forward, recipe_->forward)) return false;
    for (size_t i = 0; i < module_call().calls.size(); ++i) {
      if (!is_attribute(type_, module_call().call_names[i], module_call().calls[i])) return false;
    }
    if (!std::all_of(hooks_.begin(), hooks_.end(), &is_empty)) return false;
    stack = constants_;
    return push_tensors(args, count, stack);
  }

  PyObject* run(Stack&& stack) const { return recipe_->op.run(std::move(stack)); }

 private:
  void hold(PyObject* inner, const Scope& scope) {
    const auto& [own, buffers, modules] = scope.dicts;
    held_.push_back({inner, {Contents(own), Contents(buffers), Contents(modules)}});
  }

  static bool only_forwards(PyObject* own) {
    PyObject* const compiled = item(own, module_call().compiled);
    return (compiled == nullptr || compiled == Py_None) &&
           item(own, module_call().forward) == nullptr &&
           item(own, module_call().call_names[1]) == nullptr;
  }

  bool read(const Scope& scope) {
    const Op& op = recipe_->op;
    const std::vector<Argument>& arguments = recipe_->arguments;
    if (!op.served || arguments.size() > op.parameters.size()) return false;
    for (const py::object& option : recipe_->excluded) {
      if (!is_unset(scope.find(option))) return false;
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      PyObject* const value = arguments[i].path.empty() ? Py_None : find(scope, arguments[i]);
      if (value == nullptr) return false;
      values_.push_back(py::reinterpret_borrow<py::object>(value));
      if (PyList_Check(value)) lists_.emplace_back(value);
      const bool is_state = arguments[i].kind == Argument::kState;
      if (!is_state || THPVariable_CheckExact(value)) {
        if (arguments[i].kind != Argument::kNone) varying_.push_back(i);
        constants_.emplace_back();
      } else if (!op.push(i, value, constants_)) {
        return false;
      }
    }
    for (size_t i = arguments.size(); i < op.parameters.size(); ++i) {
      if (!op.parameters[i].default_value) return false;
      constants_.push_back(*op.parameters[i].default_value);
    }
    return true;
  }

  /// The attribute, None where a module on the way is None, or null; borrowed.
  PyObject* find(const Scope& scope, const Argument& argument) {
    PyObject* value = scope.find(argument.path[0]);
    for (size_t i = 1; i < argument.path.size() && value != nullptr && value != Py_None; ++i) {
      const Scope inner(value);
      hold(value, inner);
      value = inner.find(argument.path[i]);
    }
    return value;
  }

  bool push_tensors(PyObject* const* args, size_t count, Stack& stack) const {
    size_t next = 0;
    for (const size_t i : varying_) {
      PyObject* const value = values_[i].ptr();
      at::Tensor tensor;
      switch (recipe_->arguments[i].kind) {
        case Argument::kNone:
          break;
        case Argument::kState:
          if (!take(value, tensor)) return false;
          stack[i] = std::move(tensor);
          break;
        case Argument::kSource:
          if (next == count || !take(args[next], tensor)) return false;
          if (!has_dtype(tensor, value, next++)) return false;
          stack[i] = std::move(tensor);
          break;
        case Argument::kSources:
          if (next == count || !push_list(args[next++], value, stack[i])) return false;
          break;
        case Argument::kOthers:
          if (!push_others(args + next, args + count, stack[i])) return false;
          next = count;
          break;
        case Argument::kGiven:
          if (!push_given(i, next < count ? args[next] : nullptr, stack[i])) return false;
          next = std::min(next + 1, count);
      }
    }
    return next == count;
  }

  bool push_given(size_t index, PyObject* value, c10::IValue& to) const {
    const Op& op = recipe_->op;
    if (value == nullptr) {
      if (!op.parameters[index].default_value) return false;
      to = *op.parameters[index].default_value;
      return true;
    }
    Stack one;
    if (!op.push(index, value, one)) return false;
    to = std::move(one[0]);
    return true;
  }

  static bool push_list(PyObject* list, PyObject* dtypes, c10::IValue& to) {
    c10::List<at::Tensor> srcs;
    if (!take(list, srcs)) return false;
    for (size_t i = 0; i < srcs.size(); ++i) {
      if (!has_dtype(srcs.get(i), dtypes, i)) return false;
    }
    to = std::move(srcs);
    return true;
  }

  static bool push_others(PyObject* const* begin, PyObject* const* end, c10::IValue& to) {
    c10::List<at::Tensor> others;
    for (at::Tensor tensor; begin != end; ++begin) {
      if (*begin == Py_None) continue;
      if (!take(*begin, tensor)) return false;
      others.push_back(tensor);
    }
    to = std::move(others);
    return true;
  }

  py::object type_;
  std::optional<Recipe> recipe_;  // without one the module is always called
  struct Held {
    PyObject* module;  // inside the one that is called; null for that
    std::array<Contents, 3> contents;
  };
  std::vector<Held> held_;
  std::vector<PyObject*> hooks_;    // in the module's dict, as long as its contents are unchanged
  std::vector<py::object> values_;  // one for each of the recipe's arguments
  std::vector<List> lists_;         // those of them that are lists
  std::vector<size_t> varying_;     // the arguments that are tensors
  Stack constants_;                 // the op's arguments, empty for tensors
  bool suits_ = false;
};

struct Site {
  py::object base;  // of the classes whose `_direct` counts
  std::shared_ptr<const State> state;
};

PyObject* call_site(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Site& site = *static_cast<Site*>(PyCapsule_GetPointer(self, nullptr));
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "torchq: a site must be called with a module, got nothing.");
    return nullptr;
  }
  try {
    if (keywords == nullptr && !is_observed()) {
      std::shared_ptr<const State> state = site.state, before;
      if (state == nullptr || !state->is_of(args[0])) {
        state = std::make_shared<const State>(args[0],
                                              reinterpret_cast<PyTypeObject*>(site.base.ptr()));
        before = std::exchange(site.state, state);
      }
      Stack stack;
      if (state->push_all(args + 1, static_cast<size_t>(count - 1), stack)) {
        return state->run(std::move(stack));
      }
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

/// site(base): see the top of the file; `base` is that of the classes whose `_direct` counts.
PyObject* new_site(PyObject*, PyObject* base) {
  try {
    module_call();  // as torch has it now, not as someone patches it later
    if (!PyType_Check(base)) throw py::type_error("torchq: the base of a site must be a class.");
    const py::capsule owner(new Site{py::reinterpret_borrow<py::object>(base), nullptr},
                            [](void* pointer) { delete static_cast<Site*>(pointer); });
    return PyCFunction_NewEx(&kCallSite, owner.ptr(), nullptr);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

PyMethodDef kMethods[] = {{"site", &new_site, METH_O, nullptr}, {}};
PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT, "_C", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace torchq

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&torchq::kModule); }
