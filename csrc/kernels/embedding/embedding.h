// SPDX-License-Identifier: Apache-2.0
// Embeddings: rows of a table, and sums or maxima of them (contract.h).
#pragma once

#include "kernels/embedding/rows.h"

namespace {

/// 16 bytes of codes as vectors of floats: one of 8-bit codes; of 4-bit ones
/// those in the low halves of the bytes, then the others. They are put in order
/// once for a bag, by `store`.
template <class Isa, int kBits>
struct CodeGroup {
  using Float = typename Isa::Float;
  static constexpr int kVectors = 8 / kBits, kCodes = kVectors * kPanel;

  template <bool kWhole>
  static TORCHQ_INLINE void load(const uint8_t* codes, typename Isa::Mask m, Float (&v)[kVectors]) {
    const auto bytes = kWhole ? Isa::load_u8(codes) : Isa::load_u8(codes, m);
    if constexpr (kBits == 8) {
      v[0] = Isa::to_float(bytes);
    } else {
      v[0] = Isa::to_float(Isa::bit_and(bytes, Isa::set_int(15)));
      v[1] = Isa::to_float(Isa::template shift_right<4>(bytes));
    }
  }
  static TORCHQ_INLINE void store(float* dst, const Float (&v)[kVectors], int64_t count) {
    if constexpr (kBits == 8) {
      store_first(dst, v[0], count);
    } else {
      Float ordered[2];
      Isa::interleave_lanes(v[0], v[1], ordered);
      store_first(dst, ordered[0], count);
      if (count > kPanel) store_first(dst + kPanel, ordered[1], count - kPanel);
    }
  }
  static TORCHQ_INLINE void store_first(float* dst, Float v, int64_t count) {
    if (count >= kPanel) return Isa::store(dst, v);
    Isa::store(dst, v, Isa::mask(static_cast<int>(count)));
  }
};

/// Returns the lanes of the last group's bytes; all where it is whole.
template <class Isa, int kBits>
TORCHQ_INLINE typename Isa::Mask last_bytes_of(int64_t dim) {
  const int rest = static_cast<int>(dim % CodeGroup<Isa, kBits>::kCodes);
  return Isa::mask(rest == 0 ? kPanel : (rest * kBits + 7) / 8);
}

template <class Isa, int kBits>
TORCHQ_INLINE int64_t embedding_rows(const EmbeddingRows& e) {
  using Group = CodeGroup<Isa, kBits>;
  const RowTable t = e.table;
  const RowIndices indices = e.indices;
  const auto last = last_bytes_of<Isa, kBits>(t.dim);
  float* dst = e.dst;
  for (int64_t i = e.first; i < e.end; ++i, dst += t.dim) {
    prefetch_row(t, indices, i);
    const int64_t index = index_at(indices, i);
    if (!is_row(t, index)) return i;
    const TableRow row = row_at(t, index);
    const auto scale = Isa::set(row.scale), offset = Isa::set(row.offset);
    const uint8_t* codes = row.codes;
    for (int64_t d = 0; d < t.dim; d += Group::kCodes, codes += kPanel) {
      typename Isa::Float v[Group::kVectors];
      if (t.dim - d >= Group::kCodes) {
        Group::template load<true>(codes, last, v);
      } else {
        Group::template load<false>(codes, last, v);
      }
      TORCHQ_UNROLL for (auto& x : v) x = Isa::add(Isa::mul(x, scale), offset);
      Group::store(dst + d, v, t.dim - d);
    }
  }
  return -1;
}

/// The sums or maxima of kGroups groups of codes, in registers.
template <class Isa, int kBits, bool kMax, int kGroups, bool kWhole>
struct BagSums {
  using Group = CodeGroup<Isa, kBits>;
  using Float = typename Isa::Float;
  static constexpr int kVectors = Group::kVectors;
  Float s[kGroups][kVectors];

  /// s[g][v] = use(s[g][v], its place)
  template <class Use>
  TORCHQ_INLINE void each(Use use) {
    TORCHQ_UNROLL for (int g = 0; g < kGroups; ++g) {
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
        s[g][v] = use(s[g][v], (g * kVectors + v) * kPanel);
      }
    }
  }
  TORCHQ_INLINE void clear() {
    each([](Float, int) TORCHQ_INLINE_LAMBDA { return Isa::set(0.0f); });
  }
  TORCHQ_INLINE void load(const float* partial) {
    each([&](Float, int at) TORCHQ_INLINE_LAMBDA { return Isa::load(partial + at); });
  }
  TORCHQ_INLINE void store(float* partial) {
    each([&](Float x, int at) TORCHQ_INLINE_LAMBDA {
      Isa::store(partial + at, x);
      return x;
    });
  }
  TORCHQ_INLINE void add(const TableRow& row, bool is_first, typename Isa::Mask last) {
    const Float scale = Isa::set(row.scale), offset = Isa::set(row.offset);
    TORCHQ_UNROLL for (int g = 0; g < kGroups; ++g) {
      Float q[kVectors];
      Group::template load<kWhole>(row.codes + g * kPanel, last, q);
      TORCHQ_UNROLL for (int v = 0; v < kVectors; ++v) {
        if constexpr (kMax) {
          const Float real = Isa::add(Isa::mul(q[v], scale), offset);
          s[g][v] = is_first ? real : Isa::max(s[g][v], real);
        } else {
          s[g][v] = Isa::fma(q[v], scale, s[g][v]);
        }
      }
    }
  }
  /// dst = (s + offsets) / divisor, or s; `count` is what is valid of one group
  /// that is not whole.
  TORCHQ_INLINE void finish(float offsets, float divisor, float* dst, int64_t count) {
    if constexpr (!kMax) {
      const Float offset = Isa::set(offsets), d = Isa::set(divisor);
      each([&](Float x, int) TORCHQ_INLINE_LAMBDA { return Isa::add(x, offset); });
      if (divisor != 1) each([&](Float x, int) TORCHQ_INLINE_LAMBDA { return Isa::div(x, d); });
    }
    TORCHQ_UNROLL for (int g = 0; g < kGroups; ++g) {
      Group::store(dst + g * Group::kCodes, s[g], kWhole ? Group::kCodes : count);
    }
  }
};

/// The common call, whose rows are read without a branch: int64 indices, the usual dtype of scales,
/// neither factors nor padding.
template <int kBits>
TORCHQ_INLINE bool is_plain(const EmbeddingBags& e) {
  return e.indices.is_wide && e.table.is_half == (kBits == 4) && e.factors == nullptr &&
         e.padding == kNoPadding;
}

/// use(row, whether it is the first) for each row of a bag, with its factor; returns the position
/// of an index that is no row, or -1. `offsets` and `n` become those of the bag.
template <int kBits, bool kPlain, class Use>
TORCHQ_INLINE int64_t for_each_row(const EmbeddingBags& e, int64_t b, float& offsets, int64_t& n,
                                   Use use) {
  RowTable table = e.table;
  RowIndices indices = e.indices;
  if (kPlain) table.is_half = kBits == 4;
  if (kPlain) indices.is_wide = true;
  float sum = 0;
  int64_t rows = 0;
  for (int64_t i = e.begin[b], end = e.begin[b + 1]; i < end; ++i) {
    prefetch_row(table, indices, i);
    const int64_t index = index_at(indices, i);
    if (!is_row(table, index)) return i;
    if (!kPlain && index == e.padding) continue;
    TableRow row = row_at(table, index);
    if (!kPlain && e.factors != nullptr) {
      row.scale *= e.factors[i];
      row.offset *= e.factors[i];
    }
    sum += row.offset;
    use(row, rows == 0);
    ++rows;
  }
  offsets = sum;
  n = rows;
  return -1;
}

/// Bags of rows of kGroups whole groups, or of one that is not: each row is added as it is found.
template <class Isa, int kBits, bool kMax, bool kPlain, int kGroups, bool kWhole = true>
TORCHQ_INLINE int64_t narrow_bags(const EmbeddingBags& given) {
  const EmbeddingBags e = given;
  BagSums<Isa, kBits, kMax, kGroups, kWhole> sums;
  const auto last = last_bytes_of<Isa, kBits>(e.table.dim);
  const int64_t dim = kWhole ? kGroups * CodeGroup<Isa, kBits>::kCodes : e.table.dim;
  float* dst = e.dst;
  for (int64_t b = e.first; b < e.end; ++b, dst += dim) {
    float offsets = 0;
    int64_t n = 0;
    sums.clear();
    const int64_t bad = for_each_row<kBits, kPlain>(
        e, b, offsets, n, [&](const TableRow& row, bool is_first) TORCHQ_INLINE_LAMBDA {
          sums.add(row, is_first, last);
        });
    if (bad >= 0) return bad;
    sums.finish(offsets, e.mode == BagMode::mean && n > 0 ? static_cast<float>(n) : 1, dst, dim);
  }
  return -1;
}

/// Rows of a bag that are added together, group by group of their codes.
struct BagPart {
  static constexpr int kRows = 32;
  TableRow rows[kRows];
  int64_t count;
  bool is_first, is_last;
  float offsets, divisor;
};

template <class Isa, int kBits, bool kMax, int kGroups, bool kWhole>
TORCHQ_INLINE void add_part(const EmbeddingBags& e, const BagPart& part, float* dst, int64_t d,
                            typename Isa::Mask last) {
  BagSums<Isa, kBits, kMax, kGroups, kWhole> sums;
  const int64_t first_byte = d * kBits / 8;
  if (part.is_first) {
    sums.clear();
  } else {
    sums.load(e.partial + d);
  }
  for (int64_t r = 0; r < part.count; ++r) {
    const TableRow& row = part.rows[r];
    sums.add({row.codes + first_byte, row.scale, row.offset}, part.is_first && r == 0, last);
  }
  if (part.is_last) {
    sums.finish(part.offsets, part.divisor, dst + d, e.table.dim - d);
  } else {
    sums.store(e.partial + d);
  }
}

template <class Isa, int kBits>
constexpr int kMostGroups = (Isa::kVectors == 32 ? 8 : 4) * kBits / 8;  // what registers hold

template <class Isa, int kBits, bool kMax>
TORCHQ_NOINLINE void add_part(const EmbeddingBags& e, const BagPart& part, float* dst) {
  constexpr int kCodes = CodeGroup<Isa, kBits>::kCodes, kMost = kMostGroups<Isa, kBits>;
  const auto last = last_bytes_of<Isa, kBits>(e.table.dim);
  const int64_t dim = e.table.dim;
  int64_t d = 0;
  for (; dim - d >= kMost * kCodes; d += kMost * kCodes) {
    add_part<Isa, kBits, kMax, kMost, true>(e, part, dst, d, last);
  }
  if constexpr (kMost > 4) {
    if (dim - d >= 4 * kCodes) {
      add_part<Isa, kBits, kMax, 4, true>(e, part, dst, d, last);
      d += 4 * kCodes;
    }
  }
  if constexpr (kMost > 2) {
    if (dim - d >= 2 * kCodes) {
      add_part<Isa, kBits, kMax, 2, true>(e, part, dst, d, last);
      d += 2 * kCodes;
    }
  }
  if (dim - d >= kCodes) {
    add_part<Isa, kBits, kMax, 1, true>(e, part, dst, d, last);
    d += kCodes;
  }
  if (d < dim) add_part<Isa, kBits, kMax, 1, false>(e, part, dst, d, last);
}

/// Bags of rows of any size, whose rows are collected first.
template <class Isa, int kBits, bool kMax, bool kPlain>
TORCHQ_INLINE int64_t wide_bags(const EmbeddingBags& e) {
  BagPart part;
  float* dst = e.dst;
  for (int64_t b = e.first; b < e.end; ++b, dst += e.table.dim) {
    int64_t n = 0;
    part.count = 0;
    part.is_first = true;
    part.is_last = false;
    const int64_t bad = for_each_row<kBits, kPlain>(
        e, b, part.offsets, n, [&](const TableRow& row, bool) TORCHQ_INLINE_LAMBDA {
          if (part.count == BagPart::kRows) {
            add_part<Isa, kBits, kMax>(e, part, dst);
            part.is_first = false;
            part.count = 0;
          }
          part.rows[part.count++] = row;
        });
    if (bad >= 0) return bad;
    part.is_last = true;
    part.divisor = e.mode == BagMode::mean && n > 0 ? static_cast<float>(n) : 1;
    add_part<Isa, kBits, kMax>(e, part, dst);
  }
  return -1;
}

template <class Isa, int kBits, bool kMax, bool kPlain>
TORCHQ_INLINE int64_t bags_of(const EmbeddingBags& e) {
  constexpr int kCodes = CodeGroup<Isa, kBits>::kCodes, kMost = kMostGroups<Isa, kBits>;
  const int64_t dim = e.table.dim;
  if (dim < kCodes) return narrow_bags<Isa, kBits, kMax, kPlain, 1, false>(e);
  if (dim == kCodes) return narrow_bags<Isa, kBits, kMax, kPlain, 1>(e);
  if (dim == 2 * kCodes) return narrow_bags<Isa, kBits, kMax, kPlain, 2>(e);
  if constexpr (kMost >= 4) {
    if (dim == 4 * kCodes) return narrow_bags<Isa, kBits, kMax, kPlain, 4>(e);
  }
  if constexpr (kMost >= 8) {
    if (dim == 8 * kCodes) return narrow_bags<Isa, kBits, kMax, kPlain, 8>(e);
  }
  return wide_bags<Isa, kBits, kMax, kPlain>(e);
}

template <class Isa, int kBits>
TORCHQ_INLINE int64_t bags_of(const EmbeddingBags& e) {
  if (e.mode == BagMode::max) return bags_of<Isa, kBits, true, false>(e);
  return is_plain<kBits>(e) ? bags_of<Isa, kBits, false, true>(e)
                            : bags_of<Isa, kBits, false, false>(e);
}

template <class Isa>
int64_t embedding(const EmbeddingRows& e) {
  return e.table.bits == 8 ? embedding_rows<Isa, 8>(e) : embedding_rows<Isa, 4>(e);
}

template <class Isa>
int64_t embedding_bag(const EmbeddingBags& e) {
  return e.table.bits == 8 ? bags_of<Isa, 8>(e) : bags_of<Isa, 4>(e);
}

}  // namespace
