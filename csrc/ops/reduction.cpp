// SPDX-License-Identifier: Apache-2.0
// Reductions and resampling of 8-bit tensors: integer sums and double products
// in a fixed order, one rounding to float32 (Note [Real units] in real.h).
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "../checks.h"
#include "../parallel.h"
#include "geometry.h"
#include "real.h"

namespace torchq {
namespace {

/// q - zero_point of the value at `p`.
int32_t centered(const uint8_t* p, const Real& from) {
  return (from.dtype == DType::s8 ? static_cast<int8_t>(*p) : *p) - from.zero_point;
}

enum class Reduce { sum, mean, max, min, mul };

Reduce reduce_alg(c10::string_view name) {
  constexpr c10::string_view names[] = {"sum", "mean", "max", "min", "mul"};
  for (size_t i = 0; i < std::size(names); ++i) {
    if (names[i] == name) return static_cast<Reduce>(i);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "torchq.reduction: alg must be sum, mean, max, min or mul, got '", name,
      "'. The nearest to a norm is a sum of torchq.functional.eltwise "
      "'square'.");
}

/// The sum, largest or smallest of n >= 1 values: exact.
int64_t reduce_row(Reduce alg, const uint8_t* row, int64_t n, const Real& from) {
  int64_t result = centered(row, from);
  for (int64_t i = 1; i < n; ++i) {
    const int64_t q = centered(row + i, from);
    result = alg == Reduce::max   ? std::max(result, q)
             : alg == Reduce::min ? std::min(result, q)
                                  : result + q;
  }
  return result;
}

double product_of_row(const uint8_t* row, int64_t n, const Real& from) {
  double result = 1;
  for (int64_t i = 0; i < n; ++i) result *= double{from.scale} * centered(row + i, from);
  return result;
}

at::Tensor reduction(const at::Tensor& src, c10::string_view alg_name, c10::IntArrayRef dims,
                     bool keepdim, const at::Tensor& scales, const at::Tensor& zero_points,
                     int64_t dst_dtype, c10::string_view post_ops) {
  OpTrace trace("reduction");
  const Kernels& tier = kernels();
  trace.ran(tier, "reduction");
  check_src("reduction", "src", src);
  const Reduce alg = reduce_alg(alg_name);
  const auto params =
      read_params("reduction", scales, zero_points, {src}, dst_dtype_of("reduction", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("reduction", post_ops)};
  const int64_t rank = src.dim();
  c10::SmallVector<bool, 8> reduced(static_cast<size_t>(rank), false);
  for (const int64_t d : dims) {
    TORCH_CHECK_VALUE(d >= -rank && d < rank, "torchq.reduction: dims must lie in [", -rank, ", ",
                      rank - 1, "] for src ", src.sizes(), ", got ", d, ".");
    bool& seen = reduced[static_cast<size_t>(d < 0 ? d + rank : d)];
    TORCH_CHECK_VALUE(!seen, "torchq.reduction: dims must differ, got ", dims, ".");
    seen = true;
  }
  c10::SmallVector<int64_t, 8> order, sizes;
  int64_t n = 1;
  for (const bool last : {false, true}) {
    for (int64_t d = 0; d < rank; ++d) {
      if (reduced[static_cast<size_t>(d)] == last) order.push_back(d);
    }
  }
  for (int64_t d = 0; d < rank; ++d) {
    const bool gone = reduced[static_cast<size_t>(d)];
    if (gone) n *= src.size(d);
    if (!gone || keepdim) sizes.push_back(gone ? 1 : src.size(d));
  }
  TORCH_CHECK_VALUE(n > 0, "torchq.reduction: src must have at least one value to reduce, got src ",
                    src.sizes(), " and dims ", dims, ".");
  const at::Tensor rows = src.permute(order).contiguous();
  const at::Tensor dst = at::detail::empty_cpu(sizes, scalar_type(out.to.dtype));
  trace.describe([&] { return describe_call({src}, dst, "alg:" + std::string(alg_name)); });
  if (dst.numel() == 0) return dst;
  const uint8_t* data = static_cast<const uint8_t*>(rows.const_data_ptr());
  void* result = dst.mutable_data_ptr();
  const bool exact = out.to.dtype == DType::s32 && out.from.scale == 1 && out.to.scale == 1 &&
                     alg != Reduce::mean && alg != Reduce::mul && out.chain.empty();
  const int64_t count = dst.numel();
  const int parts = static_cast<int>(std::min<int64_t>(threads_for(count * n, 100'000), count));
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(count, parts, part);
    float x[kRealBlock];
    for (int64_t first = range.begin; first < range.end; first += kRealBlock) {
      const int64_t block = std::min<int64_t>(kRealBlock, range.end - first);
      for (int64_t i = 0; i < block; ++i) {
        const uint8_t* row = data + (first + i) * n;
        if (alg == Reduce::mul) {
          x[i] = static_cast<float>(product_of_row(row, n, out.from));
          continue;
        }
        const int64_t q = reduce_row(alg, row, n, out.from);
        if (exact) {
          static_cast<int32_t*>(result)[first + i] = static_cast<int32_t>(
              std::clamp<int64_t>(q + out.to.zero_point, std::numeric_limits<int32_t>::min(),
                                  std::numeric_limits<int32_t>::max()));
          continue;
        }
        const double real = double{out.from.scale} * static_cast<double>(q);
        x[i] = static_cast<float>(alg == Reduce::mean ? real / static_cast<double>(n) : real);
      }
      if (!exact) out.store(x, block, result, first);
    }
  });
  return dst;
}

/// Where one destination index reads along one dimension: (1 - w) src[left] + w
/// src[right].
struct Tap {
  int64_t index[2];
  double weight[2];
};

/// oneDNN's coordinates, in float32: s = (o + 0.5) * input / output - 0.5.
Tap tap_of(int64_t o, int64_t output, int64_t input, bool linear) {
  const float s =
      (static_cast<float>(o) + 0.5f) * static_cast<float>(input) / static_cast<float>(output) -
      0.5f;
  const float last = static_cast<float>(input - 1);
  if (!linear) {
    const int64_t nearest = static_cast<int64_t>(std::clamp(std::round(s), 0.0f, last));
    return {{nearest, nearest}, {1, 0}};
  }
  const float inside = std::clamp(s, 0.0f, last);
  const float left = std::floor(inside);
  const float weight = inside - left;
  const int64_t index = static_cast<int64_t>(left);
  return {{index, std::min(index + 1, input - 1)}, {1.0 - weight, weight}};
}

at::Tensor resampling(const at::Tensor& src_arg, c10::string_view alg, c10::IntArrayRef size,
                      const at::Tensor& scales, const at::Tensor& zero_points, int64_t dst_dtype,
                      c10::string_view post_ops) {
  OpTrace trace("resampling");
  const Kernels& tier = kernels();
  trace.ran(tier, "resampling");
  check_src("resampling", "src", src_arg);
  TORCH_CHECK_VALUE(alg == "nearest" || alg == "linear",
                    "torchq.resampling: alg must be nearest or linear, got '", alg, "'.");
  const auto params = read_params("resampling", scales, zero_points, {src_arg},
                                  dst_dtype_of("resampling", dst_dtype));
  const RealOutput out{tier, params[0], params[1], parse_eltwise("resampling", post_ops)};
  const ChannelsLast src = to_channels_last("resampling", src_arg);
  const int64_t dims = src.spatial_dims;
  int64_t output[3] = {1, 1, 1}, pixels = 1;
  TORCH_CHECK_VALUE(static_cast<int64_t>(size.size()) == dims, "torchq.resampling: size must have ",
                    dims, " values for src ", src_arg.sizes(), ", got ", size, ".");
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t wanted = size[static_cast<size_t>(d)];
    TORCH_CHECK_VALUE(wanted >= 1 && wanted <= (1 << 24) && src_arg.size(d + 2) >= 1 &&
                          src_arg.size(d + 2) <= (1 << 24),
                      "torchq.resampling: sizes must lie in [1, 2^24], got src ", src_arg.sizes(),
                      " and size ", size, ".");
    output[d + 3 - dims] = wanted;
    pixels *= wanted;
    TORCH_CHECK_VALUE(pixels < (int64_t{1} << 31),
                      "torchq.resampling: dst must have fewer than 2^31 positions, got size ", size,
                      ".");
  }
  const at::Tensor dst =
      empty_channels_last(src.batch, src.channels, size, scalar_type(out.to.dtype));
  trace.describe([&] { return describe_call({src_arg}, dst, "alg:" + std::string(alg)); });
  if (dst.numel() == 0) return dst;
  std::array<std::vector<Tap>, 3> taps;
  for (int d = 0; d < 3; ++d) {
    for (int64_t o = 0; o < output[d]; ++o)
      taps[static_cast<size_t>(d)].push_back(
          tap_of(o, output[d], src.size[d], alg == "linear" && src.size[d] != output[d]));
  }
  const uint8_t* data = static_cast<const uint8_t*>(src.tensor.const_data_ptr());
  void* result = dst.mutable_data_ptr();
  const int64_t c = src.channels, rows = src.batch * output[0] * output[1];
  const int parts =
      static_cast<int>(std::min<int64_t>(threads_for(dst.numel() * 8, 100'000), rows));
  parallel_parts(parts, [&](int part) {
    const Range range = part_of(rows, parts, part);
    double sum[kRealBlock];
    float x[kRealBlock];
    for (int64_t r = range.begin; r < range.end; ++r) {
      const int64_t n = r / (output[0] * output[1]);
      const Tap& d = taps[0][static_cast<size_t>(r / output[1] % output[0])];
      const Tap& h = taps[1][static_cast<size_t>(r % output[1])];
      for (int64_t ow = 0; ow < output[2]; ++ow) {
        const Tap& w = taps[2][static_cast<size_t>(ow)];
        for (int64_t first = 0; first < c; first += kRealBlock) {
          const int64_t block = std::min<int64_t>(kRealBlock, c - first);
          std::fill_n(sum, block, 0.0);
          for (int corner = 0; corner < 8; ++corner) {
            const int k = corner >> 2, j = corner >> 1 & 1, i = corner & 1;
            const double weight = d.weight[k] * h.weight[j] * w.weight[i];
            if (weight == 0) continue;
            const uint8_t* p =
                data + first +
                (((n * src.size[0] + d.index[k]) * src.size[1] + h.index[j]) * src.size[2] +
                 w.index[i]) *
                    c;
            for (int64_t ch = 0; ch < block; ++ch) sum[ch] += weight * centered(p + ch, out.from);
          }
          for (int64_t ch = 0; ch < block; ++ch)
            x[ch] = static_cast<float>(double{out.from.scale} * sum[ch]);
          out.store(x, block, result, (r * output[2] + ow) * c + first);
        }
      }
    }
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  m.impl("reduction", &torchq::reduction);
  m.impl("resampling", &torchq::resampling);
}
