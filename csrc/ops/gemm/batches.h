// SPDX-License-Identifier: Apache-2.0
// Batches of matrices given at run time, in any strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <vector>

#include "runtime/scratch.h"

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
  const int64_t dims = static_cast<int64_t>(batch.size());
  std::vector<int64_t> offsets(1, 0);
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t own = d - dims + t.dim() - 2;
    const int64_t stride = own < 0 || t.size(own) == 1 ? 0 : t.stride(own);
    const size_t outer = offsets.size(), inner = static_cast<size_t>(batch[static_cast<size_t>(d)]);
    offsets.resize(outer * inner);
    for (size_t i = outer; i-- > 0;) {  // from the end: each makes room for `inner` of them
      for (size_t j = inner; j-- > 0;) {
        offsets[i * inner + j] = offsets[i] + static_cast<int64_t>(j) * stride;
      }
    }
  }
  return offsets;
}

}  // namespace torchq
