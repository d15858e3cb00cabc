// SPDX-License-Identifier: Apache-2.0
// add, mul and concat of quantized tensors, each with its own scale and zero point.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/common.h"
#include "kernels/cpu_tuning.h"
#include "ops/pointwise/elementwise.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"
#include "runtime/sizes.h"

namespace torchq {
namespace {

/// Bytes of an operand that broadcasts over rows, repeated so that narrow rows fill vectors.
constexpr int64_t kRepeated = 1024;

/// Scale and zero point of each operand, then of the destination.
struct Params {
  Params(const char* op, const at::Tensor& scales, const at::Tensor& zero_points,
         at::TensorList srcs, DType dst_dtype) {
    const int64_t count = static_cast<int64_t>(srcs.size()) + 1;
    check_param(op, "scales", scales, at::kFloat);
    check_param(op, "zero_points", zero_points, at::kInt);
    check_numel(op, "scales", scales, count);
    TORCH_CHECK_VALUE(scales.dim() == 1 && zero_points.dim() == 1, "torchq.", op,
                      ": scales and zero_points must have one dimension, got ", scales.sizes(),
                      " and ", zero_points.sizes(), ". Flatten them.");
    check_numel(op, "zero_points", zero_points, count);
    scale = scales.const_data_ptr<float>();
    zero_point = zero_points.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_VALUE(std::isfinite(scale[i]) && scale[i] > 0, "torchq.", op,
                        ": scales must be finite and greater than 0, got ", scale[i], " at index ",
                        i, ". Check the calibration that produced it.");
      const DType dtype =
          i + 1 == count ? dst_dtype : check_src(op, "src", srcs[static_cast<size_t>(i)]);
      const auto [lo, hi] = zero_point_range(dtype);
      TORCH_CHECK_VALUE(zero_point[i] >= lo && zero_point[i] <= hi, "torchq.", op,
                        ": zero_points must lie in [", lo, ", ", hi,
                        "], the range of their tensor, got ", zero_point[i], " at index ", i, ".");
    }
    TORCH_CHECK_VALUE(dst_dtype != DType::f32 || scale[count - 1] == 1, "torchq.", op,
                      ": a float32 destination must have scale 1, got ", scale[count - 1], ".");
    TORCH_CHECK_NOT_IMPLEMENTED(
        dst_dtype != DType::s32, "torchq.", op,
        ": an int32 destination is not supported; use float32, int8 or uint8.");
  }
  const float* scale;
  const int32_t* zero_point;
};

using RowFn = void (*)(const BinaryRows&);

/// Returns true if the rows of src0 and dst, of n values, lie side by side and src1 has one row for
/// all. Strides are those of dst, src0 and src1 along a row, then between rows.
bool shares_row(const BinaryRows& row, const int64_t* strides, int64_t n) {
  const int64_t size = element_size(row.dst_dtype);
  return strides[0] == size && strides[1] == 1 && strides[2] == 1 && strides[3] == n * size &&
         strides[4] == n && strides[5] == 0;
}

/// Rows that share one of src1: joined where they are narrow, so that they fill vectors, and as
/// many in a call as stay in L1 while panel after panel goes through them.
void run_shared(RowFn run, BinaryRows row, char** data, int64_t n, int64_t rows) {
  alignas(64) char repeated[kRepeated];
  const int64_t joined = std::clamp<int64_t>(kRepeated / n, 1, rows);
  for (int64_t i = 0; joined > 1 && i < joined; ++i)
    std::memcpy(repeated + i * n, data[2], static_cast<size_t>(n));
  row.src1 = joined > 1 ? repeated : data[2];
  const int64_t together = joined * std::max<int64_t>(tuning::kRowBytesInL1 / (joined * n), 1);
  for (int64_t r = 0; r < rows;) {
    const int64_t count = std::min(rows - r, together);
    row.rows = std::max<int64_t>(count / joined, 1);
    row.size = std::min(count, joined) * n;
    row.dst = data[0] + r * n * element_size(row.dst_dtype);
    row.src0 = data[1] + r * n;
    run(row);
    r += row.rows * row.size / n;
  }
}

/// `rows` rows of n values of dst, src0 and src1, which begin at `data`.
void run_rows(RowFn run, BinaryRows row, char** data, const int64_t* strides, int64_t n,
              int64_t rows) {
  row.step0 = strides[1];
  row.step1 = strides[2];
  if (shares_row(row, strides, n)) return run_shared(run, row, data, n, rows);
  const auto unit = [](int64_t step) { return step == 0 || step == 1; };
  const bool whole =
      strides[0] == element_size(row.dst_dtype) && unit(strides[1]) && unit(strides[2]);
  row.rows = 1;
  row.size = whole ? n : 1;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; i += row.size) {  // other strides: value by value
      row.dst = data[0] + r * strides[3] + i * strides[0];
      row.src0 = data[1] + r * strides[4] + i * strides[1];
      row.src1 = data[2] + r * strides[5] + i * strides[2];
      run(row);
    }
  }
}

/// Strides of a dense tensor whose dimensions lie in memory in the same order as those of `like`.
c10::SmallVector<int64_t, 5> strides_in_order_of(const at::Tensor& like, c10::IntArrayRef sizes) {
  c10::SmallVector<int64_t, 5> order(sizes.size()), strides(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[static_cast<size_t>(order[i])] = stride;
    stride = product_of({stride, std::max<int64_t>(sizes[static_cast<size_t>(order[i])], 1)});
  }
  return strides;
}

bool is_expanded(const at::Tensor& t) {
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1 && t.stride(d) == 0) return true;
  }
  return false;
}

/// Returns true if `src` is dense, with dimensions in the memory order of `like`.
bool lies_like(const at::Tensor& src, const at::Tensor& like) {
  const auto strides = strides_in_order_of(like, src.sizes());
  for (int64_t d = 0; d < src.dim(); ++d) {
    if (src.size(d) > 1 && src.stride(d) != strides[static_cast<size_t>(d)]) return false;
  }
  return true;
}

/// `src`, or a dense copy in the order of `like`. Values whose strides fit no vector are converted
/// one by one: measured on Zen 4, an expanded source took 50 times as long as its copy and that.
at::Tensor in_order_of(const at::Tensor& like, const at::Tensor& src) {
  if (lies_like(src, like)) return src;
  const at::Tensor dense =
      empty_dst(src.sizes(), strides_in_order_of(like, src.sizes()), src.scalar_type());
  return dense.copy_(src);
}

/// `src`, or a dense copy where its steps along the innermost dimension of `dst` fit no vector.
at::Tensor with_short_steps(const at::Tensor& dst, const at::Tensor& src) {
  if (src.sizes() != dst.sizes()) return src;
  for (int64_t d = 0; d < dst.dim(); ++d) {
    if (dst.size(d) > 1 && dst.stride(d) == 1 && src.stride(d) > 1) return in_order_of(dst, src);
  }
  return src;
}

/// `swaps`: the smaller source may come second, where its rows are shared.
at::Tensor binary(const char* op, OpTrace& trace, RowFn run, const at::Tensor& src0,
                  const at::Tensor& src1, BinaryRows row, bool swaps) {
  for (const float f : {row.m0, row.m1, row.c}) {
    TORCH_CHECK_VALUE(std::isfinite(f), "torchq.", op,
                      ": the ratio of the scales is not a finite float32 (", f,
                      "). Check the calibration that produced them.");
  }
  at::Tensor dst = empty_broadcast(op, src0, src1, scalar_type(row.dst_dtype));
  trace.describe([&] { return describe_call({src0, src1}, dst); });
  if (is_done(dst)) return dst;
  const bool swap = swaps && src0.numel() < src1.numel();
  if (swap) {
    std::swap(row.dtype0, row.dtype1);
    std::swap(row.z0, row.z1);
  }
  const at::Tensor first = with_short_steps(dst, swap ? src1 : src0);
  const at::Tensor second = with_short_steps(dst, swap ? src0 : src1);
  at::TensorIterator iter = at::TensorIteratorConfig()
                                .check_all_same_dtype(false)
                                .resize_outputs(false)
                                .add_output(dst)
                                .add_const_input(first)
                                .add_const_input(second)
                                .build();
  iter.for_each(
      [&](char** data, const int64_t* strides, int64_t n, int64_t rows) {
        const FloatMode mode;
        run_rows(run, row, data, strides, n, rows);
      },
      tuning::kConvertGrain);
  return dst;
}

BinaryRows make_row(const char* op, const at::Tensor& src0, const at::Tensor& src1, const Params& p,
                    DType dst, bool relu) {
  BinaryRows row{};
  row.dtype0 = check_src(op, "src0", src0);
  row.dtype1 = check_src(op, "src1", src1);
  row.dst_dtype = dst;
  row.z0 = p.zero_point[0];
  row.z1 = p.zero_point[1];
  row.lo = relu ? static_cast<float>(p.zero_point[2]) : -std::numeric_limits<float>::infinity();
  return row;
}

at::Tensor add(const at::Tensor& src0, const at::Tensor& src1, const at::Tensor& scales,
               const at::Tensor& zero_points, int64_t dst_dtype, bool relu) {
  OpTrace trace("add");
  const Kernels& tier = kernels();
  trace.ran(tier, "add");
  const DType dst = dst_dtype_of("add", dst_dtype);
  const at::Tensor srcs[] = {src0, src1};
  const Params p("add", scales, zero_points, srcs, dst);
  BinaryRows row = make_row("add", src0, src1, p, dst, relu);
  const double m0 = double{p.scale[0]} / p.scale[2], m1 = double{p.scale[1]} / p.scale[2];
  row.m0 = static_cast<float>(m0);
  row.m1 = static_cast<float>(m1);
  row.c = static_cast<float>(p.zero_point[2] - p.zero_point[0] * m0 - p.zero_point[1] * m1);
  return binary("add", trace, tier.add, src0, src1, row, false);
}

at::Tensor mul(const at::Tensor& src0, const at::Tensor& src1, const at::Tensor& scales,
               const at::Tensor& zero_points, int64_t dst_dtype, bool relu) {
  OpTrace trace("mul");
  const Kernels& tier = kernels();
  trace.ran(tier, "mul");
  const DType dst = dst_dtype_of("mul", dst_dtype);
  const at::Tensor srcs[] = {src0, src1};
  const Params p("mul", scales, zero_points, srcs, dst);
  BinaryRows row = make_row("mul", src0, src1, p, dst, relu);
  row.m0 = static_cast<float>(double{p.scale[0]} * p.scale[1] / p.scale[2]);
  row.c = static_cast<float>(p.zero_point[2]);
  return binary("mul", trace, tier.mul, src0, src1, row, true);
}

/// `rows` rows of `width` bytes each, to `stride` bytes apart. Narrow rows, such as DenseNet's 32
/// channels, inline: calling memcpy for each would cost more than the copy.
void copy_rows(const uint8_t* src, int64_t rows, int64_t width, uint8_t* dst, int64_t stride) {
  constexpr int64_t kChunk = 16, kInline = 256;
  const size_t bytes = static_cast<size_t>(width);
  for (int64_t r = 0; r < rows; ++r, src += width, dst += stride) {
    if (width < kChunk || width > kInline) {
      std::memcpy(dst, src, bytes);
      continue;
    }
    for (int64_t i = 0; i + kChunk < width; i += kChunk) std::memcpy(dst + i, src + i, kChunk);
    std::memcpy(dst + width - kChunk, src + width - kChunk, kChunk);  // may overlap the last one
  }
}

/// A source of a concat, whose rows, of `width` bytes, become parts of the destination's.
struct ConcatSource {
  const uint8_t* data;
  int64_t width;
  bool copies;
  ConvertRow convert;  // but for src, dst and size
};

/// Rows of a destination whose rows have `stride` bytes. Where several are converted at a time they
/// pass through L1.
void concat_rows(const Kernels& tier, c10::ArrayRef<ConcatSource> sources, const Range& range,
                 uint8_t* dst, int64_t stride) {
  constexpr int64_t kBlock = 4096, kRows = 64;
  alignas(64) uint8_t block[kBlock];
  for (int64_t r = range.begin; r < range.end; r += kRows) {
    const int64_t rows = std::min(range.end - r, kRows);
    uint8_t* to = dst + r * stride;
    for (const ConcatSource& source : sources) {
      const uint8_t* src = source.data + r * source.width;
      const int64_t together = source.copies ? rows : std::max(kBlock / source.width, int64_t{1});
      for (int64_t i = 0; i < rows; i += together) {
        const int64_t count = std::min(together, rows - i);
        const uint8_t* from = src + i * source.width;
        uint8_t* part = to + i * stride;
        if (source.copies) {
          copy_rows(from, count, source.width, part, stride);
          continue;
        }
        ConvertRow row = source.convert;
        row.src = from;
        row.dst = count > 1 ? block : part;
        row.size = count * source.width;
        tier.convert(row);
        if (count > 1) copy_rows(block, count, source.width, part, stride);
      }
      to += source.width;
    }
  }
}

/// The first source with memory of its own for every value decides the order of the dimensions. An
/// expanded one says nothing about it; where there are no others, dst is contiguous.
c10::SmallVector<int64_t, 5> concat_strides(at::TensorList srcs, c10::IntArrayRef sizes) {
  for (const at::Tensor& src : srcs) {
    if (!is_expanded(src)) return strides_in_order_of(src, sizes);
  }
  return strides_in_order_of(at::empty(sizes, at::kByte), sizes);
}

/// A row goes from the start of `dim` through the dimensions inside it. Destinations of 32 bits,
/// and long rows that are too few for the threads, go tensor by tensor. The sources lie like dst.
void concat_into(const Kernels& tier, const at::Tensor& dst, at::TensorList srcs, const Params& p,
                 int64_t dim) {
  const size_t last = srcs.size();
  const DType dst_dtype = dtype_of("concat", "dst", dst);
  const int64_t inner = dst.stride(dim);
  c10::SmallVector<float, 32> factors;
  c10::SmallVector<ConcatSource, 32> sources;
  factors.reserve(last);
  for (size_t i = 0; i < last; ++i) {
    const at::Tensor& src = srcs[i];
    factors.push_back(static_cast<float>(double{p.scale[i]} / p.scale[last]));
    TORCH_CHECK_VALUE(std::isfinite(factors[i]), "torchq.concat: the ratio of the scales at index ",
                      i, " is not a finite float32 (", factors[i],
                      "). Check the calibration that produced them.");
    if (src.numel() == 0) continue;
    const bool same = src.scalar_type() == dst.scalar_type() && p.scale[i] == p.scale[last] &&
                      p.zero_point[i] == p.zero_point[last];
    ConvertRow row{};
    row.src_dtype = dtype_of("concat", "src", src);
    row.dst_dtype = dst_dtype;
    row.factor = &factors[i];
    row.src_zero_point = p.zero_point + i;
    row.dst_zero_point = p.zero_point + last;
    sources.push_back({bytes_of(src), src.size(dim) * inner, same, row});
  }
  const int64_t stride = dst.size(dim) * inner, rows = dst.numel() / stride;
  const int parts = threads_for(dst.numel(), tuning::kConvertGrain);
  if (element_size(dst_dtype) == 1 && rows >= parts) {
    uint8_t* to = static_cast<uint8_t*>(dst.mutable_data_ptr());
    return parallel_parts(parts, [&](int part) {
      concat_rows(tier, sources, part_of(rows, parts, part), to, stride);
    });
  }
  int64_t begin = 0;
  size_t next = 0;
  for (size_t i = 0; i < last; ++i) {
    const at::Tensor part = dst.narrow(dim, begin, srcs[i].size(dim));
    begin += srcs[i].size(dim);
    if (srcs[i].numel() == 0) continue;
    const ConcatSource& source = sources[next++];
    if (source.copies) {
      part.copy_(srcs[i]);
    } else {
      convert_into(tier, part, srcs[i], at::scalar_tensor(factors[i]),
                   at::scalar_tensor(p.zero_point[i], at::kInt),
                   at::scalar_tensor(p.zero_point[last], at::kInt));
    }
  }
}

at::Tensor concat(at::TensorList srcs, const at::Tensor& scales, const at::Tensor& zero_points,
                  int64_t dim, int64_t dst_dtype) {
  OpTrace trace("concat");
  const Kernels& tier = kernels();
  trace.ran(tier, "convert");
  TORCH_CHECK_VALUE(!srcs.empty() && srcs[0].dim() > 0,
                    "torchq.concat: srcs must be at least one tensor with ", "dimensions, got ",
                    srcs.size(), " tensors.");
  const DType dst_type = dst_dtype_of("concat", dst_dtype);
  const Params p("concat", scales, zero_points, srcs, dst_type);
  const int64_t dims = srcs[0].dim();
  TORCH_CHECK_VALUE(dim >= -dims && dim < dims, "torchq.concat: dim must lie in [", -dims, ", ",
                    dims - 1, "] for src ", srcs[0].sizes(), ", got ", dim, ".");
  if (dim < 0) dim += dims;
  c10::SmallVector<int64_t, 5> sizes(srcs[0].sizes().begin(), srcs[0].sizes().end());
  sizes[static_cast<size_t>(dim)] = 0;
  for (const at::Tensor& src : srcs) {
    bool fits = src.dim() == dims;
    for (int64_t d = 0; fits && d < dims; ++d)
      fits = d == dim || src.size(d) == sizes[static_cast<size_t>(d)];
    TORCH_CHECK_VALUE(fits, "torchq.concat: srcs must agree in every dimension but ", dim, ", got ",
                      srcs[0].sizes(), " and ", src.sizes(), ".");
    int64_t& size = sizes[static_cast<size_t>(dim)];
    TORCH_CHECK_VALUE(!__builtin_add_overflow(size, src.size(dim), &size),
                      "torchq.concat: sizes in dimension ", dim,
                      " must add to less than 2^63, got ", src.size(dim),
                      " more than fit. Use smaller tensors.");
  }
  at::Tensor dst = empty_dst(sizes, concat_strides(srcs, sizes), scalar_type(dst_type));
  trace.describe([&] { return describe_call(srcs, dst); });
  if (is_done(dst)) return dst;
  c10::SmallVector<at::Tensor, 8> dense;
  for (const at::Tensor& src : srcs) dense.push_back(in_order_of(dst, src));
  concat_into(tier, dst, dense, p, dim);
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::add>(m, "add");
  torchq::implement<&torchq::mul>(m, "mul");
  torchq::implement<&torchq::concat>(m, "concat");
}
