// SPDX-License-Identifier: Apache-2.0
// Products of sizes, and their text. A tensor without values may have any sizes, and takes no
// memory: their product need not fit 64 bits.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <exception>
#include <string>

namespace torchq {

/// Sizes whose product 64 bits cannot hold. The border of an op (bfloat16.h) makes it a ValueError.
class TooLarge : public std::exception {
 public:
  explicit TooLarge(c10::IntArrayRef factors);
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// Returns the product of factors, none of them negative; throws TooLarge where 64 bits cannot hold
/// it.
inline int64_t product_of(c10::IntArrayRef factors) {
  int64_t product = 1;
  for (const int64_t factor : factors)
    if (factor < 0 || __builtin_mul_overflow(product, factor, &product)) throw TooLarge(factors);
  return product;
}

/// For messages: "3x3".
std::string by(c10::IntArrayRef sizes);

/// Throws TooLarge where 64 bits cannot hold the strides, or the bytes, of a contiguous tensor.
void check_sizes(c10::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace torchq
