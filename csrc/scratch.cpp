// SPDX-License-Identifier: Apache-2.0
#include "scratch.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace torchq {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kSlack = 64;  // vectors may be read past the last value, never past this
constexpr size_t kFirstBlock = size_t{1} << 16;
constexpr size_t kLargestGrowth = size_t{1} << 26;

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
};

Arena& arena() {
  static thread_local Arena instance;
  return instance;
}

}  // namespace

ScratchFrame::ScratchFrame() : block_(arena().block), used_(arena().used) {}

ScratchFrame::~ScratchFrame() {
  Arena& a = arena();
  a.block = block_;
  a.used = used_;
  if (block_ == 0 && used_ == 0 && a.blocks.size() > 1) {  // outermost: one block next time
    size_t size = 0;
    for (const auto& block : a.blocks) size += block->size;
    a.blocks.clear();
    try {
      a.blocks.push_back(std::make_unique<Block>(size));
    } catch (const std::bad_alloc&) {  // the call is done; the next one starts from nothing
    }
  }
}

void* ScratchFrame::take_bytes(size_t bytes) {
  Arena& a = arena();
  const size_t need = (bytes + kSlack + kAlignment - 1) / kAlignment * kAlignment;
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
  return p;
}

int64_t scratch_bytes() { return total_bytes; }

}  // namespace torchq
