// SPDX-License-Identifier: Apache-2.0
// The verbose log: its level, and kernels that were not taken.
#pragma once

namespace torchq {

/// What TORCHQ_VERBOSE asks for, read once: 0, 1 or 2. Raises ValueError for anything else.
int verbosity();

/// Whether anybody reads what `rejects` says.
bool explains();

/// Prints "torchq,dispatch,<kernel>,<why>" where it `explains`; not for null, which is no reason.
/// The line of the op that runs comes behind those of its kernels.
void rejects(const char* kernel, const char* why);

}  // namespace torchq
