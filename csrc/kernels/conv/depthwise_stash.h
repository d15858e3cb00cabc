// SPDX-License-Identifier: Apache-2.0
// The interleaved source columns of a stretch of a row (the stash); depthwise_dot.h multiplies
// them.
#pragma once

#include "kernels/conv/depthwise_chunk.h"

namespace {

/// The first pixel of each source row, at the chunk's channel: those of a band, and the one behind
/// them. A single row stands four times.
struct StashRows {
  const uint8_t* row[4][kQuad + 1];
};

/// `n` columns, `step` columns apart: row i's byte is pixel + i * shift, then pixel_step further.
struct StashSpan {
  int64_t pixel, pixel_step, shift, n;
  uint8_t* out;
  int64_t out_step;
};

using StashFn = void (*)(const DepthwiseLayer&, const StashRows&, const StashSpan&, int channel,
                         int count);

/// Kinds of spans: all pixels inside the row (the fourth row repeats the third, or is one of its
/// own), or any pixels, with zero points for those outside; kPairs: see stash_pairs.
enum StashKind : int { kThreeRows, kFourRows, kChecked, kPairs };

template <class Isa, bool kFlip, StashKind kKind, int kSplit>
TORCHQ_NOINLINE void stash_columns(const DepthwiseLayer& d, const StashRows& rows,
                                   const StashSpan& span, int channel, int count) {
  constexpr int kRows = kKind == kThreeRows ? 3 : kQuad;
  // Stores to the stash could alias what is behind the references.
  const StashRows row = rows;
  const int64_t src_step = d.channels, src_pixels = d.src_pixels, pixel_step = span.pixel_step,
                shift = span.shift, out_step = span.out_step;
  const uint8_t* const padding = d.padding + channel;
  uint8_t* out = span.out;
  int64_t pixel = span.pixel;
  for (int64_t i = span.n; i > 0; --i, pixel += pixel_step, out += out_step) {
    typename Isa::Bytes bytes[kQuad];
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      const uint8_t* src[kSplit];
      const int64_t p = kKind == kChecked ? pixel + r * shift : pixel;
      const bool inside = static_cast<uint64_t>(p) < static_cast<uint64_t>(src_pixels);
      TORCHQ_UNROLL for (int s = 0; s < kSplit; ++s) {
        src[s] = kKind != kChecked || inside ? row.row[s][r] + p * src_step : padding;
      }
      bytes[r] = Isa::load_rows(src, count);
      if constexpr (kFlip) bytes[r] = Isa::flip_sign(bytes[r]);
    }
    if constexpr (kRows < kQuad) bytes[kRows] = bytes[kRows - 1];
    typename Isa::Int quads[Isa::kDepthwiseVectors];
    Isa::interleave(bytes, quads);
    TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
      Isa::store_int(reinterpret_cast<int32_t*>(out) + v * kPanel, quads[v]);
    }
  }
}

/// A quad of two pairs: the byte of row 0 at pixel, that of row 1 at pixel + shift, then the same
/// span.pixel_step further, where the next quad begins. Zero points stand for pixels outside.
template <class Isa, bool kFlip, int kSplit>
TORCHQ_NOINLINE void stash_pairs(const DepthwiseLayer& d, const StashRows& rows,
                                 const StashSpan& span, int channel, int count) {
  using Bytes = typename Isa::Bytes;
  const StashRows row = rows;
  const int64_t src_step = d.channels, src_pixels = d.src_pixels, shift = span.shift,
                pixel_step = span.pixel_step, out_step = span.out_step;
  const uint8_t* const padding = d.padding + channel;
  const auto load = [&](int64_t pixel, Bytes(&pair)[2]) {
    Bytes bytes[2];
    TORCHQ_UNROLL for (int r = 0; r < 2; ++r) {
      const uint8_t* src[kSplit];
      const int64_t p = pixel + r * shift;
      const bool inside = static_cast<uint64_t>(p) < static_cast<uint64_t>(src_pixels);
      TORCHQ_UNROLL for (int s = 0; s < kSplit; ++s) {
        src[s] = inside ? row.row[s][r] + p * src_step : padding;
      }
      bytes[r] = Isa::load_rows(src, count);
      if constexpr (kFlip) bytes[r] = Isa::flip_sign(bytes[r]);
    }
    Isa::pair_bytes(bytes[0], bytes[1], pair);
  };
  Bytes pairs[2], next[2];
  uint8_t* out = span.out;
  int64_t pixel = span.pixel;
  load(pixel, pairs);
  for (int64_t i = span.n; i > 0; --i, out += out_step) {
    load(pixel += pixel_step, next);
    typename Isa::Int quads[Isa::kDepthwiseVectors];
    Isa::interleave_pairs(pairs, next, quads);
    TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
      Isa::store_int(reinterpret_cast<int32_t*>(out) + v * kPanel, quads[v]);
    }
    TORCHQ_UNROLL for (int half = 0; half < 2; ++half) pairs[half] = next[half];
  }
}

template <class Isa, bool kFlip, int kSplit>
StashFn stash_fn(StashKind kind) {
  if (kind == kPairs) return &stash_pairs<Isa, kFlip, kSplit>;
  if (kind == kThreeRows) return &stash_columns<Isa, kFlip, kThreeRows, kSplit>;
  if (kind == kFourRows) return &stash_columns<Isa, kFlip, kFourRows, kSplit>;
  return &stash_columns<Isa, kFlip, kChecked, kSplit>;
}

template <class Isa>
StashFn stash_fn(int split, bool flip, StashKind kind) {
  if (split == 1) return flip ? stash_fn<Isa, true, 1>(kind) : stash_fn<Isa, false, 1>(kind);
  if constexpr (Isa::kDepthwiseSplits >= 4) {
    if (split == 4) return flip ? stash_fn<Isa, true, 4>(kind) : stash_fn<Isa, false, 4>(kind);
  }
  return flip ? stash_fn<Isa, true, 2>(kind) : stash_fn<Isa, false, 2>(kind);
}

/// Fills one band's columns for the destinations x .. x + pixels - 1.
template <class Isa>
void stash_band(StashFn inner, StashFn checked, StashFn pairs, const DepthwiseLayer& d,
                const StashPlan& plan, int band, int64_t x, int64_t pixels, const StashRows& rows,
                const DepthwiseChunk<Isa>& chunk) {
  constexpr int64_t kColumn = kStashColumn<Isa>;
  const bool run = d.kernel_rows - band * kQuad == 1;
  uint8_t* out = chunk.stash + band * plan.columns * kColumn;
  const int64_t first = x * d.stride - d.pad_begin;
  const int64_t shift = run ? d.dilation : 0;
  const int64_t quads = run ? (d.width + kQuad - 1) / kQuad : d.width;  // of one destination
  const int64_t tap_step = run ? kQuad : 1;
  if (plan.gathered) {
    for (int64_t i = 0; i < pixels; ++i, out += chunk.pixel_step) {
      checked(d, rows,
              {first + i * d.stride, tap_step * d.dilation, shift, quads, out, tap_step * kColumn},
              chunk.channel, chunk.count);
    }
    return;
  }
  if (run && plan.tail) {
    pairs(d, rows, {first, 1, 0, pixels + kFive - 1, out, kColumn}, chunk.channel, chunk.count);
    return;
  }
  const int64_t columns = (pixels - 1) * d.stride + (quads - 1) * tap_step * d.dilation + 1;
  if (run) {
    if (d.stride == 2 && d.dilation == 1) {
      pairs(d, rows, {first, 2, 1, (columns - 1) / 2 + 1, out, 2 * kColumn}, chunk.channel,
            chunk.count);
      return;
    }
    const int64_t step = quads == 1 || tap_step * d.dilation % d.stride == 0 ? d.stride : 1;
    checked(d, rows, {first, step, shift, (columns - 1) / step + 1, out, step * kColumn},
            chunk.channel, chunk.count);
    return;
  }
  // Columns begin .. end - 1 are inside the row.
  int64_t begin = first < 0 ? -first : 0, end = d.src_pixels - first;
  if (end > columns) end = columns;
  if (begin > columns) begin = columns;
  if (end < begin) end = begin;
  const uint8_t value = d.flip ? d.zero_point ^ 0x80 : d.zero_point;
  if (begin > 0) memset(out, value, size_t(begin * kColumn));
  if (end < columns) memset(out + end * kColumn, value, size_t((columns - end) * kColumn));
  inner(d, rows, {first + begin, 1, 0, end - begin, out + begin * kColumn, kColumn}, chunk.channel,
        chunk.count);
}

}  // namespace
