// SPDX-License-Identifier: Apache-2.0
// The verbose log: its level, and kernels that were not taken.
#pragma once

namespace torchq {

/// Returns TORCHQ_VERBOSE, read once: 0, 1 or 2. Raises ValueError for anything else.
int verbosity();

/// Returns true if `Reasons` are logged (TORCHQ_VERBOSE=2).
bool logs_kernel_choice();

/// Kernels and forms that a choice left out, and why; all text is literals.
class Reasons {
 public:
  /// A null `why` is none.
  void add(const char* kernel, const char* why) {
    if (why != nullptr) reasons_[size_++] = {kernel, why};
  }
  /// Prints "torchq,dispatch,<kernel>,<why>" for each if `logs_kernel_choice`. The op's own line
  /// follows those of its choices.
  void log() const;

 private:
  static constexpr int kMost = 4;
  struct Reason {
    const char *kernel, *why;
  };
  Reason reasons_[kMost];
  int size_ = 0;
};

}  // namespace torchq
