// SPDX-License-Identifier: Apache-2.0
// Depthwise convolution (contract: DepthwiseLayer in contract.h).
//
// Note [Depthwise convolution]
// Channels are lanes, and four taps share a 32-bit lane.
//
// A source column of up to four kernel rows is interleaved, so that the four bytes of a channel
// share a lane, and then used for every window that has it. There are two strategies along a row:
//
// clang-format off
//   slide  windows 3 wide and 2 or 3 high, stride 1 or 2, no dilation along the row, a folded
//          8-bit epilogue: the columns under the window stay in registers (depthwise_slide.h; where
//          32 of them have 16 lanes each, stride 2 is depthwise_slide_two.h, windows of 5 x 5 too)
//   stash  everything else: the columns of a stretch of the row are stored in L1, then up to
//          kDepthwisePixels destinations at a time meet the weights (depthwise_stash.h, _dot.h)
//
// Columns outside the row are zero points, so borders need no other path. A chunk of channels fills
// a vector in one of three splits:
//
//   split 1  kDepthwiseChannels channels of one row
//   split 2  half as many of two rows
//   split 4  a quarter of four rows (AVX-512 only)
// clang-format on
//
// The last two are for the channels that would leave a vector half empty; the last chunk of a kind
// overlaps the one before. With 2 or 3 kernel rows and stride 1, two destination rows share
// columns, since their source rows are four at most; with 5 x 5, since the fifth and sixth row fill
// quads of two columns.
#pragma once

#include "kernels/conv/depthwise_dot.h"
#include "kernels/conv/depthwise_slide_two.h"

namespace {

template <class Isa>
using SlideFn = void (*)(const DepthwiseLayer&, const DepthwiseChunk<Isa>&, const SlideRows&,
                         int64_t x, int64_t pixels, const Epilogue&);

/// True for tiers whose 32 registers hold the columns of SlidePairs and SlideFive.
template <class Isa>
constexpr bool kHoldsColumns = Isa::kSteps == 1 && Isa::kDepthwiseVectors == 4;

template <class Isa, bool kFlip, int kSplit>
SlideFn<Isa> slide_fn(const DepthwiseLayer& d, bool pairs) {
  if (d.stride == 1) {
    return pairs ? &Slide<Isa, kFlip, kSplit, 1, true>::run
                 : &Slide<Isa, kFlip, kSplit, 1, false>::run;
  }
  if constexpr (kHoldsColumns<Isa>) {
    return d.width == kFive ? &SlideFive<Isa, kFlip, kSplit>::run
                            : &SlidePairs<Isa, kFlip, kSplit>::run;
  } else {
    return &Slide<Isa, kFlip, kSplit, 2, false>::run;
  }
}

/// State of one call of `depthwise`.
template <class Isa>
struct DepthwiseRun {
  const DepthwiseLayer& layer;
  const DepthwiseRows& rows;
  const Epilogue& epilogue;
  const StashPlan plan;
  const DotFns<Isa> dots;
  DepthwiseChunk<Isa>& chunk;
  StashFns stash;
  SlideFn<Isa> slide[2];  // of one destination row, of two; null where the stash is used
};

/// Returns true if the source rows of destination rows y and y + 1 are one row apart.
inline bool shares_rows(const DepthwiseLayer& d, const DepthwiseRows& rows, int y) {
  const uint8_t* const* src = rows.src + int64_t{y} * d.kernel_rows;
  for (int r = 0; r + 1 < d.kernel_rows; ++r) {
    if (src[r + 1] != src[d.kernel_rows + r]) return false;
  }
  return true;
}

/// Destination rows y[0 .. split - 1], and, when `pairs`, the rows behind each of them.
template <class Isa>
void depthwise_rows(const DepthwiseRun<Isa>& run, const int* y, bool pairs) {
  const DepthwiseLayer& d = run.layer;
  const DepthwiseChunk<Isa>& chunk = run.chunk;
  const StashPlan& plan = run.plan;
  StashRows sources;
  const auto find_sources = [&](int band) {
    for (int s = 0; s < chunk.split; ++s) {
      const uint8_t* const* src = run.rows.src + int64_t{y[s]} * d.kernel_rows;
      for (int i = 0; i <= kQuad; ++i) {
        const int row = band * kQuad + i, last = d.kernel_rows - 1;
        const uint8_t* pixel = row <= last ? src[row] : pairs ? src[2 * last + 1] : src[last];
        sources.row[s][i] = pixel + chunk.channel;
      }
    }
  };
  find_sources(0);
  for (int64_t x = 0; x < d.dst_pixels; x += plan.pixels) {
    const int64_t pixels = d.dst_pixels - x < plan.pixels ? d.dst_pixels - x : plan.pixels;
    DepthwiseDst dst[2];
    for (int second = 0; second <= pairs; ++second) {
      dst[second].step = d.channels;
      for (int s = 0; s < chunk.split; ++s) {
        dst[second].offset[s] = run.rows.dst_offset[y[s] + second] + x * d.channels + chunk.channel;
      }
    }
    for (int band = 0; band < plan.bands; ++band) {
      if (plan.bands > 1) find_sources(band);
      const StashKind inner = pairs || d.kernel_rows != 3 ? kFourRows : kThreeRows;
      stash_band<Isa>(run.stash, inner, d, plan, band, x, pixels, sources, chunk);
    }
    for (int second = 0; second <= pairs; ++second) {
      const int8_t* weight = chunk.weight + second * chunk.weight_bytes;
      for (int64_t i = 0; i < pixels;) {
        const int n = min_int(pixels - i, Isa::kDepthwisePixels);
        run.dots.of[n](chunk, chunk.stash + i * chunk.pixel_step, weight, run.epilogue,
                       dst[second]);
        for (int s = 0; s < chunk.split; ++s) dst[second].offset[s] += n * d.channels;
        i += n;
      }
    }
  }
}

/// Groups of destination rows from y on, as many as stay in L1; returns how many.
template <class Isa>
int slide_rows(const DepthwiseRun<Isa>& run, int y, bool pairs) {
  const DepthwiseLayer& d = run.layer;
  const int split = run.chunk.split, count = run.rows.count, rows = pairs ? 2 * split : split;
  const int64_t stretch = d.dst_pixels < kSlidePixels ? d.dst_pixels : kSlidePixels;
  const int64_t pixels_of_group = rows * stretch * (d.stride * d.stride + 2);  // src; words, dst
  // Rows that do not share are one image's last and the next one's first: pairs go on behind them.
  const int64_t most = pairs == run.chunk.paired ? tuning::kSlideBytes / (pixels_of_group * 64) : 1;
  const auto share = [&](int first) {
    for (int s = 0; pairs && s < split; ++s) {
      if (!shares_rows(d, run.rows, first + 2 * s)) return false;
    }
    return true;
  };
  int groups = 1;
  while (groups < most && y + (groups + 1) * rows <= count && share(y + groups * rows)) ++groups;
  for (int64_t x = 0; x < d.dst_pixels; x += stretch) {
    const int64_t pixels = d.dst_pixels - x < stretch ? d.dst_pixels - x : stretch;
    run.slide[pairs](d, run.chunk, {run.rows, d.kernel_rows, y, groups}, x, pixels, run.epilogue);
  }
  return groups;
}

template <class Isa>
void depthwise_chunk(const DepthwiseRun<Isa>& run) {
  const int split = run.chunk.split, count = run.rows.count;
  for (int y = 0; y < count;) {
    int first[4];
    const int left = count - y;
    bool pairs = run.chunk.paired && left > split && count >= 2 * split;
    if (pairs) {
      const int begin = left < 2 * split ? count - 2 * split : y;  // again rather than half empty
      for (int s = 0; s < split; ++s) {
        first[s] = begin + 2 * s;
        pairs = pairs && shares_rows(run.layer, run.rows, first[s]);
      }
    }
    if (!pairs) {
      const int begin = left < split && count >= split ? count - split : y;
      for (int s = 0; s < split; ++s) first[s] = min_int(begin + s, count - 1);
    }
    int groups = 1;
    if (run.slide[pairs] != nullptr) {
      groups = slide_rows<Isa>(run, first[0], pairs);
    } else {
      depthwise_rows<Isa>(run, first, pairs);
    }
    y += groups * (pairs ? 2 * split : split);
  }
}

/// Returns the reason why an epilogue is not the 8-bit one of words, or null.
inline const char* why_no_bytes(const Epilogue& e) {
  if (e.dst_dtype != DType::u8 && e.dst_dtype != DType::s8) return "dst has more than 8 bits";
  if (e.mode != Epilogue::kFolded) return "post-ops do not fold";
  if (e.guard) return "results may exceed 32 bits, or row_sums are given";
  if (e.num_sums > 0) return "another tensor is added";
  return e.lo != nullptr ? "bounds differ between channels" : nullptr;
}

/// Returns the reason why a layer's windows cannot slide, or null.
template <class Isa>
const char* why_no_slide(const DepthwiseLayer& d, const Epilogue& e) {
  constexpr bool kFives = kHoldsColumns<Isa>;
  if (const char* why = why_no_bytes(e); why != nullptr) return why;
  if (d.dilation != 1) return "taps of a row are not neighbors";
  if (d.stride > 2) return "the stride along a row is more than 2";
  if (d.width == 3 && (d.kernel_rows == 2 || d.kernel_rows == 3)) return nullptr;
  if (kFives && d.stride == 2 && d.width == 5 && d.kernel_rows == 5) return nullptr;
  return kFives ? "the kernel is not 3x3 or 2x3, nor 5x5 with stride 2"
                : "the kernel is not 3x3 or 2x3";
}

template <class Isa>
int64_t depthwise_bytes(const DepthwiseLayer& d) {
  const StashPlan plan = stash_plan<Isa>(d);
  return 2 * chunk_weight_bytes<Isa>(plan) + stash_bytes<Isa>(plan) +
         int64_t{plan.quads} * static_cast<int64_t>(sizeof(int64_t));
}

template <class Isa>
void depthwise(const DepthwiseLayer& d, const DepthwiseRows& rows, const Epilogue& e,
               void* scratch) {
  constexpr int kChannels = Isa::kDepthwiseChannels;
  const bool fold = why_no_bytes(e) == nullptr;
  DepthwiseChunk<Isa> chunk;
  const StashPlan plan = stash_plan<Isa>(d);
  chunk.joined = d.slides && kHoldsColumns<Isa> && d.stride == 2;
  DepthwiseRun<Isa> run{d, rows, e, plan, dot_fns<Isa>(d, plan, fold), chunk, {}, {}};
  init_chunk<Isa>(d, plan, scratch, &chunk);
  for (int channel = 0; channel < d.channels;) {
    const int left = d.channels - channel;
    chunk.split = 1;
    while (chunk.split < Isa::kDepthwiseSplits && left <= kChannels / chunk.split / 2) {
      chunk.split *= 2;
    }
    if (chunk.split == 1 && Isa::kDepthwiseSplits == 4 && left <= kChannels * 3 / 4 && !d.slides)
      chunk.split = 2;
    // Without masks two halves that overlap beat a vector with lanes that have no channel.
    if (Isa::kDepthwiseSplits == 2 && d.channels < kChannels) chunk.split = 2;
    const int width = chunk.width = kChannels / chunk.split;
    chunk.channel = left < width && d.channels >= width ? d.channels - width : channel;
    chunk.count = min_int(d.channels - chunk.channel, width);
    if (chunk.count == width && chunk.channel % kPanel == 0) {
      fill_chunk<Isa, true>(d, e, fold, &chunk);
    } else {
      fill_chunk<Isa, false>(d, e, fold, &chunk);
    }
    for_split<Isa>(chunk.split, d.flip, [&]<bool kFlip, int kSplit>() {
      run.stash = stash_fns<Isa, kFlip, kSplit>();
      for (int pairs = 0; d.slides && pairs < 2; ++pairs) {
        run.slide[pairs] = slide_fn<Isa, kFlip, kSplit>(d, pairs != 0);
      }
    });
    depthwise_chunk<Isa>(run);
    channel = chunk.channel + chunk.count;
  }
}

}  // namespace
