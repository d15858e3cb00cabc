// SPDX-License-Identifier: Apache-2.0
// Terms that all contracts share: panels, quads and dtypes.
#pragma once

#include <cstdint>

namespace torchq {

/// Output channels of one packed panel: 16 int32 lanes, one to four registers.
constexpr int kPanel = 16;
/// Consecutive k that one 32-bit lane holds (what VPDPBUSD sums).
constexpr int kQuad = 4;

enum class DType : int { u8, s8, s32, f32 };

}  // namespace torchq
