// SPDX-License-Identifier: Apache-2.0
// The matrix product in plain loops.
#pragma once

#include "kernels/epilogue/reference.h"
#include "kernels/gemm/contract.h"

namespace {

int32_t unsigned_src(uint8_t byte, bool flip) { return flip ? byte ^ 0x80 : byte; }

void gemm(const GemmTile& t, const Epilogue& e) {
  for (int r = 0; r < t.rows; ++r) {
    for (int n = 0; n < t.channels; ++n) {
      const int8_t* panel = t.weight + n / kPanel * t.panel_stride;
      uint32_t acc = static_cast<uint32_t>(t.acc_init[n]);
      for (int i = 0; i < t.num_runs; ++i) {
        const uint8_t* src = t.src + t.row_offset[r] + t.runs[i].src_offset;
        const int8_t* weight = panel + t.runs[i].weight_offset + n % kPanel * kQuad;
        for (int64_t k = 0; k < t.runs[i].quads * kQuad; ++k) {
          const int32_t w = weight[k / kQuad * kPanel * kQuad + k % kQuad];
          acc += static_cast<uint32_t>(unsigned_src(src[k], t.flip) * w);
        }
      }
      apply_epilogue(e, static_cast<int32_t>(acc), t.channel + n, t.dst_offset[r] + t.channel + n);
    }
  }
}

void gemm_int4(const Int4Tile& t) {
  const int64_t lanes = t.has_zeros ? t.groups : (t.groups + 1) / 2;
  for (int64_t i = 0; i < t.rows * t.channels; ++i) {
    const int64_t row = i / t.channels, n = i % t.channels, lane = n % kPanel;
    const int8_t* weight = t.weight + n / kPanel * t.k / 8 * kPanel * kQuad + lane * kQuad;
    float acc = 0;
    for (int64_t g = 0; g < t.groups; ++g) {
      const int64_t at = n / kPanel * lanes + (t.has_zeros ? g : g / 2);
      const uint32_t param = static_cast<uint32_t>(t.params[at * kPanel + lane]);
      const int32_t zero = t.has_zeros ? static_cast<int32_t>(param & 0xffff) : 8;
      const uint32_t bits = t.has_zeros || g % 2 == 1 ? param & 0xffff0000u : param << 16;
      float scale;
      memcpy(&scale, &bits, sizeof scale);
      int32_t sum = -zero * t.sums[row * t.groups + g];
      for (int64_t k = g * t.group; k < t.k && k < (g + 1) * t.group; ++k) {
        const int code = weight[k / 8 * kPanel * kQuad + k % kQuad] >> (k % 8 / kQuad * 4) & 15;
        sum += t.src[row * t.k + k] * code;
      }
      acc = fmaf(static_cast<float>(sum), scale, acc);
    }
    float y = acc * t.src_scale[row];
    if (t.bias != nullptr) y += t.bias[n];
    t.dst[row * t.dst_stride + n] = y != y ? Math<Scalar>::kNan : y;
  }
}

void compensate(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t sum = 0;
    for (int t = 0; t < num_taps; ++t) {
      sum += static_cast<uint32_t>(compensation[taps[t] * stride + i]);
    }
    const uint32_t init = bias == nullptr ? 0 : static_cast<uint32_t>(bias[i]);
    acc_init[i] = static_cast<int32_t>(init - sum * static_cast<uint32_t>(zero_point));
  }
}

void pack_panel(const PanelSource& s, int8_t* dst, int32_t* sums) {
  memset(dst, 0, static_cast<size_t>((s.k + kQuad - 1) / kQuad * kPanel * kQuad));
  memset(sums, 0, kPanel * sizeof(int32_t));
  for (int n = 0; n < s.channels; ++n) {
    for (int64_t k = 0; k < s.k; ++k) {
      const uint8_t q = s.data[k * s.k_stride + n * s.channel_stride];
      const int8_t w = static_cast<int8_t>(s.flip ? q ^ 0x80 : q);
      dst[(k / kQuad * kPanel + n) * kQuad + k % kQuad] = w;
      sums[n] += w;
    }
  }
}

int32_t sum_bytes(const uint8_t* src, int64_t size, bool flip) {
  int32_t sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += unsigned_src(src[i], flip);
  return sum;
}

}  // namespace
