// SPDX-License-Identifier: Apache-2.0
// Weights clipped so that adjacent pairs fit 16-bit sums, and their excess (contract: `clip` in
// contract.h).
#pragma once

#include "kernels/common.h"
#include "kernels/gemm/contract.h"

namespace {

template <class Isa>
int64_t clip(const int8_t* packed, int64_t quads, int8_t* clipped, int8_t* excess, int64_t* index) {
  constexpr int64_t kBytes = kPanel * kQuad;
  int64_t count = 0;
  for (int64_t q = 0; q < quads; ++q) {
    index[count] = q;  // stays if there is any
    count += Isa::clip_pairs(packed + q * kBytes, clipped + q * kBytes, excess + count * kBytes);
  }
  return count;
}

}  // namespace
