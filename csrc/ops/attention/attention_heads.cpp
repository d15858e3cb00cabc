// SPDX-License-Identifier: Apache-2.0
// Attention of heads, block by block (Note [Attention] in attention.h).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu_tuning.h"
#include "ops/attention/attention.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

constexpr float kLog2E = 1.44269504f;

PackedColumns take_columns(ScratchFrame& scratch, int64_t n, int64_t k) {
  const int64_t panels = panels_of(n), panel_bytes = quads_of(k) * kPanel * kQuad;
  return {panel_bytes, scratch.take<int8_t>(panels, panel_bytes),
          scratch.take<int32_t>(panels, kPanel), scratch.take<int32_t>(panels, kPanel)};
}

float* filled(ScratchFrame& scratch, int64_t count, float value) {
  float* values = scratch.take<float>(count);
  std::fill_n(values, count, value);
  return values;
}

/// dst[row][n] = (float(row * columns) * multiplier[n] + offset[n]) * rows.scale[row].
struct Product {
  QueryRows rows;
  int64_t count;
  const PackedColumns& columns;
  int64_t n, k;
  const float *multiplier, *offset;
  float* dst;
};

void multiply(const Kernels& tier, const Product& p) {
  const GemmRun run{0, 0, quads_of(p.k)};
  GemmProblem problem;
  problem.src = p.rows.data;
  problem.flip = p.rows.flip;
  problem.weight = p.columns.weight;
  problem.panel_bytes = p.columns.panel_bytes;
  problem.group_channels = static_cast<int>(p.n);
  problem.panels_per_group = static_cast<int>(panels_of(p.n));
  problem.add_rows(p.count, p.rows.stride, run, p.columns.init);
  Epilogue epilogue{};
  epilogue.mode = Epilogue::kFolded;
  epilogue.dst_dtype = DType::f32;
  epilogue.dst = p.dst;
  epilogue.multiplier = p.multiplier;
  epilogue.offset = p.offset;
  epilogue.row_scale = p.rows.scale;
  epilogue.channels = epilogue.group_channels = static_cast<int>(p.n);
  run_gemm(problem, epilogue, tier);
}

/// State that a thread keeps from block to block.
struct Worker {
  const Attention& a;
  const Heads& heads;
  Head head;
  const float *score_offset, *one, *zero;

  Worker(ScratchFrame& scratch, const Attention& attention, const Heads& source)
      : a(attention), heads(source) {
    const int64_t padded = padded_keys(a.keys);
    head.keys = take_columns(scratch, padded, a.size);
    head.values = take_columns(scratch, a.value_size, a.keys);
    head.score_scale = filled(scratch, padded, 0.0f);
    float* offset = filled(scratch, padded, 0.0f);
    std::fill(offset + a.keys, offset + padded, -INFINITY);
    score_offset = offset;
    one = filled(scratch, a.value_size, 1.0f);
    zero = filled(scratch, a.value_size, 0.0f);
  }

  /// Rows [first, first + count) of head h, which is loaded.
  void attend(size_t h, int64_t first, int64_t count) const {
    const int64_t seen = a.causal ? std::min(a.keys, first + count) : a.keys;
    const int64_t stride = padded_keys(seen);
    ScratchFrame scratch;
    float* scores = scratch.take<float>(count, stride);
    uint8_t* weights = scratch.take<uint8_t>(count, stride);
    float* sums = scratch.take<float>(count, a.value_size);
    float* total = scratch.take<float>(count);
    multiply(a.tier, {heads.queries(scratch, h, first, count), count, head.keys, stride, a.size,
                      head.score_scale, score_offset, scores});
    const float* mask = nullptr;
    int64_t mask_stride = 0;
    if (a.mask.defined()) {
      mask_stride = a.mask.size(-2) == 1 ? 0 : a.mask.stride(-2);
      mask = a.mask.const_data_ptr<float>() + a.mask_offset[h] + first * mask_stride;
    }
    a.tier.attention_weights({scores, stride, count, std::min(a.keys, stride),
                              a.causal ? first + 1 : a.keys, mask, mask_stride, kLog2E, weights,
                              total});
    multiply(a.tier, {{weights, stride, false, nullptr},
                      count,
                      head.values,
                      a.value_size,
                      seen,
                      one,
                      zero,
                      sums});
    a.tier.attention_means({sums, count, a.value_size, total, head.mean_scale, head.mean_shift,
                            behind(a.dst, a.dst_offset[h] + first * a.dst_stride), a.dst_stride});
  }
};

}  // namespace

void pack_columns(const Kernels& tier, const PanelSource& columns, int64_t n, int64_t padded,
                  int32_t zero_point, const PackedColumns& packed) {
  for (int64_t p = 0; p < padded / kPanel; ++p) {
    PanelSource panel = columns;
    panel.data += p * kPanel * columns.channel_stride;
    panel.channels = static_cast<int>(std::clamp<int64_t>(n - p * kPanel, 0, kPanel));
    tier.pack_panel(panel, packed.weight + p * packed.panel_bytes,
                    packed.compensation + p * kPanel);
  }
  const int32_t tap = 0;
  std::memset(packed.init, 0, static_cast<size_t>(padded) * sizeof(int32_t));
  tier.compensate(packed.compensation, padded, &tap, 1, nullptr, zero_point, padded, packed.init);
}

void run_attention(const Attention& a, const Heads& heads) {
  const int64_t count = static_cast<int64_t>(a.dst_offset.size());
  const int threads = threads_for(count * a.queries * a.keys * (a.size + a.value_size + 64));
  int64_t block = std::max<int64_t>(1, tuning::kAttentionBytes / (padded_keys(a.keys) * 5));
  if (block > kGemmRows) block -= block % kGemmRows;
  if (count < threads) block = std::min(block, (a.queries * count + threads - 1) / threads);
  const int64_t blocks = (a.queries + block - 1) / block;
  parallel_ranges(count * blocks, threads, [&](Range range) {
    ScratchFrame scratch;
    Worker worker(scratch, a, heads);
    int64_t loaded = -1;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t h = i / blocks, first = i % blocks * block;
      if (loaded != h) heads.load(static_cast<size_t>(h), worker.head);
      loaded = h;
      worker.attend(static_cast<size_t>(h), first, std::min(block, a.queries - first));
    }
  });
}

}  // namespace torchq
