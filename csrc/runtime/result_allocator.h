// SPDX-License-Identifier: Apache-2.0
// Allocates results from a process-wide cache of freed blocks.
#pragma once

#include <ATen/core/Tensor.h>

namespace torchq {

// Note [Memory of results]
// malloc returns freed memory to the system, depending on its size and place, and gets it back page
// by page: 2.3 us a page on two virtual cores of a Zen 5. MobileNet-V2 takes 1.2 ms where the pages
// stay and 2.4 ms where they do not, by luck. The memory that a network frees fits its next layers
// and its next call. So freed blocks of kLeastKeptBytes and more are kept for the whole process, up
// to kMostIdleBytes in all. A block serves one tensor at a time, from its allocation until its
// storage dies.

/// Returns a contiguous, uninitialized tensor, as at::detail::empty_cpu does; throws TooLarge where
/// 64 bits cannot hold its sizes.
at::Tensor empty_dst(c10::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor empty_dst(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

/// Returns a tensor in the memory order of `src`, as at::empty_like does.
at::Tensor empty_dst_like(const at::Tensor& src, at::ScalarType dtype);

/// Returns the bytes of free blocks that are kept.
int64_t idle_bytes();

/// Frees them; returns their number.
int64_t release_idle();

}  // namespace torchq
