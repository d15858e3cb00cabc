// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit, for those that `run_gemm` hands to it.
#pragma once

#include "kernels/amx/contract.h"
#include "ops/gemm/gemm_problem.h"

namespace torchq {

/// Why the tier's matrix unit does not run the problem; null where it does.
const char* why_not_matrix_unit(const GemmProblem& problem, const Kernels& tier);
/// Whether the tier would rather have one class of rows than many: what padding adds to the work is
/// less than what small regions leave empty in a matrix unit's tiles. `group_quads` are those of
/// all panels of a group; `adjacent`: rows start at adjacent pixels, and can be read in place.
bool prefers_one_region(const Kernels& tier, int64_t rows, int64_t group_quads, bool adjacent);

/// Whether the tier would rather have the channels of each group side by side, so that `taps`
/// adjacent taps are one of `runs` runs; `rows` of an image.
bool prefers_groups_apart(const Kernels& tier, int64_t rows, int64_t runs, int64_t taps,
                          int64_t tap_quads);

void run_on_matrix_unit(const GemmProblem& problem, const Epilogue& epilogue,
                        const MatrixUnit& unit);

}  // namespace torchq
