// SPDX-License-Identifier: Apache-2.0
// A chunk of channels of a depthwise layer: its weights and parameters in lane order (that of
// interleave_taps), how a row is cut into stretches, and how words become bytes.
#pragma once

#include "kernels/common.h"
#include "kernels/conv/contract.h"
#include "kernels/cpu_tuning.h"
#include "kernels/epilogue/epilogue.h"

namespace {

/// One column of the stash: the vectors that interleaving four rows (or four pixels) gives.
template <class Isa>
constexpr int kStashColumn = Isa::kDepthwiseVectors * 64;
/// Destinations of a row that a slide passes at a time: the words of two rows fit the stash.
constexpr int64_t kSlidePixels = tuning::kStashBytes / (2 * 64);

/// The width of windows of 5 x 5, and the quads of a tail (see StashPlan).
constexpr int kFive = 5, kTailQuads = 3;

/// Stretches of a row: `pixels` destinations each, whose stash holds `columns` columns for each
/// band of four kernel rows.
struct StashPlan {
  int bands;
  int64_t pixels, columns;
  /// Every destination has its own columns: strides or dilation leave few to share.
  bool gathered;
  /// True where two destination rows share a stash of 5 x 5 windows: a quad holds two columns of
  /// the fifth row and of the row after it. That takes kTailQuads quads instead of a run's two, but
  /// half of the stash (AVX-512 VNNI: 1.2 to 1.3x faster).
  bool tail;
  int quads;  // of a destination
};

template <class Isa>
StashPlan stash_plan(const DepthwiseLayer& d) {
  constexpr int kPixels = Isa::kDepthwisePixels;
  StashPlan plan{};
  plan.bands = (d.kernel_rows + kQuad - 1) / kQuad;
  // With widened weights the third quad costs more than the stash saves.
  plan.tail = Isa::kSteps == 1 && d.kernel_rows == kQuad + 1 && d.width == kFive && d.stride == 1 &&
              d.dilation == 1;
  plan.quads = plan.tail ? kFive + kTailQuads : d.quads;
  const auto fits = [&](int64_t pixels, int64_t limit) {
    const int64_t shared = (pixels - 1) * d.stride + (d.width - 1) * d.dilation + 1;
    const int64_t own = pixels * d.width;
    plan.pixels = pixels;
    plan.gathered = own < shared;
    plan.columns = plan.gathered ? own : shared;
    return plan.bands * plan.columns * kStashColumn<Isa> <= limit;
  };
  if (fits(d.dst_pixels, tuning::kStashBytes)) return plan;
  for (int64_t pixels = 8 * kPixels; pixels > kPixels; pixels -= kPixels) {
    if (pixels < d.dst_pixels && fits(pixels, tuning::kStashBytes)) return plan;
  }
  if (!fits(d.dst_pixels < kPixels ? d.dst_pixels : kPixels, tuning::kMaxStashBytes)) fits(1, 0);
  return plan;
}

/// Slides keep no columns there, but the first words of up to this many bytes.
template <class Isa>
int64_t stash_bytes(const StashPlan& plan) {
  const int64_t columns = plan.bands * plan.columns * kStashColumn<Isa>;
  return columns < tuning::kStashBytes ? tuning::kStashBytes : columns;
}

template <class Isa>
struct DepthwiseChunk {
  static constexpr int kVectors = Isa::kDepthwiseVectors;
  alignas(64) int32_t acc_init[kVectors][kPanel];
  alignas(64) float multiplier[kVectors][kPanel];
  alignas(64) float offset[kVectors][kPanel];
  alignas(64) uint8_t lo[64], hi[64];  // bounds of the folded epilogue, as bytes
  int split;                           // rows that share a vector
  int width;                           // bytes of each row in it, a power of 2
  int channel;                         // first
  int count;                           // channels of each row that exist
  int quads;
  /// A second set of weights, one row lower, serves the next destination row from the same stash.
  bool paired;
  bool tail;             // see StashPlan
  bool joined;           // weights are those of SlideFive or SlidePairs
  int8_t* weight;        // [1 or 2][quads][kVectors][kSteps][64]
  int64_t weight_bytes;  // of one set
  uint8_t* stash;        // [bands][columns][kVectors][64]
  int64_t* quad_offset;  // [quads] bytes from a destination's first column
  int64_t pixel_step;    // bytes between the first columns of neighbors
};

template <class Isa>
int64_t chunk_weight_bytes(const StashPlan& plan) {
  return int64_t{plan.quads} * Isa::kDepthwiseVectors * Isa::kSteps * 64;
}

/// Sets the fields that all chunks of a layer share; `scratch` has depthwise_bytes(d) bytes.
template <class Isa>
void init_chunk(const DepthwiseLayer& d, const StashPlan& plan, void* scratch,
                DepthwiseChunk<Isa>* chunk) {
  constexpr int64_t kColumn = kStashColumn<Isa>;
  chunk->quads = plan.quads;
  chunk->tail = plan.tail;
  chunk->paired = d.stride == 1 && (d.kernel_rows == 2 || d.kernel_rows == 3 || plan.tail);
  chunk->weight = static_cast<int8_t*>(scratch);
  chunk->weight_bytes = chunk_weight_bytes<Isa>(plan);
  chunk->stash = static_cast<uint8_t*>(scratch) + 2 * chunk->weight_bytes;
  chunk->quad_offset = reinterpret_cast<int64_t*>(chunk->stash + stash_bytes<Isa>(plan));
  chunk->pixel_step = (plan.gathered ? d.width : d.stride) * kColumn;
  int64_t* offset = chunk->quad_offset;
  for (int band = 0; band < plan.bands; ++band) {
    const bool run = d.kernel_rows - band * kQuad == 1;
    for (int j = 0; j < d.width; j += !run ? 1 : plan.tail ? 2 : kQuad) {
      *offset++ = (band * plan.columns + j * (plan.gathered ? 1 : d.dilation)) * kColumn;
    }
  }
}

/// Vectors of 16 values each, at fetch(channel, n, scratch) for n <= 16 channels, to the order of
/// interleave_taps; rows that share a vector have the same channels, lanes behind n are zeros.
/// kWhole: n is always 16.
template <class Isa, bool kWhole, class Fetch>
TORCHQ_INLINE void load_lanes(const DepthwiseChunk<Isa>& chunk,
                              typename Isa::Int (&lanes)[Isa::kDepthwiseVectors], Fetch fetch) {
  TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
    const int first = (v * kPanel) & (chunk.width - 1);
    int n = kPanel;
    int32_t scratch[kPanel];
    if constexpr (!kWhole) {
      n = min_int(chunk.count - first, kPanel);
      if (n < kPanel) memset(scratch, 0, sizeof scratch);
    }
    const void* p = n > 0 ? fetch(chunk.channel + first, n, scratch) : scratch;
    lanes[v] = Isa::load_int(static_cast<const int32_t*>(p));
  }
  Isa::lane_order(lanes);
}

/// A bound of the folded epilogue as it acts on the byte: rounding and saturation are monotone.
template <class Isa>
int byte_bound(float bound, DType dtype) {
  const bool is_signed = dtype == DType::s8;
  auto y = Isa::max(Isa::set(bound), Isa::set(is_signed ? -128.0f : 0.0f));
  y = Isa::min(y, Isa::set(is_signed ? 127.0f : 255.0f));
  int32_t rounded[kPanel];
  Isa::store_int(rounded, Isa::to_int(y));
  return rounded[0];
}

template <class Isa>
TORCHQ_INLINE void store_weights(const typename Isa::Int (&lanes)[Isa::kDepthwiseVectors],
                                 int8_t* dst) {
  TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
    if constexpr (Isa::kSteps == 1) {
      Isa::store_int(reinterpret_cast<int32_t*>(dst + v * 64), lanes[v]);
    } else {
      alignas(64) int8_t packed[64];
      Isa::store_int(reinterpret_cast<int32_t*>(packed), lanes[v]);
      Isa::widen(packed, dst + v * 128);
    }
  }
}

/// The quads of a fifth row, taps 0 .. 4: taps 1 .. 4, then tap 0 behind a byte that meets none.
template <class Isa>
TORCHQ_INLINE void join_run(DepthwiseChunk<Isa>* chunk) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors;
  auto* first = reinterpret_cast<int32_t*>(chunk->weight) + kFive * kVectors * kPanel;
  const Int low = Isa::set_int(0xff), others = Isa::set_int(0xffffff);
  for (int v = 0; v < kVectors; ++v, first += kPanel) {
    int32_t* const second = first + kVectors * kPanel;
    const Int run = Isa::load_int(first), last = Isa::load_int(second);
    Isa::store_int(first, Isa::bit_or(Isa::bit_and(Isa::template shift_right<8>(run), others),
                                      Isa::template shift_left<24>(last)));
    Isa::store_int(second, Isa::template shift_left<8>(Isa::bit_and(run, low)));
  }
}

/// Columns 0 .. 2 of up to three rows: column 0 of two rows as the upper half of a quad, the other
/// two, the third row behind a byte that meets no tap.
template <class Isa>
TORCHQ_INLINE void join_pairs(DepthwiseChunk<Isa>* chunk) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors, kQuadLanes = kVectors * kPanel;
  auto* lanes = reinterpret_cast<int32_t*>(chunk->weight);
  const Int low = Isa::set_int(0xffff), second = Isa::set_int(0xff00),
            third = Isa::set_int(0xff0000), fourth = Isa::set_int(int32_t(0xff000000));
  for (int v = 0; v < kVectors; ++v, lanes += kPanel) {
    const Int a = Isa::load_int(lanes), b = Isa::load_int(lanes + kQuadLanes),
              c = Isa::load_int(lanes + 2 * kQuadLanes);
    Isa::store_int(lanes, Isa::template shift_left<16>(a));
    Isa::store_int(lanes + kQuadLanes,
                   Isa::bit_or(Isa::bit_and(b, low), Isa::template shift_left<16>(c)));
    const Int ab =
        Isa::bit_or(Isa::bit_and(Isa::template shift_right<8>(a), second), Isa::bit_and(b, third));
    Isa::store_int(lanes + 2 * kQuadLanes,
                   Isa::bit_or(ab, Isa::bit_and(Isa::template shift_left<8>(c), fourth)));
  }
}

/// Fills the chunk at its channel, count and split; kWhole: all its vectors are whole panels.
template <class Isa, bool kWhole>
void fill_chunk(const DepthwiseLayer& d, const Epilogue& e, bool fold, DepthwiseChunk<Isa>* chunk) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors;
  constexpr int64_t kQuadBytes = kVectors * Isa::kSteps * 64;
  const auto copy = [&](const void* values, void* dst) {
    Int lanes[kVectors];
    const auto fetch = [&](int channel, int n, int32_t* scratch) -> const void* {
      const void* src = static_cast<const char*>(values) + int64_t{channel} * 4;
      return n == kPanel ? src : memcpy(scratch, src, size_t(n) * 4);
    };
    load_lanes<Isa, kWhole>(*chunk, lanes, fetch);
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      Isa::store_int(static_cast<int32_t*>(dst) + v * kPanel, lanes[v]);
    }
  };
  copy(d.acc_init, chunk->acc_init);
  if (fold) {
    copy(e.multiplier, chunk->multiplier);
    copy(e.offset, chunk->offset);
    memset(chunk->lo, byte_bound<Isa>(e.lo_scalar, e.dst_dtype), sizeof chunk->lo);
    memset(chunk->hi, byte_bound<Isa>(e.hi_scalar, e.dst_dtype), sizeof chunk->hi);
  }
  const auto load_quad = [&](int q, Int(&lanes)[kVectors]) {
    const int64_t panel_bytes = int64_t{d.quads} * kPanel * kQuad;
    const auto fetch = [&](int channel, int n, int32_t* scratch) -> const void* {
      const int8_t* panel = d.packed + channel / kPanel * panel_bytes + q * kPanel * kQuad;
      // 16 channels lie in one panel or two.
      const int first = kWhole ? 0 : channel % kPanel, head = min_int(n, kPanel - first);
      if (head == kPanel) return panel;
      memcpy(scratch, panel + first * kQuad, size_t(head) * kQuad);
      if (head < n) memcpy(scratch + head, panel + panel_bytes, size_t(n - head) * kQuad);
      return scratch;
    };
    load_lanes<Isa, kWhole>(*chunk, lanes, fetch);
  };
  int8_t* const first = chunk->weight;
  int8_t* const second = first + chunk->weight_bytes;
  const auto load_columns = [&](int q, Int(&lanes)[kVectors]) {
    load_quad(q, lanes);
    store_weights<Isa>(lanes, first + q * kQuadBytes);
    if (!chunk->paired) return;
    Int below[kVectors];
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      below[v] = Isa::template shift_left<8>(lanes[v]);
    }
    store_weights<Isa>(below, second + q * kQuadBytes);
  };
  Int lanes[kVectors];
  if (!chunk->tail) {
    for (int q = 0; q < chunk->quads; ++q) load_columns(q, lanes);
    if (chunk->joined) d.width == kFive ? join_run(chunk) : join_pairs(chunk);
    return;
  }
  // The tail's quads have taps 2 t and 2 t + 1 of the fifth row; for the second destination, each
  // stands behind that of the fourth row.
  const Int low = Isa::set_int(0xff), high = Isa::set_int(0xff0000);
  for (int t = 0; t < kTailQuads; ++t) {
    Int run[kVectors], next[kVectors];
    load_columns(2 * t, lanes);
    if (t + 1 < kTailQuads) load_columns(2 * t + 1, next);
    load_quad(kFive + t / 2, run);
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      Int fourth = Isa::bit_and(Isa::template shift_right<24>(lanes[v]), low);
      if (t + 1 < kTailQuads) {
        fourth = Isa::bit_or(fourth, Isa::bit_and(Isa::template shift_right<8>(next[v]), high));
      }
      const Int taps = t % 2 == 0 ? run[v] : Isa::template shift_right<16>(run[v]);
      run[v] = Isa::bit_or(Isa::bit_and(taps, low),
                           Isa::bit_and(Isa::template shift_left<8>(taps), high));
      lanes[v] = Isa::bit_or(fourth, Isa::template shift_left<8>(run[v]));
    }
    store_weights<Isa>(run, first + (kFive + t) * kQuadBytes);
    store_weights<Isa>(lanes, second + (kFive + t) * kQuadBytes);
  }
}

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
