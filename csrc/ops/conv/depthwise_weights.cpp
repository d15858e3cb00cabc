// SPDX-License-Identifier: Apache-2.0
#include "ops/conv/depthwise_weights.h"

#include <algorithm>
#include <cstring>

#include "kernels/types.h"

namespace torchq {
namespace {

constexpr int kQuadBytes = kPanel * kQuad;
constexpr int kMaxParts = 3;  // 255 = 127 + 127 + 1
/// Code for a rest of 128; no other rest is below -127.
constexpr int8_t kRest128 = -128;

/// first + rest of each difference that `keep` has. Pointers that cannot alias, here and below, so
/// that the compiler makes vectors of the loops.
void split_quad(const int8_t* __restrict weight, const int8_t* __restrict zero_point,
                const int8_t* __restrict keep, int8_t* __restrict first, int8_t* __restrict rest) {
  for (int i = 0; i < kQuadBytes; ++i) {
    const int16_t difference = static_cast<int16_t>((weight[i] - zero_point[i]) & keep[i]);
    int16_t in_range = difference < -128 ? int16_t{-128} : difference;
    in_range = in_range > 127 ? int16_t{127} : in_range;
    first[i] = static_cast<int8_t>(in_range);
    rest[i] = static_cast<int8_t>(difference - in_range);
  }
}

/// Returns the number of parts of a difference with these rests.
int64_t count_parts(const int8_t* rest, int64_t bytes) {
  int8_t some = 0, least = 0;
  for (int64_t i = 0; i < bytes; ++i) {
    some = static_cast<int8_t>(some | rest[i]);
    least = rest[i] < least ? rest[i] : least;
  }
  return least == kRest128 ? 3 : some != 0 ? 2 : 1;
}

/// Splits rests, some of which are 128, into a second part, in place, and a third.
void split_rest(int8_t* __restrict rest, int64_t bytes, int8_t* __restrict third) {
  for (int64_t i = 0; i < bytes; ++i) {
    third[i] = rest[i] == kRest128;
    rest[i] = rest[i] == kRest128 ? int8_t{127} : rest[i];
  }
}

/// Byte `slot` of 16 lanes, of the quads of a panel.
struct Slot {
  int64_t quad;
  int shift;

  explicit Slot(int64_t slot) : quad(slot / kQuad * kPanel), shift(int(slot % kQuad) * 8) {}
};

/// Lanes of byte `to` from those of byte `from`.
void move_byte(const uint32_t* __restrict src, Slot from, uint32_t* __restrict dst, Slot to) {
  src += from.quad;
  dst += to.quad;
  for (int i = 0; i < kPanel; ++i) dst[i] |= (src[i] >> from.shift & 0xff) << to.shift;
}

}  // namespace

DepthwiseWeights depthwise_weights(ScratchFrame& scratch, const int8_t* packed, int64_t channels,
                                   c10::IntArrayRef kernel, const int32_t* zero_points) {
  DepthwiseWeights result{packed, depthwise_taps(kernel), 1};
  if (zero_points == nullptr) return result;
  const auto order = result.taps;
  const int64_t slots = static_cast<int64_t>(order.size()), panels = panels_of(channels);
  const int64_t panel_bytes = slots * kPanel;
  int8_t* part[kMaxParts];
  for (int8_t*& p : part) p = scratch.take<int8_t>(panels, panel_bytes);
  int8_t* keep = scratch.take<int8_t>(panel_bytes);
  for (int64_t i = 0; i < panel_bytes; ++i) {
    keep[i] = order[static_cast<size_t>(i / kQuadBytes * kQuad + i % kQuad)] < 0 ? 0 : -1;
  }
  for (int64_t p = 0; p < panels; ++p) {
    int8_t zero_point[kQuadBytes] = {};
    for (int64_t i = 0; i < std::min<int64_t>(channels - p * kPanel, kPanel); ++i) {
      std::memset(zero_point + i * kQuad, zero_points[p * kPanel + i], kQuad);
    }
    for (int64_t i = 0; i < panel_bytes; i += kQuadBytes) {
      const int64_t at = p * panel_bytes + i;
      split_quad(packed + at, zero_point, keep + i, part[0] + at, part[1] + at);
    }
  }
  result.packed = part[0];
  result.parts = count_parts(part[1], panels * panel_bytes);
  if (result.parts == 1) return result;
  if (result.parts == 3) split_rest(part[1], panels * panel_bytes, part[2]);

  const int64_t width = kernel.back(), all = c10::multiply_integers(kernel);
  result.taps = depthwise_taps({result.parts * all / width, width});
  c10::SmallVector<int64_t, 64> slot_of(static_cast<size_t>(all));
  for (int64_t s = 0; s < slots; ++s) {
    if (order[static_cast<size_t>(s)] >= 0) slot_of[order[static_cast<size_t>(s)]] = s;
  }
  const int64_t count = static_cast<int64_t>(result.taps.size());
  const int64_t stride = count * kPanel / kQuad;  // lanes of a panel
  uint32_t* joined = scratch.take<uint32_t>(panels, stride);
  std::memset(joined, 0, static_cast<size_t>(panels * stride) * sizeof *joined);
  for (int64_t s = 0; s < count; ++s) {
    const int64_t tap = result.taps[static_cast<size_t>(s)];
    if (tap < 0) continue;
    const Slot from(slot_of[static_cast<size_t>(tap % all)]), to(s);
    const int8_t* from_part = part[tap / all];
    for (int64_t p = 0; p < panels; ++p) {
      const auto* src = reinterpret_cast<const uint32_t*>(from_part + p * panel_bytes);
      move_byte(src, from, joined + p * stride, to);
    }
  }
  result.packed = reinterpret_cast<const int8_t*>(joined);
  return result;
}

}  // namespace torchq
