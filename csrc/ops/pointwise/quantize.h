// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace torchq {

/// The op of that name.
at::Tensor quantize(const at::Tensor& src, const at::Tensor& scale, const at::Tensor& zero_point,
                    int64_t dst_dtype);

}  // namespace torchq
