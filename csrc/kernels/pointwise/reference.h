// SPDX-License-Identifier: Apache-2.0
// Elementwise ops in plain loops.
#pragma once

#include "kernels/epilogue/reference.h"
#include "kernels/pointwise/contract.h"

namespace {

void convert(const ConvertRow& c) {
  for (int64_t i = 0; i < c.size; ++i) {
    const float x = load_value(c.src, c.src_dtype, i, c.src_zero_point[i * c.src_zero_point_step]);
    const float zero_point = static_cast<float>(c.dst_zero_point[i * c.dst_zero_point_step]);
    const float factor = c.factor[i * c.factor_step];
    const float y = c.dst_dtype == DType::f32 ? x * factor : fmaf(x, factor, zero_point);
    store_value(c.dst, c.dst_dtype, i, y, zero_point);
  }
}

int32_t load_operand(const void* src, DType dtype, int64_t index) {
  return dtype == DType::u8 ? static_cast<const uint8_t*>(src)[index]
                            : static_cast<const int8_t*>(src)[index];
}

template <class Value>
void binary_rows(const BinaryRows& b, Value value) {
  for (int64_t i = 0; i < b.size * b.rows; ++i) {
    const float y = value(load_operand(b.src0, b.dtype0, i * b.step0),
                          load_operand(b.src1, b.dtype1, i % b.size * b.step1));
    store_value(b.dst, b.dst_dtype, i, max_float(b.lo, y), b.lo);
  }
}

void add(const BinaryRows& b) {
  binary_rows(b, [&](int32_t q0, int32_t q1) {
    return fmaf(static_cast<float>(q0), b.m0, fmaf(static_cast<float>(q1), b.m1, b.c));
  });
}

void mul(const BinaryRows& b) {
  binary_rows(b, [&](int32_t q0, int32_t q1) {
    return fmaf(static_cast<float>((q0 - b.z0) * (q1 - b.z1)), b.m0, b.c);
  });
}

void lookup(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size) {
  for (int64_t i = 0; i < size; ++i) dst[i] = table[src[i]];
}

}  // namespace
