// SPDX-License-Identifier: Apache-2.0
// The products of the stash (depthwise.h): up to kDepthwisePixels destinations at a time, from the
// interleaved columns in L1 to the destination.
#pragma once

#include "kernels/conv/depthwise_stash.h"

namespace {

/// kWidth columns, kTapStep apart, of kPixels destinations, kStride apart: columns are held in
/// registers while destinations share them, weights all along where they are not widened.
template <class Isa, int kParts, int kPixels, int kWidth, int kStride, int kTapStep>
TORCHQ_INLINE void accumulate_shared(const uint8_t* stash, const int8_t* weight,
                                     typename Isa::Int (&acc)[kParts][kPixels]) {
  using Int = typename Isa::Int;
  constexpr int kSteps = Isa::kSteps, kColumn = kStashColumn<Isa>;
  constexpr int64_t kQuadBytes = Isa::kDepthwiseVectors * kSteps * 64;
  const auto load = [](const void* p) { return Isa::load_int(static_cast<const int32_t*>(p)); };
  Int kept[kParts][kSteps == 1 ? kWidth : 1];
  if constexpr (kSteps == 1) {
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      TORCHQ_UNROLL for (int j = 0; j < kWidth; ++j) {
        kept[p][j] = Isa::load_weight(weight + j * kQuadBytes + p * 64);
      }
    }
  }
  TORCHQ_UNROLL for (int c = 0; c <= (kPixels - 1) * kStride + (kWidth - 1) * kTapStep; ++c) {
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      const Int column = load(stash + c * kColumn + p * 64);
      TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) {
        const int tap = c - b * kStride, j = tap / kTapStep;
        if (tap < 0 || j >= kWidth || tap % kTapStep != 0) continue;
        if constexpr (kSteps == 1) {
          Isa::dot(acc[p][b], column, kept[p][j]);
        } else {
          const int8_t* w = weight + j * kQuadBytes + p * 128;
          Isa::dot(acc[p][b], Isa::template split_src<0>(column), load(w));
          Isa::dot(acc[p][b], Isa::template split_src<1>(column), load(w + 64));
        }
      }
    }
  }
}

/// kParts vectors of kPixels accumulators, from vector v on: the quads of kWidth columns of four
/// rows, then those of kTail times two columns of two rows, then the others one by one.
template <class Isa, int kParts, int kPixels, int kWidth, int kStride, int kTail>
TORCHQ_INLINE void accumulate(const DepthwiseChunk<Isa>& chunk, const uint8_t* stash,
                              const int8_t* weight, int v,
                              typename Isa::Int (&acc)[kParts][kPixels]) {
  using Int = typename Isa::Int;
  constexpr int kSteps = Isa::kSteps;
  constexpr int64_t kQuadBytes = Isa::kDepthwiseVectors * kSteps * 64;
  TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
    const Int init = Isa::load_int(chunk.acc_init[v + p]);
    TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) acc[p][b] = init;
  }
  stash += v * 64;
  weight += v * kSteps * 64;
  const auto load = [](const void* p) { return Isa::load_int(static_cast<const int32_t*>(p)); };
  if constexpr (kWidth > 0) {
    accumulate_shared<Isa, kParts, kPixels, kWidth, kStride, 1>(stash, weight, acc);
  }
  if constexpr (kTail > 0) {
    accumulate_shared<Isa, kParts, kPixels, kTail, kStride, 2>(stash + chunk.quad_offset[kWidth],
                                                               weight + kWidth * kQuadBytes, acc);
  }
  for (int q = kWidth + kTail; q < chunk.quads; ++q) {
    const uint8_t* columns = stash + chunk.quad_offset[q];
    TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
      const int8_t* w = weight + q * kQuadBytes + p * kSteps * 64;
      const Int even = Isa::load_weight(w);
      TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) {
        const Int column = load(columns + b * chunk.pixel_step + p * 64);
        Isa::dot(acc[p][b], Isa::template split_src<0>(column), even);
        if constexpr (kSteps == 2)
          Isa::dot(acc[p][b], Isa::template split_src<1>(column), load(w + 64));
      }
    }
  }
}

/// Addresses of destinations; the lanes of a vector belong to `split` rows.
struct DepthwiseDst {
  int64_t offset[4];  // elements, of each row's first pixel and the chunk's first channel
  int64_t step;       // elements between pixels
};

/// kPixels neighboring destinations of `split` rows; kFold: the folded 8-bit epilogue, in lane
/// order.
template <class Isa, bool kFold, int kPixels, int kWidth, int kStride, int kTail>
TORCHQ_NOINLINE void dot_pixels(const DepthwiseChunk<Isa>& chunk, const uint8_t* stash,
                                const int8_t* weight, const Epilogue& e, const DepthwiseDst& dst) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors, kParts = kVectors / 2;
  if constexpr (kFold) {
    typename Isa::Bytes words[2][kPixels];
    TORCHQ_UNROLL for (int half = 0; half < 2; ++half) {
      Int y[kParts][kPixels];
      accumulate<Isa, kParts, kPixels, kWidth, kStride, kTail>(chunk, stash, weight, half * kParts,
                                                               y);
      TORCHQ_UNROLL for (int p = 0; p < kParts; ++p) {
        const int v = half * kParts + p;
        const auto multiplier = Isa::load(chunk.multiplier[v]), offset = Isa::load(chunk.offset[v]);
        TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) {
          y[p][b] = Isa::to_int(scaled<Isa>(y[p][b], multiplier, offset));
        }
      }
      TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) {
        words[half][b] = Isa::pack_words(y[0][b], y[kParts - 1][b]);
      }
    }
    const ByteEpilogue epilogue = byte_epilogue(chunk, e);
    uint8_t* const pixel = static_cast<uint8_t*>(e.dst);
    TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) {
      store_words<Isa>(epilogue, pixel + b * dst.step, dst.offset, chunk.split, words[0][b],
                       words[1][b]);
    }
  } else {
    alignas(64) int32_t tile[kPixels][kVectors][kPanel];
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      Int acc[1][kPixels];
      accumulate<Isa, 1, kPixels, kWidth, kStride, kTail>(chunk, stash, weight, v, acc);
      TORCHQ_UNROLL for (int b = 0; b < kPixels; ++b) Isa::store_int(tile[b][v], acc[0][b]);
    }
    int64_t dst_offset[4 * kPixels];
    for (int b = 0; b < kPixels; ++b) {
      Int acc[kVectors];
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) acc[v] = Isa::load_int(tile[b][v]);
      Isa::natural_order(acc);
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) Isa::store_int(tile[b][v], acc[v]);
      for (int s = 0; s < chunk.split; ++s) {
        dst_offset[b * chunk.split + s] = dst.offset[s] + b * dst.step - chunk.channel;
      }
    }
    memory_epilogue<Isa>({tile[0][0], kPixels * chunk.split, kVectors / chunk.split, dst_offset,
                          chunk.channel, chunk.count},
                         e);
  }
}

template <class Isa>
using DotFn = void (*)(const DepthwiseChunk<Isa>&, const uint8_t*, const int8_t*, const Epilogue&,
                       const DepthwiseDst&);

/// The kernels of a layer by number of pixels, 1 to kDepthwisePixels.
template <class Isa>
struct DotFns {
  DotFn<Isa> of[Isa::kDepthwisePixels + 1];
};

template <class Isa, bool kFold, int kPixels = Isa::kDepthwisePixels>
void fill_dot_fns(DotFns<Isa>* fns) {
  fns->of[kPixels] = &dot_pixels<Isa, kFold, kPixels, 0, 1, 0>;
  if constexpr (kPixels > 1) fill_dot_fns<Isa, kFold, kPixels - 1>(fns);
}

template <class Isa>
DotFns<Isa> dot_fns(const DepthwiseLayer& d, const StashPlan& plan, bool fold) {
  constexpr int kPixels = Isa::kDepthwisePixels;
  DotFns<Isa> fns;
  if (!fold) {
    fill_dot_fns<Isa, false>(&fns);
    return fns;
  }
  fill_dot_fns<Isa, true>(&fns);
  if (plan.gathered || d.kernel_rows < 2 || d.dilation != 1) return fns;
  DotFn<Isa>& full = fns.of[kPixels];
  if (d.width == 5 && d.stride == 1) full = &dot_pixels<Isa, true, kPixels, 5, 1, 0>;
  if (d.width == 5 && d.stride == 2) full = &dot_pixels<Isa, true, kPixels, 5, 2, 0>;
  if (plan.tail) full = &dot_pixels<Isa, true, kPixels, kFive, 1, kTailQuads>;
  return fns;
}

}  // namespace
