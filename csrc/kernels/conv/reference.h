// SPDX-License-Identifier: Apache-2.0
// Convolutions of small groups and depthwise ones, in plain loops.
#pragma once

#include "kernels/conv/contract.h"
#include "kernels/gemm/reference.h"

namespace {

void small_groups(const GemmTile& t, const Epilogue& e) {
  const int group = t.group_quads * kQuad;
  for (int r = 0; r < t.rows; ++r) {
    for (int n = 0; n < t.channels; ++n) {
      const int panel = n / kPanel;
      const int first = min_int(panel * kPanel, t.channels - kPanel);
      const int output = (n - first) % group, input = n - output - first;
      uint32_t acc = static_cast<uint32_t>(t.acc_init[n]);
      for (int i = 0; i < t.num_runs; ++i) {
        const uint8_t* src = t.src + first + t.row_offset[r] + t.runs[i].src_offset;
        const int8_t* vectors = t.weight + panel * t.panel_stride + t.runs[i].weight_offset;
        const int8_t* weight = vectors + (output / kQuad * kPanel + output % kQuad * kQuad) * kQuad;
        for (int k = input; k < input + group; ++k) {
          acc += static_cast<uint32_t>(unsigned_src(src[k], t.flip) * weight[k]);
        }
      }
      apply_epilogue(e, static_cast<int32_t>(acc), t.channel + n, t.dst_offset[r] + t.channel + n);
    }
  }
}

int64_t depthwise_bytes(const DepthwiseLayer&) { return 0; }

void depthwise(const DepthwiseLayer& d, const DepthwiseRows& rows, const Epilogue& e, void*) {
  const auto tap_row = [&](const uint8_t* const* src, int tap, int64_t x) {
    const int64_t pixel = x * d.stride + tap % d.width * d.dilation - d.pad_begin;
    const bool inside = pixel >= 0 && pixel < d.src_pixels;
    return inside ? src[tap / d.width] + pixel * d.channels : d.padding;
  };
  for (int64_t i = 0; i < rows.count * d.dst_pixels; ++i) {
    const int64_t row = i / d.dst_pixels, x = i % d.dst_pixels;
    for (int c = 0; c < d.channels; ++c) {
      const int8_t* weight =
          d.packed + (int64_t{c / kPanel} * d.quads * kPanel + c % kPanel) * kQuad;
      uint32_t acc = static_cast<uint32_t>(d.acc_init[c]);
      for (int t = 0; t < d.quads * kQuad; ++t) {
        if (d.taps[t] < 0) continue;
        const uint8_t q = tap_row(rows.src + row * d.kernel_rows, d.taps[t], x)[c];
        const int32_t w = weight[t / kQuad * kPanel * kQuad + t % kQuad];
        acc += static_cast<uint32_t>(unsigned_src(q, d.flip) * w);
      }
      apply_epilogue(e, static_cast<int32_t>(acc), c, rows.dst_offset[row] + x * d.channels + c);
    }
  }
}

}  // namespace
