// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/python_headers.h>

namespace torchq {

/// torchq._C.tensors(): a list of all tensors and parameters; of subclasses, none.
PyObject* tensors(PyObject*, PyObject*);

}  // namespace torchq
