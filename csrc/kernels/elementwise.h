// SPDX-License-Identifier: Apache-2.0
// Conversions, add, mul and table lookup over contiguous rows (contracts: ConvertRow, BinaryRow in
// table.h).
#pragma once

#include "epilogue.h"

namespace {

template <class Isa>
void convert(const ConvertRow& c) {
  for (int64_t i = 0; i < c.size; i += kPanel) {
    const auto m = Isa::mask(min_int(c.size - i, kPanel));
    const auto zero_point = [&](const int32_t* p, int64_t step) {
      return step == 0 ? Isa::set_int(*p) : Isa::load_int(p + i, m);
    };
    const auto factor = c.factor_step == 0 ? Isa::set(*c.factor) : Isa::load(c.factor + i, m);
    const auto src_zero = zero_point(c.src_zero_point, c.src_zero_point_step);
    const auto dst_zero = Isa::to_float(zero_point(c.dst_zero_point, c.dst_zero_point_step));
    const auto x = load_as_float<Isa>(c.src, c.src_dtype, i, src_zero, m);
    // f32 has no zero point, and adding 0 would lose the sign of -0
    const auto y = c.dst_dtype == DType::f32 ? Isa::mul(x, factor) : Isa::fma(x, factor, dst_zero);
    store_float<Isa>(c.dst, c.dst_dtype, i, y, dst_zero, m);
  }
}

template <class Isa>
TORCHQ_INLINE typename Isa::Int load_operand(const void* src, DType dtype, int64_t step, int64_t i,
                                             typename Isa::Mask m) {
  if (step == 0) {
    return Isa::set_int(dtype == DType::u8 ? *static_cast<const uint8_t*>(src)
                                           : *static_cast<const int8_t*>(src));
  }
  const void* p = element(src, dtype, i);
  return dtype == DType::u8 ? Isa::load_u8(p, m) : Isa::load_s8(p, m);
}

template <class Isa, class Combine>
TORCHQ_INLINE void binary_row(const BinaryRow& b, Combine combine) {
  const auto lo = Isa::set(b.lo);
  for (int64_t i = 0; i < b.size; i += kPanel) {
    const auto m = Isa::mask(min_int(b.size - i, kPanel));
    const auto y = combine(load_operand<Isa>(b.src0, b.dtype0, b.step0, i, m),
                           load_operand<Isa>(b.src1, b.dtype1, b.step1, i, m));
    store_float<Isa>(b.dst, b.dst_dtype, i, Isa::max(lo, y), lo, m);
  }
}

template <class Isa>
void add_row(const BinaryRow& b) {
  const auto m0 = Isa::set(b.m0), m1 = Isa::set(b.m1), c = Isa::set(b.c);
  binary_row<Isa>(b, [&](auto q0, auto q1) {
    return Isa::fma(Isa::to_float(q0), m0, Isa::fma(Isa::to_float(q1), m1, c));
  });
}

template <class Isa>
void mul_row(const BinaryRow& b) {
  const auto m0 = Isa::set(b.m0), c = Isa::set(b.c);
  const auto z0 = Isa::set_int(b.z0), z1 = Isa::set_int(b.z1);
  binary_row<Isa>(b, [&](auto q0, auto q1) {
    return Isa::fma(Isa::to_float(Isa::mul(Isa::sub(q0, z0), Isa::sub(q1, z1))), m0, c);
  });
}

/// Sixteen in-lane shuffles, one per row of 16 table entries, selected by the high nibble.
template <class Isa>
void lookup(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size) {
  for (int64_t i = 0; i < size; i += Isa::kByteLanes) {
    const int count = min_int(size - i, Isa::kByteLanes);
    const auto v = Isa::load_channels(src + i, count);
    auto result = Isa::set_bytes(0);
    for (int row = 0; row < 16; ++row) {
      result = Isa::or_bytes(result, Isa::lookup_row(Isa::load_lane(table + 16 * row), v, row));
    }
    Isa::store_channels(dst + i, result, count);
  }
}

}  // namespace
