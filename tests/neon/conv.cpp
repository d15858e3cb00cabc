// SPDX-License-Identifier: Apache-2.0
// Convolutions of small groups, depthwise convolutions, pools.
#include "random_epilogue.h"

namespace torchq {
namespace {

/// Random weights of `channels` outputs in panels of Q vectors a tap. The last panel has the last
/// 16 channels: some of them are in the panel before, too, with the same weights.
Buffer<int8_t> pack_small_groups(int channels, int quads, int taps) {
  const int group = quads * kQuad, panels = (channels + kPanel - 1) / kPanel;
  const Buffer<int8_t> weight = random_weights(int64_t{channels} * taps * group);
  Buffer<int8_t> packed(int64_t{panels} * taps * quads * kPanel * kQuad);
  for (int64_t at = 0; at < packed.size(); ++at) {
    // Byte `input` of the panel's 16, in lane 4 i + input / 4 of vector q, meets output 4 q + i.
    const int64_t vector = at / (kPanel * kQuad), lane = at / kQuad % kPanel;
    const int64_t input = lane % 4 * kQuad + at % kQuad, output = vector % quads * 4 + lane / 4;
    const int64_t tap = vector / quads % taps, panel = vector / quads / taps;
    const int64_t first = std::min<int64_t>(panel * kPanel, channels - kPanel);
    const int64_t channel = first + input / group * group + output;
    packed[at] = weight[(channel * taps + tap) * group + input % group];
  }
  return packed;
}

void check_small_groups(const Kernels& k) {
  const int quads = static_cast<int>(between(1, 2)), group = quads * kQuad;
  const int channels = group * static_cast<int>(between(kPanel / group, 10));
  const int panels = (channels + kPanel - 1) / kPanel, taps = static_cast<int>(between(0, 9));
  const int rows = static_cast<int>(between(1, 20));
  const int64_t pixels = between(10, 30), packed = int64_t{taps} * quads * kPanel * kQuad;
  std::vector<GemmRun> runs;
  for (int i = 0; i < taps; ++i) {
    runs.push_back({between(0, 9) * channels, i * int64_t{quads} * kPanel * kQuad, quads});
  }
  std::vector<int64_t> row_offset, dst_offset;
  for (int r = 0; r < rows; ++r) {
    row_offset.push_back(between(0, pixels - 10) * channels);
    dst_offset.push_back(int64_t{r} * channels);
  }
  const Buffer<uint8_t> src = random_bytes(pixels * channels);
  const Buffer<int8_t> weight = pack_small_groups(channels, quads, taps);
  const Buffer<int32_t> init = random_ints(panels * kPanel, 1 << 20);
  RandomEpilogue epilogue(channels, int64_t{rows} * channels);
  if (chance(25)) epilogue.add_row_terms(rows);

  GemmTile tile{};
  tile.src = src.data();
  tile.row_offset = row_offset.data();
  tile.dst_offset = dst_offset.data();
  tile.rows = rows;
  tile.flip = chance(50);
  tile.runs = runs.data();
  tile.num_runs = taps;
  tile.weight = weight.data();
  tile.panel_stride = packed;
  tile.panels = panels;
  tile.channels = channels;
  tile.acc_init = init.data();
  tile.group_quads = quads;
  begin_case("small_groups", text("rows", rows, "channels", channels, "group", group, "taps", taps,
                                  "flip", tile.flip) +
                                 epilogue.text());
  Buffer<uint8_t> reference = epilogue.dst(), tested = epilogue.dst();
  kReferenceKernels.small_groups(tile, epilogue.with(reference.data()));
  const Buffer<int8_t> wide = widened(k, k.widening, weight);
  tile.weight = wide.data();
  k.small_groups(tile, epilogue.with(tested.data()));
  expect_same("dst", reference, tested);
}

/// The taps that packed bytes meet: four kernel rows of a column share a quad, and four columns of
/// a row that is left alone.
std::vector<int32_t> depthwise_taps(int rows, int width) {
  std::vector<int32_t> taps;
  for (int first = 0; first < rows; first += kQuad) {
    const int band = std::min(rows - first, kQuad);
    const int columns = band == 1 ? (width + kQuad - 1) / kQuad : width;
    for (int i = 0; i < columns * kQuad; ++i) {
      const int row = band == 1 ? 0 : i % kQuad, column = band == 1 ? i : i / kQuad;
      taps.push_back(row < band && column < width ? (first + row) * width + column : -1);
    }
  }
  return taps;
}

void check_depthwise(const Kernels& k) {
  DepthwiseLayer d{};
  d.kernel_rows = static_cast<int>(chance(60) ? between(2, 3) : between(1, 6));
  d.width = chance(60) ? 3 : between(1, 7);
  d.channels = static_cast<int>(between(1, 100));
  d.stride = chance(60) ? 1 : between(2, 3);
  d.dilation = chance(70) ? 1 : 2;
  d.pad_begin = between(0, d.width - 1);
  d.src_pixels = between(1, 40);
  d.dst_pixels = between(1, 20);
  d.flip = chance(50);
  d.zero_point = static_cast<uint8_t>(between(0, 255));
  const std::vector<int32_t> taps = depthwise_taps(d.kernel_rows, static_cast<int>(d.width));
  d.taps = taps.data();
  d.quads = static_cast<int>(taps.size()) / kQuad;
  const int panels = (d.channels + kPanel - 1) / kPanel;
  Buffer<int8_t> packed = random_weights(int64_t{panels} * d.quads * kPanel * kQuad);
  for (int64_t i = 0; i < packed.size(); ++i) {
    const int64_t quad = i / (kPanel * kQuad) % d.quads;
    if (taps[static_cast<size_t>(quad * kQuad + i % kQuad)] < 0) packed[i] = 0;
  }
  d.packed = packed.data();
  const Buffer<int32_t> init = random_ints(panels * kPanel, 1 << 20);
  d.acc_init = init.data();
  const int64_t row_bytes = d.src_pixels * d.channels;
  const Buffer<uint8_t> padding = filled<uint8_t>(row_bytes, [&] { return d.zero_point; });
  d.padding = padding.data();

  const int64_t height = between(1, 12), step = between(1, 2);
  const Buffer<uint8_t> image = random_bytes(height * row_bytes);
  DepthwiseRows rows{};
  rows.count = static_cast<int>(between(1, 9));
  std::vector<const uint8_t*> src;
  std::vector<int64_t> dst_offset;
  for (int y = 0; y < rows.count; ++y) {
    for (int r = 0; r < d.kernel_rows; ++r) {
      const int64_t row = y * step + r - 1;
      const bool inside = row >= 0 && row < height;
      src.push_back(inside ? image.data() + row * row_bytes : padding.data());
    }
    dst_offset.push_back(y * d.dst_pixels * d.channels);
  }
  rows.src = src.data();
  rows.dst_offset = dst_offset.data();
  const RandomEpilogue epilogue(d.channels, rows.count * d.dst_pixels * d.channels);
  begin_case("depthwise",
             text("kernel", d.kernel_rows, "x", d.width, "channels", d.channels, "stride", d.stride,
                  "dilation", d.dilation, "pad", d.pad_begin, "src", d.src_pixels, "dst",
                  d.dst_pixels, "rows", rows.count, "flip", d.flip) +
                 epilogue.text());
  Buffer<uint8_t> reference = epilogue.dst(), tested = epilogue.dst();
  kReferenceKernels.depthwise(d, rows, epilogue.with(reference.data()), nullptr);
  const int64_t bytes = (k.depthwise_bytes(d) + 63) / 64 * 64;
  Buffer<uint8_t> scratch(bytes);
  const Epilogue to_tested = epilogue.with(tested.data());
  d.slides = k.why_no_slide(d, to_tested) == nullptr && chance(80);
  k.depthwise(d, rows, to_tested, scratch.data());
  expect_same("dst", reference, tested);
}

void check_pools(const Kernels& k) {
  PoolRow p{};
  const int64_t pixels = between(3, 12);
  p.channels = between(1, 150);
  p.windows = between(1, 5);
  p.step = between(0, 2) * p.channels;
  p.is_signed = chance(50);
  p.num_taps = static_cast<int>(chance(10) ? between(250, 600) : between(1, 12));
  const Buffer<uint8_t> src = random_bytes((pixels + 2 * p.windows) * p.channels);
  std::vector<const uint8_t*> taps;
  for (int i = 0; i < p.num_taps; ++i) {
    taps.push_back(src.data() + between(0, pixels) * p.channels);
  }
  p.taps = taps.data();
  p.bias = static_cast<int32_t>(between(-1000, 1000));
  p.divisor = static_cast<float>(chance(80) ? p.num_taps : between(1, 300));
  const auto run = [&](const Kernels& kernels, bool average, Buffer<uint8_t>& dst) {
    p.dst = dst.data();
    (average ? kernels.avg_pool : kernels.max_pool)(p);
  };
  for (const bool average : {false, true}) {
    p.dst_dtype = average && chance(40) ? DType::f32 : p.is_signed ? DType::s8 : DType::u8;
    begin_case(average ? "avg_pool" : "max_pool",
               text("channels", p.channels, "windows", p.windows, "step", p.step, "taps",
                    p.num_taps, "divisor", p.divisor, "signed", p.is_signed, "dst", p.dst_dtype));
    Buffer<uint8_t> reference(p.windows * p.channels * size_of(p.dst_dtype)), tested = reference;
    run(kReferenceKernels, average, reference), run(k, average, tested);
    expect_same("dst", reference, tested);
  }
}

}  // namespace

void check_conv(const Kernels& k) {
  for (int i = 0; i < 1000; ++i) check_small_groups(k);
  for (int i = 0; i < 3000; ++i) check_depthwise(k);
  for (int i = 0; i < 500; ++i) check_pools(k);
}

}  // namespace torchq
