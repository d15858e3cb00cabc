// SPDX-License-Identifier: Apache-2.0
// Convolutions as a gemm over gathered rows: pixels by their valid taps, region by region. Those of
// a transposed one interleave (Note [Transposed convolution]).
#include <algorithm>

#include "ops/conv/conv.h"
#include "ops/gemm/gemm.h"

namespace torchq {
namespace {

/// Runs of one region, relative to its first valid tap, and their rows of the compensation.
struct TapSet {
  c10::ArrayRef<GemmRun> runs;
  c10::ArrayRef<int32_t> taps;
};

TapSet make_taps(ScratchFrame& scratch, const Conv& c, const Source& s,
                 const TapInterval (&at)[3]) {
  const int64_t quads = c.packing.quads, tap_bytes = quads * kPanel * kQuad;
  const bool row_runs = c.packing.form == ConvPacking::kRowRuns;
  // Adjacent taps of a row are adjacent in the source and in the panel: one run.
  const bool merge = !row_runs && c.packing.group_inputs == s.channels && s.channels % kQuad == 0 &&
                     at[2].tap_step == 1;
  const TapRange row = row_runs ? TapRange{0, 1} : at[2].taps;
  const int64_t kernel_width = row_runs ? 1 : c.axes[2].kernel, width = row.end - row.begin;
  const int64_t count = at[0].num_taps() * at[1].num_taps() * width;
  GemmRun* const runs = scratch.take<GemmRun>(count);
  int32_t* const taps = scratch.take<int32_t>(count);
  GemmRun* run = runs;
  int32_t* tap = taps;
  const int64_t step[3] = {at[0].tap_step * s.pitch(0), at[1].tap_step * s.pitch(1),
                           at[2].tap_step * s.pitch(2)};
  for (int64_t kd = 0; kd < at[0].num_taps(); ++kd) {
    for (int64_t kh = 0; kh < at[1].num_taps(); ++kh) {
      const int64_t first = (at[0].taps.begin + kd) * c.axes[1].kernel + at[1].taps.begin + kh;
      for (int64_t kw = 0; kw < width; ++kw) {
        *tap = static_cast<int32_t>(first * kernel_width + row.begin + kw);
        if (!merge || kw == 0) {
          *run++ = {kd * step[0] + kh * step[1] + kw * step[2], *tap * tap_bytes,
                    merge ? width * quads : quads};
        }
        ++tap;
      }
    }
  }
  return {{runs, run}, {taps, tap}};
}

/// Returns the position in src and dst of the pixels with the same valid taps.
TapRegion make_region(const Conv& c, const Source& s, const TapInterval (&at)[3]) {
  TapRegion g{};
  g.size[0] = s.batch;
  g.src_stride[0] = s.image_bytes();
  g.dst_stride[0] = c.packing.outputs() * c.output(0) * c.output(1) * c.output(2);
  for (int d = 0; d < 3; ++d) {
    g.size[d + 1] = at[d].count;
    g.src_stride[d + 1] = at[d].src_step * s.pitch(d);
    g.dst_stride[d + 1] = at[d].dst_step * c.dst_pitch[d];
    g.src_base += at[d].src * s.pitch(d);
    g.dst_base += at[d].dst * c.dst_pitch[d];
  }
  return g;
}

/// Returns the problem without its regions. `s` is the source to read; `flip`: it is still s8.
GemmProblem make_problem(const Conv& c, const Source& s, bool flip) {
  const ConvPacking& p = c.packing;
  GemmProblem problem;
  problem.src = s.data;
  problem.flip = flip;
  problem.weight = c.weight;
  problem.panel_bytes = p.taps * p.quads * kPanel * kQuad;
  if (p.form == ConvPacking::kSmallGroups) {
    problem.groups = 1;
    problem.group_channels = static_cast<int>(p.outputs());
    problem.panels_per_group = static_cast<int>(p.panels());
    problem.group_quads = static_cast<int>(p.quads);
  } else {
    problem.groups = static_cast<int>(p.groups);
    const bool apart = s.channels == p.group_inputs;
    problem.src_group_stride = apart ? s.batch * s.image_bytes() : p.group_inputs;
    problem.group_channels = static_cast<int>(p.group_outputs);
    problem.panels_per_group = static_cast<int>(p.panels_per_group());
  }
  problem.narrow = c.narrow;
  problem.last_step = c.last_step;
  return problem;
}

/// Runs follow the last dimension of the source. Where the kernel has one tap there, such as k x 1
/// over a single column, the dimension of its rows takes that place.
void follow_rows(ScratchFrame& scratch, Conv& c, Source& s) {
  const int64_t kernel[] = {c.axes[0].kernel, c.axes[1].kernel, c.axes[2].kernel};
  const int d = run_dimension(kernel);
  const bool moves_nothing = s.pitch(d) == s.channels;
  if (d == 2 || (!moves_nothing && c.packing.form != ConvPacking::kRowRuns)) return;
  s = move_last(scratch, s, d);
  move_last(c.axes, d);
  move_last(c.dst_pitch, d);
}

/// The source as it was chosen, and the intervals over it.
Source prepare(ScratchFrame& scratch, Conv& c, const Source& s, const ConvChoice& choice,
               TapIntervals (&axes)[3]) {
  if (choice.copy == ConvChoice::kInPlace) return s;
  if (choice.copy == ConvChoice::kAsItIs) return copy_for_overread(scratch, s);
  for (int d = 0; d < 3; ++d) {
    c.axes[d] = c.axes[d].padded();
    axes[d] = c.axes[d].intervals();
  }
  const int64_t groups = choice.copy == ConvChoice::kGroupsApart ? c.packing.groups : 1;
  return pad(c.op, scratch, s, c.axes,
             {static_cast<uint8_t>(c.effective_zero_point()), c.is_signed, groups});
}

}  // namespace

void run_dense(const Conv& conv, const Source& src, const Epilogue& epilogue, OpTrace& trace) {
  ScratchFrame scratch;
  Conv c = conv;
  Source s = src;
  follow_rows(scratch, c, s);
  TapIntervals axes[3];
  for (int d = 0; d < 3; ++d) axes[d] = c.axes[d].intervals();
  const ConvChoice choice = choose(c, s, axes);
  choice.reasons.log();
  s = prepare(scratch, c, s, choice, axes);
  const bool in_place = choice.copy <= ConvChoice::kAsItIs;

  GemmProblem problem = make_problem(c, s, c.is_signed && in_place);
  // Regions that add no zero point, or meet no tap, share their values. Measured on Zen 4, nine
  // regions: 3x3 of 1024 channels in groups of 32 at 14x14 take 0.98 of the time with two threads,
  // whose caches pass these values on; small layers 0.99 with one.
  const int32_t* bias_only = nullptr;
  const auto acc_init = [&](c10::ArrayRef<int32_t> taps) {
    const bool adds_nothing = c.effective_zero_point() == 0 || taps.empty();
    if (adds_nothing && bias_only != nullptr) return bias_only;
    const int32_t* init =
        make_acc_init(scratch, c.tier, c.compensation, taps, c.acc_bias, c.effective_zero_point(),
                      problem.groups, problem.group_channels, problem.panels_per_group);
    if (adds_nothing) bias_only = init;
    return init;
  };
  for (const TapInterval& d : axes[0]) {
    for (const TapInterval& h : axes[1]) {
      for (const TapInterval& w : axes[2]) {
        const TapInterval at[3] = {d, h, w};
        TapRegion g = make_region(c, s, at);
        const TapSet set = make_taps(scratch, c, s, at);
        g.runs = set.runs;
        g.acc_init = acc_init(set.taps);
        problem.regions.push_back(g);
      }
    }
  }
  // Weights that no cache holds arrive during the first region: put the largest one there.
  std::iter_swap(
      problem.regions.begin(),
      std::max_element(problem.regions.begin(), problem.regions.end(),
                       [](const TapRegion& a, const TapRegion& b) { return a.rows() < b.rows(); }));
  run_gemm(problem, epilogue, c.tier, &trace);
}

}  // namespace torchq
