// SPDX-License-Identifier: Apache-2.0
// Depthwise convolutions: blocks of destination rows, each with the source rows that it meets.
#include <algorithm>
#include <cstring>

#include "kernels/conv/depthwise_strategy.h"
#include "ops/conv/conv.h"
#include "ops/conv/depthwise_weights.h"
#include "ops/gemm/gemm.h"
#include "runtime/parallel.h"
#include "runtime/verbose.h"

namespace torchq {
namespace {

/// Source bytes of the rows that pass through the depthwise kernel at a time, chunk after chunk of
/// channels: they stay in L2.
constexpr int64_t kDepthwiseBytes = 256 * 1024;
constexpr int64_t kMinDepthwiseRows = 8;

/// Taps in the padding read zero points, so one compensation serves every pixel.
DepthwiseLayer depthwise_layer(const Conv& c, const Source& s, const DepthwiseWeights& weights,
                               ScratchFrame& scratch) {
  const Window& w = s.window;
  const int32_t all_taps = 0;
  DepthwiseLayer layer{};
  layer.packed = weights.packed;
  layer.taps = weights.taps.data();
  layer.channels = static_cast<int>(s.channels);
  layer.quads = static_cast<int>(weights.taps.size() / kQuad);
  layer.kernel_rows = static_cast<int>(weights.parts * w.kernel[0] * w.kernel[1]);
  layer.width = w.kernel[2];
  layer.stride = w.stride[2];
  layer.dilation = w.dilation[2];
  layer.pad_begin = w.pad_begin[2];
  layer.src_pixels = s.size[2];
  layer.dst_pixels = c.output[2];
  layer.flip = c.is_signed;
  layer.zero_point = static_cast<uint8_t>(c.zero_point);
  layer.acc_init =
      make_acc_init(scratch, c.tier, c.compensation, all_taps, c.acc_bias, c.effective_zero_point(),
                    1, layer.channels, static_cast<int>(panels_of(layer.channels)));
  if (c.weight_zero_point != nullptr) {
    int32_t* init = scratch.take<int32_t>(panels_of(s.channels) * kPanel);
    // Wraps as the sums do.
    const uint32_t shift = static_cast<uint32_t>(w.taps() * c.effective_zero_point());
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
  const int64_t (&size)[3];

  RowPosition(const int64_t (&output)[3], int64_t row)
      : n(row / (output[0] * output[1])),
        depth(row / output[1] % output[0]),
        height(row % output[1]),
        size(output) {}
  void next() {
    if (++height < size[1]) return;
    height = 0;
    if (++depth < size[0]) return;
    depth = 0;
    ++n;
  }
};

/// The source rows that a destination row meets.
void depthwise_sources(const Source& s, const DepthwiseLayer& layer, const RowPosition& row,
                       const uint8_t** src) {
  const Window& w = s.window;
  const uint8_t** const begin = src;
  const int64_t d0 = row.depth * w.stride[0] - w.pad_begin[0];
  const int64_t h0 = row.height * w.stride[1] - w.pad_begin[1];
  const uint8_t* const image = s.data + row.n * s.image_bytes();
  for (int64_t kd = 0; kd < w.kernel[0]; ++kd) {
    for (int64_t kh = 0; kh < w.kernel[1]; ++kh) {
      const int64_t d = d0 + kd * w.dilation[0], h = h0 + kh * w.dilation[1];
      const bool inside = d >= 0 && d < s.size[0] && h >= 0 && h < s.size[1];
      *src++ = inside ? image + d * s.pitch(0) + h * s.pitch(1) : layer.padding;
    }
  }
  // The parts of weights, see DepthwiseWeights.
  const int64_t rows = src - begin;
  for (; src < begin + layer.kernel_rows; ++src) *src = src[-rows];
}

/// Logs why the fastest strategy along a row is not taken.
void log_depthwise_choice(const Conv& c, const DepthwiseLayer& layer, int64_t parts,
                          const Epilogue& epilogue) {
  const std::string_view isa = c.tier.isa;
  if (isa == "reference") return;
  const char* why = why_no_bytes(epilogue);
  if (why == nullptr) {
    const bool two = isa == "avx512_vnni" || isa == "amx";
    DepthwiseLayer one = layer;
    one.kernel_rows /= static_cast<int>(parts);
    why = why_no_slide(layer, two);
    if (why != nullptr && why_no_slide(one, two) == nullptr)
      why = "weights have more than 8 bits without their zero points";
  }
  log_rejected("depthwise slide", why);
}

}  // namespace

void run_depthwise(const Conv& c, const Source& s, const Epilogue& epilogue, OpTrace& trace) {
  trace.ran(c.tier, "depthwise");
  ScratchFrame scratch;
  const DepthwiseWeights weights =
      depthwise_weights(scratch, c.weight.const_data_ptr<int8_t>(), s.channels,
                        {s.window.kernel, 3}, c.weight_zero_point);
  const DepthwiseLayer layer = depthwise_layer(c, s, weights, scratch);
  if (logs_kernel_choice()) log_depthwise_choice(c, layer, weights.parts, epilogue);
  const int64_t rows = s.batch * c.output[0] * c.output[1];
  const int64_t row_bytes = std::max<int64_t>(s.window.stride[1] * s.pitch(1), 1);
  const int64_t block = std::max(kDepthwiseBytes / row_bytes, kMinDepthwiseRows);
  const int threads = threads_for(rows * c.output[2] * s.channels * layer.quads * kQuad);
  parallel_ranges(rows, threads, [&](Range range) {
    const int64_t size = std::min(block, range.end - range.begin);
    ScratchFrame frame;
    const uint8_t** src = frame.take<const uint8_t*>(size * layer.kernel_rows);
    int64_t* dst_offset = frame.take<int64_t>(size);
    void* work = frame.take<uint8_t>(c.tier.depthwise_bytes(layer));
    RowPosition row(c.output, range.begin);
    for (int64_t begin = range.begin; begin < range.end; begin += size) {
      const int count = static_cast<int>(std::min(size, range.end - begin));
      for (int i = 0; i < count; ++i, row.next()) {
        depthwise_sources(s, layer, row, src + int64_t{i} * layer.kernel_rows);
        dst_offset[i] = (begin + i) * c.output[2] * s.channels;
      }
      c.tier.depthwise(layer, {count, src, dst_offset}, epilogue, work);
      const int64_t dst_row = c.output[2] * s.channels;
      c.last_step.apply(static_cast<uint8_t*>(epilogue.dst) + begin * dst_row, count * dst_row);
    }
  });
}

}  // namespace torchq
