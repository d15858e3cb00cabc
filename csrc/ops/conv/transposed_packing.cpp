// SPDX-License-Identifier: Apache-2.0
// pack_conv_transpose and its inverse: the weights of a transposed convolution, rearranged to those
// of the ordinary convolutions it consists of (Note [Transposed convolution]).
#include <torch/library.h>

#include <algorithm>

#include "epilogue/post_ops.h"
#include "ops/conv/border.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"

namespace torchq {
namespace {

struct Shape {
  int64_t groups, inputs, outputs;  // channels of one group
  c10::SmallVector<int64_t, 3> kernel;
  /// packed position -> tap
  c10::SmallVector<int64_t, 64> order;

  ConvPacking packing() const { return dense_packing(outputs * groups, inputs, groups, kernel); }
  /// (G, IC/G, OC/G, taps), contiguous.
  WeightLayout layout() const {
    const int64_t taps = static_cast<int64_t>(order.size());
    return {outputs, inputs, inputs * outputs * taps, taps, outputs * taps, order};
  }
};

/// Flat tap indices in packed order: the product of the orders along each dimension.
c10::SmallVector<int64_t, 64> flat_order(c10::IntArrayRef kernel, c10::IntArrayRef stride,
                                         c10::IntArrayRef dilation) {
  c10::SmallVector<int64_t, 64> order = {0};
  for (size_t d = 0; d < kernel.size(); ++d) {
    const auto taps = transposed_taps(kernel[d], stride[d], dilation[d]);
    c10::SmallVector<int64_t, 64> longer;
    for (const int64_t outer : order) {
      for (const int64_t tap : taps) longer.push_back(outer * kernel[d] + tap);
    }
    order = std::move(longer);
  }
  return order;
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
  TORCH_CHECK_VALUE(sizes[1] <= kMaxChannels / groups, "torchq.", op, ": weight must have at most ",
                    kMaxChannels, " outputs, got weight ", sizes, " in ", groups,
                    " groups. Split the layer along its outputs.");
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
  return pack_weights(s.packing(), s.layout(), weight, s.kernel);
}

at::Tensor unpack_conv_transpose(const at::Tensor& packed, c10::IntArrayRef weight_shape,
                                 int64_t groups, c10::IntArrayRef stride,
                                 c10::IntArrayRef dilation) {
  constexpr const char* op = "unpack_conv_transpose";
  const Shape s = checked_shape(op, weight_shape, groups, stride, dilation);
  return unpack_weights(op, s.packing(), s.layout(), packed, weight_shape, s.kernel);
}

}  // namespace

}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::pack_conv_transpose>(m, "pack_conv_transpose");
  torchq::implement<&torchq::unpack_conv_transpose>(m, "unpack_conv_transpose");
}
