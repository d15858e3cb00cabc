// SPDX-License-Identifier: Apache-2.0
// Depthwise convolution: channels are lanes, four taps share a 32-bit lane (contract:
// DepthwiseLayer in table.h).
//
// Three ways through a row:
//   sliding  kernels of 2 to 5 rows with stride 1 or 2: a column of up to four rows is interleaved
//            once and kept while it is under the window; interleaving anew for every pixel is
//            most of the work.
//   flat     few channels, stride 1: the row is one run of pixels * channels bytes, so that no lane
//   is empty; the
//            weights repeat with the period of the channels.
//   plain    everything else, and pixels whose window the padding cuts.
#pragma once

#include "epilogue.h"

namespace {

/// What one vector of channels needs, in the lane order of Isa::interleave.
template <class Isa>
struct DepthwiseChunk {
  static constexpr int kVectors = Isa::kDepthwiseVectors;
  alignas(64) int32_t acc_init[kVectors][kPanel];
  alignas(64) float multiplier[kVectors][kPanel];
  alignas(64) float offset[kVectors][kPanel];
  alignas(64) int channel;  // first
  int count;                // channels that exist
  // followed by int8 weight[quads][kVectors][kSteps][64]
};

struct DepthwiseHeader {
  int chunks;
  bool flat;
  bool lanes;  // the epilogue is simple enough for the lane order
};

constexpr int64_t kHeaderBytes = 64;

template <class Isa>
int64_t chunk_bytes(int quads) {
  return static_cast<int64_t>(sizeof(DepthwiseChunk<Isa>)) +
         int64_t{quads} * Isa::kDepthwiseVectors * Isa::kSteps * 64;
}

template <class Isa>
TORCHQ_INLINE const int8_t* chunk_weight(const DepthwiseChunk<Isa>* chunk) {
  return reinterpret_cast<const int8_t*>(chunk + 1);
}

/// Chunks after which the channels start at a vector's first lane again.
template <class Isa>
int flat_period(int channels) {
  int divisor = Isa::kDepthwiseChannels;
  while (channels % divisor != 0) divisor /= 2;
  return channels / divisor;
}

template <class Isa>
bool runs_flat(const DepthwiseLayer& d) {
  constexpr int kChunk = Isa::kDepthwiseChannels;
  const int64_t bytes = d.row_pixels * d.channels;
  return d.channels < kChunk && d.src_step == d.channels && d.dst_step == d.channels &&
         bytes >= int64_t{4} * flat_period<Isa>(d.channels) * kChunk;
}

template <class Isa>
int64_t depthwise_bytes(const DepthwiseLayer& d) {
  constexpr int kChunk = Isa::kDepthwiseChannels;
  const int straight = (d.channels + kChunk - 1) / kChunk;
  const int chunks = runs_flat<Isa>(d) ? flat_period<Isa>(d.channels) + straight : straight;
  return kHeaderBytes + chunks * chunk_bytes<Isa>(d.quads);
}

/// Fills one chunk; `channel_of(i)` is the channel of position i, or -1.
template <class Isa, class ChannelOf>
void fill_chunk(const DepthwiseLayer& d, const Epilogue& e, bool lanes, ChannelOf channel_of,
                DepthwiseChunk<Isa>* chunk) {
  int8_t* weight = reinterpret_cast<int8_t*>(chunk + 1);
  for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
    int channels[kPanel];
    for (int i = 0; i < kPanel; ++i) {
      const int c = channel_of(Isa::depthwise_channel(v, i / 4) + i % 4);
      channels[i] = c;
      chunk->acc_init[v][i] = c < 0 ? 0 : d.acc_init[c];
      chunk->multiplier[v][i] = c < 0 || !lanes ? 0.0f : e.multiplier[c];
      chunk->offset[v][i] = c < 0 || !lanes ? 0.0f : e.offset[c];
    }
    for (int q = 0; q < d.quads; ++q) {
      alignas(64) int8_t vector[64] = {};
      for (int i = 0; i < kPanel; ++i) {
        const int c = channels[i];
        if (c < 0) continue;
        memcpy(vector + 4 * i,
               d.packed + ((int64_t{c / kPanel} * d.quads + q) * kPanel + c % kPanel) * kQuad, 4);
      }
      int8_t* dst = weight + (q * Isa::kDepthwiseVectors + v) * 64 * Isa::kSteps;
      if constexpr (Isa::kSteps == 1) {
        memcpy(dst, vector, 64);
      } else {
        Isa::widen(vector, dst);
      }
    }
  }
}

template <class Isa>
void prepare_depthwise(const DepthwiseLayer& d, const Epilogue& e, void* prepared) {
  constexpr int kChunk = Isa::kDepthwiseChannels;
  DepthwiseHeader* header = static_cast<DepthwiseHeader*>(prepared);
  header->lanes = e.mode == Epilogue::kFolded && element_size(e.dst_dtype) == 1 && !e.guard &&
                  e.num_sums == 0 && e.lo == nullptr;
  header->flat = header->lanes && runs_flat<Isa>(d);
  char* next = static_cast<char*>(prepared) + kHeaderBytes;
  const int straight = (d.channels + kChunk - 1) / kChunk;
  header->chunks = straight;
  // The last chunk overlaps the one before rather than run half empty.
  for (int i = 0; i < straight; ++i, next += chunk_bytes<Isa>(d.quads)) {
    auto* chunk = reinterpret_cast<DepthwiseChunk<Isa>*>(next);
    const int last = d.channels - kChunk;
    chunk->channel = i * kChunk > last && last > 0 ? last : i * kChunk;
    chunk->count = min_int(d.channels - chunk->channel, kChunk);
    const auto channel_of = [&](int p) { return p < chunk->count ? chunk->channel + p : -1; };
    fill_chunk<Isa>(d, e, header->lanes, channel_of, chunk);
  }
  if (!header->flat) return;
  const int period = flat_period<Isa>(d.channels);
  for (int i = 0; i < period; ++i, next += chunk_bytes<Isa>(d.quads)) {
    auto* chunk = reinterpret_cast<DepthwiseChunk<Isa>*>(next);
    chunk->channel = i * kChunk;
    chunk->count = kChunk;
    fill_chunk<Isa>(d, e, true, [&](int p) { return (i * kChunk + p) % d.channels; }, chunk);
  }
}

/// One quad of taps: loaded, made unsigned, interleaved.
template <class Isa, bool kFlip>
TORCHQ_INLINE void load_quad(const uint8_t* const* taps, int64_t offset, int count,
                             typename Isa::Int (&quad)[Isa::kDepthwiseVectors]) {
  typename Isa::Bytes bytes[kQuad];
  TORCHQ_UNROLL for (int i = 0; i < kQuad; ++i) {
    bytes[i] = Isa::load_channels(taps[i] + offset, count);
    if constexpr (kFlip) bytes[i] = Isa::flip_sign(bytes[i]);
  }
  Isa::interleave(bytes, quad);
}

template <class Isa>
TORCHQ_INLINE void dot_quad(typename Isa::Int (&acc)[Isa::kDepthwiseVectors],
                            const typename Isa::Int (&quad)[Isa::kDepthwiseVectors],
                            const int8_t* weight) {
  TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
    Isa::dot(acc[v], Isa::template split_src<0>(quad[v]),
             Isa::load_int(reinterpret_cast<const int32_t*>(weight)));
    if constexpr (Isa::kSteps == 2) {
      Isa::dot(acc[v], Isa::template split_src<1>(quad[v]),
               Isa::load_int(reinterpret_cast<const int32_t*>(weight + 64)));
    }
    weight += 64 * Isa::kSteps;
  }
}

template <class Isa>
TORCHQ_INLINE void load_init(const DepthwiseChunk<Isa>* chunk,
                             typename Isa::Int (&acc)[Isa::kDepthwiseVectors]) {
  TORCHQ_UNROLL for (int v = 0; v < Isa::kDepthwiseVectors; ++v) {
    acc[v] = Isa::load_int(chunk->acc_init[v]);
  }
}

/// `count` bytes at `dst_index`; kLanes: the folded 8-bit epilogue, in lane order.
template <class Isa, bool kLanes>
TORCHQ_INLINE void finish_chunk(const Epilogue& e, const DepthwiseChunk<Isa>* chunk,
                                typename Isa::Int (&acc)[Isa::kDepthwiseVectors], int64_t dst_index,
                                int count) {
  constexpr int kVectors = Isa::kDepthwiseVectors;
  if constexpr (kLanes) {
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
      auto y = Isa::fma(Isa::to_float(acc[v]), Isa::load(chunk->multiplier[v]),
                        Isa::load(chunk->offset[v]));
      if (e.clamp) y = Isa::min(Isa::max(y, Isa::set(e.lo_scalar)), Isa::set(e.hi_scalar));
      acc[v] = Isa::to_int(y);
    }
    Isa::store_lanes(static_cast<uint8_t*>(e.dst) + dst_index, acc, e.dst_dtype == DType::s8,
                     count);
  } else {
    Isa::natural_order(acc);
    alignas(64) int32_t tile[kVectors * kPanel];
    TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) Isa::store_int(tile + v * kPanel, acc[v]);
    const int64_t dst_offset = dst_index - chunk->channel;
    finish_tile<Isa>({tile, 1, kVectors, &dst_offset, chunk->channel, count}, e);
  }
}

/// `steps` vectors of `count` channels along a row.
struct DepthwiseSpan {
  int64_t src, src_step;  // bytes
  int64_t dst, dst_step;  // elements
  int64_t steps;
  int count;
};

template <class Isa, bool kFlip, bool kLanes>
TORCHQ_NOINLINE void depthwise_plain(const DepthwiseLayer& d, const DepthwiseChunk<Isa>* chunk,
                                     const DepthwiseRow& row, const DepthwiseSpan& span,
                                     const Epilogue& e) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors;
  for (int64_t i = 0; i < span.steps; ++i) {
    Int acc[kVectors];
    load_init<Isa>(chunk, acc);
    const int8_t* weight = chunk_weight<Isa>(chunk);
    for (int q = 0; q < d.quads; ++q, weight += kVectors * Isa::kSteps * 64) {
      Int quad[kVectors];
      load_quad<Isa, kFlip>(row.taps + q * kQuad, span.src + i * span.src_step, span.count, quad);
      dot_quad<Isa>(acc, quad, weight);
    }
    finish_chunk<Isa, kLanes>(e, chunk, acc, span.dst + i * span.dst_step, span.count);
  }
}

/// Columns of up to four rows stay in registers while the window passes over them: pixel i needs
/// columns kStride * i .. kStride * i + kWidth - 1, so kStride new ones. kTail: quads behind the
/// columns, loaded as they come. Full vectors only.
template <class Isa, bool kFlip, bool kLanes, int kWidth, int kStride, bool kTail>
TORCHQ_NOINLINE void depthwise_sliding(const DepthwiseLayer& d, const DepthwiseChunk<Isa>* chunk,
                                       const DepthwiseRow& row, const DepthwiseSpan& span,
                                       const Epilogue& e) {
  using Int = typename Isa::Int;
  constexpr int kVectors = Isa::kDepthwiseVectors, kCount = Isa::kDepthwiseChannels;
  constexpr int64_t kQuadBytes = kVectors * Isa::kSteps * 64;
  // Stores to dst could alias the weights, so they would be read again for every pixel.
  constexpr bool kKeepWeights = Isa::kSteps == 1 && kWidth == 3;
  const int64_t column_step = span.src_step / kStride;
  const uint8_t* const rows[kQuad] = {row.taps[0], row.taps[1], row.taps[2], row.taps[3]};
  const int8_t* weight = chunk_weight<Isa>(chunk);
  Int kept[kKeepWeights ? kWidth : 1][kVectors];
  if constexpr (kKeepWeights) {
    TORCHQ_UNROLL for (int j = 0; j < kWidth; ++j) {
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
        kept[j][v] = Isa::load_weight(weight + j * kQuadBytes + v * 64);
      }
    }
  }
  Int columns[kWidth][kVectors];
  int64_t src = span.src;
  TORCHQ_UNROLL for (int j = 0; j < kWidth - kStride; ++j, src += column_step) {
    load_quad<Isa, kFlip>(rows, src, kCount, columns[j]);
  }
  for (int64_t i = 0; i < span.steps; i += kWidth) {
    // kWidth pixels at a time: column c lives in slot c % kWidth, so that no register is moved.
    TORCHQ_UNROLL for (int u = 0; u < kWidth; ++u) {
      if (i + u >= span.steps) return;
      TORCHQ_UNROLL for (int s = 0; s < kStride; ++s, src += column_step) {
        load_quad<Isa, kFlip>(rows, src, kCount,
                              columns[(u * kStride + kWidth - kStride + s) % kWidth]);
      }
      Int acc[kVectors];
      load_init<Isa>(chunk, acc);
      TORCHQ_UNROLL for (int j = 0; j < kWidth; ++j) {
        const auto& column = columns[(u * kStride + j) % kWidth];
        if constexpr (kKeepWeights) {
          TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) Isa::dot(acc[v], column[v], kept[j][v]);
        } else {
          dot_quad<Isa>(acc, column, weight + j * kQuadBytes);
        }
      }
      if constexpr (kTail) {
        for (int q = kWidth; q < d.quads; ++q) {
          Int quad[kVectors];
          load_quad<Isa, kFlip>(row.taps + q * kQuad, span.src + (i + u) * span.src_step, kCount,
                                quad);
          dot_quad<Isa>(acc, quad, weight + q * kQuadBytes);
        }
      }
      finish_chunk<Isa, kLanes>(e, chunk, acc, span.dst + (i + u) * span.dst_step, kCount);
    }
  }
}

template <class Isa>
using RowFn = void (*)(const DepthwiseLayer&, const DepthwiseChunk<Isa>*, const DepthwiseRow&,
                       const DepthwiseSpan&, const Epilogue&);

/// The sliding kernel for a layer, or null.
template <class Isa, bool kFlip, bool kLanes>
RowFn<Isa> sliding_kernel(const DepthwiseLayer& d) {
  const bool two = d.src_step == 2 * int64_t{d.channels}, tail = d.quads > d.columns;
  if (d.channels < Isa::kDepthwiseChannels || (!two && d.src_step != d.channels)) return nullptr;
  if (d.columns == 3 && !tail) {
    return two ? &depthwise_sliding<Isa, kFlip, kLanes, 3, 2, false>
               : &depthwise_sliding<Isa, kFlip, kLanes, 3, 1, false>;
  }
  if (d.columns == 5 && tail) {
    return two ? &depthwise_sliding<Isa, kFlip, kLanes, 5, 2, true>
               : &depthwise_sliding<Isa, kFlip, kLanes, 5, 1, true>;
  }
  return nullptr;
}

template <class Isa, bool kFlip, bool kLanes>
void depthwise_row(const DepthwiseLayer& d, const DepthwiseHeader& header, const char* chunks,
                   const DepthwiseRow& row, const Epilogue& e) {
  constexpr int kChunk = Isa::kDepthwiseChannels;
  const int64_t bytes = chunk_bytes<Isa>(d.quads);
  if (header.flat) {
    const int period = flat_period<Isa>(d.channels);
    const int64_t size = row.pixels * d.channels, stride = int64_t{period} * kChunk;
    for (int i = 0; i < period && i * kChunk < size; ++i) {
      const auto* chunk =
          reinterpret_cast<const DepthwiseChunk<Isa>*>(chunks + (header.chunks + i) * bytes);
      const int64_t begin = i * kChunk,
                    full = size >= begin + kChunk ? (size - begin - kChunk) / stride + 1 : 0;
      depthwise_plain<Isa, kFlip, true>(
          d, chunk, row, {begin, stride, row.dst_offset + begin, stride, full, kChunk}, e);
      const int64_t tail = begin + full * stride;
      if (tail < size) {
        depthwise_plain<Isa, kFlip, true>(
            d, chunk, row, {tail, 0, row.dst_offset + tail, 0, 1, min_int(size - tail, kChunk)}, e);
      }
    }
    return;
  }
  RowFn<Isa> run = &depthwise_plain<Isa, kFlip, kLanes>;
  if (row.regular && row.pixels > 1) {
    const RowFn<Isa> sliding = sliding_kernel<Isa, kFlip, kLanes>(d);
    if (sliding != nullptr) run = sliding;
  }
  for (int i = 0; i < header.chunks; ++i) {
    const auto* chunk = reinterpret_cast<const DepthwiseChunk<Isa>*>(chunks + i * bytes);
    run(d, chunk, row,
        {chunk->channel, d.src_step, row.dst_offset + chunk->channel, d.dst_step, row.pixels,
         chunk->count},
        e);
  }
}

template <class Isa>
void depthwise(const DepthwiseLayer& d, const void* prepared, const DepthwiseRow& row,
               const Epilogue& e) {
  const auto& header = *static_cast<const DepthwiseHeader*>(prepared);
  const char* chunks = static_cast<const char*>(prepared) + kHeaderBytes;
  if (header.lanes) {
    d.flip ? depthwise_row<Isa, true, true>(d, header, chunks, row, e)
           : depthwise_row<Isa, false, true>(d, header, chunks, row, e);
  } else {
    d.flip ? depthwise_row<Isa, true, false>(d, header, chunks, row, e)
           : depthwise_row<Isa, false, false>(d, header, chunks, row, e);
  }
}

}  // namespace
