// SPDX-License-Identifier: Apache-2.0
// eltwise, binary and sum in real units (Note [Real units] in real.h).
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/cpu_tuning.h"
#include "ops/pointwise/elementwise.h"
#include "ops/rows/real.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/result_allocator.h"

namespace torchq {
namespace {

/// body(data, strides, n, first): n <= kRealBlock adjacent values of dst, from element `first` of
/// its memory on, and those of each source, broadcast.
template <class Body>
void for_each_block(const at::Tensor& dst, at::TensorList srcs, const Body& body) {
  if (is_done(dst)) return;
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false).add_output(dst);
  for (const at::Tensor& src : srcs) config.add_const_input(src);
  at::TensorIterator iter = config.build();
  const size_t tensors = srcs.size() + 1;
  const char* base = static_cast<const char*>(dst.const_data_ptr());
  const int64_t size = dst.element_size();
  iter.for_each(
      [&](char** data, const int64_t* strides, int64_t n) {
        const FloatMode mode;
        c10::SmallVector<char*, 4> at(data, data + tensors);
        const int64_t block = strides[0] == size ? kRealBlock : 1;
        for (int64_t done = 0; done < n; done += block) {
          body(at.data(), strides, std::min<int64_t>(n - done, block), (at[0] - base) / size);
          for (size_t t = 0; t < tensors; ++t) at[t] += block * strides[t];
        }
      },
      tuning::kEltwiseGrain);
}

at::Tensor eltwise(const at::Tensor& src, const at::Tensor& scales, const at::Tensor& zero_points,
                   int64_t dst_dtype, c10::string_view post_ops,
                   std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("eltwise");
  const Kernels& tier = kernels();
  check_source("eltwise", "src", src);
  const auto params =
      read_params("eltwise", scales, zero_points, {src}, dst_dtype_of("eltwise", dst_dtype));
  const Real &from = params[0], &to = params[1];
  at::Tensor dst = empty_dst_like(src, scalar_type(to.dtype));
  const RealOutput out({"eltwise", tier, to, post_ops, post_op_srcs}, dst);
  trace.describe([&] { return describe_call({src}, dst, "", post_ops); });
  if (is_int8(from.dtype) && is_int8(to.dtype) && out.is_map()) {
    trace.ran(tier, "lookup");
    alignas(64) uint8_t bytes[256], table[256];
    for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
    alignas(64) float x[256];
    load_real(tier, from, bytes, 1, 256, x);
    out.tabulate(x, 256, table);
    lookup_into(tier, dst, src, table);
    return dst;
  }
  trace.ran(tier, "eltwise");
  for_each_block(dst, {src}, [&](char** data, const int64_t* strides, int64_t n, int64_t first) {
    alignas(64) float x[kRealBlock];
    load_real(tier, from, data[1], strides[1], n, x);
    out.store(x, n, first);
  });
  return dst;
}

Binary binary_alg(c10::string_view name) {
  constexpr c10::string_view names[] = {"add", "sub", "mul", "div", "max", "min",    "ge",
                                        "gt",  "le",  "lt",  "eq",  "ne",  "select", "prelu"};
  static_assert(std::size(names) == static_cast<size_t>(Binary::prelu) + 1);
  for (size_t i = 0; i < std::size(names); ++i) {
    if (names[i] == name) return static_cast<Binary>(i);
  }
  TORCH_CHECK_VALUE(false,
                    "torchq.binary: alg must be add, sub, mul, div, max, min, ge, gt, le, lt, ",
                    "eq, ne, select or prelu, got '", name, "'. Pass one of these.");
}

at::Tensor binary(const at::Tensor& src0, const at::Tensor& src1,
                  const std::optional<at::Tensor>& condition, c10::string_view alg,
                  const at::Tensor& scales, const at::Tensor& zero_points, int64_t dst_dtype,
                  c10::string_view post_ops, std::optional<at::TensorList> post_op_srcs) {
  OpTrace trace("binary");
  const Kernels& tier = kernels();
  trace.ran(tier, "binary");
  const Binary kind = binary_alg(alg);
  check_source("binary", "src0", src0);
  check_source("binary", "src1", src1);
  const auto params =
      read_params("binary", scales, zero_points, {src0, src1}, dst_dtype_of("binary", dst_dtype));
  TORCH_CHECK_VALUE((kind == Binary::select) == condition.has_value(),
                    "torchq.binary: condition must be given for select and only then, got ",
                    condition.has_value() ? "one" : "none", " with '", alg, "'.");
  at::Tensor dst = empty_broadcast("binary", src0, src1, scalar_type(params[2].dtype));
  c10::SmallVector<at::Tensor, 3> srcs{src0, src1};
  if (condition.has_value()) {
    TORCH_CHECK_TYPE(condition->scalar_type() == at::kByte || condition->scalar_type() == at::kChar,
                     "torchq.binary: condition must be uint8 or int8, got ",
                     dtype_name(condition->scalar_type()), ". Convert it with .to(torch.uint8).");
    check_cpu("binary", "condition", *condition);
    TORCH_CHECK_VALUE(condition->sizes() == dst.sizes(),
                      "torchq.binary: condition must have the shape of dst, ", dst.sizes(),
                      ", got ", condition->sizes(), ". Expand it.");
    srcs.push_back(*condition);
  }
  const RealOutput out({"binary", tier, params[2], post_ops, post_op_srcs}, dst, kind);
  trace.describe([&] { return describe_call(srcs, dst, "alg:" + std::string(alg)); });
  for_each_block(dst, srcs, [&](char** data, const int64_t* strides, int64_t n, int64_t first) {
    alignas(64) float x[kRealBlock], v[kRealBlock], c[kRealBlock];
    load_real(tier, params[0], data[1], strides[1], n, x);
    load_real(tier, params[1], data[2], strides[2], n, v);
    c10::SmallVector<SumSrc, 2> operands{{v, DType::f32, nullptr, 1, 0}};
    if (condition.has_value()) {
      load_real(tier, {DType::u8, 1, 0}, data[3], strides[3], n, c);
      operands.push_back({c, DType::f32, nullptr, 1, 0});
    }
    out.store(x, n, first, operands);
  });
  return dst;
}

at::Tensor sum(at::TensorList srcs, const at::Tensor& scales, const at::Tensor& zero_points,
               int64_t dst_dtype) {
  OpTrace trace("sum");
  const Kernels& tier = kernels();
  trace.ran(tier, "sum");
  TORCH_CHECK_VALUE(!srcs.empty() && srcs.size() <= 32,
                    "torchq.sum: srcs must be 1 to 32 tensors, got ", srcs.size(),
                    ". Sum in several steps.");
  for (const at::Tensor& src : srcs) {
    check_source("sum", "srcs", src);
    TORCH_CHECK_VALUE(src.sizes() == srcs[0].sizes(), "torchq.sum: srcs must have one shape, got ",
                      srcs[0].sizes(), " and ", src.sizes(), ". Expand the smaller one.");
  }
  const auto params =
      read_params("sum", scales, zero_points, srcs, dst_dtype_of("sum", dst_dtype), true);
  at::Tensor dst = empty_dst_like(srcs[0], scalar_type(params.back().dtype));
  const RealOutput out({"sum", tier, params.back(), "", {}}, dst);
  trace.describe([&] { return describe_call(srcs, dst); });
  for_each_block(dst, srcs, [&](char** data, const int64_t* strides, int64_t n, int64_t first) {
    alignas(64) float x[kRealBlock], v[kRealBlock];
    load_real(tier, params[0], data[1], strides[1], n, x);
    for (size_t s = 1; s < srcs.size(); ++s) {
      load_real(tier, params[s], data[s + 1], strides[s + 1], n, v);
      for (int64_t i = 0; i < n; ++i) x[i] = x[i] + v[i];
    }
    out.store(x, n, first);
  });
  return dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::eltwise>(m, "eltwise");
  torchq::implement<&torchq::binary>(m, "binary");
  torchq::implement<&torchq::sum>(m, "sum");
}
