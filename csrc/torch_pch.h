// SPDX-License-Identifier: Apache-2.0
// Headers of files that register ops, or call torch's. setup.py precompiles this file, passes it to
// them as -include, and tensor_pch.h to the other files above the kernels. No file includes either.
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
