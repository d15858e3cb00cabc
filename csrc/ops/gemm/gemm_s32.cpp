// SPDX-License-Identifier: Apache-2.0
// torchq::gemm: what gemm_u8s8s32 and gemm_s8s8s32 compute,
//   dst = saturate_s32(alpha * (op(A) - ao) * (op(B) - bo) + beta * C + co).
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu_tuning.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/matmul.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

constexpr const char* kOp = "gemm";

struct ScaledEpilogue {
  double alpha, beta;
  const int32_t *c, *co;
  int64_t co_row, co_column;  // steps of co: 0 or 1

  bool exact() const { return alpha == 1 && (beta == 0 || beta == 1); }
};

/// The exact integer, saturated.
int32_t exact_epilogue(const ScaledEpilogue& f, int64_t acc, int64_t c, int64_t co) {
  const int64_t sum = acc + (f.beta == 1 ? c : 0) + co;
  return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
}

/// In double: alpha * acc + beta * c, then + co, each rounded; then to an integer, half to even.
int32_t scaled_epilogue(const ScaledEpilogue& f, double acc, double c, double co) {
  const double sum = f.alpha * acc + f.beta * c + co;
  return static_cast<int32_t>(std::nearbyint(std::clamp(sum, -2147483648.0, 2147483647.0)));
}

/// In place over the accumulators [m, n].
void apply_epilogue(const ScaledEpilogue& f, int32_t* dst, int64_t m, int64_t n) {
  parallel_ranges(m, threads_for(m * n, tuning::kScaleGrain), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      int32_t* row = dst + r * n;
      const int32_t* c = f.c == nullptr ? nullptr : f.c + r * n;
      const int32_t* co = f.co + r * f.co_row;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t old = c == nullptr ? 0 : c[i], extra = co[i * f.co_column];
        row[i] = f.exact() ? exact_epilogue(f, row[i], old, extra)
                           : scaled_epilogue(f, row[i], old, extra);
      }
    }
  });
}

at::Tensor zero_point(const char* arg, int64_t value, DType dtype) {
  const auto [lo, hi] = zero_point_range(dtype);
  TORCH_CHECK_VALUE(value >= lo && value <= hi, "torchq.gemm: ", arg, " must lie in [", lo, ", ",
                    hi, "], the range of its matrix, got ", value, ".");
  at::Tensor result = at::empty({1}, at::kInt);
  *result.mutable_data_ptr<int32_t>() = static_cast<int32_t>(value);
  return result;
}

/// Steps of co over rows and columns.
std::pair<int64_t, int64_t> co_steps(c10::string_view offsetc, const at::Tensor& co, int64_t m,
                                     int64_t n) {
  TORCH_CHECK_VALUE(
      offsetc == "F" || offsetc == "C" || offsetc == "R", "torchq.gemm: offsetc must ",
      "be F (one value), C (a column: one per row of C) or R (a row: one per column), ", "got '",
      offsetc, "'.");
  check_param(kOp, "co", co, at::kInt);
  const int64_t expected = offsetc == "F" ? 1 : offsetc == "C" ? m : n;
  TORCH_CHECK_VALUE(co.numel() == expected, "torchq.gemm: co must have ", expected,
                    " values for offsetc ", offsetc, " and a result of ", m, " x ", n, ", got ",
                    co.numel(), ".");
  return {offsetc == "C", offsetc == "R"};
}

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c,
                bool trans_a, bool trans_b, double alpha, double beta, int64_t ao, int64_t bo,
                c10::string_view offsetc, const at::Tensor& co) {
  OpTrace trace(kOp);
  const DType a_dtype = check_src(kOp, "a", a);
  TORCH_CHECK_TYPE(b.scalar_type() == at::kChar, "torchq.gemm: b must be int8, got ",
                   dtype_name(b.scalar_type()), ". Use matmul for uint8.");
  check_cpu(kOp, "b", b);
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 2, "torchq.gemm: a and b must be matrices, got ",
                    a.sizes(), " and ", b.sizes(), ". Use matmul for batches.");
  const at::Tensor left = trans_a ? a.t() : a, right = trans_b ? b.t() : b;
  const int64_t m = left.size(0), k = left.size(1), n = right.size(1);
  TORCH_CHECK_VALUE(right.size(0) == k,
                    "torchq.gemm: op(a) must have as many columns as op(b) has ", "rows, got ",
                    left.sizes(), " and ", right.sizes(), ". Check trans_a and trans_b.");
  const int64_t longest = max_reduction(bo != 0);
  TORCH_CHECK_VALUE(k <= longest, "torchq.gemm: K must be at most ", longest,
                    bo == 0 ? "" : " with bo", ", got ", k,
                    "; longer sums could overflow int32. Split it and add with beta = 1.");
  const bool finite =
      std::isfinite(static_cast<float>(alpha)) && std::isfinite(static_cast<float>(beta));
  TORCH_CHECK_VALUE(finite,
                    "torchq.gemm: alpha and beta must be finite and in float32's range, got ",
                    alpha, " and ", beta, ". Both are factors of int32 values.");
  const auto [co_row, co_column] = co_steps(offsetc, co, m, n);
  at::Tensor old;
  if (c.has_value()) {
    TORCH_CHECK_TYPE(c->scalar_type() == at::kInt, "torchq.gemm: c must be int32, got ",
                     dtype_name(c->scalar_type()), ". It has the dtype of the result.");
    check_cpu(kOp, "c", *c);
    TORCH_CHECK_VALUE(c->dim() == 2 && c->size(0) == m && c->size(1) == n,
                      "torchq.gemm: c must be [", m, ", ", n, "], got ", c->sizes(), ".");
    old = c->contiguous();
  }
  TORCH_CHECK_VALUE(c.has_value() || beta == 0, "torchq.gemm: beta must be 0 without c, got ", beta,
                    ". Pass c, the matrix it scales.");
  const at::Tensor none = at::empty({0}, at::kFloat);
  at::Tensor dst =
      run_matmul(trace, left, right, none, none, {}, zero_point("ao", ao, a_dtype),
                 zero_point("bo", bo, DType::s8), static_cast<int64_t>(at::kInt), "", none, {});
  if (is_done(dst)) return dst;
  apply_epilogue(
      {alpha, beta, beta == 0 || !old.defined() ? nullptr : old.const_data_ptr<int32_t>(),
       co.const_data_ptr<int32_t>(), co_row, co_column},
      dst.mutable_data_ptr<int32_t>(), m, n);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::gemm>(m, "gemm"); }
