// SPDX-License-Identifier: Apache-2.0
// The interleaved source columns of a stretch of a row (the stash); depthwise_dot.h multiplies
// them.
#pragma once

#include "kernels/conv/depthwise_chunk.h"

namespace {

/// Source of a row's pixels. Held by value, since stores of bytes could alias a reference.
struct PixelSource {
  const uint8_t* padding;  // a pixel of zero points
  int64_t step, pixels;    // elements between pixels; of a row
  int channel, count;      // the first one; that exist

  PixelSource(const DepthwiseLayer& d, int first, int channels)
      : padding(d.padding + first),
        step(d.channels),
        pixels(d.src_pixels),
        channel(first),
        count(channels) {}
};

/// Compile-time facts about a pixel: it may be outside the row; its channels fill the lanes and its
/// result is u8 without bounds, so that the row needs no checks.
template <bool kMayBeOutside, bool kPlain = false>
struct Checked {
  static constexpr bool value = kMayBeOutside, plain = kPlain;
};

/// The bytes of pixel p of one source row of each part, `offset` from its first pixel, or zero
/// points for a pixel outside.
template <class Isa, bool kFlip, int kSplit, class Check, class Rows>
TORCHQ_INLINE typename Isa::Bytes load_pixel(const Rows& rows, int r, const PixelSource& src,
                                             int64_t p, int64_t offset) {
  const bool inside = static_cast<uint64_t>(p) < static_cast<uint64_t>(src.pixels);
  const uint8_t* pixel[kSplit];
  TORCHQ_UNROLL for (int s = 0; s < kSplit; ++s) {
    pixel[s] = !Check::value || inside ? rows.row[s][r] + offset : src.padding;
  }
  auto bytes = Isa::load_rows(pixel, Check::plain ? Isa::kDepthwiseChannels / kSplit : src.count);
  if constexpr (kFlip) bytes = Isa::flip_sign(bytes);
  return bytes;
}

/// Half kHalf of the quads of four taps.
template <class Isa, int kHalf>
TORCHQ_INLINE void interleave_taps(const typename Isa::Bytes (&taps)[kQuad],
                                   typename Isa::Int (&quads)[Isa::kDepthwiseVectors / 2]) {
  Isa::interleave_half(Isa::template pair_half<kHalf>(taps[0], taps[1]),
                       Isa::template pair_half<kHalf>(taps[2], taps[3]), quads);
}

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
/// Those that fill the stash, by kind.
struct StashFns {
  StashFn of[kPairs + 1];
};

template <class Isa>
TORCHQ_INLINE void store_quads(const typename Isa::Int (&quads)[Isa::kDepthwiseVectors / 2],
                               uint8_t* out) {
  TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors / 2; ++v) {
    Isa::store_int(reinterpret_cast<int32_t*>(out) + v * kPanel, quads[v]);
  }
}

template <class Isa, bool kFlip, StashKind kKind, int kSplit>
TORCHQ_NOINLINE void stash_columns(const DepthwiseLayer& d, const StashRows& rows,
                                   const StashSpan& span, int channel, int count) {
  constexpr int kRows = kKind == kThreeRows ? 3 : kQuad;
  using Check = Checked<kKind == kChecked>;
  // Stores to the stash could alias what is behind the references.
  const StashRows row = rows;
  const PixelSource src(d, channel, count);
  const int64_t pixel_step = span.pixel_step, shift = span.shift, out_step = span.out_step;
  uint8_t* out = span.out;
  int64_t pixel = span.pixel;
  for (int64_t i = span.n; i > 0; --i, pixel += pixel_step, out += out_step) {
    typename Isa::Bytes bytes[kQuad];
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      const int64_t p = Check::value ? pixel + r * shift : pixel;
      bytes[r] = load_pixel<Isa, kFlip, kSplit, Check>(row, r, src, p, p * src.step);
    }
    if constexpr (kRows < kQuad) bytes[kRows] = bytes[kRows - 1];
    typename Isa::Int low[Isa::kDepthwiseVectors / 2], high[Isa::kDepthwiseVectors / 2];
    interleave_taps<Isa, 0>(bytes, low);
    interleave_taps<Isa, 1>(bytes, high);
    store_quads<Isa>(low, out);
    store_quads<Isa>(high, out + kStashColumn<Isa> / 2);
  }
}

/// A quad of two pairs: the byte of row 0 at pixel, that of row 1 at pixel + shift, then the same
/// span.pixel_step further, where the next quad begins. Zero points stand for pixels outside.
template <class Isa, bool kFlip, int kSplit>
TORCHQ_NOINLINE void stash_pairs(const DepthwiseLayer& d, const StashRows& rows,
                                 const StashSpan& span, int channel, int count) {
  using Bytes = typename Isa::Bytes;
  const StashRows row = rows;
  const PixelSource src(d, channel, count);
  const int64_t shift = span.shift, pixel_step = span.pixel_step, out_step = span.out_step;
  const auto load = [&](int64_t pixel, Bytes(&pair)[2]) {
    Bytes bytes[2];
    TORCHQ_UNROLL for (int r = 0; r < 2; ++r) {
      const int64_t p = pixel + r * shift;
      bytes[r] = load_pixel<Isa, kFlip, kSplit, Checked<true>>(row, r, src, p, p * src.step);
    }
    pair[0] = Isa::template pair_half<0>(bytes[0], bytes[1]);
    pair[1] = Isa::template pair_half<1>(bytes[0], bytes[1]);
  };
  Bytes pairs[2], next[2];
  uint8_t* out = span.out;
  int64_t pixel = span.pixel;
  load(pixel, pairs);
  for (int64_t i = span.n; i > 0; --i, out += out_step) {
    load(pixel += pixel_step, next);
    TORCHQ_UNROLL for (int half = 0; half < 2; ++half) {
      typename Isa::Int quads[Isa::kDepthwiseVectors / 2];
      Isa::interleave_half(pairs[half], next[half], quads);
      store_quads<Isa>(quads, out + half * (kStashColumn<Isa> / 2));
      pairs[half] = next[half];
    }
  }
}

template <class Isa, bool kFlip, int kSplit>
StashFns stash_fns() {
  return {{&stash_columns<Isa, kFlip, kThreeRows, kSplit>,
           &stash_columns<Isa, kFlip, kFourRows, kSplit>,
           &stash_columns<Isa, kFlip, kChecked, kSplit>, &stash_pairs<Isa, kFlip, kSplit>}};
}

/// Calls body<flip, split>().
template <class Isa, class Body>
void for_split(int split, bool flip, Body body) {
  const auto of = [&]<int kSplit>() {
    flip ? body.template operator()<true, kSplit>() : body.template operator()<false, kSplit>();
  };
  if (split == 1) return of.template operator()<1>();
  if constexpr (Isa::kDepthwiseSplits >= 4) {
    if (split == 4) return of.template operator()<4>();
  }
  of.template operator()<2>();
}

/// Fills one band's columns for the destinations x .. x + pixels - 1; `inner`: those inside the
/// row.
template <class Isa>
void stash_band(const StashFns& fns, StashKind inner, const DepthwiseLayer& d,
                const StashPlan& plan, int band, int64_t x, int64_t pixels, const StashRows& rows,
                const DepthwiseChunk<Isa>& chunk) {
  constexpr int64_t kColumn = kStashColumn<Isa>;
  const bool run = d.kernel_rows - band * kQuad == 1;
  const auto fill = [&](StashKind kind, const StashSpan& span) {
    fns.of[kind](d, rows, span, chunk.channel, chunk.count);
  };
  uint8_t* out = chunk.stash + band * plan.columns * kColumn;
  const int64_t first = x * d.stride - d.pad_begin;
  const int64_t shift = run ? d.dilation : 0;
  const int64_t quads = run ? (d.width + kQuad - 1) / kQuad : d.width;  // of one destination
  const int64_t tap_step = run ? kQuad : 1;
  if (plan.gathered) {
    for (int64_t i = 0; i < pixels; ++i, out += chunk.pixel_step) {
      fill(kChecked,
           {first + i * d.stride, tap_step * d.dilation, shift, quads, out, tap_step * kColumn});
    }
    return;
  }
  if (run && plan.tail) {
    return fill(kPairs, {first, 1, 0, pixels + kFive - 1, out, kColumn});
  }
  const int64_t columns = (pixels - 1) * d.stride + (quads - 1) * tap_step * d.dilation + 1;
  if (run) {
    if (d.stride == 2 && d.dilation == 1) {
      return fill(kPairs, {first, 2, 1, (columns - 1) / 2 + 1, out, 2 * kColumn});
    }
    const int64_t step = quads == 1 || tap_step * d.dilation % d.stride == 0 ? d.stride : 1;
    return fill(kChecked, {first, step, shift, (columns - 1) / step + 1, out, step * kColumn});
  }
  // Columns begin .. end - 1 are inside the row.
  int64_t begin = first < 0 ? -first : 0, end = d.src_pixels - first;
  if (end > columns) end = columns;
  if (begin > columns) begin = columns;
  if (end < begin) end = begin;
  const uint8_t value = d.flip ? d.zero_point ^ 0x80 : d.zero_point;
  if (begin > 0) memset(out, value, size_t(begin * kColumn));
  if (end < columns) memset(out + end * kColumn, value, size_t((columns - end) * kColumn));
  fill(inner, {first + begin, 1, 0, end - begin, out + begin * kColumn, kColumn});
}

}  // namespace
