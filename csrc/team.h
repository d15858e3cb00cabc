// SPDX-License-Identifier: Apache-2.0
// One parallel region whose threads meet at barriers: what recurrent layers need, which depend on
// all of the step before.
#pragma once

#include <sched.h>

#include <atomic>

#include "parallel.h"

namespace torchq {

/// Counts the parts that have arrived, not the threads: it is correct whatever number of threads
/// the region gets, as long as every thread runs its parts together and meets the barrier once for
/// all of them. Spins, then yields, so that threads that wait for one without a core give theirs
/// up. (Sleeping until the last one arrives is worse where a core is shared with another process: a
/// thread that was woken waits for that one's time slice, at every barrier.)
class alignas(64) TeamBarrier {
 public:
  explicit TeamBarrier(int parts) : parts_(parts) {}

  /// `phase` is the thread's own count of the barriers it has met, 0 at first.
  void meet(int own_parts, int64_t& phase) {
    if (own_parts == parts_) return;
    const int64_t all = ++phase * parts_;
    if (arrived_.fetch_add(own_parts, std::memory_order_acq_rel) + own_parts >= all) return;
    for (int spins = 0; arrived_.load(std::memory_order_acquire) < all; ++spins) {
      if (spins < kSpins) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  // About 20 us on a Zen 4: longer than threads that run are apart.
  static constexpr int kSpins = 1000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<int64_t> arrived_{0};
  const int parts_;
};

/// body(begin, end) for pieces of [0, parts) that run at the same time, each on a thread of its
/// own.
template <class Body>
void parallel_team(int parts, const Body& body) {
#if AT_PARALLEL_OPENMP
  if (parts > 1) {
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      const FloatMode mode;
      body(static_cast<int>(begin), static_cast<int>(end));
    });
    return;
  }
#endif
  // Other thread pools may run the pieces one after another, which would never meet.
  const FloatMode mode;
  body(0, parts);
}

}  // namespace torchq
