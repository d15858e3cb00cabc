// SPDX-License-Identifier: Apache-2.0
#include "runtime/result_allocator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "runtime/sizes.h"

namespace torchq {
namespace {

constexpr size_t kLeastKeptBytes = size_t{1} << 14;
constexpr size_t kMostIdleBytes = size_t{1} << 26;
constexpr int kMostIdleBlocks = 64;

/// In front of a block's data, which so is aligned to 64 bytes as torch's own.
struct alignas(64) Block {
  size_t bytes;   // of the data
  void* address;  // of what was allocated

  void* data() { return this + 1; }
  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
};

/// Small blocks are aligned by hand: malloc with an alignment takes 30 to 90 ns, without 5 to 20.
Block* new_block(size_t bytes) {
  if (bytes >= kLeastKeptBytes) {
    void* const address = c10::alloc_cpu(sizeof(Block) + bytes);
    return new (address) Block{bytes, address};
  }
  size_t size = sizeof(Block) + bytes + alignof(Block);
  void* const address = std::malloc(size);
  if (address == nullptr) throw std::bad_alloc();
  void* place = address;
  return new (std::align(alignof(Block), sizeof(Block) + bytes, place, size)) Block{bytes, address};
}

void delete_block(Block* block) {
  if (block->bytes >= kLeastKeptBytes) return c10::free_cpu(block->address);
  std::free(block->address);
}

/// Blocks without a tensor, the one that was freed last at the end. Nobody waits for the lock, so
/// that a process forked while another thread held it is none the worse.
class IdleBlocks {
 public:
  /// The smallest block that holds `bytes`, of these the last freed: it is in a cache. Not one of
  /// more than twice the size. Null if there is none.
  Block* take(size_t bytes) {
    if (busy_.test_and_set(std::memory_order_acquire)) return nullptr;
    int best = -1;
    for (int i = 0; i < count_; ++i) {
      if (sizes_[i] < bytes || sizes_[i] / 2 > bytes) continue;
      if (best < 0 || sizes_[i] <= sizes_[best]) best = i;
    }
    Block* const block = best < 0 ? nullptr : remove(best);
    busy_.clear(std::memory_order_release);
    return block;
  }

  /// Keeps the block, and frees the oldest ones if there are too many.
  void put(Block* block) {
    if (block->bytes < kLeastKeptBytes || block->bytes > kMostIdleBytes ||
        busy_.test_and_set(std::memory_order_acquire)) {
      delete_block(block);
      return;
    }
    while (count_ == kMostIdleBlocks || bytes() + block->bytes > kMostIdleBytes) {
      delete_block(remove(0));
    }
    blocks_[count_] = block;
    sizes_[count_++] = block->bytes;
    bytes_.store(bytes() + block->bytes, std::memory_order_relaxed);
    busy_.clear(std::memory_order_release);
  }

  /// Frees all blocks, unless another thread takes or puts one at this moment; returns their bytes.
  size_t release() {
    if (busy_.test_and_set(std::memory_order_acquire)) return 0;
    const size_t released = bytes();
    while (count_ > 0) delete_block(remove(count_ - 1));
    busy_.clear(std::memory_order_release);
    return released;
  }

  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  Block* remove(int i) {
    Block* const block = blocks_[i];
    bytes_.store(bytes() - sizes_[i], std::memory_order_relaxed);
    std::copy(blocks_ + i + 1, blocks_ + count_, blocks_ + i);
    std::copy(sizes_ + i + 1, sizes_ + count_, sizes_ + i);
    --count_;
    return block;
  }

  std::atomic_flag busy_;
  std::atomic<size_t> bytes_ = 0;
  int count_ = 0;
  Block* blocks_[kMostIdleBlocks] = {};
  size_t sizes_[kMostIdleBlocks] = {};
};

// Tensors may die after all else in the process: it is never destroyed.
constinit IdleBlocks idle_blocks;

class DstAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_data, at::kCPU};
    Block* block = bytes < kLeastKeptBytes ? nullptr : idle_blocks.take(bytes);
    if (block == nullptr) block = new_block(bytes);
    c10::profiledCPUMemoryReporter().New(block->data(), bytes);
    return {block->data(), block->data(), &free_data, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }

  void copy_data(void* dst, const void* src, size_t bytes) const override {
    default_copy_data(dst, src, bytes);
  }

 private:
  static void free_data(void* data) {
    if (data == nullptr) return;
    c10::profiledCPUMemoryReporter().Delete(data);
    idle_blocks.put(Block::of(data));
  }
};

c10::Allocator* allocator() {
  static DstAllocator* const instance = new DstAllocator;  // never destroyed
  return instance;
}

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

}  // namespace

at::Tensor empty_dst(c10::IntArrayRef sizes, at::ScalarType dtype) {
  check_sizes(sizes, dtype);
  return at::detail::empty_generic(sizes, allocator(), kCpu, dtype, std::nullopt);
}

at::Tensor empty_dst(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  check_sizes(sizes, dtype);
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kCpu, dtype);
}

at::Tensor empty_dst_like(const at::Tensor& src, at::ScalarType dtype) {
  if (src.is_non_overlapping_and_dense()) return empty_dst(src.sizes(), src.strides(), dtype);
  return empty_dst(src.sizes(), at::infer_dense_strides(src.sizes(), src.strides()), dtype);
}

int64_t idle_bytes() { return static_cast<int64_t>(idle_blocks.bytes()); }

int64_t release_idle() { return static_cast<int64_t>(idle_blocks.release()); }

}  // namespace torchq
