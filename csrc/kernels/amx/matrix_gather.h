// SPDX-License-Identifier: Apache-2.0
// Rows that a matrix unit cannot read where they are, side by side in L1 (contract: GatherRows in
// amx/contract.h).
#pragma once

#include "kernels/amx/contract.h"
#include "kernels/common.h"

namespace {

/// Whole vectors first: a count that is known saves the mask.
template <class Isa, bool kFlip>
TORCHQ_INLINE void copy_run(const uint8_t* src, uint8_t* dst, int64_t size) {
  const auto copy = [&](int64_t at, int count) {
    auto bytes = Isa::load_channels(src + at, count);
    if constexpr (kFlip) bytes = Isa::flip_sign(bytes);
    Isa::store_channels(dst + at, bytes, count);
  };
  int64_t done = 0;
  for (; done + Isa::kByteLanes <= size; done += Isa::kByteLanes) copy(done, Isa::kByteLanes);
  if (done < size) copy(done, static_cast<int>(size - done));
}

template <class Isa>
TORCHQ_INLINE void zero_bytes(uint8_t* p, const uint8_t* end) {
  for (; p < end; p += Isa::kByteLanes) {
    Isa::store_channels(p, Isa::set_bytes(0), min_int(end - p, Isa::kByteLanes));
  }
}

template <class Isa, bool kFlip>
TORCHQ_INLINE void gather_row(const GatherRows& g, const uint8_t* src, uint8_t* dst) {
  uint8_t* written = dst;
  for (int i = 0; i < g.num_runs; ++i) {
    const GemmRun& run = g.runs[i];
    uint8_t* to = dst + run.weight_offset / kPanel - g.first_quad * kQuad;
    zero_bytes<Isa>(written, to);
    copy_run<Isa, kFlip>(src + run.src_offset, to, run.quads * kQuad);
    written = to + run.quads * kQuad;
  }
  const uint8_t* end = dst + g.quads * kQuad;
  zero_bytes<Isa>(written, end);
  const int tail = static_cast<int>(g.quads % kChunkQuads) * kQuad;
  if (g.quads > kChunkQuads && tail != 0) {
    uint8_t* chunk = dst + g.quads * kQuad - tail;
    const auto last = Isa::load_channels(end - Isa::kByteLanes, Isa::kByteLanes);
    Isa::store_channels(chunk, last, Isa::kByteLanes);
    Isa::store_channels(chunk, Isa::set_bytes(0), Isa::kByteLanes - tail);
  }
}

template <class Isa>
void gather_rows(const GatherRows& g) {
  for (int r = 0; r < g.rows; ++r) {
    const uint8_t* src = g.src + g.row_offset[r];
    uint8_t* dst = g.dst + r * g.dst_stride;
    if (g.flip) {
      gather_row<Isa, true>(g, src, dst);
    } else {
      gather_row<Isa, false>(g, src, dst);
    }
  }
}

}  // namespace
