// SPDX-License-Identifier: Apache-2.0
// Reductions (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/cpu_tuning.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

enum class Alg { sum, mean, max, min, mul, norm_max, norm_sum, power_max, power_sum };

bool is_norm(Alg alg) { return alg >= Alg::norm_max; }

Alg reduce_alg(c10::string_view name) {
  constexpr c10::string_view names[] = {"sum",
                                        "mean",
                                        "max",
                                        "min",
                                        "mul",
                                        "norm_lp_max",
                                        "norm_lp_sum",
                                        "norm_lp_power_p_max",
                                        "norm_lp_power_p_sum"};
  static_assert(std::size(names) == static_cast<size_t>(Alg::power_sum) + 1);
  for (size_t i = 0; i < std::size(names); ++i) {
    if (names[i] == name) return static_cast<Alg>(i);
  }
  TORCH_CHECK_VALUE(false, "torchq.reduction: alg must be sum, mean, max, min, mul, norm_lp_max, ",
                    "norm_lp_sum, norm_lp_power_p_max or norm_lp_power_p_sum, got '", name,
                    "'. Pass one of these.");
}

/// In long double: the pow of doubles is one of glibc 2.29, which manylinux_2_28 lacks.
double raised(double x, double p) {
  return static_cast<double>(std::pow(static_cast<long double>(x), static_cast<long double>(p)));
}

/// Of sums of |x|^p: eps is added, or the least of them.
struct Norm {
  double p, eps;

  double root(Alg alg, double sum) const {
    const bool adds = alg == Alg::norm_sum || alg == Alg::power_sum;
    const double power = adds ? sum + eps : sum < eps ? eps : sum;  // NaN stays
    if (alg == Alg::power_max || alg == Alg::power_sum || p == 1) return power;
    return p == 2 ? std::sqrt(power) : raised(power, 1 / p);
  }
};

/// A dense [outer][count][inner] source; the middle is reduced. Bytes by the tier's kernel, wider
/// values in code that all tiers share: sums of float32 in double.
template <class T>
struct Blocks {
  using Result = Reduced<T>;
  const Kernels& tier;
  Alg alg;
  Norm norm;
  const T* data;
  int64_t count, inner;

  Reduce kind() const {
    return alg == Alg::max ? Reduce::max : alg == Alg::min ? Reduce::min : Reduce::sum;
  }

  /// result[i] over `rows` rows of `size` <= kRealBlock values, `stride` apart.
  void columns(const T* src, int64_t rows, int64_t stride, int64_t size, Result* result) const {
    const auto take = [&](const auto* part, bool first) {
      for (int64_t i = 0; i < size; ++i) {
        const Result value{part[i]};
        result[i] = first ? value : combine(kind(), result[i], value);
      }
    };
    if constexpr (sizeof(T) == 1) {
      constexpr int64_t kRows = 1 << 22;
      int32_t part[kRealBlock];
      for (int64_t r = 0; r < rows; r += kRows) {
        tier.reduce({reinterpret_cast<const uint8_t*>(src + r * stride), std::is_signed_v<T>,
                     kind(), std::min(rows - r, kRows), stride, size, part});
        take(part, r == 0);
      }
    } else {
      for (int64_t r = 0; r < rows; ++r) take(src + r * stride, r == 0);
    }
  }
  /// Over `count` adjacent values: as rows of 64, and the rest.
  Result row(const T* src) const {
    const int64_t width = std::min<int64_t>(count, 64), rows = count / width;
    const int64_t rest = count - rows * width;
    Result sums[64], tail[64];
    columns(src, rows, width, width, sums);
    for (int64_t i = 1; i < width; ++i) sums[0] = combine(kind(), sums[0], sums[i]);
    if (rest > 0) columns(src + rows * width, 1, width, rest, tail);
    for (int64_t i = 0; i < rest; ++i) sums[0] = combine(kind(), sums[0], tail[i]);
    return sums[0];
  }
  /// result[i] of destination element first + i, for as many of n as one outer index has; how many.
  int64_t results(int64_t first, int64_t n, Result* result) const {
    if (inner == 1) {
      for (int64_t i = 0; i < n; ++i) result[i] = row(data + (first + i) * count);
      return n;
    }
    const int64_t i = first % inner;
    n = std::min(n, inner - i);
    columns(data + first / inner * count * inner + i, count, inner, n, result);
    return n;
  }
  /// take(result, x) of the real values of one destination element, one after the other.
  template <class Take>
  double in_order(int64_t at, const Real& from, double result, const Take& take) const {
    const T* q = data + at / inner * count * inner + at % inner;
    for (int64_t i = 0; i < count; ++i) {
      const double value = static_cast<double>(q[i * inner]) - from.zero_point;
      result = take(result, double{from.scale} * value);
    }
    return result;
  }
  /// The product, or the norm.
  double one_by_one(int64_t at, const Real& from) const {
    if (alg == Alg::mul)
      return in_order(at, from, 1, [](double result, double x) { return result * x; });
    const double p = norm.p;
    const double sum =
        p == 1 ? in_order(at, from, 0, [](double s, double x) { return s + std::abs(x); })
        : p == 2
            ? in_order(at, from, 0, [](double s, double x) { return s + x * x; })
            : in_order(at, from, 0, [&](double s, double x) { return s + raised(std::abs(x), p); });
    return norm.root(alg, sum);
  }
};

/// Returns true if nothing has to be copied: the reduced dimensions are adjacent in memory, and
/// dst's elements have the order of the others.
bool in_blocks(const at::Tensor& src, const c10::SmallVector<bool, 8>& reduced) {
  c10::SmallVector<int64_t, 8> order;
  for (int64_t d = 0; d < src.dim(); ++d) {
    if (src.size(d) != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return src.stride(a) > src.stride(b); });
  int64_t stride = 1, kept = src.dim();
  int runs = 0;  // of reduced dimensions
  bool inside = false;
  for (size_t i = order.size(); i-- > 0;) {
    const int64_t d = order[i];
    const bool gone = reduced[static_cast<size_t>(d)];
    if (src.stride(d) != stride || (!gone && d > kept)) return false;
    stride *= src.size(d);
    if (!gone) kept = d;
    runs += gone && !inside;
    inside = gone;
  }
  return runs <= 1;
}

/// `src` or a copy with dense [outer][count][inner] elements, `count` being the number of reduced
/// values, and `inner`.
std::pair<at::Tensor, int64_t> dense_blocks(const at::Tensor& src,
                                            const c10::SmallVector<bool, 8>& reduced,
                                            int64_t count) {
  if (in_blocks(src, reduced)) {
    int64_t innermost = std::numeric_limits<int64_t>::max();  // stride of the reduced ones
    for (int64_t d = 0; d < src.dim(); ++d) {
      if (reduced[static_cast<size_t>(d)] && src.size(d) != 1)
        innermost = std::min(innermost, src.stride(d));
    }
    return {src, count > 1 ? innermost : 1};
  }
  c10::SmallVector<int64_t, 8> order;
  for (const bool last : {false, true}) {
    for (int64_t d = 0; d < src.dim(); ++d) {
      if (reduced[static_cast<size_t>(d)] == last) order.push_back(d);
    }
  }
  return {src.permute(order).contiguous(), 1};
}

/// clamp(result - zero points): an int32 destination without scales, in integers only.
template <class T>
void store_exact(const Blocks<T>& blocks, const Real& from, const Real& to, const Range& range,
                 int32_t* dst) {
  int64_t result[kRealBlock];
  const int64_t shift =
      to.zero_point - (blocks.alg == Alg::sum ? blocks.count : 1) * from.zero_point;
  for (int64_t first = range.begin; first < range.end;) {
    const int64_t n =
        blocks.results(first, std::min<int64_t>(kRealBlock, range.end - first), result);
    for (int64_t i = 0; i < n; ++i) {
      dst[first + i] = static_cast<int32_t>(
          std::clamp<int64_t>(result[i] + shift, std::numeric_limits<int32_t>::min(),
                              std::numeric_limits<int32_t>::max()));
    }
    first += n;
  }
}

template <class T>
void store_reduced(const Blocks<T>& blocks, const Real& from, const RealOutput& out,
                   const Range& range) {
  Reduced<T> result[kRealBlock];
  alignas(64) float x[kRealBlock];
  const double count = static_cast<double>(blocks.count);
  const int64_t shift =
      (blocks.alg == Alg::sum || blocks.alg == Alg::mean ? blocks.count : 1) * from.zero_point;
  for (int64_t first = range.begin; first < range.end;) {
    int64_t n = std::min<int64_t>(kRealBlock, range.end - first);
    if (blocks.alg == Alg::mul || is_norm(blocks.alg)) {
      for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(blocks.one_by_one(first + i, from));
    } else {
      n = blocks.results(first, n, result);
      const double divisor = blocks.alg == Alg::mean ? count : 1;
      for (int64_t i = 0; i < n; ++i) {
        const double real = double{from.scale} * static_cast<double>(result[i] - shift);
        x[i] = static_cast<float>(real / divisor);
      }
    }
    out.store(x, n, first);
    first += n;
  }
}

template <class T>
void reduce(const Blocks<T>& blocks, const Real& from, const Real& to, const RealOutput& out,
            bool exact, const at::Tensor& dst) {
  const int threads = threads_for(dst.numel() * blocks.count, tuning::kPoolGrain);
  parallel_ranges(dst.numel(), threads, [&](Range range) {
    if constexpr (std::is_integral_v<T>) {
      if (exact) return store_exact(blocks, from, to, range, dst.mutable_data_ptr<int32_t>());
    }
    store_reduced(blocks, from, out, range);
  });
}

at::Tensor reduction(const at::Tensor& src, c10::string_view alg_name, c10::IntArrayRef dims,
                     bool keepdim, const at::Tensor& scales, const at::Tensor& zero_points,
                     int64_t dst_dtype, c10::string_view post_ops,
                     std::optional<at::TensorList> post_op_srcs, double p, double eps) {
  OpTrace trace("reduction");
  const Kernels& tier = kernels();
  trace.ran(tier, "reduction");
  check_source("reduction", "src", src);
  const Alg alg = reduce_alg(alg_name);
  TORCH_CHECK_VALUE(!is_norm(alg) || (std::isfinite(p) && p >= 1 && std::isfinite(eps) && eps >= 0),
                    "torchq.reduction: p must be finite and at least 1, and eps at least 0, got p ",
                    p, " and eps ", eps, ". The norm of the largest magnitude is 'max' of abs.");
  const auto params =
      read_params("reduction", scales, zero_points, {src}, dst_dtype_of("reduction", dst_dtype));
  const Real &from = params[0], &to = params[1];
  const int64_t rank = src.dim();
  c10::SmallVector<bool, 8> reduced(static_cast<size_t>(rank), false);
  for (const int64_t d : dims) {
    TORCH_CHECK_VALUE(d >= -rank && d < rank, "torchq.reduction: dims must lie in [", -rank, ", ",
                      rank - 1, "] for src ", src.sizes(), ", got ", d, ".");
    bool& seen = reduced[static_cast<size_t>(d < 0 ? d + rank : d)];
    TORCH_CHECK_VALUE(!seen, "torchq.reduction: dims must differ, got ", dims, ".");
    seen = true;
  }
  c10::SmallVector<int64_t, 8> sizes;
  int64_t n = 1;
  for (int64_t d = 0; d < rank; ++d) {
    const bool gone = reduced[static_cast<size_t>(d)];
    if (gone) n = product_of({n, src.size(d)});
    if (!gone || keepdim) sizes.push_back(gone ? 1 : src.size(d));
  }
  TORCH_CHECK_VALUE(n > 0, "torchq.reduction: src must have at least one value to reduce, got src ",
                    src.sizes(), " and dims ", dims, ".");
  const at::Tensor dst = empty_dst(sizes, scalar_type(to.dtype));
  const RealOutput out({"reduction", tier, to, post_ops, post_op_srcs}, dst);
  trace.describe([&] { return describe_call({src}, dst, c10::str("alg:", alg_name), post_ops); });
  if (is_done(dst)) return dst;
  const auto dense = dense_blocks(src, reduced, n);
  const bool exact = to.dtype == DType::s32 && from.scale == 1 && to.scale == 1 &&
                     alg != Alg::mean && alg != Alg::mul && !is_norm(alg) && post_ops.empty();
  const auto run = [&](const auto* data) {
    reduce(Blocks{tier, alg, {p, eps}, data, n, dense.second}, from, to, out, exact, dst);
  };
  const void* data = dense.first.const_data_ptr();
  switch (from.dtype) {
    case DType::u8:
      run(static_cast<const uint8_t*>(data));
      break;
    case DType::s8:
      run(static_cast<const int8_t*>(data));
      break;
    case DType::s32:
      run(static_cast<const int32_t*>(data));
      break;
    case DType::f32:
      run(static_cast<const float*>(data));
  }
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) { torchq::implement<&torchq::reduction>(m, "reduction"); }
