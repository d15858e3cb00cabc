// SPDX-License-Identifier: Apache-2.0
#include "padding.h"

#include <c10/util/Exception.h>

#include <cstring>

#include "../checks.h"

namespace torchq {
namespace {

constexpr int64_t kMaxPaddedBytes = int64_t{1} << 40;

}  // namespace

Source source_of(const ChannelsLast& src, const Window& window) {
  return {bytes_of(src.tensor),
          src.batch,
          src.channels,
          {src.size[0], src.size[1], src.size[2]},
          window};
}

Source pad(const char* op, ScratchFrame& scratch, const Source& s, int32_t zero_point) {
  Source padded = s;
  for (int d = 0; d < 3; ++d) {
    padded.size[d] += s.window.pad_begin[d] + s.window.pad_end[d];
    padded.window.pad_begin[d] = padded.window.pad_end[d] = 0;
  }
  int64_t bytes = s.batch;
  for (const int64_t factor : {s.channels, padded.size[0], padded.size[1], padded.size[2]}) {
    TORCH_CHECK_VALUE(factor == 0 || bytes <= kMaxPaddedBytes / factor, "torchq.", op,
                      ": padding src to ", c10::IntArrayRef(padded.size, 3), " with batch ",
                      s.batch, " and ", s.channels,
                      " channels takes more than 2^40 bytes. Use less padding.");
    bytes *= factor;
  }
  uint8_t* data = scratch.take<uint8_t>(bytes);
  const Window& w = s.window;
  uint8_t* dst = data;
  const uint8_t* src = s.data;
  int64_t gap = 0;  // zero points before the next row of src
  const auto fill_gap = [&] {
    std::memset(dst, static_cast<uint8_t>(zero_point), static_cast<size_t>(gap));
    dst += gap;
    gap = 0;
  };
  for (int64_t n = 0; n < s.batch; ++n) {
    gap += w.pad_begin[0] * padded.pitch(0);
    for (int64_t d = 0; d < s.size[0]; ++d) {
      gap += w.pad_begin[1] * padded.pitch(1);
      for (int64_t h = 0; h < s.size[1]; ++h) {
        gap += w.pad_begin[2] * s.channels;
        fill_gap();
        std::memcpy(dst, src, static_cast<size_t>(s.pitch(1)));
        dst += s.pitch(1);
        src += s.pitch(1);
        gap += w.pad_end[2] * s.channels;
      }
      gap += w.pad_end[1] * padded.pitch(1);
    }
    gap += w.pad_end[0] * padded.pitch(0);
  }
  fill_gap();
  padded.data = data;
  return padded;
}

Source copy_for_overread(ScratchFrame& scratch, const Source& s) {
  const int64_t bytes = s.batch * s.image_bytes();
  uint8_t* data = scratch.take<uint8_t>(bytes);
  std::memcpy(data, s.data, static_cast<size_t>(bytes));
  Source copy = s;
  copy.data = data;
  return copy;
}

}  // namespace torchq
