// SPDX-License-Identifier: Apache-2.0
// A gemm on a matrix unit, for those that `run_gemm` hands to it.
#pragma once

#include "kernels/amx/contract.h"
#include "ops/gemm/gemm_problem.h"

namespace torchq {

/// Returns the reason why the tier's matrix unit does not run the problem, or null.
const char* why_not_matrix_unit(const GemmProblem& problem, const Kernels& tier);
/// Returns true if one region is better than many: padding adds less work than small regions leave
/// empty in a matrix unit's tiles. `group_quads`: of all panels of a group; `adjacent`: rows start
/// at adjacent pixels, and can be read in place.
bool prefers_one_region(const Kernels& tier, int64_t rows, int64_t group_quads, bool adjacent);

/// Returns true if copying the channels of each group side by side pays: `taps` adjacent taps then
/// are one of `runs` runs; `rows` of an image.
bool prefers_groups_apart(const Kernels& tier, int64_t rows, int64_t runs, int64_t taps,
                          int64_t tap_quads);

void run_on_matrix_unit(const GemmProblem& problem, const Epilogue& epilogue,
                        const MatrixUnit& unit);

}  // namespace torchq
