// SPDX-License-Identifier: Apache-2.0
// Choice between the strategies along a row (depthwise.h).
#pragma once

#include "kernels/conv/contract.h"
#include "kernels/epilogue/contract.h"

namespace {

/// Returns the reason why an epilogue is not the 8-bit one of words, or null.
inline const char* why_no_bytes(const torchq::Epilogue& e) {
  using torchq::DType;
  if (e.dst_dtype != DType::u8 && e.dst_dtype != DType::s8) return "dst has more than 8 bits";
  if (e.mode != torchq::Epilogue::kFolded) return "post-ops do not fold";
  if (e.guard) return "results may exceed 32 bits, or row_sums are given";
  if (e.num_sums > 0) return "another tensor is added";
  return e.lo != nullptr ? "bounds differ between channels" : nullptr;
}

/// Returns the reason why a layer's windows cannot slide, or null. `two`: see kHoldsColumns.
inline const char* why_no_slide(const torchq::DepthwiseLayer& d, bool two) {
  if (d.dilation != 1) return "taps of a row are not neighbors";
  if (d.stride > 2) return "the stride along a row is more than 2";
  if (d.width == 3 && (d.kernel_rows == 2 || d.kernel_rows == 3)) return nullptr;
  if (two && d.stride == 2 && d.width == 5 && d.kernel_rows == 5) return nullptr;
  return two ? "the kernel is not 3x3 or 2x3, nor 5x5 with stride 2"
             : "the kernel is not 3x3 or 2x3";
}

}  // namespace
