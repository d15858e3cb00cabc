// SPDX-License-Identifier: Apache-2.0
// pack_weights and unpack_weights: weights to packed panels and back, one panel at a time.
//
// A packed panel interleaves 16 rows of 32-bit lanes. Weights are gathered into rows first, which
// are contiguous; then lane after lane is interleaved, with contiguous writes. Both steps stay in
// L2. Measured on Zen 4, one thread: 4096x4096 at 2900 MB/s, 512x512x3x3 at 1700; writing weights
// to their final bytes one by one gave 140, with four divisions each.
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>

#include "kernels/common.h"
#include "kernels/cpu_tuning.h"
#include "ops/gemm/packed_weights.h"
#include "runtime/checks.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace torchq {
namespace {

/// Behind each row, so that the rows of a power of two do not share the sets of a cache.
constexpr int64_t kRowGap = 64;

/// Inputs of one output that are adjacent in a row of the panel, at its first tap.
struct Segment {
  int lane;
  int64_t row;     // first byte in the row
  int64_t weight;  // first element in the weight
  int64_t count;
  int64_t output;
  bool repeated;  // from the panel before
};

/// The segments of a panel: one per output, or up to two in small groups.
using Segments = c10::SmallVector<Segment, 2 * kPanel>;

Segments small_group_segments(const ConvPacking& p, const WeightLayout& weight, int64_t panel) {
  Segments segments;
  const int64_t first = std::min(panel * kPanel, p.outputs() - kPanel);
  const int64_t count = std::min<int64_t>(weight.inputs, kQuad);
  for (int64_t output = first; output < first + kPanel; ++output) {
    const int64_t n = output % p.group_outputs, group = output / weight.outputs;
    for (int64_t i = 0; i < weight.inputs; i += count) {
      const int64_t k = group * weight.inputs - first + i;  // among the panel's 16 inputs
      segments.push_back({static_cast<int>(n % kQuad * kQuad + k / kQuad),
                          n / kQuad * kQuad + k % kQuad,
                          weight.index(group, output % weight.outputs, i), count, output,
                          output / kPanel != panel});
    }
  }
  return segments;
}

Segments segments_of(const ConvPacking& p, const WeightLayout& weight, int64_t panel) {
  if (p.form == ConvPacking::kSmallGroups) return small_group_segments(p, weight, panel);
  Segments segments;
  const int64_t merged_group = panel / p.panels_per_group();
  const int64_t first = panel % p.panels_per_group() * kPanel;
  const int64_t end = std::min<int64_t>(first + kPanel, p.group_outputs);
  const int64_t spread = p.form == ConvPacking::kDepthwise ? 0 : weight.inputs;
  for (int64_t n = first; n < end; ++n) {
    const int64_t group = n / weight.outputs;  // of those merged
    segments.push_back({static_cast<int>(n - first), group * spread,
                        weight.index(merged_group * p.merged + group, n % weight.outputs, 0),
                        weight.inputs, merged_group * p.group_outputs + n, false});
  }
  return segments;
}

/// Offset of a tap in the weight and in a row of the panel.
struct Tap {
  int64_t weight, row;
};

c10::SmallVector<Tap, 64> taps_of(const ConvPacking& p, const WeightLayout& layout,
                                  c10::IntArrayRef kernel) {
  c10::SmallVector<Tap, 64> taps;
  for (const int64_t tap : layout.taps) taps.push_back({tap, 0});
  if (p.form == ConvPacking::kDepthwise) {
    const auto order = depthwise_taps(kernel);
    for (size_t slot = 0; slot < order.size(); ++slot) {
      if (order[slot] >= 0) taps[static_cast<size_t>(order[slot])].row = static_cast<int64_t>(slot);
    }
    return taps;
  }
  const int64_t width =
      p.form == ConvPacking::kRowRuns ? kernel[static_cast<size_t>(run_dimension(kernel))] : 1;
  for (size_t t = 0; t < taps.size(); ++t) {
    const int64_t tap = static_cast<int64_t>(t);
    taps[t].row = tap / width * p.quads * kQuad + tap % width * layout.inputs;
  }
  return taps;
}

/// dst[i dst_stride] = src[i src_stride]. Few values are what most calls copy: no loop for them.
TORCHQ_INLINE void copy_strided(const int8_t* __restrict src, int64_t src_stride,
                                int8_t* __restrict dst, int64_t dst_stride, int64_t count) {
  switch (count) {
    case 4:
      dst[3 * dst_stride] = src[3 * src_stride];
      [[fallthrough]];
    case 3:
      dst[2 * dst_stride] = src[2 * src_stride];
      [[fallthrough]];
    case 2:
      dst[dst_stride] = src[src_stride];
      [[fallthrough]];
    case 1:
      dst[0] = src[0];
      return;
    default:
      if (src_stride == 1 && dst_stride == 1) {
        std::memcpy(dst, src, static_cast<size_t>(count));
        return;
      }
      for (int64_t i = 0; i < count; ++i) dst[i * dst_stride] = src[i * src_stride];
  }
}

/// The packed form, the weight's own, and the copies between them.
class PanelCopy {
 public:
  PanelCopy(const ConvPacking& packing, const WeightLayout& weight, c10::IntArrayRef kernel)
      : packing_(packing), weight_(weight), taps_(taps_of(packing, weight, kernel)) {
    const auto sizes = packing.packed_sizes();
    panels_ = sizes[0];
    panel_bytes_ = c10::multiply_integers(sizes) / std::max<int64_t>(panels_, 1);
    stride_ = panel_bytes_ / kPanel + kRowGap;
  }

  int64_t panels() const { return panels_; }
  int64_t panel_bytes() const { return panel_bytes_; }
  int64_t rows_bytes() const { return stride_ * kPanel; }
  int threads() const { return threads_for(panels_ * panel_bytes_, tuning::kPackGrain); }
  Segments segments(int64_t panel) const { return segments_of(packing_, weight_, panel); }

  /// Weights to the panel's rows.
  void gather(const Segments& segments, const int8_t* weight, int8_t* rows) const {
    const int64_t stride = weight_.input_stride;
    for_each(segments, [=](int64_t row, int64_t first, int64_t count) {
      copy_strided(weight + first, stride, rows + row, 1, count);
    });
  }
  /// The panel's rows to weights.
  void scatter(const Segments& segments, const int8_t* rows, int8_t* weight) const {
    const int64_t stride = weight_.input_stride;
    for_each(segments, [=](int64_t row, int64_t first, int64_t count) {
      copy_strided(rows + row, 1, weight + first, stride, count);
    });
  }

  /// Rows to a panel: lane after lane of four bytes, one of each row.
  void interleave(const int8_t* rows, int8_t* panel) const {
    for (int64_t q = 0; q < panel_bytes_ / (kPanel * kQuad); ++q) {
      for (int lane = 0; lane < kPanel; ++lane) {
        std::memcpy(panel + (q * kPanel + lane) * kQuad, rows + lane * stride_ + q * kQuad, kQuad);
      }
    }
  }
  /// A panel to rows.
  void separate(const int8_t* panel, int8_t* rows) const {
    for (int64_t q = 0; q < panel_bytes_ / (kPanel * kQuad); ++q) {
      for (int lane = 0; lane < kPanel; ++lane) {
        std::memcpy(rows + lane * stride_ + q * kQuad, panel + (q * kPanel + lane) * kQuad, kQuad);
      }
    }
  }

  /// Adds the sums of a panel's rows to those of its outputs [run][output].
  void sum(const Segments& segments, const int8_t* rows, int32_t* sums) const {
    const bool by_inputs =
        packing_.form == ConvPacking::kDense || packing_.form == ConvPacking::kSmallGroups;
    const int64_t run_bytes = packing_.quads * kQuad;
    for (const Segment& s : segments) {
      if (s.repeated) continue;
      const int64_t bytes = by_inputs ? s.count : run_bytes;
      for (int64_t run = 0; run < packing_.compensation_taps(); ++run) {
        const int8_t* row = rows + s.lane * stride_ + s.row + run * run_bytes;
        int32_t total = 0;
        for (int64_t i = 0; i < bytes; ++i) total += row[i];
        sums[run * packing_.outputs() + s.output] += total;
      }
    }
  }

 private:
  /// body(byte of the rows, element of the weight, count) for all inputs of these segments, tap by
  /// tap, in the order of the weight's memory.
  template <class Body>
  void for_each(const Segments& segments, const Body& body) const {
    if (segments.empty()) return;
    const bool outputs_inside = weight_.output_stride < weight_.input_stride;
    const int64_t inputs = segments[0].count, step = outputs_inside ? 1 : inputs;
    for (int64_t i = 0; i < inputs; i += step) {
      for (const Segment& s : segments) {
        const int64_t row = s.lane * stride_ + s.row + i;
        const int64_t weight = s.weight + i * weight_.input_stride;
        for (const Tap& tap : taps_) body(row + tap.row, weight + tap.weight, step);
      }
    }
  }

  const ConvPacking& packing_;
  const WeightLayout& weight_;
  const c10::SmallVector<Tap, 64> taps_;
  int64_t panels_, panel_bytes_, stride_;
};

/// Adds the sums of a panel, or of one tap of it, to those of its 16 outputs. Returns the pair
/// bound, the largest |sum| of adjacent weights of one sign: at most 128 means that 16-bit pair
/// sums are exact for every u8 source (255 * 128 = 32640; 255 * 129 overflows).
///
/// All of it is in 16 bits, which hold 127 sums of two weights: SSE2 has no maximum of signed
/// bytes.
int32_t sum_panel(const int8_t* panel, int64_t quads, int32_t* sums) {
  constexpr int kPairs = kPanel * kQuad / 2;
  constexpr int64_t kBlock = 127;
  int16_t most[kPairs] = {}, least[kPairs] = {};
  for (int64_t first = 0; first < quads; first += kBlock) {
    int16_t totals[kPairs] = {};
    for (int64_t q = first; q < std::min(first + kBlock, quads); ++q) {
      int16_t pairs[kPairs];
      std::memcpy(pairs, panel + q * kPanel * kQuad, sizeof pairs);
      for (int i = 0; i < kPairs; ++i) {
        const int16_t a = static_cast<int16_t>(static_cast<int16_t>(pairs[i] << 8) >> 8);
        const int16_t b = static_cast<int16_t>(pairs[i] >> 8);
        const int16_t zero = 0;
        const int16_t sum = static_cast<int16_t>(a + b);
        const int16_t above = static_cast<int16_t>(std::max(a, zero) + std::max(b, zero));
        const int16_t below = static_cast<int16_t>(sum - above);
        totals[i] = static_cast<int16_t>(totals[i] + sum);
        most[i] = std::max(most[i], above);
        least[i] = std::min(least[i], below);
      }
    }
    for (int i = 0; i < kPairs; ++i) sums[i / 2] += totals[i];
  }
  return std::max<int32_t>(*std::max_element(most, most + kPairs),
                           -*std::min_element(least, least + kPairs));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> packed_sums(const at::Tensor& packed) {
  constexpr const char* kOp = "_packed_sums";
  check_param(kOp, "packed", packed, at::kChar);
  TORCH_CHECK_VALUE(packed.dim() == 5 && packed.size(3) == kPanel && packed.size(4) == kQuad,
                    "torchq._packed_sums: packed must be [panels, taps, quads, 16, 4], got ",
                    packed.sizes(), ". Pack the weight with torchq.packing.");
  const int64_t panels = packed.size(0), taps = packed.size(1), quads = packed.size(2);
  at::Tensor compensation = at::detail::empty_cpu({taps, panels * kPanel}, at::kInt);
  at::Tensor bounds = at::detail::empty_cpu({panels}, at::kInt);
  compensation.zero_();
  bounds.zero_();
  const int8_t* src = packed.const_data_ptr<int8_t>();
  int32_t* sums = compensation.mutable_data_ptr<int32_t>();
  int32_t* bound = bounds.mutable_data_ptr<int32_t>();
  const int threads = threads_for(packed.numel(), tuning::kPackGrain);
  parallel_ranges(panels, threads, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; ++i) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int8_t* panel = src + (i * taps + tap) * quads * kPanel * kQuad;
        int32_t* row = sums + (tap * panels + i) * kPanel;
        bound[i] = std::max(bound[i], sum_panel(panel, quads, row));
      }
    }
  });
  return {compensation, bounds};
}

Packed pack_weights(const ConvPacking& p, const WeightLayout& layout, const at::Tensor& weight,
                    c10::IntArrayRef kernel) {
  const PanelCopy copy(p, layout, kernel);
  at::Tensor packed = at::detail::empty_cpu(p.packed_sizes(), at::kChar);
  at::Tensor compensation = at::detail::empty_cpu({p.compensation_taps(), p.outputs()}, at::kInt);
  at::Tensor bounds = at::detail::empty_cpu({copy.panels()}, at::kInt);
  if (only_checks()) return {packed, compensation, bounds};
  compensation.zero_();
  const at::Tensor dense = weight.contiguous();
  const int8_t* src = dense.const_data_ptr<int8_t>();
  int8_t* dst = packed.mutable_data_ptr<int8_t>();
  int32_t* sums = compensation.mutable_data_ptr<int32_t>();
  int32_t* bound = bounds.mutable_data_ptr<int32_t>();
  parallel_ranges(copy.panels(), copy.threads(), [&](Range panels) {
    ScratchFrame scratch;
    int8_t* rows = scratch.take<int8_t>(copy.rows_bytes());
    for (int64_t i = panels.begin; i < panels.end; ++i) {
      const Segments segments = copy.segments(i);
      int8_t* panel = dst + i * copy.panel_bytes();
      std::memset(rows, 0, static_cast<size_t>(copy.rows_bytes()));
      copy.gather(segments, src, rows);
      copy.sum(segments, rows, sums);
      copy.interleave(rows, panel);
      int32_t unused[kPanel] = {};  // of outputs: groups are merged, or a row is shared
      bound[i] = sum_panel(panel, copy.panel_bytes() / (kPanel * kQuad), unused);
    }
  });
  return {packed, compensation, bounds};
}

at::Tensor unpack_weights(const char* op, const ConvPacking& p, const WeightLayout& layout,
                          const at::Tensor& packed, c10::IntArrayRef weight_shape,
                          c10::IntArrayRef kernel) {
  check_param(op, "packed", packed, at::kChar);
  TORCH_CHECK_VALUE(packed.sizes() == c10::IntArrayRef(p.packed_sizes()), "torchq.", op,
                    ": packed must be ", c10::IntArrayRef(p.packed_sizes()), " for weight shape ",
                    weight_shape, ", got ", packed.sizes(), ". Pass the shape it was packed from.");
  const PanelCopy copy(p, layout, kernel);
  at::Tensor weight = at::detail::empty_cpu(weight_shape, at::kChar);
  if (is_done(weight)) return weight;
  const int8_t* src = packed.const_data_ptr<int8_t>();
  int8_t* dst = weight.mutable_data_ptr<int8_t>();
  parallel_ranges(copy.panels(), copy.threads(), [&](Range panels) {
    ScratchFrame scratch;
    int8_t* rows = scratch.take<int8_t>(copy.rows_bytes());
    for (int64_t i = panels.begin; i < panels.end; ++i) {
      Segments segments = copy.segments(i);
      // Another thread may write those of the panel before.
      segments.erase(std::remove_if(segments.begin(), segments.end(),
                                    [](const Segment& s) { return s.repeated; }),
                     segments.end());
      copy.separate(src + i * copy.panel_bytes(), rows);
      copy.scatter(segments, rows, dst);
    }
  });
  return weight;
}

}  // namespace torchq
