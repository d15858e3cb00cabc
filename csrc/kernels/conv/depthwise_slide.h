// SPDX-License-Identifier: Apache-2.0
// Windows of three columns and up to three rows, without a stash: the columns under the window stay
// in registers while it passes along the row. One half of the vectors at a time, so that the
// weights and parameters stay there too (contract: DepthwiseLayer in contract.h). On Zen 4 the 3x3
// with stride 1 of benchmarks' suite `depthwise`, results s8, are 1.22 to 1.45 times as fast as
// with the stash (geometric mean 1.31).
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

/// `pixels` destinations of a row from x on, or of two neighboring rows when kPairs.
template <class Isa, bool kFlip, int kSplit, int kStride, bool kPairs>
struct Slide {
  static constexpr int kSteps = Isa::kSteps;
  /// True where row pointers are loaded at each use. Those of two parts or four do not fit the
  /// registers: kept and spilled by the compiler, they made a row 4 to 12 % slower.
  static constexpr bool kReread = Isa::kDepthwiseVectors == 4 && kStride == 1 && kSplit > 1;
  static constexpr int kParts = Isa::kDepthwiseVectors / 2;
  static constexpr int kRows = kPairs ? 4 : 3, kDst = kPairs ? 2 : 1;
  static constexpr int kNew = kSlideWidth - kStride;  // first of the columns that a pixel adds
  static constexpr int64_t kQuadBytes = int64_t{Isa::kDepthwiseVectors} * kSteps * 64;
  using Int = typename Isa::Int;
  using Float = typename Isa::Float;
  using Bytes = typename Isa::Bytes;
  using Columns = Int[kSlideWidth][kParts];
  using Group = SlideGroup<kSplit, kRows, kDst, kStride>;
  struct Params {
    Int init[kParts];
    Float multiplier[kParts], offset[kParts];
  };

  /// Half kHalf of the column at pixel p, or of a column of zero points.
  template <int kHalf>
  static TORCHQ_INLINE void load_column(const Group& rows, const uint8_t* padding, int64_t src_step,
                                        int channel, int count, int64_t p, bool inside,
                                        Int (&column)[kParts]) {
    Bytes bytes[kQuad];
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      const uint8_t* src[kSplit];
      TORCHQ_UNROLL for (int s = 0; s < kSplit; ++s) {
        src[s] = inside ? rows.row[s][r] + channel + p * src_step : padding;
      }
      bytes[r] = Isa::load_rows(src, count);
      if constexpr (kFlip) bytes[r] = Isa::flip_sign(bytes[r]);
    }
    if constexpr (kRows < kQuad) bytes[kRows] = bytes[kRows - 1];
    Isa::template interleave_half<kHalf>(bytes, column);
  }

  /// Half the words of destination row r's pixel.
  static TORCHQ_INLINE Bytes dot_columns(const Columns& columns, const Columns& kept,
                                         const int8_t* weight, const Params& params) {
    Int acc[kParts];
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      acc[p] = params.init[p];
      TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
        if constexpr (kSteps == 1) {
          Isa::dot(acc[p], columns[j][p], kept[j][p]);
        } else {
          const auto* w = reinterpret_cast<const int32_t*>(weight + j * kQuadBytes + p * 128);
          Isa::dot(acc[p], Isa::template split_src<0>(columns[j][p]), Isa::load_int(w));
          Isa::dot(acc[p], Isa::template split_src<1>(columns[j][p]), Isa::load_int(w + 16));
        }
      }
      acc[p] = Isa::to_int(scaled<Isa>(acc[p], params.multiplier[p], params.offset[p]));
    }
    return Isa::pack_words(acc[0], acc[kParts - 1]);
  }

  static void run(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk, const SlideRows& rows,
                  int64_t x, int64_t pixels, const Epilogue& e) {
    half<0>(d, chunk, rows, x, pixels, e);
    half<1>(d, chunk, rows, x, pixels, e);
  }

  /// The words of half 0 wait in the stash for those of half 1.
  template <int kHalf>
  static TORCHQ_NOINLINE void half(const DepthwiseLayer& d, const DepthwiseChunk<Isa>& chunk,
                                   const SlideRows& rows, int64_t x, int64_t pixels,
                                   const Epilogue& e) {
    // Stores could alias what is behind the references.
    const int64_t src_step = d.channels, src_pixels = d.src_pixels;
    const uint8_t* const padding = d.padding + chunk.channel;
    const int count = chunk.count;
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    uint8_t* const first_pixel = static_cast<uint8_t*>(e.dst) + x * src_step + chunk.channel;
    const int64_t first = x * kStride - d.pad_begin;  // the first column's pixel
    const int groups = rows.groups, channel = chunk.channel;
    const int8_t* const weight = chunk.weight + kHalf * kParts * kSteps * 64;
    Columns kept[kDst];
    Params params;
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      params.init[p] = Isa::load_int(chunk.acc_init[kHalf * kParts + p]);
      params.multiplier[p] = Isa::load(chunk.multiplier[kHalf * kParts + p]);
      params.offset[p] = Isa::load(chunk.offset[kHalf * kParts + p]);
      if constexpr (kSteps == 1) {
        TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) {
          TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
            kept[r][j][p] =
                Isa::load_weight(weight + r * chunk.weight_bytes + j * kQuadBytes + p * 64);
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
      int64_t next = first;  // the next column's pixel
      const auto load = [&](Int(&column)[kParts]) TORCHQ_INLINE_LAMBDA {
        const bool inside = static_cast<uint64_t>(next) < static_cast<uint64_t>(src_pixels);
        load_column<kHalf>(*from, padding, src_step, channel, count, next, inside, column);
        ++next;
      };
      TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) load(columns[j]);
      for (int64_t i = 0; i < pixels; ++i, pixel += src_step) {
        if constexpr (kReread) asm volatile("" : "+r"(from)::"memory");
        TORCHQ_UNROLL for (int j = kNew; j < kSlideWidth; ++j) load(columns[j]);
        TORCHQ_UNROLL for (int r = 0; r < kDst; ++r, words += sizeof(Bytes)) {
          const int8_t* row_weight = weight + r * chunk.weight_bytes;
          const Bytes word = dot_columns(columns, kept[r], row_weight, params);
          if constexpr (kHalf == 0) {
            Isa::store_channels(words, word, sizeof(Bytes));
          } else {
            store_words<Isa>(epilogue, pixel, from->offset[r], kSplit,
                             Isa::load_channels(words, sizeof(Bytes)), word);
          }
        }
        TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) {
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) columns[j][p] = columns[j + kStride][p];
        }
      }
    }
  }
};

}  // namespace
