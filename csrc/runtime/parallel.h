// SPDX-License-Identifier: Apache-2.0
// Parallel parts of an op: at::parallel_for, with the floating-point mode that the numerics
// contract requires on every worker. Elementwise ops leave their split to TensorIterator::for_each
// and set the mode inside it.
#pragma once

// Without -fopenmp, at::parallel_for compiles to a serial loop and says nothing.
#ifndef _OPENMP
#error "compile torchq's ops with -fopenmp"
#endif

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cpu_tuning.h"
#include "runtime/float_mode.h"

namespace torchq {

/// Threads worth using for `cost` multiply-accumulates, or other units of work, each with its
/// grain.
inline int threads_for(int64_t cost, int64_t serial_below = tuning::kProductGrain) {
  if (cost < serial_below || at::in_parallel_region()) return 1;
  return at::get_num_threads();
}

/// body(i) for i in [0, parts), each part on one thread.
template <class Body>
void parallel_parts(int parts, const Body& body) {
  if (parts == 1) {
    const FloatMode mode;
    body(0);
    return;
  }
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    const FloatMode mode;
    for (int64_t i = begin; i < end; ++i) body(static_cast<int>(i));
  });
}

/// Part `i` of [0, size) cut into `parts` pieces whose sizes differ by at most one.
struct Range {
  int64_t begin, end;
};
inline Range part_of(int64_t size, int parts, int i) {
  return {size * i / parts, size * (i + 1) / parts};
}

/// body(range) for the pieces of [0, size), one for each of up to `threads` threads.
template <class Body>
void parallel_ranges(int64_t size, int threads, const Body& body) {
  const int parts = static_cast<int>(std::min<int64_t>(threads, size));
  parallel_parts(parts, [&](int part) { body(part_of(size, parts, part)); });
}

}  // namespace torchq
