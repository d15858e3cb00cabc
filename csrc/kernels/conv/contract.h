// SPDX-License-Identifier: Apache-2.0
// Contract of depthwise convolution; dense convolutions are GemmTile.
#pragma once

#include "kernels/epilogue/contract.h"
#include "kernels/gemm/contract.h"

namespace torchq {

/// dst[row][x][c] = epilogue(c, acc_init[c] + sum over kernel rows r and columns j of
///   src[row][r][x * stride + j * dilation - pad_begin][c] * weight[c][r][j])
///
/// Pixels outside a row, and rows outside the source, are zero points. src is u8, or s8 read as u8
/// (`flip`).
struct DepthwiseLayer {
  const int8_t* packed;     // [ceil(C/16)][quads][16][4], see ops/gemm/packing.h
  const int32_t* taps;      // [quads * 4] the tap r * width + j that each packed byte meets, or -1
  const int32_t* acc_init;  // [channels rounded up to 16]
  int channels, quads;
  int kernel_rows;                             // of all dimensions but the last
  int64_t width, stride, dilation, pad_begin;  // along the row, in pixels
  int64_t src_pixels, dst_pixels;              // of a row; pixels have `channels` bytes or elements
  bool flip;
  uint8_t zero_point;
  const uint8_t* padding;  // a row of zero points, of at least one pixel
  /// Windows slide along a row: where `why_no_slide` has no reason against it. Faster.
  bool slides;
};

/// Destination rows of one layer.
struct DepthwiseRows {
  int count;
  const uint8_t* const* src;  // [count][kernel_rows] first pixels; `padding` for rows outside
  const int64_t* dst_offset;  // [count] elements
};

/// Entries of conv/small_groups.cpp.
struct SmallGroupKernels {
  /// `gemm` and `gemm_narrow` for small groups: dst[row][n] sums over the
  /// inputs of n's group only.
  void (*small_groups)(const GemmTile&, const Epilogue&);
  void (*small_groups_narrow)(const GemmTile&, const Epilogue&) = nullptr;
};

/// Entries of conv/depthwise.cpp.
struct DepthwiseKernels {
  /// Returns the reason why windows do not slide along a row, the faster of two strategies, or
  /// null. Null: there is one strategy.
  const char* (*why_no_slide)(const DepthwiseLayer&, const Epilogue&) = nullptr;
  /// Bytes of scratch that `depthwise` needs, aligned to 64.
  int64_t (*depthwise_bytes)(const DepthwiseLayer&);
  void (*depthwise)(const DepthwiseLayer&, const DepthwiseRows&, const Epilogue&, void* scratch);
};

}  // namespace torchq
