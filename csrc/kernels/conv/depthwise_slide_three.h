// SPDX-License-Identifier: Apache-2.0
// Stride 1 where 32 registers have 16 lanes each and results are plain (ByteEpilogue): as Slide,
// but three pixels at a time, after which each column is in its register again, and without a
// question along the row but whether a border is near. On Zen 5, whose pipes would take 8.4 cycles
// for 64 outputs, instructions are what a pixel costs: 45 of them instead of 72, 11 to 13 cycles
// instead of 12.5 to 17.
#pragma once

#include "kernels/conv/depthwise_slide_two.h"

namespace {

template <int kValue>
struct Phase {
  static constexpr int value = kValue;
};

/// `pixels` destinations of a row from x on, or of two neighboring rows when kPairs.
template <class Isa, bool kFlip, int kSplit, bool kPairs>
struct SlideThree {
  using Base = Slide<Isa, kFlip, kSplit, 1, kPairs>;
  using Int = typename Isa::Int;
  using Bytes = typename Isa::Bytes;
  using Group = typename Base::Group;
  using Columns = typename Base::Columns;
  static constexpr int kParts = Base::kParts, kRows = Base::kRows, kDst = Base::kDst;
  static constexpr int kNew = Base::kNew;

  /// Half kHalf of the column at pixel p. On to the next.
  template <int kHalf, class Check>
  static TORCHQ_INLINE void load_column(const Group& rows, const SlideSrc& src, int64_t p,
                                        int64_t& offset, Int (&column)[kParts]) {
    const bool inside = static_cast<uint64_t>(p) < static_cast<uint64_t>(src.pixels);
    Bytes bytes[kQuad];
    TORCHQ_UNROLL for (int r = 0; r < kRows; ++r) {
      bytes[r] = load_pixel<Isa, kFlip, kSplit, Check>(rows, r, src, offset, inside);
    }
    next_pixel(src, offset);
    if constexpr (kRows < kQuad) bytes[kRows] = bytes[kRows - 1];
    Isa::template interleave_half<kHalf>(bytes, column);
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
    const SlideSrc src(d, chunk.channel, chunk.count);
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    uint8_t* const first_pixel = static_cast<uint8_t*>(e.dst) + x * src.step + src.channel;
    const int64_t first = x - d.pad_begin;  // the first column's pixel
    const int groups = rows.groups;
    Columns kept[kDst];
    typename Base::Params params;
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      const int v = kHalf * kParts + p;
      params.init[p] = Isa::load_int(chunk.acc_init[v]);
      params.multiplier[p] = Isa::load(chunk.multiplier[v]);
      params.offset[p] = Isa::load(chunk.offset[v]);
      TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) {
        TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
          kept[r][j][p] = Isa::load_weight(chunk.weight + r * chunk.weight_bytes +
                                           j * Base::kQuadBytes + v * 64);
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
        load_column<kHalf, Checked<true, true>>(*from, src, next++, offset, columns[j]);
      }
      // Phase: where the window's first column is.
      const auto step = [&](auto check, auto phase) TORCHQ_INLINE_LAMBDA {
        using Check = decltype(check);
        constexpr int kPhase = decltype(phase)::value;
        if constexpr (Base::kReread) asm volatile("" : "+r"(from)::"memory");
        load_column<kHalf, Check>(*from, src, next++, offset,
                                  columns[(kNew + kPhase) % kSlideWidth]);
        // Columns outermost, so that no product waits for the one before it.
        Int acc[kDst][kParts];
        TORCHQ_UNROLL for (int j = 0; j < kSlideWidth; ++j) {
          TORCHQ_UNROLL for (int r = 0; r < kDst; ++r) {
            TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
              if (j == 0) acc[r][p] = params.init[p];
              Isa::dot(acc[r][p], columns[(j + kPhase) % kSlideWidth][p], kept[r][j][p]);
            }
          }
        }
        TORCHQ_UNROLL for (int r = 0; r < kDst; ++r, words += sizeof(Bytes)) {
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
            acc[r][p] = Isa::to_int(scaled<Isa>(acc[r][p], params.multiplier[p], params.offset[p]));
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
      const int64_t end = next + pixels, inside = src.pixels < end ? src.pixels : end;
      while (next < end) {
        if (next >= 0 && next + kSlideWidth <= inside) {
          do {
            step(Checked<false, true>{}, Phase<0>{});
            step(Checked<false, true>{}, Phase<1>{});
            step(Checked<false, true>{}, Phase<2>{});
          } while (next + kSlideWidth <= inside);
          continue;
        }
        step(Checked<true, true>{}, Phase<0>{});
        TORCHQ_UNROLL for (int j = 0; j < kNew; ++j) {
          TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) columns[j][p] = columns[j + 1][p];
        }
      }
    }
  }
};

}  // namespace
