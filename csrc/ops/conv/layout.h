// SPDX-License-Identifier: Apache-2.0
// Copies of bytes between layouts; torch's own goes element by element there.
#pragma once

#include <cstdint>

namespace torchq {

/// dst[pixel][channel] = src[channel][pixel], of each image.
void interleave_channels(const uint8_t* src, uint8_t* dst, int64_t images, int64_t channels,
                         int64_t pixels);

}  // namespace torchq
