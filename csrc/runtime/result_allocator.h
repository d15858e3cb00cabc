// SPDX-License-Identifier: Apache-2.0
// Where ops put their results: new tensors, in memory that results no longer in use have left.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchq {

// Note [Memory of results]
// malloc gives memory that was freed back to the system, by its size and by its place, and takes it
// again page by page: on two virtual cores of a Zen 5, 2.3 us each. MobileNet-V2 takes 1.2 ms where
// the pages stay and 2.4 ms where they do not, by luck. A network frees what its next layers, and
// its next call, take again. So some freed memory is kept for them, of the whole process, up to
// kMostIdleBytes: blocks of kLeastKeptBytes and more. A block serves one tensor at a time, from its
// allocation until its storage dies.

/// A tensor as at::detail::empty_cpu gives it: contiguous, uninitialized.
at::Tensor empty_dst(c10::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor empty_dst(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

/// As at::empty_like gives it: in the order of `src` in memory.
at::Tensor empty_dst_like(const at::Tensor& src, at::ScalarType dtype);

/// Bytes that are kept for results to come.
int64_t idle_bytes();

/// Frees them; returns how many there were.
int64_t release_idle();

}  // namespace torchq
