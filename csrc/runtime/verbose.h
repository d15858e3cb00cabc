// SPDX-License-Identifier: Apache-2.0
// The verbose log: its level, and kernels that were not taken.
#pragma once

namespace torchq {

/// Returns TORCHQ_VERBOSE, read once: 0, 1 or 2. Raises ValueError for anything else.
int verbosity();

/// Returns true if `log_rejected` prints (TORCHQ_VERBOSE=2).
bool logs_kernel_choice();

/// Prints "torchq,dispatch,<kernel>,<why>" if `logs_kernel_choice` and `why` is not null. The op's
/// own line follows those of its kernels.
void log_rejected(const char* kernel, const char* why);

}  // namespace torchq
