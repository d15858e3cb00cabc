// SPDX-License-Identifier: Apache-2.0
// Contracts of the matrix product: tiles of rows times packed panels, and packing at run time.
#pragma once

#include "kernels/epilogue/contract.h"
#include "kernels/types.h"

namespace torchq {

/// Rows that `Kernels::gemm` is called with at most: many tiles, so that what a call costs is
/// shared by them. Measured on Zen 5, beside 8 tiles: 1x1 of 32 to 16 channels takes 0.91 of the
/// time, of 64 to 64 and the 3x3 stem 0.97, of 256 to 1024 1.00.
constexpr int kGemmRows = 32 * kTileRows;
/// Up to so many rows stay in L1 while all weights pass: `Kernels::gemm` takes them through all of
/// its panels, panels outermost, and `run_gemm` hands it all panels in one call.
constexpr int kFewRows = 16;

/// A run of `quads` * 4 source bytes and the packed weights they meet: one tap, or several that are
/// adjacent in the source as well as in the panel.
struct GemmRun {
  int64_t src_offset;     // bytes, relative to a row's first tap
  int64_t weight_offset;  // bytes inside a packed panel
  int64_t quads;
};

/// Excess of a panel's clipped weights (`Kernels::clip`), for the quads that have any.
struct GemmExcess {
  struct Quad {
    int64_t src_offset;     // bytes, as in GemmRun
    int64_t weight_offset;  // bytes, in `weight`
  };
  const Quad* quads;
  int64_t num_quads;
  const int8_t* weight;
};

/// Software-prefetch policy of a tile: nothing, or its own weights ahead of their use.
/// kNextPanelsL1/L2: tile n of the row loop prefetches panel n of the next panels.
enum Prefetch : int { kNone, kOwnWeights, kNextPanelsL1, kNextPanelsL2 };

/// How `gemm` cuts a call into tiles, where `plans_tiles`; all zeros: plain tiles without
/// prefetches. No plan changes a result.
struct TilePlan {
  /// Of up to kFewRows rows. Streams (Note [Streamed weights]); eight panels; three of more rows.
  enum FewRows : uint8_t { kPlain, kStreamed, kFewStreams, kWide, kTall };
  FewRows few_rows;
  /// Of more rows: bit n where n full panels are pipelined (Note [Pipelined tiles]), and whether
  /// the others have tiles with their sums written out (gemm_short.h), if there are any.
  uint8_t pipelined;
  bool is_short;
  Prefetch prefetch, rest_prefetch;  // of four panels, of fewer
};
/// Quads of one run, and of each of three whose weights follow one another, with short tiles.
constexpr int64_t kShortQuads[] = {4, 6, 8, 10, 12, 16, 24}, kShortQuadsOfThree = 3;
/// Sums of a pipelined tile: whole rows, and whole vectors of bytes. With 20 sums, of five rows, 64
/// inputs take 1.03 of the time without pipelining.
constexpr int pipelined_sums(int panels) { return panels == 4 ? 16 : 12; }
/// Sums whose epilogue runs beside one quad. With two, layers of 32 to 60 inputs are pipelined,
/// too: four panels are 1.01 to 1.05x faster, with a residual 1.04 to 1.15x, but three or two
/// panels 0.93 to 1.00x.
constexpr int ends_per_quad(int panels) { return panels == 4 ? 2 : 1; }

/// dst[row][n] = epilogue(n, acc_init[n] + sum over runs and k of src[row][run][k] *
/// weight[n][run][k])
///
/// src is u8, or s8 read as u8 by flipping the sign bit (`flip`, Note [Compensation] in
/// ops/gemm/gemm.h). Rows come as offsets because a convolution is a matmul with scattered rows. No
/// byte outside a run is read.
struct GemmTile {
  const uint8_t* src;
  const int64_t* row_offset;  // [rows] bytes
  const int64_t* dst_offset;  // [rows] elements, of channel 0
  int rows;                   // 1..kGemmRows
  bool flip;
  /// src is what `Kernels::widen_src` made: `flip` is done, all offsets in it count widened bytes.
  bool widened;
  const GemmRun* runs;
  int num_runs;
  const int8_t* weight;      // first panel
  int64_t panel_stride;      // bytes of a packed panel (before widening)
  const GemmExcess* excess;  // gemm_narrow: [panels], or null where the weights are not clipped
  int panels;
  int panels_behind;        // those that follow in `weight`, and are next; 0 where others are
  int channel;              // first channel of the first panel, in dst and in the epilogue's arrays
  int channels;             // valid channels in these panels
  const int32_t* acc_init;  // [panels * 16], for `channel` onwards
  // clang-format off
  /// Quads of a group where the panels are those of several, which have as many inputs as outputs,
  /// else 0. Then src is that of `channel`, and a run is one tap, or quads of one, of each group.
  ///
  ///   1, 2  small groups (Note [Conv packings] in ops/gemm/packing.h); where `channels` is less
  ///         than 16, those before `channel` exist
  ///   4, 8  gemm_groups: groups of one or two whole panels
  // clang-format on
  int group_quads;
  TilePlan plan;
};

/// Rows times panels of 4-bit weights, in groups along k; the last may be shorter:
///
///   sum[g] = the sum over k in group g of src[row][k] * (code[n][k] - zero[n][g])
///   acc = 0, then acc = fma(float(sum[g]), scale[n][g], acc) for each g in order
///   dst[row][n] = acc * src_scale[row] + bias[n], rounded twice; one NaN stands for all
///
/// A panel's 64 bytes at position j have the codes of k = 8 j to 8 j + 3 in their low halves, four
/// for each channel, and those of the next four k in their high halves. Where `has_zeros`, a lane
/// of `params` is one group: zero point in the low 16 bits, scale as bfloat16 in the high ones.
/// Else zero points are 8, and a lane has the scales of two groups, the first in the low bits.
struct Int4Tile {
  const int8_t* src;       // [rows][k], zeros behind the layer's own k
  const int32_t* sums;     // [rows][groups]: of src
  const float* src_scale;  // [rows]
  int64_t rows;
  int64_t k, group;  // multiples of 8
  int64_t groups;
  const int8_t* weight;   // [panels][k / 8][16][4]
  const int32_t* params;  // [panels][groups, or half as many, rounded up][16]
  bool has_zeros;
  const float* bias;  // null: 0
  int panels;
  int64_t channels;  // valid in these panels
  float* dst;
  int64_t dst_stride;  // values
};

/// Up to 16 channels of a matrix of bytes, to be packed: one of the strides is 1.
struct PanelSource {
  const uint8_t* data;
  int64_t k_stride, channel_stride;  // bytes
  int64_t k;
  int channels;
  bool flip;  // u8 packed as value - 128
};

/// Entries of gemm/gemm.cpp.
struct GemmKernels {
  /// Bytes a packed weight byte occupies for `gemm`: 1, or 2 where weights are
  /// widened to 16 bits first.
  int widening;
  /// `gemm` has all the tiles of TilePlan, and takes those that it is told.
  bool plans_tiles = false;
  void (*gemm)(const GemmTile&, const Epilogue&);
  /// Exact only for panels whose pair bound is at most 128, as clipped ones, to
  /// whose products it adds those of `excess`, on tiers with `clip`; reads packed
  /// weights as they are. Null where `gemm` already does.
  void (*gemm_narrow)(const GemmTile&, const Epilogue&) = nullptr;
  /// `gemm` with packed weights as they are, widened in registers once for each
  /// tile of rows: for few rows. Null where `gemm` reads them, and on `avx512`.
  void (*gemm_split)(const GemmTile&, const Epilogue&) = nullptr;
  /// The same as `gemm` for the panels of several groups; null where `gemm`
  /// takes them one by one.
  void (*gemm_groups)(const GemmTile&, const Epilogue&) = nullptr;
};

/// Entries of gemm/panels.cpp.
struct PanelKernels {
  /// Rows times panels of 4-bit weights.
  void (*gemm_int4)(const Int4Tile&);
  /// Widens `bytes` packed weights for `gemm`. Null when `widening` is 1.
  void (*widen)(const int8_t* packed, int64_t bytes, int8_t* dst) = nullptr;
  /// Packed weights as the sum of clipped ones, whose pairs fit 16-bit sums,
  /// and of their excess, which no odd byte has: that of the even bytes, as
  /// 16-bit values, is written for the quads that have any, `index` says for
  /// which. Returns how many; all three have room for `quads`, and entries past
  /// the returned count may be overwritten. Null where `gemm_split` is.
  int64_t (*clip)(const int8_t* packed, int64_t quads, int8_t* clipped, int8_t* excess,
                  int64_t* index) = nullptr;
  /// Widens the rows of a tile for `gemm`, their runs side by side; s8 become
  /// u8 (`flip`). Null where that does not pay.
  void (*widen_src)(const GemmTile&, uint8_t* dst) = nullptr;
  /// acc_init[n] = bias[n] - zero_point * sum over taps of
  /// compensation[tap][n]; bias may be null.
  void (*compensate)(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                     const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init);
  /// dst[ceil(k/4)][16][4], zeros where there is nothing; sums[16] over k.
  void (*pack_panel)(const PanelSource&, int8_t* dst, int32_t* sums);
  /// The sum of u8 values, or of s8 values + 128 (`flip`).
  int32_t (*sum_bytes)(const uint8_t* src, int64_t size, bool flip);
};

}  // namespace torchq
