// SPDX-License-Identifier: Apache-2.0
// Depthwise convolution: channels are lanes, four taps share a 32-bit lane (contract: DepthwiseRow
// in table.h).
#pragma once

#include "epilogue.h"

namespace {

template <class Isa>
int64_t depthwise_weight_bytes(int64_t channels, int quads) {
  constexpr int kChunk = Isa::kDepthwiseChannels;
  return (channels + kChunk - 1) / kChunk * kChunk * quads * kQuad * Isa::kSteps;
}

/// [ceil(C/16)][quads][16][4] to the lane order of Isa::interleave, widened where the ISA
/// multiplies 16 bits. Cheap (one pass over 12 bytes a channel for 3x3), so it is done per call and
/// the packed form stays neutral.
template <class Isa>
void prepare_depthwise(const int8_t* packed, int64_t channels, int quads, int8_t* dst) {
  for (int64_t chunk = 0; chunk < channels; chunk += Isa::kDepthwiseChannels) {
    for (int q = 0; q < quads; ++q) {
      for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
        alignas(64) int8_t vector[64];
        for (int lane = 0; lane < 4; ++lane) {
          const int64_t channel = chunk + Isa::depthwise_channel(v, lane);
          if (channel < channels) {
            memcpy(vector + 16 * lane,
                   packed + ((channel / kPanel * quads + q) * kPanel + channel % kPanel) * kQuad,
                   16);
          } else {
            memset(vector + 16 * lane, 0, 16);
          }
        }
        if constexpr (Isa::kSteps == 1) {
          memcpy(dst, vector, 64);
        } else {
          Isa::widen(vector, dst);
        }
        dst += 64 * Isa::kSteps;
      }
    }
  }
}

template <class Isa, bool kFlip>
void depthwise_rows(const DepthwiseRow& d, const Epilogue& e) {
  constexpr int kChunk = Isa::kDepthwiseChannels, kVectors = Isa::kDepthwiseVectors;
  using Int = typename Isa::Int;
  const int64_t weight_stride = static_cast<int64_t>(d.quads) * kChunk * kQuad * Isa::kSteps;
  for (int channel = 0; channel < d.channels; channel += kChunk) {
    const int count = min_int(d.channels - channel, kChunk);
    const bool in_registers = finishes_in_registers(e, count, kVectors);
    for (int64_t pixel = 0; pixel < d.pixels; ++pixel) {
      const int64_t src_offset = pixel * d.src_step + channel;
      const int8_t* weight = d.weight + channel / kChunk * weight_stride;
      Int acc[kVectors];
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) acc[v] = Isa::zero();
      for (int q = 0; q < d.quads; ++q) {
        typename Isa::Bytes taps[kQuad];
        TORCHQ_UNROLL for (int i = 0; i < kQuad; ++i) {
          taps[i] = Isa::load_channels(d.taps[q * kQuad + i] + src_offset, count);
          if constexpr (kFlip) taps[i] = Isa::flip_sign(taps[i]);
        }
        Int quads[kVectors];
        Isa::interleave(taps, quads);
        TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
          Isa::dot(acc[v], Isa::template split_src<0>(quads[v]), Isa::load_weight(weight));
          if constexpr (Isa::kSteps == 2) {
            Isa::dot(acc[v], Isa::template split_src<1>(quads[v]), Isa::load_weight(weight + 64));
          }
          weight += 64 * Isa::kSteps;
        }
      }
      Isa::natural_order(acc);
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
        acc[v] = Isa::add(acc[v], Isa::load_int(d.acc_init + channel + v * kPanel));
      }
      const int64_t dst_offset = d.dst_offset + pixel * d.dst_step;
      if (in_registers) {
        finish_row<Isa, kVectors>(e, acc, dst_offset + channel, channel);
      } else {
        alignas(64) int32_t tile[kChunk];
        for (int v = 0; v < kVectors; ++v) Isa::store_int(tile + v * kPanel, acc[v]);
        finish_tile<Isa>({tile, 1, kVectors, &dst_offset, channel, count}, e);
      }
    }
  }
}

template <class Isa>
void depthwise(const DepthwiseRow& d, const Epilogue& e) {
  d.flip ? depthwise_rows<Isa, true>(d, e) : depthwise_rows<Isa, false>(d, e);
}

}  // namespace
