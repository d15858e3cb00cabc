// SPDX-License-Identifier: Apache-2.0
// Rows of a quantized table by their indices, and bags of them.
//
// A row of `weight` is its codes (embedding_dim bytes, or half as many, rounded up, for 4 bits),
// its scale and its offset: both float32 or both float16. They lie side by side, since the
// time of a row is that of its cache lines. torch.ao's packed weights have the same rows.
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "kernels/cpu_tuning.h"
#include "kernels/embedding/contract.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/dispatch.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"
#include "runtime/scratch.h"

namespace torchq {
namespace {

RowTable table_of(const char* op, const at::Tensor& weight, int64_t embedding_dim, int64_t bits) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "torchq.", op, ": bits must be 8 or 4, got ", bits,
                    ". Pack the weight with torchq.packing.pack_embedding.");
  check_param(op, "weight", weight, at::kByte);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && embedding_dim >= 1 && embedding_dim <= 2 * weight.size(1), "torchq.", op,
      ": weight must be 2-D, with embedding_dim codes in a row, got shape ", weight.sizes(),
      " and embedding_dim ", embedding_dim, ". Pack it with torchq.packing.pack_embedding.");
  const int64_t codes = (embedding_dim * bits + 7) / 8;
  TORCH_CHECK_VALUE(weight.size(1) == codes + 8 || weight.size(1) == codes + 4, "torchq.", op,
                    ": weight must be [num_embeddings, ", codes, " + 8 or + 4] for rows of ",
                    embedding_dim, " codes of ", bits, " bits, got ", weight.sizes(),
                    ". Pack it with torchq.packing.pack_embedding, and pass its embedding_dim and "
                    "bits.");
  return {bytes_of(weight),
          weight.size(0),
          weight.size(1),
          codes,
          embedding_dim,
          static_cast<int>(bits),
          weight.size(1) == codes + 4};
}

void check_integers(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kLong || t.scalar_type() == at::kInt, "torchq.", op, ": ",
                   arg, " must be int64 or int32, got ", dtype_name(t.scalar_type()),
                   ". Convert it with .long().");
  check_cpu(op, arg, t);
}

/// Returns the rows that contiguous indices select.
RowIndices indices_of(const RowTable& table, const at::Tensor& indices) {
  const bool is_large = table.rows * table.row_bytes > tuning::kMinPrefetchedTableBytes;
  return {indices.const_data_ptr(), indices.scalar_type() == at::kLong, indices.numel(),
          is_large ? tuning::kRowPrefetchDistance : 0};
}

/// The first position at which a kernel found an index that is no row, of several threads.
class FirstBad {
 public:
  void found(int64_t position) {
    int64_t known = position_;
    while (position >= 0 && position < known && !position_.compare_exchange_weak(known, position)) {
    }
  }
  void check(const char* op, const RowTable& table, const at::Tensor& indices) const {
    const int64_t i = position_;
    if (i == kNone) return;
    const int64_t index = indices.scalar_type() == at::kLong ? indices.const_data_ptr<int64_t>()[i]
                                                             : indices.const_data_ptr<int32_t>()[i];
    TORCH_CHECK_INDEX(false, "torchq.", op, ": indices must lie in [0, ", table.rows - 1,
                      "], the rows of weight, got ", index, " at position ", i,
                      ". Check the vocabulary that made them.");
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> position_ = kNone;
};

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t embedding_dim,
                     int64_t bits) {
  OpTrace trace("embedding");
  const Kernels& tier = kernels();
  trace.ran(tier, "embedding");
  const RowTable table = table_of("embedding", weight, embedding_dim, bits);
  check_integers("embedding", "indices", indices);
  c10::SmallVector<int64_t, 8> sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(table.dim);
  const at::Tensor dst = empty_dst(sizes, at::kFloat), dense = indices.contiguous();
  trace.describe([&] { return describe_call({weight, indices}, dst, c10::str("bits:", bits)); });
  if (is_done(dst)) return dst;
  float* values = dst.mutable_data_ptr<float>();
  const RowIndices rows = indices_of(table, dense);
  FirstBad bad;
  const int threads =
      threads_for(rows.count * (table.row_bytes + 4 * table.dim), tuning::kEmbeddingGrain);
  parallel_ranges(rows.count, threads, [&](Range range) {
    bad.found(
        tier.embedding({table, rows, range.begin, range.end, values + range.begin * table.dim}));
  });
  bad.check("embedding", table, dense);
  return dst;
}

/// begin[b] of each bag, and the end of the last, from offsets.
const int64_t* read_offsets(ScratchFrame& frame, const at::Tensor& offsets, int64_t count,
                            bool include_last_offset) {
  const at::Tensor dense = offsets.contiguous().to(at::kLong);
  const int64_t* values = dense.const_data_ptr<int64_t>();
  const int64_t size = dense.numel();
  int64_t* begin = frame.take<int64_t>(size + 1);
  int64_t before = 0;
  for (int64_t b = 0; b < size; ++b) {
    TORCH_CHECK_VALUE(values[b] >= before && values[b] <= count && (b > 0 || values[b] == 0),
                      "torchq.embedding_bag: offsets must ascend from 0 to at most ", count,
                      ", the number of indices, got ", values[b], " at position ", b,
                      ". Each is where its bag begins.");
    begin[b] = before = values[b];
  }
  if (!include_last_offset) begin[size] = count;
  return begin;
}

/// The same of bags of one size.
const int64_t* equal_bags(ScratchFrame& frame, int64_t bags, int64_t size) {
  int64_t* begin = frame.take<int64_t>(bags + 1);
  for (int64_t b = 0; b <= bags; ++b) begin[b] = b * size;
  return begin;
}

void check_bags(const at::Tensor& indices, const std::optional<at::Tensor>& offsets,
                bool include_last_offset) {
  TORCH_CHECK_VALUE(indices.dim() == (offsets.has_value() ? 1 : 2),
                    "torchq.embedding_bag: indices must be 1-D with offsets, or 2-D without, a bag "
                    "in each row, got ",
                    indices.dim(), "-D and ", offsets.has_value() ? "offsets" : "no offsets",
                    ". Flatten them, and say with offsets where each bag begins.");
  TORCH_CHECK_VALUE(offsets.has_value() || !include_last_offset,
                    "torchq.embedding_bag: include_last_offset must be False without offsets, got "
                    "True. Pass 1-D indices with offsets.");
  if (!offsets.has_value()) return;
  check_integers("embedding_bag", "offsets", *offsets);
  TORCH_CHECK_VALUE(offsets->dim() == 1 && offsets->numel() >= (include_last_offset ? 1 : 0),
                    "torchq.embedding_bag: offsets must be 1-D, with at least one value where "
                    "include_last_offset is True, got ",
                    offsets->sizes(), ". Give one for each bag.");
}

BagMode mode_of(c10::string_view name) {
  constexpr c10::string_view names[] = {"sum", "mean", "max"};
  const auto* found = std::find(std::begin(names), std::end(names), name);
  TORCH_CHECK_VALUE(found != std::end(names),
                    "torchq.embedding_bag: mode must be 'sum', 'mean' or 'max', got '", name, "'.");
  return static_cast<BagMode>(found - std::begin(names));
}

int64_t padding_of(const RowTable& table, std::optional<int64_t> padding_idx) {
  if (!padding_idx.has_value()) return kNoPadding;
  const int64_t padding = *padding_idx + (*padding_idx < 0 ? table.rows : 0);
  TORCH_CHECK_VALUE(padding >= 0 && padding < table.rows,
                    "torchq.embedding_bag: padding_idx must lie in [", -table.rows, ", ",
                    table.rows - 1, "], got ", *padding_idx, ". It is a row of weight.");
  return padding;
}

/// Contiguous factors; undefined: none.
at::Tensor factors_of(const at::Tensor& indices, const std::optional<at::Tensor>& given,
                      BagMode mode, c10::string_view mode_name) {
  if (!given.has_value()) return {};
  TORCH_CHECK_TYPE(given->scalar_type() == at::kFloat,
                   "torchq.embedding_bag: per_sample_weights must be float32, got ",
                   dtype_name(given->scalar_type()), ". Convert them with .float().");
  check_cpu("embedding_bag", "per_sample_weights", *given);
  TORCH_CHECK_VALUE(given->sizes() == indices.sizes(),
                    "torchq.embedding_bag: per_sample_weights must have the shape of indices, ",
                    indices.sizes(), ", got ", given->sizes(), ". Give one for each index.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      mode == BagMode::sum,
      "torchq.embedding_bag: per_sample_weights must be None unless mode is 'sum', got mode '",
      mode_name, "'. The nearest supported form is a sum.");
  return given->contiguous();
}

/// The first bag of a part, so that all have about as many indices and bags.
int64_t first_bag(const int64_t* begin, int64_t bags, int part, int parts) {
  const int64_t work = (begin[bags] + bags) * part / parts;
  int64_t low = 0, high = bags;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (begin[middle] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

at::Tensor embedding_bag(const at::Tensor& weight, const at::Tensor& indices,
                         const std::optional<at::Tensor>& offsets,
                         const std::optional<at::Tensor>& per_sample_weights, int64_t embedding_dim,
                         int64_t bits, c10::string_view mode_name, bool include_last_offset,
                         std::optional<int64_t> padding_idx) {
  constexpr const char* op = "embedding_bag";
  OpTrace trace(op);
  const Kernels& tier = kernels();
  trace.ran(tier, op);
  const RowTable table = table_of(op, weight, embedding_dim, bits);
  const BagMode mode = mode_of(mode_name);
  check_integers(op, "indices", indices);
  check_bags(indices, offsets, include_last_offset);
  const int64_t padding = padding_of(table, padding_idx);
  const at::Tensor factors = factors_of(indices, per_sample_weights, mode, mode_name);
  const int64_t bags =
      offsets.has_value() ? offsets->numel() - include_last_offset : indices.size(0);
  const at::Tensor dst = empty_dst({bags, table.dim}, at::kFloat), dense = indices.contiguous();
  ScratchFrame frame;
  const int64_t* begin = nullptr;
  if (offsets.has_value())
    begin = read_offsets(frame, *offsets, indices.numel(), include_last_offset);
  trace.describe([&] {
    return describe_call({weight, indices}, dst, c10::str("bits:", bits, " mode:", mode_name));
  });
  if (is_done(dst)) return dst;
  if (!offsets.has_value()) begin = equal_bags(frame, bags, indices.size(1));
  float* values = dst.mutable_data_ptr<float>();
  const RowIndices rows = indices_of(table, dense);
  const float* each = factors.defined() ? factors.const_data_ptr<float>() : nullptr;
  FirstBad bad;
  const int threads =
      threads_for(rows.count * table.row_bytes + dst.numel() * 4, tuning::kEmbeddingGrain);
  const int parts = static_cast<int>(std::clamp<int64_t>(bags, 1, threads));
  parallel_parts(parts, [&](int part) {
    ScratchFrame own;
    float* partial = own.take<float>((table.dim + 31) / 32 * 32);
    const int64_t first = first_bag(begin, bags, part, parts);
    const int64_t end = part + 1 == parts ? bags : first_bag(begin, bags, part + 1, parts);
    bad.found(tier.embedding_bag({table, rows, begin, first, end, mode, padding, each, partial,
                                  values + first * table.dim}));
  });
  bad.check(op, table, dense);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::embedding>(m, "embedding");
  torchq::implement<&torchq::embedding_bag>(m, "embedding_bag");
}
