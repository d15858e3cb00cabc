// SPDX-License-Identifier: Apache-2.0
// pack_conv_transpose and its inverse: the weights of a transposed convolution, rearranged to those
// of the ordinary convolutions it consists of (Note [Transposed convolution]).
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "../checks.h"
#include "gemm.h"
#include "packing.h"
#include "transposed.h"

namespace torchq {
namespace {

struct Shape {
  int64_t groups, inputs, outputs;  // channels of one group
  c10::SmallVector<int64_t, 3> kernel;
  /// packed position -> tap
  at::Tensor order;

  int64_t taps() const { return order.numel(); }
};

/// Flat tap indices in packed order: the product of the orders along each dimension.
at::Tensor flat_order(c10::IntArrayRef kernel, c10::IntArrayRef stride, c10::IntArrayRef dilation) {
  std::vector<int64_t> order = {0};
  for (size_t d = 0; d < kernel.size(); ++d) {
    const auto taps = transposed_taps(kernel[d], stride[d], dilation[d]);
    std::vector<int64_t> longer;
    for (const int64_t outer : order) {
      for (const int64_t tap : taps) longer.push_back(outer * kernel[d] + tap);
    }
    order = std::move(longer);
  }
  at::Tensor result = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

Shape checked_shape(const char* op, c10::IntArrayRef sizes, int64_t groups, c10::IntArrayRef stride,
                    c10::IntArrayRef dilation) {
  const auto at_least_one = [](int64_t v) { return v >= 1 && v < (1 << 24); };
  TORCH_CHECK_VALUE(sizes.size() >= 3 && sizes.size() <= 5 &&
                        std::all_of(sizes.begin(), sizes.end(), [](int64_t v) { return v >= 0; }),
                    "torchq.", op,
                    ": weight must be (IC, OC/G, k...) with one to three kernel dimensions, got ",
                    sizes, ". That is the layout of torch.nn.ConvTranspose.");
  TORCH_CHECK_VALUE(
      groups >= 1 && groups <= std::max<int64_t>(sizes[0], 1) && sizes[0] % groups == 0, "torchq.",
      op, ": groups must divide the ", sizes[0], " input channels of weight ", sizes,
      ", got groups=", groups, ".");
  const size_t dims = sizes.size() - 2;
  for (const auto& [name, values] :
       {std::pair<const char*, c10::IntArrayRef>{"stride", stride},
        std::pair<const char*, c10::IntArrayRef>{"dilation", dilation}}) {
    TORCH_CHECK_VALUE(
        values.size() == dims && std::all_of(values.begin(), values.end(), at_least_one), "torchq.",
        op, ": ", name, " must have ", dims, " values of at least 1 (and below 2^24) for weight ",
        sizes, ", got ", values, ".");
  }
  int64_t taps = 1, met = 1;
  for (size_t d = 0; d < dims; ++d) {
    const int64_t size = sizes[d + 2];
    TORCH_CHECK_VALUE(size >= 1 && size <= kMaxReduction / taps, "torchq.", op, ": weight ", sizes,
                      " must have kernel dimensions of at least 1 and at most ", kMaxReduction,
                      " taps in all. Split the layer along its kernel.");
    taps *= size;
    met *= taps_per_phase(size, stride[d], dilation[d]);
  }
  const int64_t inputs = sizes[0] / groups;
  TORCH_CHECK_VALUE(inputs == 0 || met <= kMaxReduction / inputs, "torchq.", op, ": weight sums ",
                    met, " taps of ", inputs, " channels per output, got weight ", sizes,
                    "; more than ", kMaxReduction,
                    " products could overflow int32 (255 * 128 * K). Split the layer along its "
                    "inputs.");
  return {groups,
          inputs,
          sizes[1],
          {sizes.begin() + 2, sizes.end()},
          flat_order(sizes.slice(2), stride, dilation)};
}

Packed pack_conv_transpose(const at::Tensor& weight, int64_t groups, c10::IntArrayRef stride,
                           c10::IntArrayRef dilation) {
  constexpr const char* op = "pack_conv_transpose";
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kChar, "torchq.", op, ": weight must be int8, got ",
                   dtype_name(weight.scalar_type()),
                   ". Quantize it first: torchq.functional.quantize_weight(weight, scale).");
  check_cpu(op, "weight", weight);
  const Shape s = checked_shape(op, weight.sizes(), groups, stride, dilation);
  const ConvPacking p = dense_packing(s.outputs * groups, s.inputs, groups, s.kernel);
  // (G, IC/G, OC/G, taps) to (OC, IC/G, taps in packed order).
  c10::SmallVector<int64_t, 5> sizes = {groups * s.outputs, s.inputs};
  sizes.append(s.kernel.begin(), s.kernel.end());
  const at::Tensor ordered = weight.reshape({groups, s.inputs, s.outputs, s.taps()})
                                 .transpose(1, 2)
                                 .index_select(3, s.order)
                                 .reshape(sizes);
  return pack_weights(p, ordered, s.kernel);
}

at::Tensor unpack_conv_transpose(const at::Tensor& packed, c10::IntArrayRef weight_shape,
                                 int64_t groups, c10::IntArrayRef stride,
                                 c10::IntArrayRef dilation) {
  constexpr const char* op = "unpack_conv_transpose";
  const Shape s = checked_shape(op, weight_shape, groups, stride, dilation);
  const ConvPacking p = dense_packing(s.outputs * groups, s.inputs, groups, s.kernel);
  c10::SmallVector<int64_t, 5> sizes = {groups * s.outputs, s.inputs};
  sizes.append(s.kernel.begin(), s.kernel.end());
  const at::Tensor ordered = unpack_weights(op, p, packed, sizes, s.kernel);
  return ordered.reshape({groups, s.outputs, s.inputs, s.taps()})
      .index_select(3, s.order.argsort())
      .transpose(1, 2)
      .reshape(weight_shape);
}

}  // namespace

c10::SmallVector<int64_t, 8> transposed_taps(int64_t kernel, int64_t stride, int64_t dilation) {
  c10::SmallVector<int64_t, 8> taps(static_cast<size_t>(kernel));
  std::iota(taps.rbegin(), taps.rend(), 0);
  std::stable_sort(taps.begin(), taps.end(), [&](int64_t a, int64_t b) {
    return a * dilation % stride < b * dilation % stride;
  });
  return taps;
}

int64_t taps_per_phase(int64_t kernel, int64_t stride, int64_t dilation) {
  const int64_t period = stride / std::gcd(stride, dilation);
  return (kernel + period - 1) / period;
}

}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  m.impl("pack_conv_transpose", &torchq::pack_conv_transpose);
  m.impl("unpack_conv_transpose", &torchq::unpack_conv_transpose);
}
