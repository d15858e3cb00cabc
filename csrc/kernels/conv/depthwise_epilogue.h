// SPDX-License-Identifier: Apache-2.0
// Folded 8-bit epilogue of both strategies along a row (depthwise.h): words in lane order to bytes.
#pragma once

#include "kernels/conv/depthwise_chunk.h"
#include "kernels/epilogue/epilogue.h"

namespace {

/// Parameters of the folded epilogue from words to bytes. Held by value: stores of bytes could
/// alias a reference.
struct ByteEpilogue {
  bool is_signed, clamp;
  bool plain;              // neither, and all lanes have channels
  const uint8_t *lo, *hi;  // vectors of bounds
  int count;               // bytes of each row
};

template <class Isa>
TORCHQ_INLINE ByteEpilogue byte_epilogue(const DepthwiseChunk<Isa>& chunk, const Epilogue& e) {
  const bool is_signed = e.dst_dtype == DType::s8;
  return {is_signed, e.clamp,  !is_signed && !e.clamp && chunk.count == chunk.width,
          chunk.lo,  chunk.hi, chunk.count};
}

/// Two vectors of words, in lane order, to the bytes of one pixel of `split` rows.
template <class Isa>
TORCHQ_INLINE void store_words(const ByteEpilogue& f, uint8_t* pixel, const int64_t* offset,
                               int split, typename Isa::Bytes low, typename Isa::Bytes high) {
  auto bytes = Isa::pack_bytes(low, high, f.is_signed);
  if (f.clamp) {
    constexpr int kBytes = sizeof bytes;
    bytes = Isa::max_bytes(bytes, Isa::load_channels(f.lo, kBytes), f.is_signed);
    bytes = Isa::min_bytes(bytes, Isa::load_channels(f.hi, kBytes), f.is_signed);
  }
  Isa::store_rows(pixel, offset, split, bytes, f.count);
}

}  // namespace
