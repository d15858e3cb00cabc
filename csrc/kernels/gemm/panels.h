// SPDX-License-Identifier: Apache-2.0
// Packing at run time, for operands that are not constant (contracts: PanelSource, sum_bytes in
// contract.h). 16 bytes at a time, as the compiler's vectors: a panel is 16 wide.
#pragma once

#include "kernels/common.h"
#include "kernels/gemm/contract.h"

namespace {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Words8 __attribute__((vector_size(16)));
typedef uint32_t Dwords4 __attribute__((vector_size(16)));
typedef uint64_t Qwords2 __attribute__((vector_size(16)));

TORCHQ_INLINE Bytes16 load_16(const void* p) {
  Bytes16 v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
TORCHQ_INLINE void store_16(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

/// The lanes of the first halves of a and b in turn, or of their second halves.
TORCHQ_INLINE Words8 zip_low(Bytes16 a, Bytes16 b) {
  return reinterpret_cast<Words8>(
      __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
}
TORCHQ_INLINE Words8 zip_high(Bytes16 a, Bytes16 b) {
  return reinterpret_cast<Words8>(
      __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}
TORCHQ_INLINE Dwords4 zip_low(Words8 a, Words8 b) {
  return reinterpret_cast<Dwords4>(__builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11));
}
TORCHQ_INLINE Dwords4 zip_high(Words8 a, Words8 b) {
  return reinterpret_cast<Dwords4>(__builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15));
}
TORCHQ_INLINE Qwords2 zip_low(Dwords4 a, Dwords4 b) {
  return reinterpret_cast<Qwords2>(__builtin_shufflevector(a, b, 0, 4, 1, 5));
}
TORCHQ_INLINE Qwords2 zip_high(Dwords4 a, Dwords4 b) {
  return reinterpret_cast<Qwords2>(__builtin_shufflevector(a, b, 2, 6, 3, 7));
}
TORCHQ_INLINE Qwords2 zip_low(Qwords2 a, Qwords2 b) { return __builtin_shufflevector(a, b, 0, 2); }
TORCHQ_INLINE Qwords2 zip_high(Qwords2 a, Qwords2 b) { return __builtin_shufflevector(a, b, 1, 3); }

/// One quad of up to 16 channels, byte by byte.
TORCHQ_INLINE void pack_tail_quad(const PanelSource& s, int64_t k, int8_t* dst) {
  memset(dst, 0, kPanel * kQuad);
  const int steps = min_int(s.k - k, kQuad);
  for (int n = 0; n < s.channels; ++n) {
    for (int i = 0; i < steps; ++i) {
      const uint8_t q = s.data[(k + i) * s.k_stride + n * s.channel_stride];
      dst[n * kQuad + i] = static_cast<int8_t>(s.flip ? q ^ 0x80 : q);
    }
  }
}

/// Four rows of 16 channels to 16 channels of four.
TORCHQ_INLINE void interleave_rows(const uint8_t* src, int64_t stride, Bytes16 flip, int8_t* dst) {
  Bytes16 row[kQuad];
  for (int i = 0; i < kQuad; ++i) row[i] = load_16(src + i * stride) ^ flip;
  const Words8 low01 = zip_low(row[0], row[1]), low23 = zip_low(row[2], row[3]);
  const Words8 high01 = zip_high(row[0], row[1]), high23 = zip_high(row[2], row[3]);
  store_16(dst, zip_low(low01, low23));
  store_16(dst + 16, zip_high(low01, low23));
  store_16(dst + 32, zip_low(high01, high23));
  store_16(dst + 48, zip_high(high01, high23));
}

/// Four channels of 16 k to four quads of four channels each, 64 bytes apart.
TORCHQ_INLINE void transpose_quads(const uint8_t* src, int64_t stride, Bytes16 flip, int8_t* dst) {
  Dwords4 channel[4];
  for (int n = 0; n < 4; ++n) {
    channel[n] = reinterpret_cast<Dwords4>(load_16(src + n * stride) ^ flip);
  }
  const Qwords2 low01 = zip_low(channel[0], channel[1]), low23 = zip_low(channel[2], channel[3]);
  const Qwords2 high01 = zip_high(channel[0], channel[1]),
                high23 = zip_high(channel[2], channel[3]);
  store_16(dst, zip_low(low01, low23));
  store_16(dst + 64, zip_high(low01, low23));
  store_16(dst + 128, zip_low(high01, high23));
  store_16(dst + 192, zip_high(high01, high23));
}

/// The same of fewer channels; the others are 0.
TORCHQ_INLINE void transpose_some(const uint8_t* src, int64_t stride, int channels, Bytes16 flip,
                                  int8_t* dst) {
  Bytes16 rows[4] = {flip, flip, flip, flip};
  for (int n = 0; n < channels; ++n) rows[n] = load_16(src + n * stride);
  transpose_quads(reinterpret_cast<const uint8_t*>(rows), sizeof rows[0], flip, dst);
}

/// sums[n] = sum over k of the packed weights of channel n.
template <class Isa>
TORCHQ_INLINE void sum_panel(const int8_t* panel, int64_t quads, int32_t* sums) {
  const uint32_t ones = 0x01010101u;
  const auto one = Isa::broadcast(reinterpret_cast<const uint8_t*>(&ones));
  auto total = Isa::zero();
  for (int64_t q = 0; q < quads; ++q, panel += kPanel * kQuad) {
    if constexpr (Isa::kSteps == 1) {
      Isa::dot(total, one, Isa::load_weight(panel));
    } else if constexpr (Isa::kHasNarrow) {
      Isa::dot_narrow(total, one, Isa::load_weight(panel));
    } else {
      alignas(64) int8_t wide[2 * kPanel * kQuad];
      Isa::widen(panel, wide);
      Isa::dot(total, Isa::template split_src<0>(one), Isa::load_weight(wide));
      Isa::dot(total, Isa::template split_src<1>(one), Isa::load_weight(wide + kPanel * kQuad));
    }
  }
  Isa::store_int(sums, total);
}

template <class Isa>
void pack_panel(const PanelSource& s, int8_t* dst, int32_t* sums) {
  Bytes16 flip;
  memset(&flip, s.flip ? 0x80 : 0, sizeof flip);
  const int64_t quads = (s.k + kQuad - 1) / kQuad;
  int64_t k = 0;
  if (s.channels == kPanel && s.channel_stride == 1) {
    for (; k + kQuad <= s.k; k += kQuad) {
      interleave_rows(s.data + k * s.k_stride, s.k_stride, flip, dst + k * kPanel);
    }
  } else if (s.k_stride == 1) {
    for (; k + 4 * kQuad <= s.k; k += 4 * kQuad) {
      for (int n = 0; n < kPanel; n += 4) {
        const uint8_t* src = s.data + k + n * s.channel_stride;
        int8_t* const quads_of_four = dst + k * kPanel + n * kQuad;
        if (s.channels - n >= 4) {
          transpose_quads(src, s.channel_stride, flip, quads_of_four);
        } else {
          transpose_some(src, s.channel_stride, s.channels - n, flip, quads_of_four);
        }
      }
    }
  }
  for (; k < s.k; k += kQuad) pack_tail_quad(s, k, dst + k * kPanel);
  sum_panel<Isa>(dst, quads, sums);
}

/// Products with ones, of 64 bytes at a time.
template <class Isa>
int32_t sum_bytes(const uint8_t* src, int64_t size, bool flip) {
  const auto ones = Isa::set_int(Isa::kSteps == 1 ? 0x01010101 : 0x00010001);
  auto total = Isa::zero();
  int64_t i = 0;
  for (; i + kPanel * kQuad <= size; i += kPanel * kQuad) {
    auto v = Isa::load_int(reinterpret_cast<const int32_t*>(src + i));
    if (flip) v = Isa::flip_sign(v);
    Isa::dot(total, Isa::template split_src<0>(v), ones);
    if constexpr (Isa::kSteps == 2) Isa::dot(total, Isa::template split_src<1>(v), ones);
  }
  int32_t sum = static_cast<int32_t>(Isa::sum_lanes(total));
  for (; i < size; ++i) sum += flip ? src[i] ^ 0x80 : src[i];
  return sum;
}

template <class Isa>
void compensate(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init) {
  for (int64_t i = 0; i < n; i += kPanel) {
    const auto m = Isa::mask(min_int(n - i, kPanel));
    auto sum = Isa::zero();
    for (int t = 0; t < num_taps; ++t) {
      sum = Isa::add(sum, Isa::load_int(compensation + taps[t] * stride + i, m));
    }
    auto init = bias == nullptr ? Isa::zero() : Isa::load_int(bias + i, m);
    Isa::store_int(acc_init + i, Isa::sub(init, Isa::mul(sum, Isa::set_int(zero_point))), m);
  }
}

}  // namespace
