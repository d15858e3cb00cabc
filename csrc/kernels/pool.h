// SPDX-License-Identifier: Apache-2.0
// One destination pixel of a pooling window; channels are lanes (contract: PoolRow in table.h).
#pragma once

#include "epilogue.h"

namespace {

template <class Isa>
void max_pool(const PoolRow& p) {
  for (int64_t c = 0; c < p.channels; c += Isa::kByteLanes) {
    const int count = min_int(p.channels - c, Isa::kByteLanes);
    auto best = Isa::load_channels(p.taps[0] + c, count);
    for (int t = 1; t < p.num_taps; ++t) {
      best = Isa::max_bytes(best, Isa::load_channels(p.taps[t] + c, count), p.is_signed);
    }
    Isa::store_channels(static_cast<uint8_t*>(p.dst) + c, best, count);
  }
}

template <class Isa>
void avg_pool(const PoolRow& p) {
  const auto divisor = Isa::set(p.divisor), zero = Isa::set(0.0f);
  const DType dtype = p.is_signed ? DType::s8 : DType::u8;
  for (int64_t c = 0; c < p.channels; c += kPanel) {
    const auto m = Isa::mask(min_int(p.channels - c, kPanel));
    auto sum = Isa::set_int(p.bias);
    for (int t = 0; t < p.num_taps; ++t) {
      const uint8_t* src = p.taps[t] + c;
      sum = Isa::add(sum, p.is_signed ? Isa::load_s8(src, m) : Isa::load_u8(src, m));
    }
    store_float<Isa>(p.dst, dtype, c, Isa::div(Isa::to_float(sum), divisor), zero, m);
  }
}

}  // namespace
