// SPDX-License-Identifier: Apache-2.0
#include "runtime/sizes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace torchq {

TooLarge::TooLarge(c10::IntArrayRef factors)
    : what_(c10::str("sizes must multiply to less than 2^63, in bytes too, got ", factors,
                     ". Use smaller tensors.")) {}

std::string by(c10::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

void check_sizes(c10::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t stride = 1;  // of dimension d; torch counts sizes of 0 as 1
  bool is_empty = false;
  for (size_t d = sizes.size(); d-- > 0;) {
    is_empty = is_empty || sizes[d] == 0;
    if (d == 0 && is_empty) return;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(sizes[d], 1), &stride))
      throw TooLarge(sizes);
  }
  product_of({stride, static_cast<int64_t>(c10::elementSize(dtype))});
}

}  // namespace torchq
