// SPDX-License-Identifier: Apache-2.0
// torchq::dynamic_linear_int4 and grouped_linear_int4: float in, float out, 4-bit weights in groups
// along k (Int4Tile in kernels/gemm/contract.h). Each row of the source is quantized to s8 by its
// largest magnitude.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/gemm/groups.h"
#include "ops/gemm/packed_weights.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "dynamic_linear_int4";
constexpr const char* kGroupedOp = "grouped_linear_int4";

void check_float(const char* op, const at::Tensor& src) {
  TORCH_CHECK_TYPE(src.scalar_type() == at::kFloat, "torchq.", op, ": src must be float32, got ",
                   dtype_name(src.scalar_type()), ". Convert it with .float().");
  check_cpu(op, "src", src);
}

void check_bias(const char* op, const std::optional<at::Tensor>& bias, int64_t channels) {
  if (!bias.has_value()) return;
  check_param(op, "bias", *bias, at::kFloat);
  check_numel(op, "bias", *bias, channels);
}

void check_weight(const char* op, const at::Tensor& src, const at::Tensor& weight,
                  const at::Tensor& params, int64_t in_features, int64_t channels,
                  int64_t group_size, bool symmetric) {
  TORCH_CHECK_VALUE(group_size == 32 || group_size == 64 || group_size == 128, "torchq.", op,
                    ": group_size must be 32, 64 or 128, got ", group_size,
                    ". Pack the weight with torchq.packing.pack_linear_int4.");
  check_param(op, "weight", weight, at::kByte);
  check_param(op, "params", params, at::kInt);
  TORCH_CHECK_VALUE(src.dim() >= 1 && src.size(-1) == in_features, "torchq.", op,
                    ": src must be (*, ", in_features, "), got ", src.sizes(),
                    ". Check the layer's in_features.");
  const int64_t panels = ceil_div(channels, kPanel);
  const int64_t groups = ceil_div(in_features, group_size);
  const int64_t lanes = symmetric ? ceil_div(groups, 2) : groups;
  TORCH_CHECK_VALUE(
      channels >= 0 &&
          weight.sizes() == at::IntArrayRef({panels, ceil_div(in_features, 8), kPanel, kQuad}) &&
          params.sizes() == at::IntArrayRef({panels, lanes, kPanel}),
      "torchq.", op, ": weight must be [ceil(N/16), ceil(K/8), 16, 4] with params [ceil(N/16), ",
      lanes, ", 16] for N = ", channels, ", K = ", in_features, ", got ", weight.sizes(), " and ",
      params.sizes(), ". Pack it with torchq.packing.pack_linear_int4.");
}

/// A tile of a whole checked weight; rows, channels and dst are still to be set.
Int4Tile tile_of(const at::Tensor& weight, const at::Tensor& params,
                 const std::optional<at::Tensor>& bias, int64_t in_features, int64_t group_size,
                 bool symmetric) {
  Int4Tile t{};
  t.k = weight.size(1) * 8;
  t.group = group_size;
  t.groups = ceil_div(in_features, group_size);
  t.weight = static_cast<const int8_t*>(weight.const_data_ptr());
  t.params = params.const_data_ptr<int32_t>();
  t.has_zeros = !symmetric;
  t.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  t.panels = static_cast<int>(weight.size(0));
  return t;
}

/// Makes s8 of u8 with zero point 128, and returns their sum. `count`: a multiple of 8, up to 256.
int32_t to_signed(uint8_t* bytes, int64_t count) {
  constexpr uint64_t kEvenBytes = 0x00ff00ff00ff00ff, kSignBits = 0x8080808080808080;
  uint64_t sums = 0;  // four, of 16 bits each
  for (int64_t i = 0; i < count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, bytes + i, sizeof eight);
    sums += (eight & kEvenBytes) + (eight >> 8 & kEvenBytes);
    eight ^= kSignBits;
    std::memcpy(bytes + i, &eight, sizeof eight);
  }
  return static_cast<int32_t>(sums * 0x0001000100010001 >> 48) - 128 * static_cast<int32_t>(count);
}

/// Sets the tile's source: the first rows of src as s8, and their sums by group. ValueError for
/// what is not finite.
void quantize_rows(const char* op, ScratchFrame& scratch, const Kernels& tier,
                   const at::Tensor& src, Int4Tile& t) {
  const int64_t size = src.size(-1);
  const float* values = src.const_data_ptr<float>();
  uint8_t* bytes = scratch.take<uint8_t>(t.rows, t.k);
  int32_t* sums = scratch.take<int32_t>(t.rows, t.groups);
  float* scale = scratch.take<float>(t.rows);
  parallel_ranges(t.rows, threads_for(t.rows * t.k, tuning::kQuantizeRowGrain), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      uint8_t* row = bytes + r * t.k;
      tier.quantize_symmetric({values + r * size, size, 1, size, false, row, t.k, scale + r});
      std::fill(row + size, row + t.k, 128);
      for (int64_t g = 0; g < t.groups; ++g) {
        const int64_t first = g * t.group;
        sums[r * t.groups + g] = to_signed(row + first, std::min(t.group, t.k - first));
      }
    }
  });
  for (int64_t r = 0; r < t.rows; ++r) {
    TORCH_CHECK_VALUE(!std::isnan(scale[r]), "torchq.", op,
                      ": src must be finite, got NaN or inf in row ", r,
                      ". Its range decides the scale; repair what produced it.");
  }
  t.src = reinterpret_cast<const int8_t*>(bytes);
  t.sums = sums;
  t.src_scale = scale;
}

/// The tile's rows and panels cut out of it.
Int4Tile slice_of(Int4Tile t, Range rows, Range panels) {
  const int64_t lanes = t.has_zeros ? t.groups : ceil_div(t.groups, 2);
  t.src += rows.begin * t.k;
  t.sums += rows.begin * t.groups;
  t.src_scale += rows.begin;
  t.rows = rows.end - rows.begin;
  t.weight += panels.begin * t.k / 8 * kPanel * kQuad;
  t.params += panels.begin * lanes * kPanel;
  if (t.bias != nullptr) t.bias += panels.begin * kPanel;
  t.channels = std::min(t.channels, panels.end * kPanel) - panels.begin * kPanel;
  t.panels = static_cast<int>(panels.end - panels.begin);
  t.dst += rows.begin * t.dst_stride + panels.begin * kPanel;
  return t;
}

/// Many rows are shared among the threads, else panels are; of these four are a tile's.
void multiply(const Kernels& tier, const Int4Tile& t) {
  const int64_t work = t.rows * t.channels * t.k;
  const int threads = threads_for(work);
  const int64_t block =
      std::max<int64_t>(kTileRows, tuning::kResidentWeightBytes / std::max<int64_t>(t.k, 1));
  const auto run = [&](Range rows, Range panels) {
    for (int64_t r = rows.begin; r < rows.end; r += block) {
      tier.gemm_int4(slice_of(t, {r, std::min(r + block, rows.end)}, panels));
    }
  };
  if (t.rows >= 4 * kTileRows * threads) {
    return parallel_ranges(t.rows, threads, [&](Range rows) { run(rows, {0, t.panels}); });
  }
  const int64_t tiles = ceil_div(t.panels, 4);
  parallel_ranges(tiles, threads, [&](Range range) {
    run({0, t.rows}, {4 * range.begin, std::min<int64_t>(4 * range.end, t.panels)});
  });
}

/// Applies the post-ops to the values of dst.
void finish(const RealOutput& out, float* values, int64_t size) {
  parallel_ranges(ceil_div(size, kRealBlock), threads_for(size, tuning::kRealGrain),
                  [&](Range blocks) {
                    alignas(64) float x[kRealBlock];
                    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
                      const int64_t first = b * kRealBlock;
                      const int64_t n = std::min<int64_t>(kRealBlock, size - first);
                      std::copy_n(values + first, n, x);
                      out.store(x, n, first);
                    }
                  });
}

at::Tensor dynamic_linear_int4(const at::Tensor& src_arg, const at::Tensor& weight,
                               const at::Tensor& params, const std::optional<at::Tensor>& bias,
                               int64_t in_features, int64_t out_features, int64_t group_size,
                               bool symmetric, c10::string_view post_ops,
                               std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace(kOp);
  const Kernels& tier = kernels();
  trace.ran(tier, "gemm_int4");
  check_float(kOp, src_arg);
  check_weight(kOp, src_arg, weight, params, in_features, out_features, group_size, symmetric);
  check_bias(kOp, bias, out_features);
  c10::SmallVector<int64_t, 5> sizes(src_arg.sizes().begin(), src_arg.sizes().end());
  sizes.back() = out_features;
  at::Tensor dst = empty_dst(sizes, at::kFloat);
  const RealOutput out({kOp, tier, {DType::f32, 1, 0}, post_ops, post_op_srcs}, dst);
  if (is_done(dst)) return dst;
  trace.describe(
      [&] { return describe_call({src_arg}, dst, c10::str("group_size:", group_size), post_ops); });
  const at::Tensor src = src_arg.contiguous();
  ScratchFrame scratch;
  Int4Tile t = tile_of(weight, params, bias, in_features, group_size, symmetric);
  t.rows = dst.numel() / out_features;
  t.channels = out_features;
  quantize_rows(kOp, scratch, tier, src, t);
  t.dst = dst.mutable_data_ptr<float>();
  t.dst_stride = out_features;
  multiply(tier, t);
  if (!out.is_plain()) finish(out, t.dst, dst.numel());
  return dst;
}

at::Tensor grouped_linear_int4(const at::Tensor& src_arg, const at::Tensor& offsets,
                               const at::Tensor& weight, const at::Tensor& params,
                               const std::optional<at::Tensor>& bias, int64_t in_features,
                               int64_t out_features, int64_t group_size, bool symmetric) {
  OpTrace trace(kGroupedOp);
  const Kernels& tier = kernels();
  trace.ran(tier, "gemm_int4");
  check_float(kGroupedOp, src_arg);
  check_grouped(kGroupedOp, src_arg, offsets, weight, out_features);
  const int64_t channels = weight.size(0) * kPanel;
  check_weight(kGroupedOp, src_arg, weight, params, in_features, channels, group_size, symmetric);
  check_bias(kGroupedOp, bias, channels);
  at::Tensor dst = empty_dst({src_arg.size(0), out_features}, at::kFloat);
  if (is_done(dst)) return dst;
  trace.describe([&] {
    return describe_call({src_arg}, dst,
                         c10::str("groups:", offsets.numel(), " group_size:", group_size));
  });
  const RowGroups groups(kGroupedOp, offsets, src_arg.size(0));
  zero_rest(groups, dst);
  const at::Tensor src = src_arg.contiguous();
  ScratchFrame scratch;
  Int4Tile t = tile_of(weight, params, bias, in_features, group_size, symmetric);
  t.rows = groups.rows();
  t.channels = channels;
  quantize_rows(kGroupedOp, scratch, tier, src, t);
  t.dst_stride = out_features;
  const int64_t panels = panels_of(out_features);
  groups.for_each([&](int64_t group, Range rows) {
    Int4Tile own = slice_of(t, rows, {group * panels, (group + 1) * panels});
    own.channels = out_features;
    own.dst = dst.mutable_data_ptr<float>() + rows.begin * out_features;
    multiply(tier, own);
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::dynamic_linear_int4>(m, "dynamic_linear_int4");
  torchq::implement<&torchq::grouped_linear_int4>(m, "grouped_linear_int4");
}
