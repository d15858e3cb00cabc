// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/python_headers.h>

namespace torchq {

/// torchq._C.site(base): see site.cpp; `base` is that of the classes whose `_direct` counts.
PyObject* new_site(PyObject*, PyObject*);

}  // namespace torchq
