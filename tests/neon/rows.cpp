// SPDX-License-Identifier: Apache-2.0
// Rows in real units: softmax, normalizations, resampling, reductions.
#include <cmath>

#include "check.h"

namespace torchq {
namespace {

/// A destination of `size` values; runs both tables with it.
template <class Args, class Entry>
void check_real(RealRow Args::* dst, Args args, int64_t size, Entry entry, const Kernels& k) {
  RealRow& row = args.*dst;
  row.dtype = pick({DType::u8, DType::s8, DType::f32});
  row.inverse_scale = within(200.0f);
  row.zero_point = static_cast<float>(row.dtype == DType::u8   ? between(0, 255)
                                      : row.dtype == DType::s8 ? between(-128, 127)
                                                               : 0);
  Buffer<uint8_t> reference(size * size_of(row.dtype)), tested = reference;
  row.data = reference.data();
  (kReferenceKernels.*entry)(args);
  row.data = tested.data();
  (k.*entry)(args);
  expect_same("dst", reference, tested);
}

void check_softmax(const Kernels& k) {
  SoftmaxRow s{};
  s.src_dtype = pick({DType::u8, DType::s8, DType::f32});
  s.size = chance(20) ? between(500, 1100) : between(1, 100);
  s.scale = within(1.0f);
  s.logarithmic = chance(50);
  const Buffer<uint8_t> bytes = random_bytes(s.size);
  const Buffer<float> floats = any_floats(s.size, 10.0f);
  s.src = s.src_dtype == DType::f32 ? static_cast<const void*>(floats.data()) : bytes.data();
  Buffer<float> values((s.size + kPanel - 1) / kPanel * kPanel);
  s.values = values.data();
  begin_case("softmax",
             text("size", s.size, "src", static_cast<int>(s.src_dtype), "log", s.logarithmic));
  check_real(&SoftmaxRow::dst, s, s.size, &Kernels::softmax, k);
}

void check_row_deviations(const Kernels& k) {
  const int64_t size = chance(20) ? between(500, 1100) : between(1, 100);
  const bool centered = chance(50);
  const Buffer<float> src = chance(30) ? any_floats(size, 10.0f) : random_floats(size, 10.0f);
  begin_case("row_deviations", text("size", size, "centered", centered));
  Buffer<float> reference(2), tested(2);
  kReferenceKernels.row_deviations(src.data(), size, centered, &reference[0], &reference[1]);
  k.row_deviations(src.data(), size, centered, &tested[0], &tested[1]);
  for (int64_t i = 0; i < 2; ++i) {  // `affine`, which reads them, makes all NaNs one
    if (std::isnan(reference[i]) && std::isnan(tested[i])) tested[i] = reference[i];
  }
  expect_same("deviations", reference, tested);
}

void check_affine(const Kernels& k) {
  AffineRows a{};
  a.src_dtype = pick({DType::u8, DType::s8, DType::f32});
  a.size = between(0, 100);
  a.rows = between(1, 4);
  a.per_value = chance(50);
  const Buffer<uint8_t> bytes = random_bytes(a.rows * a.size);
  const Buffer<float> floats = any_floats(a.rows * a.size, 10.0f);
  const int64_t parameters = a.per_value ? a.size : a.rows;
  const Buffer<float> center =
      filled<float>(parameters, [] { return static_cast<float>(between(-255, 255)); });
  const Buffer<float> factor = any_floats(parameters, 1.0f), shift = any_floats(parameters, 1.0f);
  const Buffer<float> weight = any_floats(a.size, 2.0f), bias = any_floats(a.size, 2.0f);
  a.src = a.src_dtype == DType::f32 ? static_cast<const void*>(floats.data()) : bytes.data();
  a.center = center.data();
  a.factor = factor.data();
  a.shift = shift.data();
  a.weight = chance(50) ? weight.data() : nullptr;
  a.bias = chance(50) ? bias.data() : nullptr;
  begin_case("affine",
             text("size", a.size, "rows", a.rows, "src", static_cast<int>(a.src_dtype), "per_value",
                  a.per_value, "weight", a.weight != nullptr, "bias", a.bias != nullptr));
  check_real(&AffineRows::dst, a, a.rows * a.size, &Kernels::affine, k);
}

void check_blend(const Kernels& k) {
  BlendRow b{};
  b.num_lines = pick({1, 2, 4});
  b.channels = between(1, 70);
  b.pixels = between(1, 5);
  b.scale = within(2.0f);
  std::vector<Buffer<float>> lines;
  std::vector<const float*> starts;
  for (int i = 0; i < b.num_lines; ++i) lines.push_back(any_floats(6 * b.channels, 10.0f));
  for (const Buffer<float>& line : lines) starts.push_back(line.data());
  const Buffer<int64_t> offset =
      filled<int64_t>(2 * b.pixels, [&] { return between(0, 5) * b.channels; });
  const Buffer<float> weight = random_floats(2 * b.num_lines * b.pixels, 1.0f);
  b.lines = starts.data();
  b.offset = offset.data();
  b.weight = weight.data();
  begin_case("blend", text("lines", b.num_lines, "channels", b.channels, "pixels", b.pixels));
  check_real(&BlendRow::dst, b, b.pixels * b.channels, &Kernels::blend, k);
}

void check_reduce(const Kernels& k) {
  ReduceRows r{};
  r.is_signed = chance(50);
  r.alg = pick({Reduce::sum, Reduce::max, Reduce::min});
  r.rows = between(1, 40);
  r.size = between(1, 120);
  r.stride = r.size + between(0, 5);
  const Buffer<uint8_t> src = random_bytes((r.rows - 1) * r.stride + r.size);
  r.src = src.data();
  begin_case("reduce", text("alg", static_cast<int>(r.alg), "rows", r.rows, "size", r.size,
                            "signed", r.is_signed));
  Buffer<int32_t> reference(r.size), tested(r.size);
  r.dst = reference.data();
  kReferenceKernels.reduce(r);
  r.dst = tested.data();
  k.reduce(r);
  expect_same("dst", reference, tested);
}

void check_moments(const Kernels& k) {
  MomentsRows m{};
  m.src_dtype = pick({DType::u8, DType::s8, DType::f32});
  m.rows = between(1, 256);
  m.size = between(1, 60);
  m.stride = m.size + between(0, 5);
  const int64_t size = (m.rows - 1) * m.stride + m.size;
  const Buffer<uint8_t> bytes = random_bytes(size);
  const Buffer<float> floats = random_floats(size, 10.0f);
  m.src = m.src_dtype == DType::f32 ? static_cast<const void*>(floats.data()) : bytes.data();
  begin_case("moments", text("rows", m.rows, "size", m.size, "src", static_cast<int>(m.src_dtype)));
  Buffer<int32_t> reference(2 * m.size), tested(2 * m.size);
  const auto run = [&](const Kernels& kernels, Buffer<int32_t>& result) {
    m.sums = result.data();
    m.squares = result.data() + m.size;
    kernels.moments(m);
  };
  run(kReferenceKernels, reference), run(k, tested);
  expect_same("moments", reference, tested);
}

void check_row_moments(const Kernels& k) {
  const int64_t size = chance(5) ? between(600'000, 700'000) : between(0, 300);
  const bool is_signed = chance(50);
  const Buffer<uint8_t> src = random_bytes(size);
  begin_case("row_moments", text("size", size, "signed", is_signed));
  int64_t reference[2], tested[2];
  kReferenceKernels.row_moments(src.data(), size, is_signed, reference, reference + 1);
  k.row_moments(src.data(), size, is_signed, tested, tested + 1);
  expect_same("moments", reference, tested, sizeof tested);
}

void check_row_range(const Kernels& k) {
  const int64_t size = between(0, 100);
  const Buffer<float> src = chance(30) ? any_floats(size, 10.0f) : random_floats(size, 10.0f);
  begin_case("row_range", text("size", size));
  float reference[2], tested[2];
  const bool finite = kReferenceKernels.row_range(src.data(), size, reference, reference + 1);
  const bool result = k.row_range(src.data(), size, tested, tested + 1);
  expect_same("result", &finite, &result, sizeof result);
  if (finite) expect_same("range", reference, tested, sizeof tested);
}

}  // namespace

void check_rows(const Kernels& k) {
  for (int i = 0; i < 500; ++i) {
    check_softmax(k);
    check_row_deviations(k);
    check_affine(k);
    check_blend(k);
    check_reduce(k);
  }
  for (int i = 0; i < 200; ++i) {
    check_moments(k);
    check_row_moments(k);
    check_row_range(k);
  }
}

}  // namespace torchq
