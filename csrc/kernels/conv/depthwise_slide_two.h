// SPDX-License-Identifier: Apache-2.0
// Stride 2 where 32 registers have 16 lanes each, as depthwise_slide.h: windows of three columns
// and up to three rows, all vectors at a time, and of 5 x 5, one half of them at a time. On Zen 4,
// layers of benchmarks' suite `depthwise`: 3x3 are 1.10 to 1.57 times as fast as with Slide
// (geometric mean 1.32), 5x5 1.14 and 1.23 times as fast as with the stash.
#pragma once

#include "kernels/conv/depthwise_slide.h"

namespace {

/// Calls step(checked, next) for `pixels` destinations, whose new columns are the two from pixel
/// `next` on: `first` for the first of them. Unchecked where both are inside the row: loads then
/// need no arithmetic, which would take the ports of the multiplications. Along rows of more than
/// kTwoFrom pixels two at a time where results are `plain`, after which what is left of the pixel
/// before is in its register again: the moves were a sixth of a pixel's instructions.
template <class Step>
TORCHQ_INLINE void for_each_pixel(int64_t first, int64_t src_pixels, int64_t pixels, bool plain,
                                  Step step) {
  constexpr int64_t kTwoFrom = 8;
  const int64_t last = first + (pixels - 1) * 2;
  const int64_t inside = src_pixels - 2 < last ? src_pixels - 2 : last;
  for (int64_t next = first; next <= last;) {
    if (plain && next >= 0 && next + kTwoFrom * 2 <= inside) {
      do {
        step(Checked<false, true>{}, next);
        step(Checked<false, true>{}, next + 2);
        next += 4;
      } while (next + 2 <= inside);
    } else if (next >= 0 && next <= inside) {
      do {
        step(Checked<false>{}, next);
        next += 2;
      } while (next <= inside);
    } else {
      step(Checked<true>{}, next);
      next += 2;
    }
  }
}

/// `pixels` destinations of a row from x on, of windows of three columns and up to three rows.
/// Quads are two columns of two rows, and four neighboring pixels of the third row: 14 interleaving
/// steps for the two columns that a destination adds, where columns of rows need 16. Weights are
/// those of join_pairs.
template <class Isa, bool kFlip, int kSplit>
struct SlidePairs {
  static constexpr int kVectors = Isa::kDepthwiseVectors, kParts = kVectors / 2;
  using Int = typename Isa::Int;
  using Bytes = typename Isa::Bytes;
  using Group = SlideGroup<kSplit, 3, 1, 2>;
  /// State carried to the next pixel: the last quads of two rows, whose upper half is pixel x, and
  /// the pairs of the third row that end with it.
  struct Before {
    Int quads[kVectors];
    Bytes pair[2];
  };

  /// Half of the state at the first column, of which b is the last pixel.
  template <int kHalf>
  static TORCHQ_INLINE void begin(const Bytes (&b)[3], Before& before) {
    const Bytes pair = Isa::template pair_half<kHalf>(b[0], b[1]);
    Int quads[kParts];
    Isa::interleave_half(pair, pair, quads);
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) before.quads[kHalf * kParts + p] = quads[p];
    before.pair[kHalf] = Isa::template pair_half<kHalf>(b[2], b[2]);
  }

  /// Half the words of a destination whose new pixels are a and b.
  template <int kHalf>
  static TORCHQ_INLINE Bytes dot_half(const DepthwiseChunk<Isa>& chunk, const Bytes (&a)[3],
                                      const Bytes (&b)[3], const Int (&weight)[3][kVectors],
                                      Before& before) {
    Int quads[kParts], run[kParts], acc[kParts];
    Isa::interleave_half(Isa::template pair_half<kHalf>(a[0], a[1]),
                         Isa::template pair_half<kHalf>(b[0], b[1]), quads);
    const Bytes pair = Isa::template pair_half<kHalf>(a[2], b[2]);
    Isa::interleave_half(before.pair[kHalf], pair, run);
    before.pair[kHalf] = pair;
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      const int v = kHalf * kParts + p;
      acc[p] = Isa::load_int(chunk.acc_init[v]);
      Isa::dot(acc[p], before.quads[v], weight[0][v]);
      Isa::dot(acc[p], quads[p], weight[1][v]);
      Isa::dot(acc[p], run[p],
               kFlip ? Isa::load_weight(chunk.weight + (2 * kVectors + v) * 64) : weight[2][v]);
      before.quads[v] = quads[p];
      acc[p] = Isa::to_int(
          scaled<Isa>(acc[p], Isa::load(chunk.multiplier[v]), Isa::load(chunk.offset[v])));
    }
    return Isa::pack_words(acc[0], acc[kParts - 1]);
  }

  static TORCHQ_NOINLINE void run(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk,
                                  const SlideRows& rows, int64_t x, int64_t pixels,
                                  const Epilogue& e) {
    const PixelSource src(d, chunk.channel, chunk.count);
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    uint8_t* const first_pixel = static_cast<uint8_t*>(e.dst) + x * src.step + src.channel;
    const int groups = rows.groups;
    Int weight[3][kVectors];
    TORCHQ_UNROLL for (int q = 0; q < 3; ++q) {
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
        weight[q][v] = Isa::load_weight(chunk.weight + (q * kVectors + v) * 64);
      }
    }
    const int64_t first = x * 2 - d.pad_begin;  // the first column's pixel
    for (int g = 0; g < groups; ++g) {
      const Group group(rows, g);
      const Group* from = &group;
      uint8_t* pixel = first_pixel;
      int64_t offset = first * src.step + src.channel;
      Bytes a[3], b[3];
      const auto load = [&](auto check, int64_t p, Bytes(&bytes)[3]) {
        TORCHQ_UNROLL for (int r = 0; r < 3; ++r) {
          bytes[r] = load_pixel<Isa, kFlip, kSplit, decltype(check)>(*from, r, src, p, offset);
        }
        next_pixel(src, offset);
      };
      load(Checked<true>{}, first, b);
      Before before;
      begin<0>(b, before);
      begin<1>(b, before);
      for_each_pixel(first + 1, src.pixels, pixels, epilogue.plain,
                     [&](auto check, int64_t next) TORCHQ_INLINE_LAMBDA {
                       if constexpr (kSplit > 1)
                         asm("" : "+r"(from));  // read its pointers again, see Slide::kReread
                       load(check, next, a);
                       load(check, next + 1, b);
                       const Bytes low = dot_half<0>(chunk, a, b, weight, before);
                       const Bytes high = dot_half<1>(chunk, a, b, weight, before);
                       store_pixel<Isa, decltype(check)>(epilogue, pixel, group.offset[0], low,
                                                         high);
                       pixel += src.step;
                     });
    }
  }
};

/// The same for windows of 5 x 5. Quads are columns of four rows, and four neighboring pixels of
/// the fifth row. One half of the vectors at a time, so that 12 of its 14 weights stay in
/// registers. The weights of the fifth row are those of join_run.
template <class Isa, bool kFlip, int kSplit>
struct SlideFive {
  static constexpr int kParts = Isa::kDepthwiseVectors / 2;
  static constexpr int kNew = kFive - 2;  // first of the columns that a pixel adds
  static constexpr int64_t kQuadBytes = int64_t{Isa::kDepthwiseVectors} * 64;
  using Int = typename Isa::Int;
  using Bytes = typename Isa::Bytes;
  using Half = Int[kParts];
  using Group = SlideGroup<kSplit, kFive, 1, 2>;

  /// Half kHalf of the column at pixel p; returns the fifth row's bytes. On to the next.
  template <int kHalf, class Check>
  static TORCHQ_INLINE Bytes load_column(const Group& rows, const PixelSource& src, Check,
                                         int64_t p, int64_t& offset, Half& column) {
    Bytes bytes[kFive];
    TORCHQ_UNROLL for (int r = 0; r < kFive; ++r) {
      bytes[r] = load_pixel<Isa, kFlip, kSplit, Check>(rows, r, src, p, offset);
    }
    next_pixel(src, offset);
    Isa::interleave_half(Isa::template pair_half<kHalf>(bytes[0], bytes[1]),
                         Isa::template pair_half<kHalf>(bytes[2], bytes[3]), column);
    return bytes[kFive - 1];
  }

  /// A group at a time: in one function, those of four parts would leave no register for a row.
  static void run(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk, const SlideRows& rows,
                  int64_t x, int64_t pixels, const Epilogue& e) {
    for (int g = 0; g < rows.groups; ++g) {
      const Group group(rows, g);
      half<0>(d, chunk, group, x, pixels, e);
      half<1>(d, chunk, group, x, pixels, e);
    }
  }

  /// The words of half 0 wait in the stash for those of half 1.
  template <int kHalf>
  static TORCHQ_NOINLINE void half(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk,
                                   const Group& rows, int64_t x, int64_t pixels,
                                   const Epilogue& e) {
    const PixelSource src(d, chunk.channel, chunk.count);
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    int64_t dst_offset[kSplit];
    TORCHQ_UNROLL for (int s = 0; s < kSplit; ++s) dst_offset[s] = rows.offset[0][s];
    uint8_t* pixel = static_cast<uint8_t*>(e.dst) + x * src.step + src.channel;
    const auto weight_of = [&](int q, int p) {
      return chunk.weight + q * kQuadBytes + (kHalf * kParts + p) * 64;
    };
    Int weight[kFive + 1][kParts];  // those of the last quad do not fit registers
    TORCHQ_UNROLL for (int q = 0; q <= kFive; ++q) {
      TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
        weight[q][p] = Isa::load_weight(weight_of(q, p));
      }
    }
    uint8_t* words = chunk.stash;
    const int64_t first = x * 2 - d.pad_begin;  // the first column's pixel
    int64_t offset = first * src.step + src.channel;
    const Group* from = &rows;
    Half columns[kFive];
    Half before, run;         // quads of the fifth row: pixels x - 1 .. x + 2, x + 1 .. x + 4
    Bytes last[kFive], pair;  // its bytes; those of pixels x + 1 and x + 2
    const auto load = [&](auto check, int j, int64_t p) {
      last[j] = load_column<kHalf>(*from, src, check, p, offset, columns[j]);
    };
    TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) load(Checked<true>{}, j, first + j);
    pair = Isa::template pair_half<kHalf>(last[1], last[2]);
    Isa::interleave_half(Isa::template pair_half<kHalf>(last[0], last[0]), pair, before);
    for_each_pixel(
        first + kNew, src.pixels, pixels, epilogue.plain,
        [&](auto check, int64_t next) TORCHQ_INLINE_LAMBDA {
          if constexpr (kSplit > 1)
            asm("" : "+r"(from));  // read its pointers again, see Slide::kReread
          // Two sums, since one of seven products waits for its own latency (4 % slower). First
          // what is left of the pixels before: its registers are free then.
          Half acc, other;
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
            acc[p] = Isa::load_int(chunk.acc_init[kHalf * kParts + p]);
            other[p] = Isa::zero();
            TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) {
              Isa::dot(j % 2 != 0 ? other[p] : acc[p], columns[j][p], weight[j][p]);
            }
            Isa::dot(other[p], before[p], Isa::load_weight(weight_of(kFive + 1, p)));
          }
          load(check, 3, next);
          load(check, 4, next + 1);
          const Bytes newest = Isa::template pair_half<kHalf>(last[3], last[4]);
          Isa::interleave_half(pair, newest, run);
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
            const int v = kHalf * kParts + p;
            Isa::dot(acc[p], columns[3][p], weight[3][p]);
            Isa::dot(other[p], columns[4][p], weight[4][p]);
            Isa::dot(acc[p], run[p], weight[kFive][p]);
            acc[p] =
                Isa::to_int(scaled<Isa>(Isa::add(acc[p], other[p]), Isa::load(chunk.multiplier[v]),
                                        Isa::load(chunk.offset[v])));
          }
          const Bytes word = Isa::pack_words(acc[0], acc[kParts - 1]);
          if constexpr (kHalf == 0) {
            Isa::store_channels(words, word, sizeof(Bytes));
          } else {
            store_pixel<Isa, decltype(check)>(epilogue, pixel, dst_offset,
                                              Isa::load_channels(words, sizeof(Bytes)), word);
          }
          words += sizeof(Bytes);
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
            TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) columns[j][p] = columns[j + 2][p];
            before[p] = run[p];
          }
          pair = newest;
          pixel += src.step;
        });
  }
};

}  // namespace
