// SPDX-License-Identifier: Apache-2.0
// Pooling in plain loops.
#pragma once

#include "kernels/epilogue/reference.h"
#include "kernels/pool/contract.h"

namespace {

void max_pool(const PoolRow& p) {
  for (int64_t i = 0; i < p.windows * p.channels; ++i) {
    const int64_t at = i / p.channels * p.step + i % p.channels;
    uint8_t best = p.taps[0][at];
    for (int t = 1; t < p.num_taps; ++t) {
      const uint8_t q = p.taps[t][at];
      const bool greater =
          p.is_signed ? static_cast<int8_t>(q) > static_cast<int8_t>(best) : q > best;
      if (greater) best = q;
    }
    static_cast<uint8_t*>(p.dst)[i] = best;
  }
}

void avg_pool(const PoolRow& p) {
  for (int64_t i = 0; i < p.windows * p.channels; ++i) {
    const int64_t at = i / p.channels * p.step + i % p.channels;
    int32_t sum = p.bias;
    for (int t = 0; t < p.num_taps; ++t) {
      sum += p.is_signed ? static_cast<int8_t>(p.taps[t][at]) : p.taps[t][at];
    }
    store_value(p.dst, p.dst_dtype, i, static_cast<float>(sum) / p.divisor, 0);
  }
}

}  // namespace
