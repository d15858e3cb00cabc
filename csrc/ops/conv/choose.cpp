// SPDX-License-Identifier: Apache-2.0
#include "ops/gemm/choose.h"

#include <cstdio>

#include "kernels/cpu_tuning.h"
#include "ops/conv/conv.h"
#include "runtime/parallel.h"

namespace torchq {
namespace {

/// Returns true if the channels of each group are to be copied side by side.
bool copies_groups_apart(const Conv& c) {
  const ConvPacking& p = c.packing;
  const TapAxis(&axes)[3] = c.axes;
  return p.form == ConvPacking::kDense && p.groups > 1 && p.group_inputs % kQuad == 0 &&
         axes[2].dilation == 1 && !c.is_transposed() &&
         prefers_groups_apart(c.tier, c.output(1) * c.output(2), axes[0].kernel * axes[1].kernel,
                              axes[2].kernel, p.quads);
}

/// Returns true if products with padding, and its copy, take less time than `count` regions: 0.5 us
/// less for 3x3 16->16 of 7x7 pixels, 2.5 us less for 5x5 of 10x10.
bool padding_is_cheaper(const Conv& c, const Source& s, const TapIntervals (&axes)[3],
                        int64_t count) {
  double all = static_cast<double>(s.batch), valid = all;  // taps of all pixels
  double bytes = all * static_cast<double>(s.channels);
  for (int d = 0; d < 3; ++d) {
    int64_t met = 0;
    for (const TapInterval& i : axes[d]) met += i.count * i.num_taps();
    const TapAxis& axis = c.axes[d];
    all *= static_cast<double>(axis.dst_size * axis.kernel);
    valid *= static_cast<double>(met);
    bytes *= static_cast<double>(axis.src_size + axis.padding + axis.pad_end);
  }
  const int64_t without_vnni = c.tier.widening > 1 ? 4 : 1;
  const int64_t tap_products = c.packing.quads * c.packing.panels() * without_vnni;
  const double copy = bytes / 16;
  return (all - valid) * static_cast<double>(tap_products) + copy <
         tuning::kRegionProducts * static_cast<double>(count - 1);
}

/// Returns the reason why padding in memory beats one region per set of valid taps, or null.
const char* why_padded(const Conv& c, const Source& s, const TapIntervals (&axes)[3]) {
  int64_t count = 1, fewest = 1, rows = s.batch;
  for (int d = 0; d < 3; ++d) {
    count *= static_cast<int64_t>(axes[d].size());
    fewest *= c.axes[d].phases();
    rows *= c.output(d);
  }
  if (count <= fewest) return nullptr;
  if (count > tuning::kMaxRegions) return "pixels meet too many sets of valid taps";
  const int64_t group_quads = c.packing.taps * c.packing.quads * c.packing.panels_per_group();
  const bool adjacent = c.axes[0].stride * c.axes[1].stride * c.axes[2].stride == 1;
  if (!c.is_transposed() && prefers_one_region(c.tier, rows, group_quads, adjacent)) {
    return "a matrix unit wants whole tiles";
  }
  if (rows < tuning::kMinRowsPerRegion * count) return "too few pixels meet the same valid taps";
  return !c.is_transposed() && padding_is_cheaper(c, s, axes, count)
             ? "so few products with padding take less time"
             : nullptr;
}

}  // namespace

ConvChoice choose(const Conv& c, const Source& s, const TapIntervals (&axes)[3]) {
  const ConvPacking& p = c.packing;
  ConvChoice choice{ConvChoice::kPadded, {}};
  if (const int64_t groups = p.groups * p.merged; groups > 1 && !c.is_transposed()) {
    const int64_t inputs = p.group_inputs / p.merged;
    choice.reasons.add("depthwise", why_not_depthwise(p.outputs(), inputs, groups));
    choice.reasons.add("small_groups", why_not_small_groups(p.outputs(), inputs, groups));
  }
  const char* why = nullptr;
  if (p.form == ConvPacking::kRowRuns) {
    why = "a row of the kernel is read in one go";
  } else if (copies_groups_apart(c)) {
    choice.copy = ConvChoice::kGroupsApart;
    why = "a matrix unit wants groups with few channels apart";
  } else if ((why = why_padded(c, s, axes)) == nullptr) {
    choice.copy = p.group_inputs % kQuad != 0 ? ConvChoice::kAsItIs : ConvChoice::kInPlace;
  }
  choice.reasons.add("in place", why);
  return choice;
}

DepthwiseChoice choose(const Conv& c, const Source& s, const DepthwiseLayer& layer, int64_t parts,
                       const Epilogue& epilogue) {
  constexpr int64_t kMinBlockRows = 8;
  const int64_t rows = s.batch * c.output(0) * c.output(1);
  const int64_t row_bytes = std::max<int64_t>(c.axes[1].stride * s.pitch(1), 1);
  DepthwiseChoice choice{std::max(tuning::kDepthwiseBytes / row_bytes, kMinBlockRows),
                         threads_for(rows * c.output(2) * s.channels * layer.quads * kQuad),
                         false,
                         {}};
  if (c.tier.why_no_slide == nullptr) return choice;
  const char* why = c.tier.why_no_slide(layer, epilogue);
  choice.slides = why == nullptr;
  DepthwiseLayer one = layer;
  one.kernel_rows /= static_cast<int>(parts);
  if (why != nullptr && parts > 1 && c.tier.why_no_slide(one, epilogue) == nullptr) {
    why = "weights have more than 8 bits without their zero points";
  }
  choice.reasons.add("depthwise slide", why);
  return choice;
}

void DepthwiseChoice::log() const {
  if (!logs_kernel_choice()) return;
  reasons.log();
  std::printf("torchq,choice,depthwise,windows:%s shares:1x%d\n", slides ? "slide" : "stash",
              threads);
}

}  // namespace torchq
