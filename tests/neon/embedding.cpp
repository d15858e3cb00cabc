// SPDX-License-Identifier: Apache-2.0
// Embeddings: rows of a table, and bags of them.
#include "check.h"
#include "kernels/embedding/contract.h"

namespace torchq {
namespace {

/// A table that ends where its last row does, and indices; one time in twenty
/// one is no row.
struct Random {
  Buffer<uint8_t> data;
  Buffer<int64_t> wide;
  Buffer<int32_t> narrow;
  RowTable table{};
  RowIndices indices{};

  Random() {
    table.bits = chance(50) ? 8 : 4;
    table.is_half = chance(50);
    table.dim = chance(50) ? 16 * between(1, 16) : chance(20) ? between(200, 400) : between(1, 100);
    table.rows = between(1, 20);
    table.code_bytes = (table.dim * table.bits + 7) / 8;
    table.row_bytes = table.code_bytes + (table.is_half ? 4 : 8);
    data = random_bytes(table.rows * table.row_bytes);
    for (int64_t r = 0; r < table.rows; ++r) set_params(data.data() + r * table.row_bytes);
    table.data = data.data();
    indices.is_wide = chance(50);
    indices.count = chance(20) ? between(60, 120) : between(0, 50);
    indices.prefetch_distance = chance(50) ? between(1, 40) : 0;
    wide = filled<int64_t>(indices.count, [&] { return between(0, table.rows - 1); });
    if (indices.count > 0 && chance(5)) {
      wide[between(0, indices.count - 1)] = chance(50) ? -1 : table.rows;
    }
    int64_t i = 0;
    narrow = filled<int32_t>(indices.count, [&] { return wide[i++]; });
    if (indices.is_wide) {
      indices.values = wide.data();
    } else {
      indices.values = narrow.data();
    }
  }
  void set_params(uint8_t* row) const {
    uint8_t* params = row + table.code_bytes;
    const float values[] = {within(2.0f), within(10.0f)};
    if (!table.is_half) {
      std::memcpy(params, values, sizeof values);
      return;
    }
    for (int i = 0; i < 2; ++i) {  // any but inf and NaN
      const auto half = static_cast<uint16_t>(random_bits() & 0xbfff);
      std::memcpy(params + 2 * i, &half, sizeof half);
    }
  }
  std::string describe() const {
    return text("bits", table.bits, "half", table.is_half, "dim", table.dim, "wide",
                indices.is_wide, "count", indices.count, "prefetch_distance",
                indices.prefetch_distance);
  }
};

template <class Entry, class Args>
void check_args(const Kernels& k, Entry entry, Args args, int64_t size) {
  Buffer<float> reference(size), tested = reference, partial((args.table.dim + 31) / 32 * 32);
  if constexpr (requires { args.partial; }) args.partial = partial.data();
  args.dst = reference.data();
  const int64_t expected = (kReferenceKernels.*entry)(args);
  args.dst = tested.data();
  const int64_t got = (k.*entry)(args);
  expect_same("position", &expected, &got, sizeof got);
  if (expected < 0) expect_same("dst", reference, tested);
}

void check_rows_of(const Kernels& k) {
  const Random random;
  const int64_t first = between(0, random.indices.count);
  const int64_t end = between(first, random.indices.count);
  begin_case("embedding", random.describe() + text("first", first, "end", end));
  check_args(k, &Kernels::embedding,
             EmbeddingRows{random.table, random.indices, first, end, nullptr},
             (end - first) * random.table.dim);
}

void check_bags(const Kernels& k) {
  const Random random;
  const int64_t bags = between(1, 12);
  Buffer<int64_t> begin(bags + 1);
  for (int64_t b = 0; b <= bags; ++b) {
    const int64_t before = b == 0 ? 0 : begin[b - 1];
    begin[b] = chance(30) ? before : between(before, random.indices.count);
  }
  const Buffer<float> factors = random_floats(random.indices.count, 3.0f);
  EmbeddingBags e{};
  e.table = random.table;
  e.indices = random.indices;
  e.begin = begin.data();
  e.first = between(0, bags);
  e.end = between(e.first, bags);
  e.mode = pick({BagMode::sum, BagMode::mean, BagMode::max});
  e.padding = chance(30) ? between(0, random.table.rows - 1) : kNoPadding;
  e.factors = chance(30) ? factors.data() : nullptr;
  begin_case("embedding_bag",
             random.describe() + text("mode", static_cast<int>(e.mode), "bags", e.end - e.first,
                                      "padding", e.padding, "factors", e.factors != nullptr));
  check_args(k, &Kernels::embedding_bag, e, (e.end - e.first) * random.table.dim);
}

}  // namespace

void check_embedding(const Kernels& k) {
  for (int i = 0; i < 1000; ++i) {
    check_rows_of(k);
    check_bags(k);
  }
}

}  // namespace torchq
