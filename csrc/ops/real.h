// SPDX-License-Identifier: Apache-2.0
// Ops in real units: blocks of float32 that the tier's own conversions read and
// write.
//
// Note [Real units]
// An op that is no matmul reads x = scale * float(q - zero_point), computes in
// float32 (or in double, rounded to float32 once) and writes q =
// clamp(rne(fma(x, 1 / scale, zero_point))). Reading and writing are the tier's
// `convert`. What lies between is one sequence of IEEE operations in code that
// all tiers share, whose sums run in a fixed order on one thread or are of
// integers. So every tier and every thread count gives the same bits.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "../dispatch.h"

namespace torchq {

/// Values converted at a time: on the stack, in L1.
constexpr int kRealBlock = 512;

/// real = scale * (q - zero_point).
struct Real {
  DType dtype;
  float scale;
  int32_t zero_point;
};

/// The parameters of the sources and, last, of the destination, from scales and
/// zero_points with one value each. A scale is finite and greater than 0
/// (`any_sign`: a source's may be any finite number), and 1 for a float32
/// destination; a zero point lies in the range of its tensor.
c10::SmallVector<Real, 4> read_params(const char* op, const at::Tensor& scales,
                                      const at::Tensor& zero_points, at::TensorList srcs,
                                      DType dst_dtype, bool any_sign = false);

/// x[i] = real value of the i-th of n <= kRealBlock values that are `stride`
/// bytes apart.
void load_real(const Kernels& tier, const Real& src, const void* data, int64_t stride, int64_t n,
               float* x);

/// The inverse: rounds and saturates. NaN becomes the zero point.
void store_real(const Kernels& tier, const Real& dst, const float* x, void* data, int64_t stride,
                int64_t n);

/// The eltwise post-ops of a chain; NotImplementedError for any other.
c10::SmallVector<Eltwise, 4> parse_eltwise(const char* op, std::string_view post_ops);

/// x[i] = scale * alg(x[i]) for each of the chain in turn.
void apply_eltwise(const c10::SmallVector<Eltwise, 4>& chain, float* x, int64_t n);

/// How an op reads its source and writes a dense destination.
struct RealOutput {
  const Kernels& tier;
  const Real& from;
  const Real& to;
  c10::SmallVector<Eltwise, 4> chain;

  /// Applies the chain to x and writes the n <= kRealBlock values from element
  /// `first` of dst on.
  void store(float* x, int64_t n, void* dst, int64_t first) const;
};

}  // namespace torchq
