// SPDX-License-Identifier: Apache-2.0
// One parallel region whose threads meet at barriers, for recurrent layers: every step depends on
// all of the step before.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>

#include "runtime/parallel.h"

namespace torchq {

/// Counts the parts that have arrived, not the threads: it is correct whatever number of threads
/// the region gets, as long as every thread runs its parts together and meets the barrier once for
/// all of them. Spins, then yields, so that threads that wait for one without a core give theirs
/// up. Where a yield costs a time slice, since a process that only computes shares the core, the
/// thread spins for longer from then on: it would give its own slice away at every barrier whose
/// other threads are late. (Sleeping until the last one arrives costs such a slice each time, too.)
class alignas(64) TeamBarrier {
 public:
  explicit TeamBarrier(int parts) : parts_(parts) {}

  /// `phase` is the thread's own count of the barriers it has met, 0 at first.
  void meet(int own_parts, int64_t& phase) {
    if (own_parts == parts_) return;
    const int64_t all = ++phase * parts_;
    if (arrived_.fetch_add(own_parts, std::memory_order_acq_rel) + own_parts >= all) return;
    for (int spins = 0; arrived_.load(std::memory_order_acquire) < all;) {
      if (spins < tuning::kSpins || (spins < tuning::kMostSpins && loses_slices_)) {
        ++spins;
        pause();
      } else {
        loses_slices_ = yield_takes_a_slice();
        if (loses_slices_) spins = 0;
      }
    }
  }

 private:
  static bool yield_takes_a_slice() {
    using Clock = std::chrono::steady_clock;
    const auto before = Clock::now();
    sched_yield();
    return Clock::now() - before > std::chrono::milliseconds(1);
  }

  /// True if this thread's last yield took a time slice.
  static inline thread_local bool loses_slices_ = false;

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
