// SPDX-License-Identifier: Apache-2.0
#include "runtime/scratch.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace torchq {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSlack = 64;  // vectors may be read past the last value, never past this
constexpr size_t kFirstBlock = size_t{1} << 16;
constexpr size_t kLargestGrowth = size_t{1} << 26;
constexpr size_t kAlwaysKept = size_t{1} << 20;  // by a thread
// By all threads. Measured on Zen 4: convolutions that need more take 0 to 17 % longer where it is
// freed after each call (78 MB, 7x7 to 64 channels with stride 4: 385 instead of 330 ms), as its
// pages have to come from the system again.
constexpr int64_t kMostKept = int64_t{1} << 26;

std::atomic<int64_t> total_bytes{0};

struct Block {
  explicit Block(size_t bytes)
      : data(static_cast<char*>(::operator new(bytes, std::align_val_t{kAlignment}))), size(bytes) {
    total_bytes += static_cast<int64_t>(size);
  }
  ~Block() {
    ::operator delete(data, std::align_val_t{kAlignment});
    total_bytes -= static_cast<int64_t>(size);
  }
  char* data;
  size_t size;
};

struct Arena {
  std::vector<std::unique_ptr<Block>> blocks;
  size_t block = 0;  // current block
  size_t used = 0;   // of the current block
  size_t most = 0;   // of all blocks, since the outermost frame opened
  int frames = 0;    // that are open
  /// While a frame is open, or someone frees the blocks.
  std::atomic_flag busy;
  std::atomic<bool> owned = true;  // by a thread
  Arena* next = nullptr;

  /// Waits for nothing but another thread's release_scratch().
  void enter() {
    while (busy.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void leave() { busy.clear(std::memory_order_release); }

  /// Returns the bytes of the blocks before `end`.
  size_t size(size_t end) const {
    size_t bytes = 0;
    for (size_t i = 0; i < end; ++i) bytes += blocks[i]->size;
    return bytes;
  }
  size_t size() const { return size(blocks.size()); }
};

// All there ever were: no lock, so that a fork does not matter. Those of ended threads serve new
// ones.
constinit std::atomic<Arena*> arenas{nullptr};

Arena* new_arena() {
  for (Arena* a = arenas.load(std::memory_order_acquire); a != nullptr; a = a->next) {
    bool owned = false;
    if (a->owned.compare_exchange_strong(owned, true)) return a;
  }
  Arena* const made = new Arena;
  made->next = arenas.load(std::memory_order_relaxed);
  while (!arenas.compare_exchange_weak(made->next, made, std::memory_order_release)) {
  }
  return made;
}

struct Owner {
  Arena* const arena = new_arena();
  ~Owner() {
    arena->enter();
    arena->blocks.clear();
    arena->leave();
    arena->owned = false;
  }
};

Arena& arena() {
  static thread_local const Owner owner;
  return *owner.arena;
}

/// After a call: one block next time, or none where all threads hold much.
void tidy(Arena& a) {
  const size_t most = std::exchange(a.most, 0);
  const bool fits = a.blocks.size() <= 1;
  if (fits && (total_bytes <= kMostKept || a.size() <= kAlwaysKept)) return;
  a.blocks.clear();
  const int64_t total = total_bytes + static_cast<int64_t>(most);
  if (fits || (total > kMostKept && most > kAlwaysKept)) return;
  try {
    a.blocks.push_back(std::make_unique<Block>(most));
  } catch (const std::bad_alloc&) {  // the call is done; the next one starts from nothing
  }
}

}  // namespace

ScratchFrame::ScratchFrame() {
  Arena& a = arena();
  if (a.frames++ == 0) a.enter();
  block_ = a.block;
  used_ = a.used;
}

ScratchFrame::~ScratchFrame() {
  Arena& a = arena();
  a.block = block_;
  a.used = used_;
  if (--a.frames > 0) return;
  tidy(a);
  a.leave();
}

void* ScratchFrame::take_bytes(int64_t bytes) {
  Arena& a = arena();
  const size_t need =
      (static_cast<size_t>(bytes) + kSlack + kAlignment - 1) / kAlignment * kAlignment;
  while (a.block < a.blocks.size() && a.used + need > a.blocks[a.block]->size) {
    ++a.block;
    a.used = 0;
  }
  if (a.block == a.blocks.size()) {
    const size_t last = a.blocks.empty() ? kFirstBlock / 2 : a.blocks.back()->size;
    a.blocks.push_back(std::make_unique<Block>(std::max(need, std::min(2 * last, kLargestGrowth))));
  }
  char* p = a.blocks[a.block]->data + a.used;
  a.used += need;
  if (a.block > 0 || a.blocks.size() > 1) a.most = std::max(a.most, a.size(a.block) + a.used);
  return p;
}

int64_t scratch_bytes() { return total_bytes; }

int64_t release_scratch() {
  size_t released = 0;
  for (Arena* a = arenas.load(std::memory_order_acquire); a != nullptr; a = a->next) {
    if (a->busy.test_and_set(std::memory_order_acquire)) continue;
    released += a->size();
    a->blocks.clear();
    a->leave();
  }
  return static_cast<int64_t>(released);
}

}  // namespace torchq
