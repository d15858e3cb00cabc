// SPDX-License-Identifier: Apache-2.0
// torchq::matmul: batched, both operands at run time. The second one is packed into scratch, then
// it is a gemm like linear.
#include "ops/gemm/matmul.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "epilogue/post_ops.h"
#include "kernels/cpu_tuning.h"
#include "ops/gemm/batches.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

constexpr const char* kOp = "matmul";
// clang-format off
// Note [Scales per group of k]
// The multiplier is [groups, N] then, and the chain begins with the sum of the groups before the last:
//
//   sum:1:0:f32                 t = t + fma(float(acc), multiplier[g], 0)
//   binary_mul:1+sum:1:0:f32    t = t + fma(float(acc), multiplier[g], 0) * row_scale[g][row]
//
// The caller leaves that sum out of post_op_srcs; row_scale is the first of them, [groups, ..., M, 1].
// clang-format on
constexpr c10::string_view kGroupSum = "sum:1:0:f32", kRowGroupSum = "binary_mul:1+sum:1:0:f32";

bool begins_with(c10::string_view text, c10::string_view start) {
  return text.substr(0, start.size()) == start;
}

struct Matmul {
  const Kernels& tier;
  int64_t m, n, k, groups;
  bool src_flip, weight_flip;
  const int32_t* acc_bias;
  OpTrace& trace;
  const int32_t* src_zero_points = nullptr;     // [groups], of src read as u8
  const int32_t* weight_zero_points = nullptr;  // [groups][n], of the packed weights; or null
  int64_t rows = 0;                             // of dst, in all batches
  int32_t* row_terms = nullptr;                 // [groups][rows], with weight zero points
  const float* row_scales = nullptr;            // [groups][rows], with kRowGroupSum

  int64_t group_k() const { return k / groups; }
  int64_t panels() const { return panels_of(n); }
  int64_t quads() const { return quads_of(group_k()); }
  int64_t panel_bytes() const { return groups * quads() * kPanel * kQuad; }
};

/// Packed weights of one matrix, [panels][groups][quads][16][4], and their sums.
struct PackedMatrix {
  int8_t* weight;
  int32_t* compensation;  // [groups][panels * 16]
};

PackedMatrix pack(ScratchFrame& scratch, const Matmul& mm, const uint8_t* weight, int64_t k_stride,
                  int64_t n_stride) {
  const PackedMatrix packed{scratch.take<int8_t>(mm.panels(), mm.panel_bytes()),
                            scratch.take<int32_t>(mm.groups, mm.panels(), kPanel)};
  const int64_t group_bytes = mm.quads() * kPanel * kQuad;
  parallel_ranges(
      mm.panels(), threads_for(mm.k * mm.n, tuning::kPackRuntimeGrain), [&](Range range) {
        for (int64_t p = range.begin; p < range.end; ++p) {
          for (int64_t g = 0; g < mm.groups; ++g) {
            mm.tier.pack_panel(
                {weight + g * mm.group_k() * k_stride + p * kPanel * n_stride, k_stride, n_stride,
                 mm.group_k(), static_cast<int>(std::min<int64_t>(kPanel, mm.n - p * kPanel)),
                 mm.weight_flip},
                packed.weight + p * mm.panel_bytes() + g * group_bytes,
                packed.compensation + (g * mm.panels() + p) * kPanel);
          }
        }
      });
  return packed;
}

/// Rows of src: [batch][m], each k bytes.
struct Rows {
  const uint8_t* data;
  int64_t batch, batch_stride, row_stride;
};

/// Row terms of Note [Weight zero points] for one group, from row `first` of dst on.
void fill_row_terms(const Matmul& mm, const Rows& rows, int64_t group, int64_t first) {
  if (mm.row_terms == nullptr) return;
  int32_t* terms = mm.row_terms + group * mm.rows + first;
  const int32_t shift = static_cast<int32_t>(mm.group_k()) * mm.src_zero_points[group];
  for (int64_t b = 0; b < rows.batch; ++b) {
    for (int64_t r = 0; r < mm.m; ++r) {
      const uint8_t* row =
          rows.data + b * rows.batch_stride + r * rows.row_stride + group * mm.group_k();
      *terms++ = mm.tier.sum_bytes(row, mm.group_k(), mm.src_flip) - shift;
    }
  }
}

/// The epilogue of every group but the last: Note [Scales per group of k].
class GroupSums {
 public:
  GroupSums(int64_t groups, const at::Tensor& dst) {
    if (groups > 1) sum_ = empty_dst(dst.sizes(), at::kFloat);
  }
  /// Behind the checks of the last group, whose multipliers have the same shape.
  void add_epilogues(const Matmul& mm, const at::Tensor& multiplier) {
    if (mm.groups == 1) return;
    const at::Tensor zeros = at::zeros({mm.n}, at::kFloat);
    at::Tensor params = at::full({1 + mm.n}, 1.0f, at::kFloat);
    params.mutable_data_ptr<float>()[0] = 0;
    const double bound = 255.0 * 255.0 * static_cast<double>(mm.group_k());
    for (int64_t g = 0; g + 1 < mm.groups; ++g) {
      kept_.push_back(multiplier[g]);
      kept_.push_back(zeros);
      kept_.push_back(g == 0 ? zeros.slice(0, 0, 0) : params);
      builders_.push_back(std::make_unique<EpilogueBuilder>(
          EpilogueBuilder::Args{kOp, mm.n, kept_[kept_.size() - 3], kept_[kept_.size() - 2],
                                g == 0 ? "" : kGroupSum, kept_.back(),
                                g == 0 ? at::TensorList() : at::TensorList(sum_), bound},
          sum_));
      if (mm.row_terms != nullptr) {
        builders_.back()->subtract(mm.row_terms + g * mm.rows, mm.weight_zero_points + g * mm.n,
                                   mm.n, 1);
      }
      if (mm.row_scales != nullptr) {
        builders_.back()->scale_rows(mm.row_scales + g * mm.rows, nullptr, mm.n);
      }
    }
  }
  const at::Tensor& sum() const { return sum_; }
  const Epilogue& of(int64_t group) const { return builders_[static_cast<size_t>(group)]->get(); }

 private:
  at::Tensor sum_;
  std::deque<at::Tensor> kept_;  // stays where it is: builders refer to it
  std::vector<std::unique_ptr<EpilogueBuilder>> builders_;
};

/// dst[dst_base + ...] of `rows` against one packed matrix, group after group.
void multiply(const Matmul& mm, const Rows& rows, const PackedMatrix& packed, int64_t dst_base,
              const GroupSums& sums, const Epilogue& last) {
  for (int64_t g = 0; g < mm.groups; ++g) {
    ScratchFrame scratch;
    const int64_t group_bytes = mm.quads() * kPanel * kQuad;
    const GemmRun run{0, 0, mm.quads()};
    const int32_t tap = 0;
    const bool is_last = g + 1 == mm.groups;
    int32_t* init = scratch.take<int32_t>(mm.panels(), kPanel);
    const int64_t padded = mm.panels() * kPanel;
    std::memset(init, 0, static_cast<size_t>(padded) * sizeof(int32_t));
    mm.tier.compensate(packed.compensation + g * padded, padded, &tap, 1,
                       is_last ? mm.acc_bias : nullptr, mm.src_zero_points[g], mm.n, init);
    GemmProblem problem;
    problem.src = rows.data + g * mm.group_k();
    problem.flip = mm.src_flip;
    problem.weight = packed.weight + g * group_bytes;
    problem.panel_bytes = mm.panel_bytes();
    problem.group_channels = static_cast<int>(mm.n);
    problem.panels_per_group = static_cast<int>(mm.panels());
    fill_row_terms(mm, rows, g, dst_base / mm.n);
    problem.regions.push_back({{1, 1, rows.batch, mm.m},
                               {0, 0, rows.batch_stride, rows.row_stride},
                               {0, 0, mm.m * mm.n, mm.n},
                               0,
                               dst_base,
                               run,
                               init});
    // All products are alike: the first result, on the op's own thread, says how they run.
    run_gemm(problem, is_last ? last : sums.of(g), mm.tier,
             is_last && dst_base == 0 ? &mm.trace : nullptr);
  }
}

/// Every batch has its own pair of matrices.
void run_batched(const Matmul& mm, const at::Tensor& src, const at::Tensor& weight,
                 c10::IntArrayRef batch, const GroupSums& sums, const Epilogue& last) {
  const std::vector<int64_t> srcs = batch_offsets(src, batch),
                             weights = batch_offsets(weight, batch);
  const uint8_t* src_data = bytes_of(src);
  const uint8_t* weight_data = bytes_of(weight);
  const int64_t count = static_cast<int64_t>(srcs.size());
  const int threads = threads_for(count * mm.m * mm.n * std::max<int64_t>(mm.k, 1));
  // Fewer matrices than threads: each is shared among the threads instead.
  parallel_ranges(count, count < threads ? 1 : threads, [&](Range range) {
    int64_t b = range.begin;
    while (b < range.end) {
      ScratchFrame scratch;
      const int64_t offset = weights[static_cast<size_t>(b)];
      const PackedMatrix packed =
          pack(scratch, mm, weight_data + offset, weight.stride(-2), weight.stride(-1));
      for (; b < range.end && weights[static_cast<size_t>(b)] == offset; ++b) {
        const Rows rows{src_data + srcs[static_cast<size_t>(b)], 1, 0, src.stride(-2)};
        multiply(mm, rows, packed, b * mm.m * mm.n, sums, last);
      }
    }
  });
}

/// One matrix of weights serves all rows.
void run_shared(const Matmul& mm, const at::Tensor& src, const at::Tensor& weight,
                const GroupSums& sums, const Epilogue& last) {
  const at::Tensor flat = src.reshape(
      {c10::multiply_integers(src.sizes().slice(0, src.sizes().size() - 2)), mm.m, mm.k});
  ScratchFrame scratch;
  const PackedMatrix packed =
      pack(scratch, mm, bytes_of(weight), weight.stride(-2), weight.stride(-1));
  const Rows rows{bytes_of(flat), flat.size(0), flat.stride(0), flat.stride(1)};
  multiply(mm, rows, packed, 0, sums, last);
}

void check_shapes(const at::Tensor& src, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(src.dim() >= 2 && weight.dim() >= 2, "torchq.matmul: src and weight must be ",
                    "(..., M, K) and (..., K, N), got ", src.sizes(), " and ", weight.sizes(),
                    ". Add the missing dimension with unsqueeze.");
  TORCH_CHECK_VALUE(src.size(-1) == weight.size(-2),
                    "torchq.matmul: src must have as many columns ", "as weight has rows, got src ",
                    src.sizes(), " and weight ", weight.sizes(),
                    ". Transpose one of them with .mT; strides cost nothing.");
  const int64_t a = src.dim() - 2, b = weight.dim() - 2;
  for (int64_t i = 1; i <= std::min(a, b); ++i) {
    const int64_t x = src.size(a - i), y = weight.size(b - i);
    TORCH_CHECK_VALUE(x == y || x == 1 || y == 1, "torchq.matmul: the batch dimensions of src ",
                      "and weight must broadcast, got src ", src.sizes(), " and weight ",
                      weight.sizes(), ". Sizes must be equal or 1.");
  }
}

/// Checked zero points of src or weight: `values` (null: 0) in steps of 0 or more, and what makes
/// them those of the packed form.
struct ZeroPoints {
  const int32_t* values = nullptr;
  int64_t group_step = 0, step = 0;
  int32_t shift = 0;

  /// [groups][columns]: any numbers while there are no products, so it is for calls that have some.
  const int32_t* fill(ScratchFrame& scratch, int64_t groups, int64_t columns) const {
    int32_t* filled = scratch.take<int32_t>(groups, columns);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t n = 0; n < columns; ++n) {
        const int32_t given = values == nullptr ? 0 : values[g * group_step + n * step];
        filled[g * columns + n] = given + shift;
      }
    }
    return filled;
  }
};

/// Values of a parameter, which lie in the range of its tensor.
const int32_t* read_zero_points(const char* arg, const at::Tensor& given, DType dtype) {
  check_param(kOp, arg, given, at::kInt);
  const int32_t* values = given.const_data_ptr<int32_t>();
  const auto [lo, hi] = zero_point_range(dtype);
  for (int64_t i = 0; i < given.numel(); ++i) {
    TORCH_CHECK_VALUE(values[i] >= lo && values[i] <= hi, "torchq.matmul: ", arg, " must lie in [",
                      lo, ", ", hi, "], the range of its tensor, got ", values[i], " at index ", i,
                      ".");
  }
  return values;
}

/// Of src read as u8; `given` has one, or one per group.
ZeroPoints src_zero_points_of(const std::optional<at::Tensor>& given, DType dtype, int64_t groups) {
  ZeroPoints points{.shift = dtype == DType::s8 ? 128 : 0};
  if (!given.has_value()) return points;
  points.group_step = given->dim() == 2 && given->numel() == groups ? 1 : 0;
  if (points.group_step == 0) zero_point_of(kOp, "src_zero_point", given, dtype);
  points.values = read_zero_points("src_zero_point", *given, dtype);
  return points;
}

/// Of the packed weights; none if all are 0.
std::optional<ZeroPoints> weight_zero_points_of(const std::optional<at::Tensor>& given, DType dtype,
                                                int64_t groups, int64_t n) {
  ZeroPoints points{.shift = dtype == DType::u8 ? -128 : 0};
  bool any = points.shift != 0;
  if (given.has_value()) {
    points.values = read_zero_points("weight_zero_point", *given, dtype);
    const bool grouped = given->dim() == 2;
    const int64_t columns = grouped ? given->size(1) : given->numel();
    TORCH_CHECK_VALUE((!grouped || given->size(0) == groups) && (columns == 1 || columns == n),
                      "torchq.matmul: weight_zero_point must have 1 or ", n,
                      " values, one per column of weight, or rows of them for ", groups,
                      " groups, got ", given->sizes(), ".");
    points.step = columns == 1 ? 0 : 1;
    points.group_step = grouped ? columns : 0;
    any = std::any_of(points.values, points.values + given->numel(),
                      [&](int32_t z) { return z + points.shift != 0; });
  }
  return n > 0 && any ? std::optional(points) : std::nullopt;
}

int64_t groups_of(const at::Tensor& multiplier, int64_t k, c10::string_view post_ops) {
  if (multiplier.dim() != 2) return 1;
  const int64_t groups = multiplier.size(0);
  TORCH_CHECK_VALUE(groups >= 1 && k % groups == 0, "torchq.matmul: multiplier [groups, N] must ",
                    "have groups that divide K = ", k, ", got ", multiplier.sizes(),
                    ". Each group of K / groups products has its own row of multipliers.");
  TORCH_CHECK_VALUE(
      groups == 1 || begins_with(post_ops, kGroupSum) || begins_with(post_ops, kRowGroupSum),
      "torchq.matmul: post_ops must begin with '", kGroupSum, "' or '", kRowGroupSum, "' for ",
      groups, " groups, got '", post_ops, "'. That sum adds the groups before the last one.");
  return groups;
}

/// The scales of rows and groups: the first source of a chain that begins with kRowGroupSum.
at::Tensor row_scales_of(c10::string_view post_ops, const at::Tensor& src, int64_t groups,
                         const at::Tensor& dst) {
  c10::SmallVector<int64_t, 6> sizes{groups};
  sizes.append(dst.sizes().begin(), dst.sizes().end());
  sizes.back() = 1;
  check_post_op_src(kOp, post_ops, 0, src, DType::f32, sizes, dst, 0);
  return src.contiguous();
}

/// The sources of the last group's chain, with the sum of the others and its own scales of rows.
std::vector<at::Tensor> with_group_sum(const GroupSums& sums, at::TensorList srcs, bool by_row) {
  std::vector<at::Tensor> all(srcs.begin(), srcs.end());
  if (by_row) all[0] = all[0][all[0].size(0) - 1];
  if (sums.sum().defined()) all.insert(all.begin() + by_row, sums.sum());
  return all;
}

}  // namespace

at::Tensor run_matmul(OpTrace& trace, const at::Tensor& src_arg, const at::Tensor& weight_arg,
                      const at::Tensor& multiplier, const at::Tensor& offset,
                      const std::optional<at::Tensor>& acc_bias,
                      const std::optional<at::Tensor>& src_zero_point,
                      const std::optional<at::Tensor>& weight_zero_point, int64_t dst_dtype,
                      c10::string_view post_ops, const at::Tensor& post_op_params,
                      at::TensorList post_op_srcs) {
  const Kernels& tier = kernels();
  const DType src_dtype = check_src(kOp, "src", src_arg);
  const DType weight_dtype = check_src(kOp, "weight", weight_arg);
  check_shapes(src_arg, weight_arg);
  const int64_t m = src_arg.size(-2), k = src_arg.size(-1), n = weight_arg.size(-1);
  const int32_t* bias = checked_acc_bias(kOp, acc_bias, n);
  check_param(kOp, "multiplier", multiplier, at::kFloat);
  const int64_t groups = groups_of(multiplier, k, post_ops);
  Matmul mm{tier, m, n, k, groups, src_dtype == DType::s8, weight_dtype == DType::u8, bias, trace};
  const ZeroPoints src_points = src_zero_points_of(src_zero_point, src_dtype, groups);
  const auto weight_points = weight_zero_points_of(weight_zero_point, weight_dtype, groups, n);
  const int64_t longest = max_reduction(weight_points.has_value());
  TORCH_CHECK_VALUE(mm.group_k() <= longest, "torchq.matmul: K must be at most ", longest,
                    weight_points.has_value() ? " for weights with a zero point" : "", ", got ",
                    mm.group_k(), " in src ", src_arg.sizes(),
                    "; longer sums could overflow int32. Split it and add the parts.");
  const c10::IntArrayRef src_batch = src_arg.sizes().slice(0, src_arg.sizes().size() - 2);
  const c10::IntArrayRef weight_batch = weight_arg.sizes().slice(0, weight_arg.sizes().size() - 2);
  const auto batch = at::infer_size_dimvector(src_batch, weight_batch);
  c10::SmallVector<int64_t, 5> sizes(batch.begin(), batch.end());
  sizes.append({m, n});
  at::Tensor dst = empty_dst(sizes, scalar_type(dst_dtype_of(kOp, dst_dtype)));
  GroupSums sums(groups, dst);
  const at::Tensor last_multiplier =
      mm.groups == 1 ? multiplier.reshape(-1) : multiplier[mm.groups - 1];
  const bool by_row = groups > 1 && begins_with(post_ops, kRowGroupSum) && !post_op_srcs.empty();
  at::Tensor row_scales;
  if (by_row) {
    row_scales = row_scales_of(post_ops, post_op_srcs[0], groups, dst);
    mm.row_scales = row_scales.const_data_ptr<float>();
  }
  const std::vector<at::Tensor> srcs = with_group_sum(sums, post_op_srcs, by_row);
  EpilogueBuilder epilogue(
      {kOp, n, last_multiplier, offset, post_ops, post_op_params, srcs,
       acc_bias.has_value() ? 2147483648.0 : 255.0 * 255.0 * static_cast<double>(mm.group_k()),
       true},
      dst);
  if (is_done(dst)) return dst;
  ScratchFrame scratch;
  mm.rows = dst.numel() / n;
  mm.src_zero_points = src_points.fill(scratch, groups, 1);
  if (weight_points.has_value()) {
    mm.weight_zero_points = weight_points->fill(scratch, groups, n);
    mm.row_terms = scratch.take<int32_t>(groups, mm.rows);
  }
  sums.add_epilogues(mm, multiplier);
  if (mm.row_terms != nullptr) {
    epilogue.subtract(mm.row_terms + (mm.groups - 1) * mm.rows,
                      mm.weight_zero_points + (mm.groups - 1) * n, n, 1);
  }
  trace.describe([&] { return describe_call({src_arg, weight_arg}, dst, "", post_ops); });
  at::Tensor src = with_unit_stride(src_arg, false);
  if (mm.group_k() % kQuad != 0) src = copy_for_overread(scratch, src);
  const at::Tensor weight = with_unit_stride(weight_arg, true);
  if (c10::multiply_integers(weight_batch) == 1) {
    run_shared(mm, src, weight, sums, epilogue.get());
  } else {
    run_batched(mm, src, weight, {batch.data(), batch.size()}, sums, epilogue.get());
  }
  return dst;
}

namespace {

at::Tensor matmul(const at::Tensor& src, const at::Tensor& weight, const at::Tensor& multiplier,
                  const at::Tensor& offset, const std::optional<at::Tensor>& acc_bias,
                  const std::optional<at::Tensor>& src_zero_point,
                  const std::optional<at::Tensor>& weight_zero_point, int64_t dst_dtype,
                  c10::string_view post_ops, const at::Tensor& post_op_params,
                  std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace(kOp);
  return run_matmul(trace, src, weight, multiplier, offset, acc_bias, src_zero_point,
                    weight_zero_point, dst_dtype, post_ops, post_op_params,
                    post_op_srcs.value_or(at::TensorList()));
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::matmul>(m, "matmul"); }
