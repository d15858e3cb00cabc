// SPDX-License-Identifier: Apache-2.0
// Batches of matrices given at run time, in any strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <vector>

#include "../scratch.h"

namespace torchq {

/// One of the last two strides is 1, or the tensor is copied.
inline at::Tensor with_unit_stride(const at::Tensor& t, bool either) {
  const int64_t last = t.dim() - 1;
  const auto unit = [&](int64_t d) { return t.stride(d) == 1 || t.size(d) == 1; };
  return unit(last) || (either && unit(last - 1)) ? t : t.contiguous();
}

/// A copy of src behind which may be read: the last quad of a row is read in full.
inline at::Tensor copy_for_overread(ScratchFrame& scratch, const at::Tensor& src) {
  uint8_t* data = scratch.take<uint8_t>(src.numel());
  at::Tensor copy = at::from_blob(data, src.sizes(), src.options());
  copy.copy_(src);
  return copy;
}

/// Offsets in bytes of the matrices of one operand, for every matrix of dst.
inline std::vector<int64_t> batch_offsets(const at::Tensor& t, c10::IntArrayRef batch) {
  int64_t count = 1;
  for (const int64_t size : batch) count *= size;
  std::vector<int64_t> offsets(static_cast<size_t>(count), 0);
  int64_t inner = 1;
  for (int64_t d = static_cast<int64_t>(batch.size()) - 1; d >= 0; --d) {
    const int64_t own = d - static_cast<int64_t>(batch.size()) + t.dim() - 2;
    const int64_t stride = own < 0 || t.size(own) == 1 ? 0 : t.stride(own);
    for (int64_t i = 0; i < count; ++i) {
      offsets[static_cast<size_t>(i)] += i / inner % batch[static_cast<size_t>(d)] * stride;
    }
    inner *= batch[static_cast<size_t>(d)];
  }
  return offsets;
}

}  // namespace torchq
