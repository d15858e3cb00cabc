// SPDX-License-Identifier: Apache-2.0
// torchq::attention: scaled dot product attention of 8-bit queries, keys and values.
//
// Note [Attention]
// Row i of dst is the mean of the rows of v that the bytes p[i] weigh (AttentionRows in
// kernels/table.h):
//   x[i][j] = float(sum over d of (q[i][d] - q_zero_point) * k[j][d]) * q_scale k_scale scale
//             + mask[i][j],     j <= i if causal
//   dst[i]  = v_scale * (sum over j of p[i][j] * v[j] / sum of p[i] - v_zero_point)
// Both products are exact integers, by the gemm of linear. The zero point of k adds the same to all
// of a row, which softmax does not see. The sum of p is that of the bytes themselves: rounding them
// moves weight from one key to another, never the mean out of the range of the values.
#include <ATen/DimVector.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../checks.h"
#include "../dst.h"
#include "../parallel.h"
#include "batches.h"
#include "gemm.h"
#include "packing.h"
#include "real.h"

namespace torchq {
namespace {

constexpr const char* kOp = "attention";
/// Scores and weights of the rows that a thread works on: with keys and values they stay in L2.
constexpr int64_t kBlockBytes = 128 * 1024;
constexpr float kLog2E = 1.44269504f;

/// A packed operand and what it adds to its product.
struct Packed {
  int64_t panel_bytes;
  int8_t* weight;
  int32_t* compensation;  // [panels * 16]
  int32_t* init;
};

struct Attention {
  const Kernels& tier;
  int64_t queries, keys, size, value_size;  // of one head
  bool q_flip, k_flip, v_flip;
  int32_t q_zero_point;                     // of q read as u8
  const float *score_scale, *score_offset;  // [stride(keys)]
  const float *one, *zero;                  // [value_size]
  float mean_scale, mean_shift;
  bool causal;

  /// Values from row to row of scores and of weights that reach that far.
  static int64_t stride(int64_t keys) { return (keys + 63) / 64 * 64; }
};

Packed take_packed(ScratchFrame& scratch, int64_t n, int64_t k) {
  const int64_t panels = panels_of(n), panel_bytes = quads_of(k) * kPanel * kQuad;
  return {panel_bytes, scratch.take<int8_t>(panels * panel_bytes),
          scratch.take<int32_t>(panels * kPanel), scratch.take<int32_t>(panels * kPanel)};
}

/// n columns of k values, and columns of zeros up to `padded`, whole panels; `zero_point` is that
/// of the rows they will meet.
void pack(const Kernels& tier, const PanelSource& all, int64_t n, int64_t padded,
          int32_t zero_point, const Packed& packed) {
  for (int64_t p = 0; p < padded / kPanel; ++p) {
    PanelSource panel = all;
    panel.data += p * kPanel * all.channel_stride;
    panel.channels = static_cast<int>(std::clamp<int64_t>(n - p * kPanel, 0, kPanel));
    tier.pack_panel(panel, packed.weight + p * packed.panel_bytes,
                    packed.compensation + p * kPanel);
  }
  const int32_t tap = 0;
  std::memset(packed.init, 0, static_cast<size_t>(padded) * sizeof(int32_t));
  tier.compensate(packed.compensation, padded, &tap, 1, nullptr, zero_point, padded, packed.init);
}

/// Rows of bytes, `stride` apart.
struct Rows {
  const uint8_t* data;
  int64_t stride, count;
  bool flip;
};

/// dst[row][n] = float(row * packed) * multiplier[n] + offset[n].
void multiply(const Kernels& tier, const Rows& rows, const Packed& packed, int64_t n, int64_t k,
              const float* multiplier, const float* offset, float* dst) {
  const GemmRun run{0, 0, quads_of(k)};
  GemmProblem problem{};
  problem.src = rows.data;
  problem.flip = rows.flip;
  problem.weight = packed.weight;
  problem.panel_bytes = packed.panel_bytes;
  problem.groups = 1;
  problem.group_channels = static_cast<int>(n);
  problem.panels_per_group = static_cast<int>(panels_of(n));
  problem.classes.push_back(
      {{1, 1, 1, rows.count}, {0, 0, 0, rows.stride}, {0, 0, 0, n}, 0, 0, run, packed.init});
  Epilogue epilogue{};
  epilogue.mode = Epilogue::kFolded;
  epilogue.dst_dtype = DType::f32;
  epilogue.dst = dst;
  epilogue.multiplier = multiplier;
  epilogue.offset = offset;
  run_gemm(problem, epilogue, tier);
}

/// The operands and where the matrices of every head begin in them, in values.
struct Heads {
  const at::Tensor &q, &k, &v, &dst;
  std::vector<int64_t> q_offset, k_offset, v_offset, dst_offset, mask_offset;
  const at::Tensor& mask;  // may be undefined
};

/// Rows [first, first + count) of head h.
void attend(const Attention& a, const Heads& heads, size_t h, int64_t first, int64_t count,
            const Packed& keys, const Packed& values, const RealRow& dst) {
  const int64_t seen = a.causal ? std::min(a.keys, first + count) : a.keys;
  const int64_t stride = Attention::stride(seen);
  ScratchFrame scratch;
  float* scores = scratch.take<float>(count * stride);
  uint8_t* weights = scratch.take<uint8_t>(count * stride);
  float* sums = scratch.take<float>(count * a.value_size);
  float* total = scratch.take<float>(count);
  const int64_t q_stride = heads.q.stride(-2), dst_stride = heads.dst.stride(-2);
  const uint8_t* q = bytes_of(heads.q) + heads.q_offset[h] + first * q_stride;
  multiply(a.tier, {q, q_stride, count, a.q_flip}, keys, stride, a.size, a.score_scale,
           a.score_offset, scores);
  const float* mask = nullptr;
  int64_t mask_stride = 0;
  if (heads.mask.defined()) {
    mask_stride = heads.mask.size(-2) == 1 ? 0 : heads.mask.stride(-2);
    mask = heads.mask.const_data_ptr<float>() + heads.mask_offset[h] + first * mask_stride;
  }
  a.tier.attention_weights({scores, stride, count, std::min(a.keys, stride),
                            a.causal ? first + 1 : a.keys, mask, mask_stride, kLog2E, weights,
                            total});
  multiply(a.tier, {weights, stride, count, false}, values, a.value_size, seen, a.one, a.zero,
           sums);
  a.tier.attention_means({sums, count, a.value_size, total, a.mean_scale, a.mean_shift,
                          behind(dst, heads.dst_offset[h] + first * dst_stride), dst_stride});
}

/// All heads, cut into blocks of rows that the threads share.
void attend_all(const Attention& a, const Heads& heads, const RealRow& dst) {
  const int64_t count = static_cast<int64_t>(heads.q_offset.size());
  const int threads = threads_for(count * a.queries * a.keys * (a.size + a.value_size + 64));
  const int64_t padded = Attention::stride(a.keys);
  int64_t block = std::max<int64_t>(1, kBlockBytes / (padded * 5));
  if (block > kGemmRows) block -= block % kGemmRows;
  if (count < threads) block = std::min(block, (a.queries * count + threads - 1) / threads);
  const int64_t blocks = (a.queries + block - 1) / block;
  parallel_ranges(count * blocks, threads, [&](Range range) {
    ScratchFrame scratch;
    const Packed keys = take_packed(scratch, padded, a.size),
                 values = take_packed(scratch, a.value_size, a.keys);
    int64_t packed = -1;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const size_t h = static_cast<size_t>(i / blocks);
      if (packed != i / blocks) {
        pack(a.tier,
             {bytes_of(heads.k) + heads.k_offset[h], heads.k.stride(-1), heads.k.stride(-2), a.size,
              0, a.k_flip},
             a.keys, padded, a.q_zero_point, keys);
        pack(a.tier,
             {bytes_of(heads.v) + heads.v_offset[h], heads.v.stride(-2), heads.v.stride(-1), a.keys,
              0, a.v_flip},
             a.value_size, panels_of(a.value_size) * kPanel, 0, values);
        packed = i / blocks;
      }
      const int64_t first = i % blocks * block;
      attend(a, heads, h, first, std::min(block, a.queries - first), keys, values, dst);
    }
  });
}

/// Queries outside the heads where they are for q, so that what turned both around for q turns them
/// back for dst without a copy.
at::Tensor empty_like_queries(const at::Tensor& q, c10::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t last = static_cast<int64_t>(sizes.size()) - 2;  // the dimension of queries
  int64_t at = last;
  while (q.dim() == last + 2 && at > 0 && q.stride(at - 1) < q.stride(last)) --at;
  c10::SmallVector<int64_t, 5> order(sizes.begin(), sizes.end());
  std::rotate(order.begin() + at, order.begin() + last, order.begin() + last + 1);
  const at::Tensor dst = empty_dst(order, dtype);
  return at == last ? dst : dst.movedim(at, last);
}

/// float32, with unit stride along keys; true of a bool mask becomes 0, false -inf.
at::Tensor read_mask(const at::Tensor& given, c10::IntArrayRef sizes) {
  TORCH_CHECK_TYPE(given.scalar_type() == at::kBool || given.scalar_type() == at::kFloat,
                   "torchq.attention: mask must be bool (true: attend) or float32 (added), got ",
                   dtype_name(given.scalar_type()), ". Convert it with .float() or .bool().");
  check_cpu(kOp, "mask", given);
  check_no_grad(kOp, "mask", given);
  TORCH_CHECK_VALUE(at::is_expandable_to(given.sizes(), sizes), "torchq.attention: mask must ",
                    "broadcast to ", sizes, ", the scores of all heads, got ", given.sizes(),
                    ". Its last dimensions are queries and keys.");
  at::Tensor mask = given;
  for (int64_t d = 0; d < mask.dim(); ++d) {  // what was expanded is computed once
    if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
  }
  if (mask.scalar_type() == at::kBool) {
    const at::Tensor none = at::scalar_tensor(0.0f, at::kFloat);
    mask = at::where(mask, none, at::scalar_tensor(-INFINITY, at::kFloat));
  }
  if (mask.dim() == 0) mask = mask.unsqueeze(0);
  if (mask.size(-1) != sizes.back()) {
    c10::SmallVector<int64_t, 5> full(mask.sizes().begin(), mask.sizes().end());
    full.back() = sizes.back();
    mask = mask.expand(full);
  }
  if (mask.stride(-1) != 1 && sizes.back() > 1) mask = mask.contiguous();
  return mask.dim() == 1 ? mask.unsqueeze(0) : mask;
}

void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  TORCH_CHECK_VALUE(q.dim() >= 2 && k.dim() >= 2 && v.dim() >= 2,
                    "torchq.attention: query, key and value must be (..., L, E), (..., S, E) and ",
                    "(..., S, Ev), got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Add the missing dimension with unsqueeze.");
  TORCH_CHECK_VALUE(q.size(-1) == k.size(-1) && k.size(-2) == v.size(-2),
                    "torchq.attention: query and key must have as many columns, key and value as ",
                    "many rows, got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Heads are a dimension in front of them.");
  TORCH_CHECK_VALUE(q.size(-1) <= kMaxReduction && k.size(-2) <= kMaxReduction,
                    "torchq.attention: S and E must be at most ", kMaxReduction, ", got key ",
                    k.sizes(), "; longer sums could overflow int32. Use float attention.");
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0,
                    "torchq.attention: scale must be finite and greater than 0, got ", scale,
                    ". The usual is 1 / sqrt(E).");
}

/// Of all heads: what the leading dimensions broadcast to.
at::DimVector batch_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  at::DimVector batch;
  for (const at::Tensor* t : {&q, &k, &v}) {
    const c10::IntArrayRef own = t->sizes().slice(0, static_cast<size_t>(t->dim() - 2));
    while (batch.size() < own.size()) batch.insert(batch.begin(), 1);
    for (size_t i = 1; i <= own.size(); ++i) {
      int64_t& size = batch[batch.size() - i];
      const int64_t given = own[own.size() - i];
      TORCH_CHECK_VALUE(size == given || size == 1 || given == 1, "torchq.attention: the batch ",
                        "dimensions of query, key and value must broadcast, got ", q.sizes(), ", ",
                        k.sizes(), " and ", v.sizes(),
                        ". Repeat the heads of key and value where there are fewer.");
      size = size == 1 ? given : size;
    }
  }
  return batch;
}

at::Tensor attention(const at::Tensor& q_arg, const at::Tensor& k_arg, const at::Tensor& v_arg,
                     const std::optional<at::Tensor>& mask_arg, bool is_causal, double scale,
                     const at::Tensor& scales, const at::Tensor& zero_points, int64_t dst_dtype) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  const bool q_flip = check_src(kOp, "query", q_arg) == DType::s8;
  const bool k_flip = check_src(kOp, "key", k_arg) == DType::u8;
  const bool v_flip = check_src(kOp, "value", v_arg) == DType::u8;
  check_shapes(q_arg, k_arg, v_arg, scale);
  const DType to = dst_dtype_of(kOp, dst_dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(to != DType::s32, "torchq.attention: dst_dtype must be 0 (uint8), 1 ",
                              "(int8) or 6 (float32), got 3 (int32). Use float32.");
  const auto params = read_params(kOp, scales, zero_points, {q_arg, k_arg, v_arg}, to);
  const at::DimVector batch = batch_of(q_arg, k_arg, v_arg);
  c10::SmallVector<int64_t, 5> sizes(batch.begin(), batch.end());
  sizes.append({q_arg.size(-2), k_arg.size(-2)});
  const at::Tensor mask = mask_arg.has_value() ? read_mask(*mask_arg, sizes) : at::Tensor();
  sizes.back() = v_arg.size(-1);
  TORCH_CHECK_VALUE(!(mask.defined() && is_causal), "torchq.attention: is_causal must be false ",
                    "with a mask, got both. Put the triangle into the mask.");
  const at::Tensor dst = empty_like_queries(q_arg, sizes, scalar_type(to));
  trace.describe([&] {
    return describe_call({q_arg, k_arg, v_arg}, dst,
                         is_causal        ? "causal"
                         : mask.defined() ? "mask"
                                          : "");
  });
  trace.ran(tier, "attention");
  if (dst.numel() == 0) return dst;
  const int64_t keys = k_arg.size(-2), value_size = v_arg.size(-1);
  if (keys == 0) return dst.fill_(params[3].zero_point);
  ScratchFrame scratch;
  const auto filled = [&](int64_t count, float value) {
    float* values = scratch.take<float>(count);
    std::fill_n(values, count, value);
    return values;
  };
  const int64_t padded = Attention::stride(keys);
  float* score_offset = filled(padded, 0.0f);
  std::fill(score_offset + keys, score_offset + padded, -INFINITY);
  at::Tensor q = with_unit_stride(q_arg, false);
  if (q.size(-1) % kQuad != 0) q = copy_for_overread(scratch, q);
  const at::Tensor k = with_unit_stride(k_arg, true), v = with_unit_stride(v_arg, true);
  const double score_scale = double{params[0].scale} * params[1].scale * scale;
  const Attention a{
      tier,
      q.size(-2),
      keys,
      q.size(-1),
      value_size,
      q_flip,
      k_flip,
      v_flip,
      params[0].zero_point + (q_flip ? 128 : 0),
      filled(padded, static_cast<float>(score_scale)),
      score_offset,
      filled(value_size, 1.0f),
      filled(value_size, 0.0f),
      params[2].scale,
      -params[2].scale * static_cast<float>(params[2].zero_point - (v_flip ? 128 : 0)),
      is_causal};
  const c10::IntArrayRef of_heads(batch.data(), batch.size());
  Heads heads{q,
              k,
              v,
              dst,
              batch_offsets(q, of_heads),
              batch_offsets(k, of_heads),
              batch_offsets(v, of_heads),
              batch_offsets(dst, of_heads),
              {},
              mask};
  if (mask.defined()) heads.mask_offset = batch_offsets(mask, of_heads);
  attend_all(a, heads,
             {dst.data_ptr(), to, static_cast<float>(1.0 / params[3].scale),
              static_cast<float>(params[3].zero_point)});
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { m.impl("attention", &torchq::attention); }
