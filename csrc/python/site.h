// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/python_headers.h>

namespace torchq {

/// torchq._C.site(): see site.cpp.
PyObject* new_site(PyObject*, PyObject*);

}  // namespace torchq
