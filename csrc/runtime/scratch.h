// SPDX-License-Identifier: Apache-2.0
// Thread-local memory for one op call: grows until it fits, then stays, so that a call whose shapes
// were seen before allocates only its output. Beyond a bound for all threads it is freed after the
// call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/sizes.h"

namespace torchq {

/// Everything taken from a frame is released when it goes out of scope; frames of one thread nest.
class ScratchFrame {
 public:
  ScratchFrame();
  ~ScratchFrame();
  ScratchFrame(const ScratchFrame&) = delete;
  ScratchFrame& operator=(const ScratchFrame&) = delete;

  /// As many uninitialized values as the sizes' product, aligned to 64 bytes, with 64 readable
  /// bytes behind them. Throws TooLarge where 64 bits cannot hold that.
  template <class T, class... Sizes>
  T* take(Sizes... sizes) {
    const int64_t size = sizeof(T);
    return static_cast<T*>(take_bytes(product_of({size, static_cast<int64_t>(sizes)...})));
  }

 private:
  void* take_bytes(int64_t bytes);
  size_t block_, used_;
};

/// Bytes of scratch held by all threads together.
int64_t scratch_bytes();

/// Frees the scratch of all threads but those that run an op at this moment; returns its bytes.
int64_t release_scratch();

}  // namespace torchq
