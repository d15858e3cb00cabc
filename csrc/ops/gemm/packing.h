// SPDX-License-Identifier: Apache-2.0
// Layout of packed weights: one decision, taken from the shapes alone, shared by pack, unpack and
// the op.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "kernels/table.h"

namespace torchq {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t panels_of(int64_t channels) { return ceil_div(channels, kPanel); }
inline int64_t quads_of(int64_t k) { return ceil_div(k, kQuad); }

/// Note [Conv packings]
// clang-format off
/// dense      [G' * ceil(OC'/16)][taps][ceil(IC'/4)][16][4]. Groups with few channels are merged
///            into G' block-diagonal ones of up to 16 output channels (OC' = merged * OC/G), so no
///            lane is wasted on tails.
/// row runs   [ceil(OC/16)][kd * kh][ceil(kw * IC/4)][16][4] when IC is no multiple of 4: in
///            channels-last a kernel row is one run of kw * IC bytes (a 7x7x3 stem: 42 quads
///            instead of 49). Needs a source that is padded in memory. The row of a kernel is along
///            its run_dimension: a 512x1 kernel is one row of 512.
/// small      [ceil(C/16)][taps][Q][16][4], groups of 4 Q channels in and out, Q = 1 or 2. A panel
///            has the 16 channels from c on: 16 for each, and the last 16 for the last. Byte b of
///            lane 4 i + j of vector q meets input c + 4 j + b of output 4 q + i of its group: 16
///            source bytes, in every 128-bit lane, meet Q vectors and no multiplication is by
///            zero. Groups of 2 are merged in pairs.
/// depthwise  [ceil(C/16)][quads][16][4]; a quad holds four taps, see depthwise_taps.
// clang-format on
struct ConvPacking {
  enum Form { kDense, kRowRuns, kSmallGroups, kDepthwise };
  Form form;
  int64_t groups, group_outputs, group_inputs;  // after merging
  int64_t merged;                               // original groups per merged group
  int64_t taps, quads;                          // as in the packed shape

  int64_t panels_per_group() const { return panels_of(group_outputs); }
  int64_t panels() const {
    return form == kSmallGroups ? panels_of(outputs()) : groups * panels_per_group();
  }
  int64_t outputs() const { return groups * group_outputs; }
  c10::SmallVector<int64_t, 5> packed_sizes() const;
  /// Rows of the compensation: one per tap, or one for all.
  int64_t compensation_taps() const { return form == kDepthwise ? 1 : taps; }
};

/// The last dimension along which a kernel has more than one tap; the last one if none has.
int run_dimension(c10::IntArrayRef kernel);

/// Returns the reason why a grouped layer is not packed as depthwise, or as small groups, or null.
const char* why_not_depthwise(int64_t outputs, int64_t inputs_per_group, int64_t groups);
const char* why_not_small_groups(int64_t outputs, int64_t inputs_per_group, int64_t groups);

/// `kernel` and `dilation` have one entry per spatial dimension.
ConvPacking conv_packing(int64_t outputs, int64_t inputs_per_group, int64_t groups,
                         c10::IntArrayRef kernel, c10::IntArrayRef dilation);

/// The dense form, whatever the shapes.
ConvPacking dense_packing(int64_t outputs, int64_t inputs_per_group, int64_t groups,
                          c10::IntArrayRef kernel);

/// The taps of each depthwise quad, -1 where a slot is empty. Up to four kernel rows share a quad,
/// column by column, so that a kernel can slide along the row; a single leftover row is cut into
/// fours.
c10::SmallVector<int32_t, 64> depthwise_taps(c10::IntArrayRef kernel);

}  // namespace torchq
