// SPDX-License-Identifier: Apache-2.0
#include "padding.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace torchq {
namespace {

constexpr int64_t kMaxPaddedBytes = int64_t{1} << 40;

}  // namespace

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
  std::memset(data, static_cast<uint8_t>(zero_point),
              static_cast<size_t>(s.batch * padded.image_bytes()));
  const Window& w = s.window;
  for (int64_t row = 0; row < s.batch * s.size[0] * s.size[1]; ++row) {
    const int64_t n = row / (s.size[0] * s.size[1]), d = row / s.size[1] % s.size[0],
                  h = row % s.size[1];
    std::memcpy(data + n * padded.image_bytes() + (d + w.pad_begin[0]) * padded.pitch(0) +
                    (h + w.pad_begin[1]) * padded.pitch(1) + w.pad_begin[2] * padded.pitch(2),
                s.data + row * s.pitch(1), static_cast<size_t>(s.pitch(1)));
  }
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
