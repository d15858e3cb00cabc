// SPDX-License-Identifier: Apache-2.0
// The verbose log: its level, and kernels that were not taken.
#pragma once

namespace torchq {

/// What TORCHQ_VERBOSE asks for, read once: 0, 1 or 2. Raises ValueError for anything else.
int verbosity();

/// Whether anybody reads what `log_rejected` says.
bool logs_kernel_choice();

/// Prints "torchq,dispatch,<kernel>,<why>" where it `logs_kernel_choice`; not for null, which is no
/// reason. The line of the op that runs comes behind those of its kernels.
void log_rejected(const char* kernel, const char* why);

}  // namespace torchq
