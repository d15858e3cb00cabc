// SPDX-License-Identifier: Apache-2.0
// Headers that most files above the kernels include. setup.py precompiles this file and passes it
// to each of them as -include: they compile in 0.4 of the time. No file includes it itself.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>
