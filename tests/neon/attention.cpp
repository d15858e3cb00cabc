// SPDX-License-Identifier: Apache-2.0
// Rows of attention, and attention to compressed rows.
#include <algorithm>

#include "check.h"

namespace torchq {
namespace {

void check_symmetric(const Kernels& k) {
  SymmetricRows s{};
  s.rows = between(1, 5);
  s.size = between(1, 80);
  s.stride = s.size + between(0, 3);
  s.dst_stride = s.size + between(0, 3);
  s.shared = chance(50);
  const float bound = pick({1e-37f, 1.0f, 1e30f});
  Buffer<float> src = random_floats((s.rows - 1) * s.stride + s.size, bound);
  if (chance(30)) src[between(0, src.size() - 1)] = any_float(bound);
  s.src = src.data();
  begin_case("quantize_symmetric",
             text("rows", s.rows, "size", s.size, "shared", s.shared, "bound", bound));
  Buffer<uint8_t> reference((s.rows - 1) * s.dst_stride + s.size), tested = reference;
  Buffer<float> reference_scale(s.shared ? 1 : s.rows), tested_scale = reference_scale;
  s.dst = reference.data(), s.scale = reference_scale.data();
  kReferenceKernels.quantize_symmetric(s);
  s.dst = tested.data(), s.scale = tested_scale.data();
  k.quantize_symmetric(s);
  expect_same("dst", reference, tested);
  expect_same("scale", reference_scale, tested_scale);
}

void check_weights(const Kernels& k) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  AttentionRows a{};
  a.rows = between(1, 6);
  a.keys = between(1, 90);
  a.stride = (a.keys + kPanel - 1) / kPanel * kPanel + kPanel * between(0, 1);
  a.visible = chance(50) ? a.keys : between(1, a.keys);
  a.unit = 1.44269504f;
  Buffer<float> scores = random_floats(a.rows * a.stride, pick({0.5f, 20.0f, 1000.0f}));
  if (chance(20)) scores[between(0, scores.size() - 1)] = any_float(1.0f);
  for (int64_t i = 0; i < scores.size(); ++i) {
    if (i % a.stride >= a.keys) scores[i] = -kInfinity;
  }
  a.mask_stride = a.keys + between(0, 2);
  const int hidden = pick({0, 50, 100});
  const Buffer<float> mask = filled<float>((a.rows - 1) * a.mask_stride + a.keys, [&] {
    return chance(hidden) ? -kInfinity : within(3.0f);
  });
  if (chance(50)) a.mask = mask.data();
  begin_case("attention_weights", text("rows", a.rows, "keys", a.keys, "visible", a.visible, "mask",
                                       a.mask != nullptr, "hidden", hidden));
  Buffer<uint8_t> reference(a.rows * a.stride), tested = reference;
  Buffer<float> reference_total(a.rows), tested_total(a.rows), again = scores;
  a.scores = scores.data(), a.dst = reference.data(), a.total = reference_total.data();
  kReferenceKernels.attention_weights(a);
  a.scores = again.data(), a.dst = tested.data(), a.total = tested_total.data();
  k.attention_weights(a);
  expect_same("total", reference_total, tested_total);
  for (int64_t r = 0; r < a.rows; ++r) {  // dst is undefined where the total is NaN
    const int64_t at = r * a.stride;
    if (reference_total[r] != reference_total[r]) continue;
    expect_same("dst", reference.data() + at, tested.data() + at, a.stride);
  }
}

void check_means(const Kernels& k) {
  AttentionMeans a{};
  a.rows = between(1, 5);
  a.size = between(1, 80);
  a.dst_stride = a.size + between(0, 3);
  a.scale = within(0.1f);
  a.shift = within(5.0f);
  a.dst.dtype = pick({DType::u8, DType::s8, DType::f32});
  a.dst.inverse_scale = within(20.0f);
  a.dst.zero_point = a.dst.dtype == DType::u8 ? 128.0f : a.dst.dtype == DType::s8 ? -3.0f : 0.0f;
  const Buffer<float> sums = random_floats(a.rows * a.size, 1e5f);
  Buffer<float> total = random_floats(a.rows, 1e4f);
  if (chance(30)) total[0] = pick({0.0f, std::numeric_limits<float>::quiet_NaN()});
  a.sums = sums.data();
  a.total = total.data();
  begin_case("attention_means", text("rows", a.rows, "size", a.size, "dst", a.dst.dtype));
  Buffer<uint8_t> reference(((a.rows - 1) * a.dst_stride + a.size) * size_of(a.dst.dtype));
  Buffer<uint8_t> tested = reference;
  a.dst.data = reference.data();
  kReferenceKernels.attention_means(a);
  a.dst.data = tested.data();
  k.attention_means(a);
  expect_same("dst", reference, tested);
}

/// Random bytes, with random scales behind each row.
Buffer<int8_t> random_rows(int64_t length, int64_t stride, int64_t size) {
  Buffer<int8_t> rows = random_weights((length - 1) * stride + size + 4);
  for (int64_t j = 0; j < length; ++j) {
    const float scale = chance(95) ? within(0.02f) : any_float(1.0f);
    std::memcpy(rows.data() + j * stride + size, &scale, sizeof scale);
  }
  return rows;
}

void check_compressed(const Kernels& k) {
  const auto panels = [](int64_t n) { return (n + kPanel - 1) / kPanel * kPanel; };
  CompressedAttention a{};
  a.rows = between(1, 5);
  a.length = between(1, 50);
  a.scale = 0.2f;
  const int64_t size = between(1, 80), value_size = between(1, 150);
  const int64_t stride = size + 4 + between(0, 3), value_stride = value_size + 4 + between(0, 3);
  const Buffer<int8_t> keys = random_rows(a.length, stride, size);
  const Buffer<int8_t> values = random_rows(a.length, value_stride, value_size);
  a.keys = {keys.data(), stride, size};
  a.values = {values.data(), value_stride, value_size};
  Buffer<float> queries = any_floats(a.rows * panels(size), 1.0f);
  if (chance(80)) queries = random_floats(queries.size(), 1.0f);
  for (int64_t i = 0; i < queries.size(); ++i) {
    if (i % panels(size) >= size) queries[i] = 0;
  }
  a.queries = queries.data();
  const int hidden = pick({0, 50, 100});
  const Buffer<float> mask = filled<float>(a.rows * a.length, [&] {
    return chance(hidden) ? -std::numeric_limits<float>::infinity() : within(3.0f);
  });
  Buffer<float> scores(a.rows * panels(a.length)), sums(a.rows * panels(value_size));
  Buffer<float> block(kPanel * panels(std::max(size, value_size)));
  a.scores = scores.data(), a.sums = sums.data(), a.block = block.data();
  Buffer<float> reference(a.rows * value_size), tested = reference;
  std::vector<const float*> masks;
  std::vector<float*> reference_rows, tested_rows;
  for (int64_t r = 0; r < a.rows; ++r) {
    masks.push_back(mask.data() + r * a.length);
    reference_rows.push_back(reference.data() + r * value_size);
    tested_rows.push_back(tested.data() + r * value_size);
  }
  if (chance(50)) a.mask = masks.data();
  begin_case("compressed_attention",
             text("rows", a.rows, "length", a.length, "size", size, "value_size", value_size,
                  "mask", a.mask != nullptr, "hidden", hidden));
  a.dst = reference_rows.data();
  kReferenceKernels.compressed_attention(a);
  a.dst = tested_rows.data();
  k.compressed_attention(a);
  expect_same("dst", reference, tested);
}

}  // namespace

void check_attention(const Kernels& k) {
  for (int i = 0; i < 400; ++i) {
    check_symmetric(k);
    check_weights(k);
    check_means(k);
    check_compressed(k);
  }
}

}  // namespace torchq
