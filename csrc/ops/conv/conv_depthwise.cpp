// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions: blocks of destination rows, each with the source rows that it meets.
#include <algorithm>
#include <cstring>

#include "ops/conv/conv.h"
#include "ops/conv/depthwise_weights.h"
#include "ops/gemm/gemm.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

/// Taps in the padding read zero points, so one compensation serves every pixel.
DepthwiseLayer depthwise_layer(const Conv& c, const Source& s, const DepthwiseWeights& weights,
                               ScratchFrame& scratch) {
  const TapAxis& row = c.axes[2];
  const int32_t all_taps = 0;
  DepthwiseLayer layer{};
  layer.packed = weights.packed;
  layer.taps = weights.taps.data();
  layer.channels = static_cast<int>(s.channels);
  layer.quads = static_cast<int>(weights.taps.size() / kQuad);
  layer.kernel_rows = static_cast<int>(weights.parts * c.axes[0].kernel * c.axes[1].kernel);
  layer.width = row.kernel;
  layer.stride = row.stride;
  layer.dilation = row.dilation;
  layer.pad_begin = row.padding;
  layer.src_pixels = row.src_size;
  layer.dst_pixels = row.dst_size;
  layer.flip = c.is_signed;
  layer.zero_point = static_cast<uint8_t>(c.zero_point);
  layer.acc_init =
      make_acc_init(scratch, c.tier, c.compensation, all_taps, c.acc_bias, c.effective_zero_point(),
                    1, layer.channels, static_cast<int>(panels_of(layer.channels)));
  if (c.weight_zero_point != nullptr) {
    int32_t* init = scratch.take<int32_t>(panels_of(s.channels), kPanel);
    // Wraps as the sums do.
    const int64_t taps = c.axes[0].kernel * c.axes[1].kernel * row.kernel;
    const uint32_t shift = static_cast<uint32_t>(taps * c.effective_zero_point());
    for (int64_t n = 0; n < s.channels; ++n) {
      init[n] = static_cast<int32_t>(static_cast<uint32_t>(layer.acc_init[n]) +
                                     shift * static_cast<uint32_t>(c.weight_zero_point[n]));
    }
    layer.acc_init = init;
  }
  const int64_t padding_bytes = std::max<int64_t>(s.size[2], 1) * s.channels;
  uint8_t* padding = scratch.take<uint8_t>(padding_bytes);
  std::memset(padding, layer.zero_point, static_cast<size_t>(padding_bytes));
  layer.padding = padding;
  return layer;
}

/// Position of a destination row. Divides for the first row only: a call of 6 us may have as few as
/// seven rows of 7 pixels.
struct RowPosition {
  int64_t n, depth, height;
  const Conv& conv;

  RowPosition(const Conv& c, int64_t row)
      : n(row / (c.output(0) * c.output(1))),
        depth(row / c.output(1) % c.output(0)),
        height(row % c.output(1)),
        conv(c) {}
  void next() {
    if (++height < conv.output(1)) return;
    height = 0;
    if (++depth < conv.output(0)) return;
    depth = 0;
    ++n;
  }
};

/// The source rows that a destination row meets.
void depthwise_sources(const Source& s, const DepthwiseLayer& layer, const RowPosition& row,
                       const uint8_t** src) {
  const TapAxis(&axes)[3] = row.conv.axes;
  const uint8_t** const begin = src;
  const uint8_t* const image = s.data + row.n * s.image_bytes();
  for (int64_t kd = 0; kd < axes[0].kernel; ++kd) {
    const int64_t d = axes[0].source(row.depth, kd);
    for (int64_t kh = 0; kh < axes[1].kernel; ++kh) {
      const int64_t h = axes[1].source(row.height, kh);
      *src++ = d < 0 || h < 0 ? layer.padding : image + d * s.pitch(0) + h * s.pitch(1);
    }
  }
  // The parts of weights, see DepthwiseWeights.
  const int64_t rows = src - begin;
  for (; src < begin + layer.kernel_rows; ++src) *src = src[-rows];
}

}  // namespace

void run_depthwise(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace) {
  trace.ran(c.tier, "depthwise");
  ScratchFrame scratch;
  const int64_t kernel[] = {c.axes[0].kernel, c.axes[1].kernel, c.axes[2].kernel};
  const DepthwiseWeights weights =
      depthwise_weights(scratch, c.weight, s.channels, kernel, c.weight_zero_point);
  DepthwiseLayer layer = depthwise_layer(c, s, weights, scratch);
  const DepthwiseChoice choice = choose(c, s, layer, weights.parts, epilogue);
  choice.log();
  layer.slides = choice.slides;
  const int64_t rows = s.batch * c.output(0) * c.output(1);
  parallel_ranges(rows, choice.threads, [&](Range range) {
    const int64_t size = std::min(choice.block_rows, range.end - range.begin);
    ScratchFrame frame;
    const uint8_t** src = frame.take<const uint8_t*>(size, layer.kernel_rows);
    int64_t* dst_offset = frame.take<int64_t>(size);
    void* work = frame.take<uint8_t>(c.tier.depthwise_bytes(layer));
    RowPosition row(c, range.begin);
    for (int64_t begin = range.begin; begin < range.end; begin += size) {
      const int count = static_cast<int>(std::min(size, range.end - begin));
      for (int i = 0; i < count; ++i, row.next()) {
        depthwise_sources(s, layer, row, src + int64_t{i} * layer.kernel_rows);
        dst_offset[i] = (begin + i) * c.output(2) * s.channels;
      }
      c.tier.depthwise(layer, {count, src, dst_offset}, epilogue, work);
      const int64_t dst_row = c.output(2) * s.channels;
      c.last_step.apply(static_cast<uint8_t*>(epilogue.dst) + begin * dst_row, count * dst_row);
    }
  });
}

}  // namespace torchq
