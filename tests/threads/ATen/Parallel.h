// SPDX-License-Identifier: Apache-2.0
// In place of torch's header: std::thread, whose synchronization ThreadSanitizer sees. It does not
// see that of libgomp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define AT_PARALLEL_OPENMP 1

namespace at {

/// What ops ask for, and what a region gets.
inline int num_threads = 4, region_threads = 4;

inline int get_num_threads() { return num_threads; }
inline bool in_parallel_region() { return false; }

/// body(begin, end) for consecutive pieces of [begin, end), each on a thread of its own.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t /*grain*/, const Body& body) {
  const int64_t size = end - begin, pieces = std::min<int64_t>(size, region_threads);
  const auto first = [&](int64_t i) { return begin + size * i / pieces; };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < pieces; ++i) {
    threads.emplace_back([&, i] { body(first(i), first(i + 1)); });
  }
  body(begin, first(1));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace at
