// SPDX-License-Identifier: Apache-2.0
// Which core runs: chooses the row of numbers that kernels are tuned by (kernels/cpu_tuning.h).
#pragma once

#include "kernels/cpu_tuning.h"

namespace torchq {

/// The row of this machine's core, or the one that TORCHQ_CPU names, which tests and benchmarks
/// set. Raises ValueError where there is no such row.
const CpuTuning& choose_cpu_tuning();

}  // namespace torchq
