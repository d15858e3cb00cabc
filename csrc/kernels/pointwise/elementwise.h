// SPDX-License-Identifier: Apache-2.0
// Conversions, add, mul and table lookup over contiguous rows (contracts: ConvertRow, BinaryRows
// in contract.h).
#pragma once

#include "kernels/epilogue/epilogue.h"
#include "kernels/pointwise/contract.h"

namespace {

/// With one set of parameters for the row, or one per element.
template <class Isa, DType kSrc, DType kDst, bool kPerElement>
TORCHQ_INLINE void convert_row(const ConvertRow& row) {
  const ConvertRow c = row;  // by value: what is stored through dst could be any of it
  const auto value = [=](int64_t i, auto m, auto factor, auto src_zero, auto dst_zero) {
    const auto x = load_as_float<Isa>(c.src, kSrc, i, src_zero, m);
    // f32 has no zero point, and adding 0 would lose the sign of -0
    if constexpr (kDst == DType::f32) return Isa::mul(x, factor);
    return Isa::fma(x, factor, dst_zero);
  };
  if constexpr (!kPerElement) {
    const auto factor = Isa::set(*c.factor);
    const auto src_zero = Isa::set_int(*c.src_zero_point);
    const auto dst_zero = Isa::to_float(Isa::set_int(*c.dst_zero_point));
    return store_row_as<Isa, kDst>(c.dst, c.size, dst_zero, [=](int64_t i, auto m) {
      return value(i, m, factor, src_zero, dst_zero);
    });
  }
  const auto zero_point = [](const int32_t* p, int64_t step, int64_t i, auto m) {
    return step != 0 ? Isa::load_int(p + i, m) : Isa::set_int(*p);
  };
  for_each_row_panel<Isa>(c.size, [&](int64_t i, auto m) {
    const auto factor = c.factor_step != 0 ? Isa::load(c.factor + i, m) : Isa::set(*c.factor);
    const auto src_zero = zero_point(c.src_zero_point, c.src_zero_point_step, i, m);
    const auto dst_zero = Isa::to_float(zero_point(c.dst_zero_point, c.dst_zero_point_step, i, m));
    store_as<Isa, kDst>(c.dst, i, value(i, m, factor, src_zero, dst_zero), dst_zero, m);
  });
}

template <class Isa>
void convert(const ConvertRow& c) {
  const bool per_element = (c.factor_step | c.src_zero_point_step | c.dst_zero_point_step) != 0;
  if (c.size == 0) return;
  with_dtype(c.src_dtype, [&](auto src) {
    with_dtype(c.dst_dtype, [&](auto dst) {
      constexpr DType kSrc = decltype(src)::value, kDst = decltype(dst)::value;
      per_element ? convert_row<Isa, kSrc, kDst, true>(c) : convert_row<Isa, kSrc, kDst, false>(c);
    });
  });
}

/// Loads the values of a row, or one value for the whole row (`step` 0).
template <class Isa, DType kDtype>
TORCHQ_INLINE typename Isa::Int load_operand(const void* src, int64_t step, int64_t i,
                                             typename Isa::Mask m) {
  if (step == 0) {
    return Isa::set_int(kDtype == DType::u8 ? *static_cast<const uint8_t*>(src)
                                            : *static_cast<const int8_t*>(src));
  }
  const void* p = element(src, kDtype, i);
  return kDtype == DType::u8 ? Isa::load_u8(p, m) : Isa::load_s8(p, m);
}

template <class Use>
TORCHQ_INLINE void with_sign(DType dtype, Use use) {
  dtype == DType::u8 ? use(DTypeTag<DType::u8>{}) : use(DTypeTag<DType::s8>{});
}

/// combine(q0, shared(q1)) of each pair of values.
template <class Isa, class Shared, class Combine>
TORCHQ_INLINE void binary_rows(const BinaryRows& b, Shared shared, Combine combine) {
  // By value: what is stored through dst could be any of them.
  const void *const src0 = b.src0, *const src1 = b.src1;
  const int64_t step0 = b.step0, step1 = b.step1;
  const auto lo = Isa::set(b.lo);
  with_sign(b.dtype0, [&](auto dtype0) {
    with_sign(b.dtype1, [&](auto dtype1) {
      with_dtype(b.dst_dtype, [&](auto dst) {
        constexpr DType kDtype0 = decltype(dtype0)::value, kDtype1 = decltype(dtype1)::value;
        store_rows_as<Isa, decltype(dst)::value>(
            b.dst, b.size, b.rows, lo,
            [=](int64_t i, auto m) {
              return shared(load_operand<Isa, kDtype1>(src1, step1, i, m));
            },
            [=](int64_t i, auto s, auto m) {
              return Isa::max(lo, combine(load_operand<Isa, kDtype0>(src0, step0, i, m), s));
            });
      });
    });
  });
}

template <class Isa>
void add_rows(const BinaryRows& b) {
  const auto m0 = Isa::set(b.m0), m1 = Isa::set(b.m1), c = Isa::set(b.c);
  binary_rows<Isa>(
      b, [=](auto q1) { return Isa::fma(Isa::to_float(q1), m1, c); },
      [=](auto q0, auto shared) { return Isa::fma(Isa::to_float(q0), m0, shared); });
}

/// The product is exact in floats, too, whichever way it is taken apart: it has 16 bits.
template <class Isa>
void mul_rows(const BinaryRows& b) {
  const auto m0 = Isa::set(b.m0), c = Isa::set(b.c);
  const auto minus_z0 = Isa::set(-static_cast<float>(b.z0));
  const auto z1 = Isa::set_int(b.z1);
  struct Factor {
    typename Isa::Float factor, at_zero;  // q1 - z1; (0 - z0) * (q1 - z1)
  };
  binary_rows<Isa>(
      b,
      [=](auto q1) {
        const auto factor = Isa::to_float(Isa::sub(q1, z1));
        return Factor{factor, Isa::mul(factor, minus_z0)};
      },
      [=](auto q0, Factor f) {
        return Isa::fma(Isa::fma(Isa::to_float(q0), f.factor, f.at_zero), m0, c);
      });
}

/// Sixteen in-lane shuffles, one per row of 16 table entries. Row r of each half of the table
/// becomes row r xor row r - 1. Shuffle r adds it, by xor, while value - 16 r is not negative; then
/// the byte's sign makes it 0. So a value collects rows 0 to its own, which make its entry.
template <class Isa>
void lookup(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size) {
  if constexpr (requires { Isa::lookup_vbmi; }) {
    if (Isa::has_vbmi()) return Isa::lookup_vbmi(src, table, dst, size);
  }
  constexpr int kRow = 16, kHalf = 128;
  alignas(64) uint8_t change[2 * kHalf];
  memcpy(change, table, sizeof change);
  for (int half = 0; half < 2 * kHalf; half += kHalf) {
    for (int i = kRow; i < kHalf; ++i) change[half + i] ^= table[half + i - kRow];
  }
  const auto row = Isa::set_bytes(kRow);
  for (int64_t i = 0; i < size; i += Isa::kByteLanes) {
    const int count = min_int(size - i, Isa::kByteLanes);
    auto low = Isa::load_channels(src + i, count);
    auto high = Isa::xor_bytes(low, Isa::set_bytes(kHalf));
    auto result = Isa::set_bytes(0);
    TORCHQ_UNROLL for (int at = 0; at < kHalf; at += kRow) {
      const auto below = Isa::lookup_row(Isa::load_lane(change + at), low);
      const auto above = Isa::lookup_row(Isa::load_lane(change + kHalf + at), high);
      result = Isa::xor_bytes(result, Isa::xor_bytes(below, above));
      low = Isa::subtract_saturated(low, row);
      high = Isa::subtract_saturated(high, row);
    }
    Isa::store_channels(dst + i, result, count);
  }
}

}  // namespace
