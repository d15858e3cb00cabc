// SPDX-License-Identifier: Apache-2.0
// Conversion between quantized tensors of any strides, shared by the reorders and concat.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/dispatch.h"

namespace torchq {

/// dst = convert(fma(float(src - src_zero_point), factor, dst_zero_point)); the parameters
/// broadcast against src.
void convert_into(const Kernels& tier, const at::Tensor& dst, const at::Tensor& src,
                  const at::Tensor& factor, const at::Tensor& src_zero_point,
                  const at::Tensor& dst_zero_point);

/// ValueError unless `t` broadcasts against src.
void check_broadcasts(const char* op, const char* arg, const at::Tensor& t, const at::Tensor& src);

/// float32, finite, and greater than 0 if `positive`.
void check_scale(const char* op, const char* arg, const at::Tensor& scale, bool positive);

/// Zero points lie in their tensor's range; float32 tensors have none.
void check_zero_point(const char* op, const char* arg, const at::Tensor& t, DType dtype);

/// dst = bytes[src], of 256 bytes indexed by the source's byte; both tensors have 8 bits.
void lookup_into(const Kernels& tier, const at::Tensor& dst, const at::Tensor& src,
                 const uint8_t* bytes);

/// float(numerator / denominator), divided in double; ValueError unless both are finite and greater
/// than 0.
at::Tensor scale_ratio(const char* op, const at::Tensor& numerator, const at::Tensor& denominator);

/// The destination of a binary op, laid out like whichever source has its shape already, else
/// contiguous; ValueError unless the sources broadcast.
at::Tensor empty_broadcast(const char* op, const at::Tensor& src0, const at::Tensor& src1,
                           at::ScalarType dtype);

}  // namespace torchq
