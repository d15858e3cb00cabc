// SPDX-License-Identifier: Apache-2.0
// The choices that a gemm makes: kernel, form of the weights, blocking and shares of threads. All
// of them are made here; drivers carry them out, and the verbose log prints them.
#pragma once

#include "ops/gemm/gemm_matrix.h"
#include "ops/gemm/gemm_problem.h"
#include "runtime/verbose.h"

namespace torchq {

/// Form in which a tier multiplies weights: packed bytes by one instruction, or by two where all
/// pairs fit 16 bits; clipped bytes where few pairs do not; 16-bit values, made by each tile or
/// once.
enum class Weights { kBytes, kNarrow, kClipped, kSplit, kWidened };

struct GemmChoice {
  const char* kernel;
  /// Null: the matrix unit.
  void (*run)(const GemmTile&, const Epilogue&);
  Weights weights;
  /// The problem's groups as the kernel takes them: those that share tiles count as one.
  int groups, group_channels, panels_per_group, group_quads;
  /// Vectors: panels of a full block, and blocks of a group. Blocks are outermost where the weights
  /// of one are worth keeping.
  int block_panels, blocks_per_group;
  bool blocks_outer;
  /// Threads' shares: parts of all panels (or blocks) times parts of all rows.
  int panel_parts, row_parts;
  /// Rows are copied as 16-bit values once for all panels of a block.
  bool widens_rows;
  /// Calls of the kernel have a TilePlan.
  bool plans_tiles;
  /// Matrix unit: how it reads each region's rows.
  c10::SmallVector<Lines, 9> lines;
  Reasons reasons;

  bool copies_weights() const {
    return weights == Weights::kWidened || weights == Weights::kClipped;
  }
  /// Prints "torchq,choice,..." and the reasons if they are logged; the tiles are those of a
  /// region's first rows.
  void log(const GemmProblem& p, const Epilogue& epilogue) const;
};
GemmChoice choose(const GemmProblem& p, const Kernels& tier);

/// Returns the tiles of one call of `gemm`, for a tier that plans them.
TilePlan plan_tiles(const GemmTile& t, const Epilogue& epilogue);

/// Returns true if one region is better than many: padding adds less work than small regions leave
/// empty in a matrix unit's tiles. `group_quads`: of all panels of a group; `adjacent`: rows start
/// at adjacent pixels, and can be read in place.
bool prefers_one_region(const Kernels& tier, int64_t rows, int64_t group_quads, bool adjacent);

/// Returns true if copying the channels of each group side by side pays: `taps` adjacent taps then
/// are one of `runs` runs; `rows` of an image.
bool prefers_groups_apart(const Kernels& tier, int64_t rows, int64_t runs, int64_t taps,
                          int64_t tap_quads);

}  // namespace torchq
