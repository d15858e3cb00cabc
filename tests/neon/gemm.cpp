// SPDX-License-Identifier: Apache-2.0
// The matrix product, and what prepares its operands.
#include <cmath>

#include "random_epilogue.h"

namespace torchq {
namespace {

void check_product(const Kernels& k) {
  const int rows = static_cast<int>(chance(20) ? between(17, 60) : between(1, 16));
  const int panels = static_cast<int>(chance(5) ? between(6, 40) : between(1, 5));
  const int channels = static_cast<int>(panels * kPanel - (chance(50) ? 0 : between(1, 15)));
  const int first = static_cast<int>(kPanel * between(0, 2));  // channel of the first panel
  const int all = first + channels + static_cast<int>(between(0, 3));
  const int num_runs = static_cast<int>(between(0, 3));

  std::vector<GemmRun> runs;
  int64_t reach = 1, packed = 0;
  for (int i = 0; i < num_runs; ++i) {
    runs.push_back({between(0, 50), packed, between(1, chance(20) ? 40 : 6)});
    packed += runs.back().quads * kPanel * kQuad;
    reach = std::max(reach, runs.back().src_offset + runs.back().quads * kQuad);
  }
  std::vector<int64_t> row_offset, dst_offset;
  for (int r = 0; r < rows; ++r) {
    row_offset.push_back(between(0, 200));
    dst_offset.push_back((rows - 1 - r) * int64_t{all});
    reach = std::max(reach, row_offset.back() + (num_runs == 0 ? 1 : 250));
  }
  const Buffer<uint8_t> src = random_bytes(reach);
  const Buffer<int8_t> weight = random_weights(panels * packed);
  const Buffer<int32_t> init = random_ints(panels * kPanel, 1 << 20);
  RandomEpilogue epilogue(all, int64_t{rows} * all);
  if (chance(25)) epilogue.add_row_terms(rows);

  GemmTile tile{};
  tile.src = src.data();
  tile.row_offset = row_offset.data();
  tile.dst_offset = dst_offset.data();
  tile.rows = rows;
  tile.flip = chance(50);
  tile.runs = runs.data();
  tile.num_runs = num_runs;
  tile.weight = weight.data();
  tile.panel_stride = packed;
  tile.panels = panels;
  tile.channel = first;
  tile.channels = channels;
  tile.acc_init = init.data();
  begin_case("gemm", text("rows", rows, "panels", panels, "channels", channels, "first", first,
                          "runs", num_runs, "flip", tile.flip) +
                         epilogue.text());
  Buffer<uint8_t> reference = epilogue.dst(), tested = epilogue.dst();
  kReferenceKernels.gemm(tile, epilogue.with(reference.data()));
  const Buffer<int8_t> wide = widened(k, k.widening, weight);
  tile.weight = wide.data();
  k.gemm(tile, epilogue.with(tested.data()));
  expect_same("dst", reference, tested);
}

void check_int4(const Kernels& k) {
  Int4Tile tile{};
  tile.rows = chance(20) ? between(7, 20) : between(1, 6);
  tile.k = 8 * between(1, 40);
  tile.group = pick({32, 64, 128});
  tile.groups = (tile.k + tile.group - 1) / tile.group;
  tile.panels = static_cast<int>(between(1, 6));
  tile.channels = tile.panels * kPanel - (chance(50) ? 0 : between(1, 15));
  tile.has_zeros = chance(50);
  tile.dst_stride = tile.channels + between(0, 3);
  const bool extreme = chance(20);  // the largest sums: every value a limit of its range
  const int64_t lanes = tile.has_zeros ? tile.groups : (tile.groups + 1) / 2;
  const Buffer<int8_t> src =
      filled<int8_t>(tile.rows * tile.k, [&] { return extreme ? -128 : between(-128, 127); });
  const int code = static_cast<int>(between(0, 1) * 0xff);
  const Buffer<int8_t> weight = filled<int8_t>(tile.panels * tile.k / 8 * kPanel * kQuad,
                                               [&] { return extreme ? code : between(0, 0xff); });
  const int32_t bound = 128 * static_cast<int32_t>(tile.group);
  const Buffer<int32_t> sums = filled<int32_t>(
      tile.rows * tile.groups, [&] { return extreme ? -bound : between(-bound, bound); });
  const Buffer<float> scale = random_floats(tile.rows, 1.0f);
  const Buffer<float> bias = random_floats(tile.channels, 9.0f);
  const auto bfloat16 = [] {  // rounded toward zero; denormals, and values up to 2^100
    const float value = std::ldexp(within(1.0f), static_cast<int>(between(-130, 100)));
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits >> 16;
  };
  const Buffer<int32_t> params = filled<int32_t>(tile.panels * lanes * kPanel, [&] {
    const auto zero = static_cast<uint32_t>(extreme ? 15 - (code & 15) : between(0, 15));
    return bfloat16() << 16 | (tile.has_zeros ? zero : bfloat16());
  });
  tile.src = src.data(), tile.sums = sums.data(), tile.src_scale = scale.data();
  tile.weight = weight.data(), tile.params = params.data();
  tile.bias = chance(50) ? bias.data() : nullptr;
  begin_case("gemm_int4", text("rows", tile.rows, "k", tile.k, "group", tile.group, "channels",
                               tile.channels, "zeros", tile.has_zeros, "extreme", extreme));
  Buffer<float> reference(tile.rows * tile.dst_stride), tested = reference;
  tile.dst = reference.data();
  kReferenceKernels.gemm_int4(tile);
  tile.dst = tested.data();
  k.gemm_int4(tile);
  expect_same("dst", reference, tested);
}

void check_widen(const Kernels& k) {
  if (k.widen == nullptr) return;
  const int64_t quads = between(1, 20), step = kPanel * kQuad;
  const Buffer<int8_t> packed = random_weights(quads * step);
  Buffer<int8_t> expected(2 * packed.size()), tested = expected;
  for (int64_t i = 0; i < packed.size(); ++i) {  // the even bytes of a quad, then the odd ones
    const int16_t value = packed[i];
    const int64_t at = i / step * 2 * step + i % 2 * step + i % step / 2 * 2;
    std::memcpy(expected.data() + at, &value, sizeof value);
  }
  begin_case("widen", text("quads", quads));
  k.widen(packed.data(), packed.size(), tested.data());
  expect_same("dst", expected, tested);
}

void check_compensate(const Kernels& k) {
  const int64_t n = between(1, 70), taps = between(0, 9);
  const Buffer<int32_t> sums = random_ints(10 * n, INT32_MAX), bias = random_ints(n, INT32_MAX);
  const Buffer<int32_t> used = filled<int32_t>(taps, [] { return between(0, 9); });
  const bool has_bias = chance(70);
  const int32_t zero_point = static_cast<int32_t>(between(-128, 255));
  begin_case("compensate", text("n", n, "taps", taps, "bias", has_bias));
  Buffer<int32_t> reference(n), tested(n);
  const auto run = [&](const Kernels& kernels, Buffer<int32_t>& dst) {
    kernels.compensate(sums.data(), n, used.data(), static_cast<int>(taps),
                       has_bias ? bias.data() : nullptr, zero_point, n, dst.data());
  };
  run(kReferenceKernels, reference), run(k, tested);
  expect_same("acc_init", reference, tested);
}

void check_pack_panel(const Kernels& k) {
  PanelSource source{};
  source.k = between(1, 70);
  source.channels = static_cast<int>(chance(50) ? kPanel : between(1, kPanel));
  const bool rows = chance(50);  // channels side by side
  source.k_stride = rows ? source.channels + between(0, 3) : 1;
  source.channel_stride = rows ? 1 : source.k + between(0, 3);
  source.flip = chance(50);
  const int64_t last =
      (source.k - 1) * source.k_stride + (source.channels - 1) * source.channel_stride;
  const Buffer<uint8_t> data = random_bytes(last + 1);
  source.data = data.data();
  begin_case("pack_panel",
             text("k", source.k, "channels", source.channels, "rows", rows, "flip", source.flip));
  Buffer<int8_t> reference((source.k + kQuad - 1) / kQuad * kPanel * kQuad), tested = reference;
  Buffer<int32_t> reference_sums(kPanel), tested_sums(kPanel);
  kReferenceKernels.pack_panel(source, reference.data(), reference_sums.data());
  k.pack_panel(source, tested.data(), tested_sums.data());
  expect_same("dst", reference, tested);
  expect_same("sums", reference_sums, tested_sums);
}

void check_sum_bytes(const Kernels& k) {
  const int64_t size = between(0, 400);
  const Buffer<uint8_t> src = random_bytes(size);
  const bool flip = chance(50);
  begin_case("sum_bytes", text("size", size, "flip", flip));
  const int32_t reference = kReferenceKernels.sum_bytes(src.data(), size, flip);
  const int32_t tested = k.sum_bytes(src.data(), size, flip);
  expect_same("result", &reference, &tested, sizeof tested);
}

void check_epilogue_row(const Kernels& k) {
  const int size = static_cast<int>(between(1, 70)), room = (size + kPanel - 1) / kPanel * kPanel;
  const RandomEpilogue epilogue(size, size, RandomEpilogue::kChains);
  Buffer<float> x = any_floats(room, 10.0f), again = x;
  begin_case("epilogue_row", text("size", size) + epilogue.text());
  Buffer<uint8_t> reference = epilogue.dst(), tested = epilogue.dst();
  kReferenceKernels.epilogue_row(x.data(), size, epilogue.with(reference.data()));
  k.epilogue_row(again.data(), size, epilogue.with(tested.data()));
  expect_same("dst", reference, tested);
}

}  // namespace

void check_gemm(const Kernels& k) {
  for (int i = 0; i < 3000; ++i) check_product(k);
  for (int i = 0; i < 1500; ++i) check_epilogue_row(k);
  for (int i = 0; i < 1000; ++i) check_int4(k);
  for (int i = 0; i < 300; ++i) {
    check_widen(k);
    check_compensate(k);
    check_pack_panel(k);
    check_sum_bytes(k);
  }
}

}  // namespace torchq
