// SPDX-License-Identifier: Apache-2.0
// torchq::compress_rows, and attention to keys and values that it made.
#include <ATen/DimVector.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu_tuning.h"
#include "ops/attention/attention.h"
#include "ops/gemm/batches.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr int64_t kScaleBytes = sizeof(float);  // behind the values of a row

int64_t whole_panels(int64_t size) { return panels_of(size) * kPanel; }

/// dst[..., i] = rne(src[..., i] / scale), scale = max |src| / 127 of a row, as SymmetricRows has
/// it; behind them the bytes of scale.
at::Tensor compress_rows(const at::Tensor& src) {
  constexpr const char* op = "compress_rows";
  OpTrace trace(op);
  const Kernels& tier = kernels();
  trace.ran(tier, op);
  check_float(op, "src", src, "");
  TORCH_CHECK_VALUE(src.dim() >= 1 && src.size(-1) <= kMaxChannels, "torchq.", op,
                    ": src must have rows of at most ", kMaxChannels, " values, got ", src.sizes(),
                    ". Unsqueeze a single value, split longer rows.");
  at::DimVector sizes(src.sizes());
  sizes.back() += kScaleBytes;
  const at::Tensor dst = empty_dst(sizes, at::kChar);
  trace.describe([&] { return describe_call({src}, dst); });
  if (is_done(dst)) return dst;
  const at::Tensor rows = src.contiguous();
  const int64_t size = src.size(-1), stride = sizes.back();
  const float* values = rows.const_data_ptr<float>();
  uint8_t* bytes = static_cast<uint8_t*>(dst.mutable_data_ptr());
  parallel_ranges(
      dst.numel() / stride, threads_for(dst.numel(), tuning::kConvertGrain),
      [&](const Range& range) {
        for (int64_t r = range.begin; r < range.end; ++r) {
          uint8_t* row = bytes + r * stride;
          float scale;
          tier.quantize_symmetric({values + r * size, size, 1, size, false, row, size, &scale});
          for (int64_t i = 0; i < size; ++i) row[i] ^= 0x80;  // from u8 to s8
          std::memcpy(row + size, &scale, sizeof scale);
        }
      });
  return dst;
}

void check_compressed(const char* op, const char* arg, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kChar, "torchq.", op, ": ", arg, " must be int8, got ",
                   dtype_name(t.scalar_type()),
                   ". Compress it with torchq.functional.compress_rows.");
  check_cpu(op, arg, t);
}

void check_shapes(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "torchq.", op,
                    ": query, key and value must be (N, H, L, E), (N, G, S, E + 4) and ",
                    "(N, G, S, Ev + 4), got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Add the missing dimension with unsqueeze.");
  TORCH_CHECK_VALUE(std::max({q.size(3), k.size(2), v.size(3)}) <= kMaxChannels, "torchq.", op,
                    ": query and value must have at most ", kMaxChannels, " columns, key as many ",
                    "rows, got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(), ". Cut them.");
  TORCH_CHECK_VALUE(q.size(0) == k.size(0) && k.sizes().slice(0, 3) == v.sizes().slice(0, 3),
                    "torchq.", op, ": query, key and value must have the same batch, key and ",
                    "value the same heads and rows, got ", q.sizes(), ", ", k.sizes(), " and ",
                    v.sizes(), ". Expand the batch, and cut or join keys and values alike.");
  TORCH_CHECK_VALUE(k.size(1) > 0 ? q.size(1) % k.size(1) == 0 : q.size(1) == 0, "torchq.", op,
                    ": query must have a multiple of the heads of key and value, got ", q.size(1),
                    " and ", k.size(1), ". Each of these serves as many heads of query.");
  TORCH_CHECK_VALUE(k.size(3) == q.size(3) + kScaleBytes && v.size(3) >= kScaleBytes, "torchq.", op,
                    ": rows of key must have 4 bytes more than query has columns, those of ",
                    "value at least 4, got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Compress them with torchq.functional.compress_rows.");
}

/// Where the heads of the operands are; rows are adjacent values.
struct Operands {
  at::Tensor query, key, value, mask, dst;
  std::vector<int64_t> query_at, key_at, value_at, mask_at, dst_at;

  /// Rows [range.begin, range.end) of those that share key and value head g: L of each query head.
  void attend(const Kernels& tier, float scale, int64_t g, const Range& range) const {
    const int64_t length = query.size(2), shared = query.size(1) / key.size(1);
    const int64_t size = query.size(3), padded = whole_panels(size), rows = range.end - range.begin;
    const int64_t value_size = dst.size(3), keys = key.size(2);
    ScratchFrame scratch;
    float* queries = scratch.take<float>(rows, padded);
    const float** masks = mask.defined() ? scratch.take<const float*>(rows) : nullptr;
    float** results = scratch.take<float*>(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = range.begin + r, i = row % length;
      const size_t h = static_cast<size_t>(g * shared + row / length);
      float* own = queries + r * padded;
      std::copy_n(query.const_data_ptr<float>() + query_at[h] + i * query.stride(2), size, own);
      std::fill(own + size, own + padded, 0.0f);
      results[r] = dst.mutable_data_ptr<float>() + dst_at[h] + i * dst.stride(2);
      if (masks == nullptr) continue;
      const int64_t stride = mask.size(-2) == 1 ? 0 : mask.stride(-2);
      masks[r] = mask.const_data_ptr<float>() + mask_at[h] + i * stride;
    }
    const auto compressed = [](const at::Tensor& t, int64_t at) {
      return CompressedRows{t.const_data_ptr<int8_t>() + at, t.stride(2), t.size(3) - kScaleBytes};
    };
    const size_t head = static_cast<size_t>(g);
    tier.compressed_attention(
        {queries, masks, results, rows, keys, scale, compressed(key, key_at[head]),
         compressed(value, value_at[head]), scratch.take<float>(rows, whole_panels(keys)),
         scratch.take<float>(rows, whole_panels(value_size)),
         scratch.take<float>(kPanel, whole_panels(std::max(size, value_size)))});
  }
};

/// Softmax(scale * query @ real(key).mT + mask) @ real(value) in float32; formulas are at
/// CompressedAttention in kernels/attention/contract.h.
at::Tensor compressed_attention(const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, const std::optional<at::Tensor>& mask,
                                double scale) {
  constexpr const char* op = "compressed_attention";
  OpTrace trace(op);
  const Kernels& tier = kernels();
  trace.ran(tier, op);
  check_float(op, "query", query, "");
  check_compressed(op, "key", key);
  check_compressed(op, "value", value);
  check_shapes(op, query, key, value);
  check_scale(op, scale);
  at::DimVector sizes(query.sizes());
  sizes[3] = key.size(2);
  Operands o;
  if (mask.has_value()) o.mask = read_mask(op, *mask, sizes);
  sizes[3] = value.size(3) - kScaleBytes;
  o.dst = empty_like_queries(query, sizes, at::kFloat);
  trace.describe(
      [&] { return describe_call({query, key, value}, o.dst, o.mask.defined() ? "mask" : ""); });
  if (is_done(o.dst)) return o.dst;
  if (key.size(2) == 0) return o.dst.fill_(0);
  o.query = with_unit_stride(query, false);
  o.key = with_unit_stride(key, false);
  o.value = with_unit_stride(value, false);
  const c10::IntArrayRef heads = query.sizes().slice(0, 2), groups = key.sizes().slice(0, 2);
  o.query_at = batch_offsets(o.query, heads), o.dst_at = batch_offsets(o.dst, heads);
  if (o.mask.defined()) o.mask_at = batch_offsets(o.mask, heads);
  o.key_at = batch_offsets(o.key, groups), o.value_at = batch_offsets(o.value, groups);

  const int64_t count = key.size(0) * key.size(1),
                rows = query.size(1) / key.size(1) * query.size(2);
  const double cost = static_cast<double>(count * rows) * static_cast<double>(key.size(2)) *
                      static_cast<double>(key.size(3) + value.size(3));
  const int threads = threads_for(static_cast<int64_t>(std::min(cost, 1e18)));
  int64_t block = std::max<int64_t>(1, tuning::kAttentionBytes / (whole_panels(key.size(2)) * 4));
  block = std::min({block, rows, std::max<int64_t>(1, (rows * count + threads - 1) / threads)});
  const int64_t blocks = (rows + block - 1) / block;
  parallel_ranges(count * blocks, threads, [&](const Range& range) {
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t first = i % blocks * block;
      o.attend(tier, static_cast<float>(scale), i / blocks, {first, std::min(first + block, rows)});
    }
  });
  return o.dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::compress_rows>(m, "compress_rows");
  torchq::implement<&torchq::compressed_attention>(m, "compressed_attention");
}
