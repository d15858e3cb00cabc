// SPDX-License-Identifier: Apache-2.0
#include "ops/conv/layout.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/parallel.h"

namespace torchq {
namespace {

constexpr int kPixels = 16;
typedef uint8_t Bytes __attribute__((vector_size(kPixels)));

template <int kFirst, size_t... i>
Bytes merge(Bytes a, Bytes b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (kFirst + i / 2 + i % 2 * kPixels)...);
}

/// dst[pixel][row] = src[row][pixel] for 16 pixels; rows from `rows` on are zero. A perfect shuffle
/// of all bytes moves the highest bit of an index to its end; log2(kRows) of them move the row
/// behind the pixel.
template <int kRows>
void transpose(const uint8_t* src, int64_t row_stride, int rows, uint8_t* dst) {
  constexpr auto kAll = std::make_index_sequence<kPixels>();
  Bytes v[kRows] = {}, shuffled[kRows];
  for (int r = 0; r < rows; ++r) std::memcpy(&v[r], src + r * row_stride, sizeof(Bytes));
  for (int step = 1; step < kRows; step *= 2) {
    for (int i = 0; i < kRows / 2; ++i) {
      shuffled[2 * i] = merge<0>(v[i], v[i + kRows / 2], kAll);
      shuffled[2 * i + 1] = merge<kPixels / 2>(v[i], v[i + kRows / 2], kAll);
    }
    std::copy(shuffled, shuffled + kRows, v);
  }
  std::memcpy(dst, v, sizeof v);
}

/// 16 pixels of three channels: 48 bytes, and 2 of the next pixels, which come next. Most images
/// are stored so; pixel by pixel it takes four times as long.
void interleave_three(const uint8_t* src, int64_t row_stride, uint8_t* dst) {
  typedef uint64_t Words __attribute__((vector_size(kPixels)));
  Words pixels[4];
  transpose<4>(src, row_stride, 3, reinterpret_cast<uint8_t*>(pixels));
  for (int i = 0; i < 4; ++i) {
    const Words packed = (pixels[i] & 0xffffff) | (pixels[i] >> 8 & 0xffffff000000);
    const uint64_t first = packed[0], second = packed[1];
    std::memcpy(dst + 12 * i, &first, sizeof first);
    std::memcpy(dst + 12 * i + 6, &second, sizeof second);
  }
}

/// `kRows` channels of 16 pixels at a time.
template <int kRows>
void interleave(const uint8_t* src, uint8_t* dst, int64_t channels, int64_t pixels, Range range) {
  uint8_t block[kPixels * kRows];
  int64_t p = range.begin;
  if (channels == 3) {
    for (; p + kPixels < range.end; p += kPixels) {
      interleave_three(src + p, pixels, dst + 3 * p);
    }
  }
  for (; p + kPixels <= range.end; p += kPixels) {
    for (int64_t c = 0; c < channels; c += kRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kRows, channels - c));
      transpose<kRows>(src + c * pixels + p, pixels, rows, block);
      for (int i = 0; i < kPixels; ++i) {
        uint8_t* out = dst + (p + i) * channels + c;
        // With few channels the bytes behind a pixel's are the next one's, which come next.
        if (rows == kRows || (c == 0 && (kPixels - i) * channels >= kRows)) {
          std::memcpy(out, block + i * kRows, kRows);
        } else {
          std::memcpy(out, block + i * kRows, static_cast<size_t>(rows));
        }
      }
    }
  }
  for (; p < range.end; ++p) {
    for (int64_t c = 0; c < channels; ++c) dst[p * channels + c] = src[c * pixels + p];
  }
}

}  // namespace

void interleave_channels(const uint8_t* src, uint8_t* dst, int64_t images, int64_t channels,
                         int64_t pixels) {
  const int64_t image = channels * pixels;
  const int64_t blocks = std::max<int64_t>((pixels + kPixels - 1) / kPixels, 1);
  parallel_ranges(blocks, threads_for(images * image), [&](Range share) {
    const Range range{share.begin * kPixels, std::min(share.end * kPixels, pixels)};
    const auto run = channels <= 4 ? interleave<4> : interleave<16>;
    for (int64_t n = 0; n < images; ++n) {
      run(src + n * image, dst + n * image, channels, pixels, range);
    }
  });
}

}  // namespace torchq
