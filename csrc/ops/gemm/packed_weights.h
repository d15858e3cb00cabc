// SPDX-License-Identifier: Apache-2.0
// Packed weights as tensors: made, taken apart, and checked where an op takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "ops/gemm/packing.h"

namespace torchq {

/// Groups divide the channels of src and those of compensation [taps, OC].
void check_groups(const char* op, int64_t channels, int64_t groups, const at::Tensor& compensation);

/// weight and compensation are those of `p`; `remedy` says how to pack.
void check_packed(const char* op, const ConvPacking& p, const at::Tensor& src,
                  const at::Tensor& weight, const at::Tensor& compensation,
                  c10::IntArrayRef geometry, const char* remedy);

/// weight, compensation and pair bounds.
using Packed = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// The elements of a weight in memory. A tap's elements have stride 1.
struct WeightLayout {
  int64_t outputs, inputs;  // of one group, before merging
  int64_t group_stride, output_stride, input_stride;
  /// packed position -> tap
  c10::SmallVector<int64_t, 64> taps;

  /// Returns the index of tap 0; `output` and `input` count within the group.
  int64_t index(int64_t group, int64_t output, int64_t input) const {
    return group * group_stride + output * output_stride + input * input_stride;
  }
};

/// Packs a checked weight, whose elements are where `layout` says once it is contiguous.
Packed pack_weights(const ConvPacking& p, const WeightLayout& layout, const at::Tensor& weight,
                    c10::IntArrayRef kernel);

/// Returns what a dense weight in packed form proves of itself: sums [taps, panels * 16], pair
/// bounds.
std::tuple<at::Tensor, at::Tensor> packed_sums(const at::Tensor& packed);

/// The inverse of pack_weights; checks that `packed` has the shape of `p`.
at::Tensor unpack_weights(const char* op, const ConvPacking& p, const WeightLayout& layout,
                          const at::Tensor& packed, c10::IntArrayRef weight_shape,
                          c10::IntArrayRef kernel);

/// Returns the int32 bias, which has a value per channel, or null where there is none.
const int32_t* checked_acc_bias(const char* op, const std::optional<at::Tensor>& acc_bias,
                                int64_t channels);

/// Bound on |accumulator| over `reduction` products.
double max_accumulator(int64_t reduction, const std::optional<at::Tensor>& acc_bias);

/// Returns true if the pair bounds of all panels allow 16-bit pair sums: 255 * 128 <= 32767.
bool pairs_fit(const char* op, const at::Tensor& pair_bound, int64_t panels);

}  // namespace torchq
