// SPDX-License-Identifier: Apache-2.0
#include "ops/conv/geometry.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "ops/conv/layout.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"
#include "runtime/sizes.h"

namespace torchq {
namespace {

c10::SmallVector<int64_t, 5> channels_last_strides(int64_t channels, c10::IntArrayRef spatial) {
  c10::SmallVector<int64_t, 5> strides(spatial.size() + 2);
  strides[1] = 1;
  int64_t stride = channels;
  for (size_t d = spatial.size(); d-- > 0;) {
    strides[d + 2] = stride;
    stride = product_of({stride, spatial[d]});
  }
  strides[0] = stride;
  return strides;
}

}  // namespace

int64_t Window::output(int d, int64_t input, bool ceil_mode) const {
  int64_t span = input + pad_begin[d] + pad_end[d] - dilation[d] * (kernel[d] - 1) - 1;
  if (ceil_mode) span += stride[d] - 1;
  if (span < 0) return 0;
  int64_t size = span / stride[d] + 1;
  // A window must start inside the input or the leading padding.
  if (ceil_mode && (size - 1) * stride[d] >= input + pad_begin[d]) --size;
  return size;
}

std::string Window::words(int64_t spatial_dims) const {
  const size_t first = static_cast<size_t>(3 - spatial_dims);
  const auto text = [&](const int64_t (&values)[3]) { return by({values + first, 3 - first}); };
  const std::string begin = text(pad_begin), end = text(pad_end);
  return c10::str("kernel ", text(kernel), ", stride ", text(stride), ", padding ", begin,
                  begin == end ? "" : " before and " + end + " after", ", dilation ",
                  text(dilation));
}

Window parse_window(const char* op, c10::IntArrayRef geometry, int64_t spatial_dims,
                    int64_t extra) {
  const int64_t values = static_cast<int64_t>(geometry.size()) - extra, dims = values / 5;
  const bool fits = dims == spatial_dims || values % 5 != 0 || dims < 1 || dims > 3;
  TORCH_CHECK_VALUE(fits, "torchq.", op, ": src must have ", dims + 2, " dims, [N, C, ...] with ",
                    dims, " spatial ones, got ", spatial_dims + 2,
                    ". Add a batch of one with src.unsqueeze(0), or remove it.");
  TORCH_CHECK_VALUE(static_cast<int64_t>(geometry.size()) == 5 * spatial_dims + extra, "torchq.",
                    op, ": geometry must be [kernel, stride, padding_begin, padding_end, dilation",
                    extra > 0 ? ", groups, in_channels" : "", "], ", 5 * spatial_dims + extra,
                    " values for ", spatial_dims, " spatial dimensions, got ", geometry, ".");
  Window w;
  int64_t* fields[] = {w.kernel, w.stride, w.pad_begin, w.pad_end, w.dilation};
  const char* names[] = {"kernel", "stride", "padding", "padding at the end", "dilation"};
  for (int f = 0; f < 5; ++f) {
    const bool padding = f == 2 || f == 3;
    for (int64_t d = 0; d < 3; ++d) {
      const int64_t i = d - (3 - spatial_dims);
      const int64_t value = i < 0 ? !padding : geometry[static_cast<size_t>(f * spatial_dims + i)];
      // 2^24 keeps every product below 2^63.
      TORCH_CHECK_VALUE(value >= !padding && value < (1 << 24), "torchq.", op, ": ", names[f],
                        " must be at least ", int{!padding}, " and less than 2^24, got ", value,
                        " in dimension ", i, " of ", spatial_dims, ".");
      fields[f][d] = value;
    }
  }
  TORCH_CHECK_VALUE(w.kernel[0] * w.kernel[1] <= kMaxTaps && w.taps() <= kMaxTaps, "torchq.", op,
                    ": a window must have at most ", kMaxTaps, " positions, got a kernel of ",
                    by(geometry.slice(0, static_cast<size_t>(spatial_dims))),
                    ". Pool or convolve in two steps.");
  return w;
}

ChannelsLast to_channels_last(const char* op, const at::Tensor& src) {
  TORCH_CHECK_VALUE(src.dim() >= 3 && src.dim() <= 5, "torchq.", op,
                    ": src must be (N, C, spatial...) with one to three spatial dimensions, got ",
                    src.sizes(), ". Add a batch dimension with unsqueeze(0) if it is missing.");
  const c10::IntArrayRef spatial = src.sizes().slice(2);
  const auto strides = channels_last_strides(src.size(1), spatial);
  ChannelsLast result{src, src.size(0), src.size(1), {1, 1, 1}, src.dim() - 2};
  std::copy(spatial.begin(), spatial.end(), result.size + 3 - spatial.size());
  bool same = true;
  for (int64_t d = 0; d < src.dim(); ++d) {
    same = same && (src.size(d) == 1 || src.stride(d) == strides[static_cast<size_t>(d)]);
  }
  if (!same && src.numel() > 0) {
    result.tensor = empty_channels_last(src.size(0), src.size(1), spatial, src.scalar_type());
    if (src.element_size() == 1 && src.is_contiguous()) {  // 10 times as fast as copy_
      interleave_channels(bytes_of(src), static_cast<uint8_t*>(result.tensor.mutable_data_ptr()),
                          result.batch, result.channels, result.pixels() / result.batch);
    } else {
      result.tensor.copy_(src);
    }
  }
  return result;
}

at::Tensor empty_channels_last(int64_t batch, int64_t channels, c10::IntArrayRef spatial,
                               at::ScalarType dtype) {
  c10::SmallVector<int64_t, 5> sizes = {batch, channels};
  sizes.append(spatial.begin(), spatial.end());
  return empty_dst(sizes, channels_last_strides(channels, spatial), dtype);
}

at::Tensor empty_channels_last(const ChannelsLast& src, int64_t channels,
                               const int64_t (&spatial)[3], at::ScalarType dtype) {
  const size_t dims = static_cast<size_t>(src.spatial_dims);
  return empty_channels_last(src.batch, channels, {spatial + 3 - dims, dims}, dtype);
}

}  // namespace torchq
