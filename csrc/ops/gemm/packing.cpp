// SPDX-License-Identifier: Apache-2.0
// pack_linear, pack_conv and their inverses.
#include <torch/library.h>

#include <algorithm>

#include "epilogue/post_ops.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/packed_weights.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/sizes.h"

namespace torchq {
namespace {

int64_t product(c10::IntArrayRef values) {
  int64_t result = 1;
  for (int64_t v : values) result *= v;
  return result;
}

/// (OC, IC/G, taps), contiguous; linear is one group with one tap.
WeightLayout conv_layout(c10::IntArrayRef shape, int64_t groups, c10::IntArrayRef kernel) {
  const int64_t outputs = shape[0] / groups, inputs = shape[1], taps = product(kernel);
  WeightLayout layout{outputs, inputs, outputs * inputs * taps, inputs * taps, taps, {}};
  for (int64_t t = 0; t < taps; ++t) layout.taps.push_back(t);
  return layout;
}

/// Raises for a weight (outputs, inputs, ...) of more outputs or products than kernels count.
void check_counts(const char* op, c10::IntArrayRef shape, int64_t taps) {
  TORCH_CHECK_VALUE(shape[0] <= kMaxChannels, "torchq.", op, ": weight must have at most ",
                    kMaxChannels, " outputs, got weight ", shape,
                    ". Split the layer along its outputs.");
  TORCH_CHECK_VALUE(shape[1] <= kMaxReduction / taps, "torchq.", op, ": weight sums ", taps, " x ",
                    shape[1], " products per output, got weight ", shape, "; more than ",
                    kMaxReduction,
                    " could overflow int32 (255 * 128 * K). Split the layer along its inputs.");
}

void check_weight(const char* op, const at::Tensor& weight, int64_t min_dim, int64_t max_dim,
                  const char* form) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kChar, "torchq.", op, ": weight must be int8, got ",
                   dtype_name(weight.scalar_type()),
                   ". Quantize it first: torchq.functional.quantize_weight(weight, scale).");
  check_cpu(op, "weight", weight);
  TORCH_CHECK_VALUE(weight.dim() >= min_dim && weight.dim() <= max_dim, "torchq.", op,
                    ": weight must be ", form, ", got ", weight.sizes(), ".");
}

ConvPacking checked_linear_packing(const char* op, c10::IntArrayRef shape) {
  check_counts(op, shape, 1);
  return dense_packing(shape[0], shape[1], 1, {1});
}

Packed pack_linear(const at::Tensor& weight) {
  check_weight("pack_linear", weight, 2, 2, "(out_features, in_features)");
  const ConvPacking p = checked_linear_packing("pack_linear", weight.sizes());
  return pack_weights(p, conv_layout(weight.sizes(), 1, {1}), weight, {1});
}

at::Tensor unpack_linear(const at::Tensor& packed, int64_t out_features, int64_t in_features) {
  TORCH_CHECK_VALUE(
      out_features >= 0 && in_features >= 0, "torchq.unpack_linear: out_features and ",
      "in_features must not be negative, got ", out_features, " and ", in_features, ".");
  const int64_t shape[] = {out_features, in_features};
  const ConvPacking p = checked_linear_packing("unpack_linear", shape);
  return unpack_weights("unpack_linear", p, conv_layout(shape, 1, {1}), packed, shape, {1});
}

ConvPacking checked_conv_packing(const char* op, c10::IntArrayRef shape, int64_t groups,
                                 c10::IntArrayRef dilation) {
  TORCH_CHECK_VALUE(
      groups >= 1 && groups <= std::max<int64_t>(shape[0], 1) && shape[0] % groups == 0, "torchq.",
      op, ": groups must divide the ", shape[0], " output channels of weight ", shape,
      ", got groups=", groups, ".");
  TORCH_CHECK_VALUE(
      dilation.size() == shape.size() - 2 &&
          std::all_of(dilation.begin(), dilation.end(), [](int64_t d) { return d >= 1; }),
      "torchq.", op, ": dilation must have ", shape.size() - 2, " values of at least 1 for weight ",
      shape, ", got ", dilation, ".");
  int64_t taps = 1;
  for (const int64_t size : shape.slice(2)) {
    TORCH_CHECK_VALUE(size >= 1 && size <= kMaxReduction / taps, "torchq.", op, ": weight ", shape,
                      " must have kernel dimensions of at least 1 and at most ", kMaxReduction,
                      " taps in all. Split the layer along its kernel.");
    taps *= size;
  }
  check_counts(op, shape, taps);
  return conv_packing(shape[0], shape[1], groups, shape.slice(2), dilation);
}

Packed pack_conv(const at::Tensor& weight, int64_t groups, c10::IntArrayRef dilation) {
  check_weight("pack_conv", weight, 3, 5, "(OC, IC/G, k...) with one to three kernel dimensions");
  const ConvPacking p = checked_conv_packing("pack_conv", weight.sizes(), groups, dilation);
  const c10::IntArrayRef kernel = weight.sizes().slice(2);
  return pack_weights(p, conv_layout(weight.sizes(), groups, kernel), weight, kernel);
}

at::Tensor unpack_conv(const at::Tensor& packed, c10::IntArrayRef weight_shape, int64_t groups,
                       c10::IntArrayRef dilation) {
  TORCH_CHECK_VALUE(
      weight_shape.size() >= 3 && weight_shape.size() <= 5 &&
          std::all_of(weight_shape.begin(), weight_shape.end(), [](int64_t d) { return d >= 0; }),
      "torchq.unpack_conv: weight_shape must be (OC, IC/G, k...), got ", weight_shape, ".");
  const ConvPacking p = checked_conv_packing("unpack_conv", weight_shape, groups, dilation);
  const c10::IntArrayRef kernel = weight_shape.slice(2);
  return unpack_weights("unpack_conv", p, conv_layout(weight_shape, groups, kernel), packed,
                        weight_shape, kernel);
}

}  // namespace

void check_groups(const char* op, int64_t channels, int64_t groups,
                  const at::Tensor& compensation) {
  check_param(op, "compensation", compensation, at::kInt);
  TORCH_CHECK_VALUE(compensation.dim() == 2 && groups >= 1 && channels % groups == 0 &&
                        compensation.size(1) % groups == 0,
                    "torchq.", op, ": groups must divide the ", channels,
                    " channels of src and the output channels of compensation [taps, OC], got ",
                    "groups=", groups, " and compensation ", compensation.sizes(), ".");
}

void check_packed(const char* op, const ConvPacking& p, const at::Tensor& src,
                  const at::Tensor& weight, const at::Tensor& compensation,
                  c10::IntArrayRef geometry, const char* remedy) {
  check_param(op, "weight", weight, at::kChar);
  const auto sizes = p.packed_sizes();
  const int64_t taps = p.compensation_taps();
  const size_t dims = static_cast<size_t>(src.dim()) - 2;
  TORCH_CHECK_VALUE(
      weight.sizes() == c10::IntArrayRef(sizes) && compensation.size(0) == taps, "torchq.", op,
      ": src has ", src.size(1), " channels, groups=", p.groups * p.merged, " and a kernel of ",
      by(geometry.slice(0, dims)), " with dilation ", by(geometry.slice(4 * dims, dims)),
      ", which needs weight ", c10::IntArrayRef(sizes), " with compensation [", taps, ", ",
      compensation.size(1), "]; got ", weight.sizes(), " and ", compensation.sizes(), ". ", remedy);
}

c10::SmallVector<int64_t, 5> ConvPacking::packed_sizes() const {
  if (form == kDepthwise) return {panels_of(outputs()), quads, kPanel, kQuad};
  return {panels(), taps, quads, kPanel, kQuad};
}

int run_dimension(c10::IntArrayRef kernel) {
  const int last = static_cast<int>(kernel.size()) - 1;
  for (int d = last; d >= 0; --d) {
    if (kernel[d] > 1) return d;
  }
  return last;
}

const char* why_not_depthwise(int64_t outputs, int64_t inputs_per_group, int64_t groups) {
  return inputs_per_group == 1 && outputs == groups
             ? nullptr
             : "a group does not have one input and one output";
}

const char* why_not_small_groups(int64_t outputs, int64_t inputs_per_group, int64_t groups) {
  if (outputs != groups * inputs_per_group) {
    return "groups have more outputs than inputs, or fewer";
  }
  if (inputs_per_group != 2 && inputs_per_group != 4 && inputs_per_group != 8) {
    return "groups do not have 2, 4 or 8 channels";
  }
  return outputs >= kPanel && (inputs_per_group > 2 || groups % 2 == 0)
             ? nullptr
             : "there are fewer than 16 channels, or an odd number of groups of 2";
}

ConvPacking conv_packing(int64_t outputs, int64_t inputs_per_group, int64_t groups,
                         c10::IntArrayRef kernel, c10::IntArrayRef dilation) {
  const int64_t taps = product(kernel);
  if (groups > 1 && why_not_depthwise(outputs, inputs_per_group, groups) == nullptr) {
    const int64_t width = kernel.back();
    const int64_t rows = taps / width, rest = rows % kQuad;  // as depthwise_taps has them
    const int64_t last = rest == 1 ? quads_of(width) : rest > 1 ? width : 0;
    const int64_t quads = rows / kQuad * width + last;
    return {ConvPacking::kDepthwise, 1, outputs, outputs, groups, taps, quads};
  }
  const int run = run_dimension(kernel);
  const int64_t width = kernel[run];
  if (groups == 1 && inputs_per_group % kQuad != 0 && width > 1 && dilation[run] == 1) {
    return {ConvPacking::kRowRuns,
            1,
            outputs,
            inputs_per_group,
            1,
            taps / width,
            quads_of(width * inputs_per_group)};
  }
  if (groups > 1 && why_not_small_groups(outputs, inputs_per_group, groups) == nullptr) {
    const int64_t merged = inputs_per_group == 2 ? 2 : 1;  // pairs of groups of 2
    const int64_t size = merged * inputs_per_group;
    return {ConvPacking::kSmallGroups, groups / merged, size, size, merged, taps, size / kQuad};
  }
  return dense_packing(outputs, inputs_per_group, groups, kernel);
}

ConvPacking dense_packing(int64_t outputs, int64_t inputs_per_group, int64_t groups,
                          c10::IntArrayRef kernel) {
  const int64_t group_outputs = outputs / groups;
  int64_t merged = 1;
  for (int64_t m = 2; m <= std::min<int64_t>(groups, kPanel) && m * group_outputs <= kPanel; ++m) {
    if (groups % m == 0) merged = m;
  }
  return {ConvPacking::kDense,
          groups / merged,
          merged * group_outputs,
          merged * inputs_per_group,
          merged,
          product(kernel),
          quads_of(merged * inputs_per_group)};
}

c10::SmallVector<int32_t, 64> depthwise_taps(c10::IntArrayRef kernel) {
  const int32_t width = static_cast<int32_t>(kernel.back());
  const int32_t rows = static_cast<int32_t>(product(kernel)) / width;
  c10::SmallVector<int32_t, 64> taps;
  for (int32_t first = 0; first < rows; first += kQuad) {
    const int32_t block = std::min(rows - first, kQuad);
    if (block == 1) {
      for (int32_t x = 0; x < (width + kQuad - 1) / kQuad * kQuad; ++x) {
        taps.push_back(x < width ? first * width + x : -1);
      }
      continue;
    }
    for (int32_t x = 0; x < width; ++x) {
      for (int32_t r = 0; r < kQuad; ++r) taps.push_back(r < block ? (first + r) * width + x : -1);
    }
  }
  return taps;
}

const int32_t* checked_acc_bias(const char* op, const std::optional<at::Tensor>& acc_bias,
                                int64_t channels) {
  if (!acc_bias.has_value()) return nullptr;
  check_param(op, "acc_bias", *acc_bias, at::kInt);
  check_numel(op, "acc_bias", *acc_bias, channels);
  return acc_bias->const_data_ptr<int32_t>();
}

double max_accumulator(int64_t reduction, const std::optional<at::Tensor>& acc_bias) {
  return acc_bias.has_value() ? 2147483648.0 : 255.0 * 128.0 * static_cast<double>(reduction);
}

bool pairs_fit(const char* op, const at::Tensor& pair_bound, int64_t panels) {
  check_param(op, "pair_bound", pair_bound, at::kInt);
  check_numel(op, "pair_bound", pair_bound, panels);
  const int32_t* bound = pair_bound.const_data_ptr<int32_t>();
  return std::all_of(bound, bound + panels, [](int32_t b) { return b <= 128; });
}

}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::pack_linear>(m, "pack_linear");
  torchq::implement<&torchq::unpack_linear>(m, "unpack_linear");
  torchq::implement<&torchq::pack_conv>(m, "pack_conv");
  torchq::implement<&torchq::unpack_conv>(m, "unpack_conv");
  torchq::implement<&torchq::packed_sums>(m, "_packed_sums");
}
