// SPDX-License-Identifier: Apache-2.0
// Windows of three columns and up to three rows, without a stash: the columns under the window stay
// in registers while it passes along the row. One half of the vectors at a time, so that the
// weights and parameters stay there too (contract: DepthwiseLayer in contract.h). On Zen 4 the 3x3
// with stride 1 of benchmarks' suite `depthwise`, results s8, are 1.22 to 1.45 times as fast as
// with the stash (geometric mean 1.31).
//
// Plain results (ByteEpilogue) inside the row go three pixels at a time, after which each column is
// in its register again, and need no question whether a border is near. On Zen 5, whose pipes would
// take 8.4 cycles for 64 outputs, instructions are what a pixel costs: 45 of them instead of 72, 11
// to 13 cycles instead of 12.5 to 17.
#pragma once

#include "kernels/conv/depthwise_stash.h"

namespace {

constexpr int kSlideWidth = 3;

/// Destination rows of a slide: `groups` times one vector's, which are `split` rows or as many
/// pairs of neighbors, from row y on.
struct SlideRows {
  const DepthwiseRows& rows;
  int kernel_rows, y, groups;
};

/// The source rows that group g meets, and where its destinations go. Behind the last row of the
/// kernel are those that only the second row of a pair meets, or that row again.
template <int kSplit, int kRows, int kDst, int kStride>
struct SlideGroup {
  const uint8_t* row[kSplit][kRows];
  int64_t offset[kDst][kSplit];  // elements, of each row's first pixel

  TORCHQ_INLINE SlideGroup(const SlideRows& s, int g) {
    const int last = s.kernel_rows - 1;
    TORCHQ_UNROLL for (int p = 0; p < kSplit; ++p) {
      const int y = min_int(s.y + (g * kSplit + p) * kDst, s.rows.count - kDst);
      const uint8_t* const* src = s.rows.src + int64_t{y} * s.kernel_rows;
      TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
        const int behind = kDst == 1 ? last : min_int(r + s.kernel_rows - kStride, 2 * last + 1);
        row[p][r] = src[r <= last ? r : behind];
      }
      TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) offset[r][p] = s.rows.dst_offset[y + r];
    }
  }
};

/// On to the next pixel; opaque, so that the offset is not replaced by a pointer for each row.
TORCHQ_INLINE void next_pixel(const PixelSource& src, int64_t& offset) {
  offset += src.step;
  asm("" : "+r"(offset));
}

/// Two vectors of words to the bytes of one pixel of kSplit rows.
template <class Isa, class Check, int kSplit>
TORCHQ_INLINE void store_pixel(const ByteEpilogue& f, uint8_t* pixel,
                               const int64_t (&offset)[kSplit], typename Isa::Bytes low,
                               typename Isa::Bytes high) {
  if constexpr (Check::plain) {
    Isa::store_rows(pixel, offset, kSplit, Isa::pack_bytes(low, high, false),
                    Isa::kDepthwiseChannels / kSplit);
  } else {
    store_words<Isa>(f, pixel, offset, kSplit, low, high);
  }
}

/// Where the first column of the window is among the registers of columns.
template <int kValue>
struct Phase {
  static constexpr int value = kValue;
};

/// `pixels` destinations of a row from x on, or of two neighboring rows when kPairs.
template <class Isa, bool kFlip, int kSplit, int kStride, bool kPairs>
struct Slide {
  static constexpr int kSteps = Isa::kSteps;
  /// True where row pointers are loaded at each use. Those of two parts or four do not fit the
  /// registers: kept and spilled by the compiler, they made a row 4 to 12 % slower.
  static constexpr bool kReread = Isa::kDepthwiseVectors == 4 && kStride == 1 && kSplit > 1;
  static constexpr int kParts = Isa::kDepthwiseVectors / 2;
  /// True where plain results have a loop of their own: two steps of two parts would spill sums.
  static constexpr bool kHasPlain = kSteps == 1 || kParts == 1;
  static constexpr int kRows = kPairs ? 4 : 3, kDst = kPairs ? 2 : 1;
  static constexpr int kNew = kSlideWidth - kStride;  // first of the columns that a pixel adds
  static constexpr int64_t kQuadBytes = int64_t{Isa::kDepthwiseVectors} * kSteps * 64;
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  using Bytes = typename Isa::Bytes;
  using Columns = Int[kSlideWidth][kParts];
  using Group = SlideGroup<kSplit, kRows, kDst, kStride>;

  /// Half kHalf of the column at pixel p. On to the next.
  template <int kHalf, class Check>
  static TORCHQ_INLINE void load_column(const Group& rows, const PixelSource& src, int64_t p,
                                        int64_t& offset, Int (&column)[kParts]) {
    Bytes bytes[kQuad];
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      bytes[r] = load_pixel<Isa, kFlip, kSplit, Check>(rows, r, src, p, offset);
    }
    next_pixel(src, offset);
    if constexpr (kRows < kQuad) bytes[kRows] = bytes[kRows - 1];
    interleave_taps<Isa, kHalf>(bytes, column);
  }

  /// Adds a column's products with its weights: `kept` ones, or those in memory, in two steps.
  static TORCHQ_INLINE void dot(Int& acc, Int column, const Int& kept, const int8_t* weight) {
    if constexpr (kSteps == 1) {
      Isa::dot(acc, column, kept);
    } else {
      const auto* w = reinterpret_cast<const int32_t*>(weight);
      Isa::dot(acc, Isa::template split_src<0>(column), Isa::load_int(w));
      Isa::dot(acc, Isa::template split_src<1>(column), Isa::load_int(w + kPanel));
    }
  }

  static void run(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk, const SlideRows& rows,
                  int64_t x, int64_t pixels, const Epilogue& e) {
    if constexpr (kHasPlain) {
      if (byte_epilogue(chunk, e).plain) {
        half<0, true>(d, chunk, rows, x, pixels, e);
        return half<1, true>(d, chunk, rows, x, pixels, e);
      }
    }
    half<0, false>(d, chunk, rows, x, pixels, e);
    half<1, false>(d, chunk, rows, x, pixels, e);
  }

  /// The words of half 0 wait in the stash for those of half 1. kPlain: of plain results, three
  /// pixels at a time where all are inside the row.
  template <int kHalf, bool kPlain>
  static TORCHQ_NOINLINE void half(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk,
                                   const SlideRows& rows, int64_t x, int64_t pixels,
                                   const Epilogue& e) {
    const PixelSource src(d, chunk.channel, chunk.count);
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    uint8_t* const first_pixel = static_cast<uint8_t*>(e.dst) + x * src.step + src.channel;
    const int64_t first = x * kStride - d.pad_begin;  // the first column's pixel
    const int groups = rows.groups;
    const int8_t* const weight = chunk.weight + kHalf * kParts * kSteps * 64;
    const int64_t weight_bytes = chunk.weight_bytes;
    Columns kept[kDst];
    Int init[kParts];
    Float multiplier[kParts], shift[kParts];
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      init[p] = Isa::load_int(chunk.acc_init[kHalf * kParts + p]);
      multiplier[p] = Isa::load(chunk.multiplier[kHalf * kParts + p]);
      shift[p] = Isa::load(chunk.offset[kHalf * kParts + p]);
      TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) {
        TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
          if constexpr (kSteps == 1) {
            kept[r][j][p] = Isa::load_weight(weight + r * weight_bytes + j * kQuadBytes + p * 64);
          }
        }
      }
    }
    uint8_t* words = chunk.stash;
    for (int g = 0; g < groups; ++g) {
      const Group group(rows, g);
      const Group* from = &group;
      uint8_t* pixel = first_pixel;
      Columns columns;
      int64_t next = first, offset = first * src.step + src.channel;  // of the next column
      TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) {
        load_column<kHalf, Checked<true, kPlain>>(*from, src, next++, offset, columns[j]);
      }
      const auto step = [&](auto check, auto phase) TORCHQ_INLINE_LAMBDA {
        using Check = decltype(check);
        constexpr int kPhase = decltype(phase)::value;
        if constexpr (kReread) asm volatile("" : "+r"(from)::"memory");
        TORCHQ_UNROLL for (int j = kNew; j < kSlideWidth; ++j) {
          load_column<kHalf, Check>(*from, src, next++, offset,
                                    columns[(j + kPhase) % kSlideWidth]);
        }
        // Columns outermost, so that no product waits for the one before it.
        Int acc[kDst][kParts];
        TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
          TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) {
            TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
              if (j == 0) acc[r][p] = init[p];
              dot(acc[r][p], columns[(j + kPhase) % kSlideWidth][p], kept[r][j][p],
                  weight + r * weight_bytes + j * kQuadBytes + p * kSteps * 64);
            }
          }
        }
        TORCHQ_UNROLL for (int r = 0; r < kDst; ++r, words += sizeof(Bytes)) {
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
            acc[r][p] = Isa::to_int(scaled<Isa>(acc[r][p], multiplier[p], shift[p]));
          }
          const Bytes word = Isa::pack_words(acc[r][0], acc[r][kParts - 1]);
          if constexpr (kHalf == 0) {
            Isa::store_channels(words, word, sizeof(Bytes));
          } else {
            store_pixel<Isa, Check>(epilogue, pixel, from->offset[r],
                                    Isa::load_channels(words, sizeof(Bytes)), word);
          }
        }
        pixel += src.step;
      };
      for (int64_t left = pixels; left > 0; --left) {
        if constexpr (kPlain) {  // after three pixels each column is in its register again
          for (; left >= 3 && next >= 0 && next + 3 * kStride <= src.pixels; left -= 3) {
            step(Checked<false, true>{}, Phase<0>{});
            step(Checked<false, true>{}, Phase<kStride>{});
            step(Checked<false, true>{}, Phase<2 * kStride>{});
          }
          if (left == 0) break;
        }
        step(Checked<true, kPlain>{}, Phase<0>{});
        TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) {
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) columns[j][p] = columns[j + kStride][p];
        }
      }
    }
  }
};

}  // namespace
