// SPDX-License-Identifier: Apache-2.0
// Contracts of elementwise ops: conversion of dtypes, add and mul.
#pragma once

#include "kernels/types.h"

namespace torchq {

/// dst = convert(fma(float(src - src_zero_point), factor, dst_zero_point)); parameters are per row
/// (`*_step` 0) or per element (`*_step` 1). quantize: factor = 1 / scale; dequantize: scale;
/// requantize: src_scale / dst_scale.
struct ConvertRow {
  const void* src;
  DType src_dtype;
  void* dst;
  DType dst_dtype;
  int64_t size;
  const float* factor;
  int64_t factor_step;
  const int32_t* src_zero_point;
  int64_t src_zero_point_step;
  const int32_t* dst_zero_point;
  int64_t dst_zero_point_step;
};

/// add: dst = convert(max(lo, fma(float(q0), m0, fma(float(q1), m1, c))))
/// mul: dst = convert(max(lo, fma(float((q0 - z0) * (q1 - z1)), m0, c)))
/// Row after row of src0 and dst lie side by side; src1 has one row for all of them.
struct BinaryRows {
  const void *src0, *src1;
  DType dtype0, dtype1;
  int64_t step0, step1;  // elements between values; 0: one value for the whole row
  void* dst;
  DType dst_dtype;
  int64_t size, rows;
  float m0, m1, c, lo;
  int32_t z0, z1;
};

/// Entries of pointwise/elementwise.cpp.
struct PointwiseKernels {
  void (*convert)(const ConvertRow&);
  void (*add)(const BinaryRows&);
  void (*mul)(const BinaryRows&);
  void (*lookup)(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size);
};

}  // namespace torchq
