// SPDX-License-Identifier: Apache-2.0
// Conversions, add, mul, table lookups.
#include "check.h"

namespace torchq {
namespace {

const DType kDTypes[] = {DType::u8, DType::s8, DType::s32, DType::f32};

void check_convert(const Kernels& k) {
  ConvertRow c{};
  c.size = between(0, 120);
  c.src_dtype = kDTypes[between(0, 3)];
  c.dst_dtype = kDTypes[between(0, 3)];
  c.factor_step = between(0, 1);
  c.src_zero_point_step = between(0, 1);
  c.dst_zero_point_step = between(0, 1);
  const Buffer<uint8_t> src = random_values(c.size, c.src_dtype);
  const Buffer<float> factor =
      chance(50) ? any_floats(c.size + 1, 2.0f) : random_floats(c.size + 1, 2.0f);
  const int32_t bound = c.src_dtype == DType::s32 ? INT32_MAX : 128;
  const Buffer<int32_t> src_zero = random_ints(c.size + 1, bound);
  const Buffer<int32_t> dst_zero = filled<int32_t>(
      c.size + 1, [&] { return c.dst_dtype == DType::u8 ? between(0, 255) : between(-128, 127); });
  c.src = src.data();
  c.factor = factor.data();
  c.src_zero_point = src_zero.data();
  c.dst_zero_point = dst_zero.data();
  begin_case("convert",
             text("size", c.size, "src", c.src_dtype, "dst", c.dst_dtype, "steps",
                  c.factor_step + 2 * c.src_zero_point_step + 4 * c.dst_zero_point_step));
  Buffer<uint8_t> reference(c.size * size_of(c.dst_dtype)), tested = reference;
  c.dst = reference.data();
  kReferenceKernels.convert(c);
  c.dst = tested.data();
  k.convert(c);
  expect_same("dst", reference, tested);
}

void check_binary(const Kernels& k, bool multiplies) {
  BinaryRows b{};
  b.size = between(1, 120);
  b.rows = between(1, 4);
  b.dtype0 = kDTypes[between(0, 1)];
  b.dtype1 = kDTypes[between(0, 1)];
  b.dst_dtype = kDTypes[between(0, 3)];
  b.step0 = between(0, 1);
  b.step1 = between(0, 1);
  b.m0 = any_float(1.0f);
  b.m1 = any_float(1.0f);
  b.c = any_float(100.0f) + 0.0f;  // ops have no -0, and the sign of a product 0 is left open
  b.lo = chance(50) ? -std::numeric_limits<float>::infinity() : static_cast<float>(between(0, 99));
  b.z0 = static_cast<int32_t>(b.dtype0 == DType::u8 ? between(0, 255) : between(-128, 127));
  b.z1 = static_cast<int32_t>(b.dtype1 == DType::u8 ? between(0, 255) : between(-128, 127));
  const Buffer<uint8_t> src0 = random_bytes(b.step0 == 0 ? 1 : b.rows * b.size);
  const Buffer<uint8_t> src1 = random_bytes(b.step1 == 0 ? 1 : b.size);
  b.src0 = src0.data();
  b.src1 = src1.data();
  begin_case(multiplies ? "mul" : "add",
             text("size", b.size, "rows", b.rows, "dtypes", b.dtype0, "and", b.dtype1, "dst",
                  b.dst_dtype, "m0", b.m0, "m1", b.m1, "c", b.c, "lo", b.lo));
  Buffer<uint8_t> reference(b.rows * b.size * size_of(b.dst_dtype)), tested = reference;
  b.dst = reference.data();
  (multiplies ? kReferenceKernels.mul : kReferenceKernels.add)(b);
  b.dst = tested.data();
  (multiplies ? k.mul : k.add)(b);
  expect_same("dst", reference, tested);
}

void check_lookup(const Kernels& k) {
  const int64_t size = between(0, 300);
  const Buffer<uint8_t> src = random_bytes(size), table = random_bytes(256);
  begin_case("lookup", text("size", size));
  Buffer<uint8_t> reference(size), tested(size);
  kReferenceKernels.lookup(src.data(), table.data(), reference.data(), size);
  k.lookup(src.data(), table.data(), tested.data(), size);
  expect_same("dst", reference, tested);
}

}  // namespace

void check_pointwise(const Kernels& k) {
  for (int i = 0; i < 1500; ++i) check_convert(k);
  for (int i = 0; i < 800; ++i) {
    check_binary(k, false);
    check_binary(k, true);
  }
  for (int i = 0; i < 200; ++i) check_lookup(k);
}

}  // namespace torchq
