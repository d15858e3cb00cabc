// SPDX-License-Identifier: Apache-2.0
// AVX-512, VNNI and AMX in AVX2, so that the kernels of every tier run on any x86-64 CPU of today:
// what they compute, not how fast, nor what the compiler makes of their intrinsics. Included in
// front of their sources (`make test-emulated`). Most of it is SIMDe; here is what that lacks
// (0.8), what it reads or writes outside of masks, and where its NaN or rounding are not the
// instruction's.
#pragma once

#define TORCHQ_EMULATED
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

namespace emulated {

// Lanes of a vector, and masks of them

template <class T, class V>
using LanesOf = std::array<T, sizeof(V) / sizeof(T)>;

template <class T, class V>
V load(uint64_t mask, const void* from) {
  LanesOf<T, V> lanes{};
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (mask >> i & 1) std::memcpy(&lanes[i], static_cast<const T*>(from) + i, sizeof(T));
  }
  return std::bit_cast<V>(lanes);
}
template <class T, class V>
void store(void* to, uint64_t mask, V v) {
  const auto lanes = std::bit_cast<LanesOf<T, V>>(v);
  for (size_t i = 0; i < lanes.size(); ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<T*>(to) + i, &lanes[i], sizeof(T));
  }
}
inline uint8_t differing(__m512i a, __m512i b) {
  const auto x = std::bit_cast<LanesOf<int64_t, __m512i>>(a);
  const auto y = std::bit_cast<LanesOf<int64_t, __m512i>>(b);
  int mask = 0;
  for (int i = 0; i < 8; ++i) mask |= (x[i] != y[i]) << i;
  return static_cast<uint8_t>(mask);
}
inline int64_t sum(__m512i v) {
  uint64_t total = 0;
  for (const uint64_t lane : std::bit_cast<LanesOf<uint64_t, __m512i>>(v)) total += lane;
  return static_cast<int64_t>(total);
}
inline __m128i saturate_u8(__m512i v) {
  LanesOf<uint8_t, __m128i> bytes;
  const auto lanes = std::bit_cast<LanesOf<uint32_t, __m512i>>(v);
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(lanes[i] > 255 ? 255 : lanes[i]);
  return std::bit_cast<__m128i>(bytes);
}

// Halves of a vector, by instructions of AVX2

/// `f` of the low halves, then of the high ones; `To` is what both results make.
template <class To, class Half, class F, class... V>
To by_halves(F f, V... v) {
  using Result = decltype(f(std::bit_cast<std::array<Half, 2>>(v)[0]...));
  std::array<Result, 2> result = {f(std::bit_cast<std::array<Half, 2>>(v)[0]...),
                                  f(std::bit_cast<std::array<Half, 2>>(v)[1]...)};
  return std::bit_cast<To>(result);
}
#define TORCHQ_HALVES(name) \
  [](auto... half) __attribute__((always_inline)) { return name(half...); }

inline __m512 max(__m512 a, __m512 b) {
  return by_halves<__m512, __m256>(TORCHQ_HALVES(_mm256_max_ps), a, b);
}
inline __m512 min(__m512 a, __m512 b) {
  return by_halves<__m512, __m256>(TORCHQ_HALVES(_mm256_min_ps), a, b);
}
inline __m512 fma(__m512 a, __m512 b, __m512 c) {
  return by_halves<__m512, __m256>(TORCHQ_HALVES(_mm256_fmadd_ps), a, b, c);
}
inline __m512 fnma(__m512 a, __m512 b, __m512 c) {
  return by_halves<__m512, __m256>(TORCHQ_HALVES(_mm256_fnmadd_ps), a, b, c);
}
inline __m512i round_to_int(__m512 v) {
  return by_halves<__m512i, __m256>(TORCHQ_HALVES(_mm256_cvtps_epi32), v);
}
inline __m512 to_float(__m512i v) {
  return by_halves<__m512, __m256i>(TORCHQ_HALVES(_mm256_cvtepi32_ps), v);
}
inline __m512i to_int64(__m256i v) {
  return by_halves<__m512i, __m128i>(TORCHQ_HALVES(_mm256_cvtepi32_epi64), v);
}
inline __m512d to_double(__m256i v) {
  return by_halves<__m512d, __m128i>(TORCHQ_HALVES(_mm256_cvtepi32_pd), v);
}
inline __m256 to_float(__m512d v) {
  return by_halves<__m256, __m256d>(TORCHQ_HALVES(_mm256_cvtpd_ps), v);
}
inline __m512i widen_s8(__m128i v) {
  return by_halves<__m512i, int64_t>(
      [](int64_t half) { return _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(half)); }, v);
}
inline __m512i widen_u8(__m128i v) {
  return by_halves<__m512i, int64_t>(
      [](int64_t half) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(half)); }, v);
}
inline __m256i dot(__m256i acc, __m256i u8, __m256i s8) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u8, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s8, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u8, 8), _mm256_srai_epi16(s8, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}

// Tiles: what the manual calls an exception ends the process

struct Tiles {
  bool are_configured;
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}
inline void configure(const void* from) {
  uint8_t config[64];
  std::memcpy(config, from, sizeof(config));
  require(config[0] == 1);
  for (int i = 1; i < 16; ++i) require(config[i] == 0);
  tiles = {};
  tiles.are_configured = true;
  for (int i = 0; i < 8; ++i) {
    std::memcpy(&tiles.row_bytes[i], config + 16 + 2 * i, 2);
    tiles.rows[i] = config[48 + i];
    require(tiles.row_bytes[i] <= 64 && tiles.rows[i] <= 16);
    require((tiles.row_bytes[i] == 0) == (tiles.rows[i] == 0));
  }
}
inline void release() { tiles.are_configured = false; }
inline void load_tile(int t, const void* from, int64_t stride) {
  require(tiles.are_configured && tiles.rows[t] > 0);
  std::memset(tiles.data[t], 0, sizeof(tiles.data[t]));
  for (int row = 0; row < tiles.rows[t]; ++row) {
    std::memcpy(tiles.data[t][row], static_cast<const char*>(from) + row * stride,
                tiles.row_bytes[t]);
  }
}
inline void store_tile(int t, void* to, int64_t stride) {
  require(tiles.are_configured && tiles.rows[t] > 0);
  for (int row = 0; row < tiles.rows[t]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[t][row], tiles.row_bytes[t]);
  }
}
inline void multiply_tiles(int dst, int src, int weight) {
  require(tiles.are_configured && tiles.rows[dst] == tiles.rows[src]);
  require(tiles.row_bytes[src] == tiles.rows[weight] * 4);
  require(tiles.row_bytes[dst] == tiles.row_bytes[weight] && tiles.rows[weight] > 0);
  for (int row = 0; row < tiles.rows[dst]; ++row) {
    int32_t sums[16];
    std::memcpy(sums, tiles.data[dst][row], sizeof(sums));
    for (int quad = 0; quad < tiles.rows[weight]; ++quad) {
      const uint8_t* bytes = tiles.data[src][row] + 4 * quad;
      for (int i = 0; i < tiles.row_bytes[dst]; ++i) {
        const int product = bytes[i % 4] * static_cast<int8_t>(tiles.data[weight][quad][i]);
        sums[i / 4] = static_cast<int32_t>(static_cast<uint32_t>(sums[i / 4]) + product);
      }
    }
    std::memcpy(tiles.data[dst][row], sums, sizeof(sums));
  }
}

}  // namespace emulated

// In place of the intrinsics: of immintrin.h, which are functions, and of SIMDe, which are macros

#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#undef _mm512_mask_storeu_epi32
#undef _mm512_mask_storeu_ps
#undef _mm512_maskz_loadu_epi64
#undef _mm512_maskz_loadu_ps
#undef _mm512_max_ps
#undef _mm512_min_ps
#define _mm_mask_storeu_epi8 emulated::store<uint8_t, __m128i>
#define _mm_maskz_loadu_epi8 emulated::load<uint8_t, __m128i>
#define _mm256_mask_storeu_epi8 emulated::store<uint8_t, __m256i>
#define _mm256_maskz_loadu_epi8 emulated::load<uint8_t, __m256i>
#define _mm512_cmpneq_epi64_mask emulated::differing
#define _mm512_cvtepi32_epi64 emulated::to_int64
#define _mm512_cvtepi32_pd emulated::to_double
#define _mm512_cvtepi32_ps emulated::to_float
#define _mm512_cvtepi8_epi32 emulated::widen_s8
#define _mm512_cvtepu8_epi32 emulated::widen_u8
#define _mm512_cvtpd_ps emulated::to_float
#define _mm512_cvtps_epi32 emulated::round_to_int
#define _mm512_cvtusepi32_epi8 emulated::saturate_u8
#define _mm512_fmadd_ps emulated::fma
#define _mm512_fnmadd_ps emulated::fnma
#define _mm512_mask_storeu_epi32 emulated::store<int32_t, __m512i>
#define _mm512_mask_storeu_epi8 emulated::store<uint8_t, __m512i>
#define _mm512_mask_storeu_ps emulated::store<float, __m512>
#define _mm512_maskz_loadu_epi32 emulated::load<int32_t, __m512i>
#define _mm512_maskz_loadu_epi64 emulated::load<int64_t, __m512i>
#define _mm512_maskz_loadu_epi8 emulated::load<uint8_t, __m512i>
#define _mm512_maskz_loadu_ps emulated::load<float, __m512>
#define _mm512_max_ps emulated::max
#define _mm512_min_ps emulated::min
#define _mm512_reduce_add_epi64 emulated::sum
#undef _tile_dpbusd
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_stream_loadd
#define _tile_dpbusd emulated::multiply_tiles
#define _tile_loadconfig emulated::configure
#define _tile_loadd emulated::load_tile
#define _tile_release emulated::release
#define _tile_stored emulated::store_tile
#define _tile_stream_loadd emulated::load_tile

// What csrc/isa has as inline assembly

namespace emulated {

template <class V, class Constant>
V load(const Constant& c) {
  V v;
  std::memcpy(&v, &c, sizeof(v));
  return v;
}
inline __m512i dot(__m512i acc, __m512i u8, __m512i s8) {
  return by_halves<__m512i, __m256i>([](__m256i a, __m256i u, __m256i s) { return dot(a, u, s); },
                                     acc, u8, s8);
}

}  // namespace emulated

#define TORCHQ_ASM_PIN(v) static_cast<void>(v)
#define TORCHQ_ASM_MAX(v, c) v = _mm512_max_epi32(v, emulated::load<__m512i>(c))
#define TORCHQ_ASM_XOR(v, c) v = _mm512_xor_si512(v, emulated::load<__m512i>(c))
#define TORCHQ_ASM_AND(v, c) v = _mm512_and_si512(v, emulated::load<__m512i>(c))
#define TORCHQ_ASM_SHUFFLE(v, c) v = _mm_shuffle_epi8(v, emulated::load<__m128i>(c))
#define TORCHQ_ASM_DOT(acc, src, w) acc = emulated::dot(acc, src, w)
#define TORCHQ_ASM_DOT_THREE(a, b, c, src, w) \
  a = emulated::dot(a, src, w[0]), b = emulated::dot(b, src, w[1]), c = emulated::dot(c, src, w[2])
#define TORCHQ_ASM_DOT_FOUR(a, b, c, d, src, w) \
  TORCHQ_ASM_DOT_THREE(a, b, c, src, w), d = emulated::dot(d, src, w[3])
