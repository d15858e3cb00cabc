// SPDX-License-Identifier: Apache-2.0
#include "ops/conv/padding.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <type_traits>

namespace torchq {
namespace {

constexpr int64_t kMaxPaddedBytes = int64_t{1} << 40;

/// dst = `bytes` of each pixel, side by side. A size that is known saves a call.
void copy_pixels(uint8_t* dst, const uint8_t* src, int64_t pixels, int64_t bytes, int64_t pitch) {
  const auto copy = [&](auto size) {
    for (int64_t x = 0; x < pixels; ++x, dst += bytes, src += pitch) {
      std::memcpy(dst, src, static_cast<size_t>(size));
    }
  };
  if (bytes == 0) return;  // a source without channels may be null, which memcpy does not take
  if (bytes == pitch) {
    std::memcpy(dst, src, static_cast<size_t>(pixels * bytes));
  } else if (bytes == 16) {
    copy(std::integral_constant<size_t, 16>{});
  } else if (bytes == 32) {
    copy(std::integral_constant<size_t, 32>{});
  } else {
    copy(bytes);
  }
}

}  // namespace

Source pad(const char* op, ScratchFrame& scratch, const Source& s, const TapAxis (&axes)[3],
           const PadOptions& options) {
  Source padded = s;
  int64_t before[3], behind[3];
  for (int d = 0; d < 3; ++d) {
    padded.size[d] = axes[d].src_size;
    before[d] = axes[d].in_front;
    behind[d] = padded.size[d] - s.size[d] - before[d];
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
  padded.channels = s.channels / options.groups;
  const int64_t group_bytes = bytes / options.groups;
  const uint8_t* src = s.data;
  int64_t at = 0, gap = 0;  // zero points before the next row of src
  const auto fill_gap = [&] {
    for (int64_t g = 0; g < options.groups; ++g) {
      std::memset(data + g * group_bytes + at, options.zero_point, static_cast<size_t>(gap));
    }
    at += gap;
    gap = 0;
  };
  const int64_t row_bytes = s.size[2] * padded.channels;
  const auto copy_row = [&] {
    for (int64_t g = 0; g < options.groups; ++g) {
      uint8_t* dst = data + g * group_bytes + at;
      copy_pixels(dst, src + g * padded.channels, s.size[2], padded.channels, s.channels);
      if (!options.flip) continue;
      for (int64_t i = 0; i < row_bytes; ++i) dst[i] ^= 0x80;
    }
    at += row_bytes;
    src += s.pitch(1);
  };
  for (int64_t n = 0; n < s.batch; ++n) {
    gap += before[0] * padded.pitch(0);
    for (int64_t d = 0; d < s.size[0]; ++d) {
      gap += before[1] * padded.pitch(1);
      for (int64_t h = 0; h < s.size[1]; ++h) {
        gap += before[2] * padded.channels;
        fill_gap();
        copy_row();
        gap += behind[2] * padded.channels;
      }
      gap += behind[1] * padded.pitch(1);
    }
    gap += behind[0] * padded.pitch(0);
  }
  fill_gap();
  padded.data = data;
  return padded;
}

Source move_last(ScratchFrame& scratch, const Source& s, int d) {
  Source moved = s;
  move_last(moved.size, d);
  const int64_t pitch = s.pitch(d), length = s.size[d];
  if (pitch == s.channels) return moved;
  uint8_t* dst = scratch.take<uint8_t>(s.batch, s.image_bytes());
  moved.data = dst;
  const uint8_t* const end = s.data + s.batch * s.image_bytes();
  for (const uint8_t* block = s.data; block < end; block += length * pitch) {
    for (const uint8_t* src = block; src < block + pitch; src += s.channels) {
      copy_pixels(dst, src, length, s.channels, pitch);
      dst += length * s.channels;
    }
  }
  return moved;
}

Source copy_for_overread(ScratchFrame& scratch, const Source& s) {
  const int64_t bytes = s.batch * s.image_bytes();
  uint8_t* data = scratch.take<uint8_t>(bytes);
  if (bytes > 0) std::memcpy(data, s.data, static_cast<size_t>(bytes));
  Source copy = s;
  copy.data = data;
  return copy;
}

}  // namespace torchq
