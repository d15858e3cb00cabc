// SPDX-License-Identifier: Apache-2.0
// Which tier runs: detected once, selectable per thread, captured when an op starts.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"

namespace torchq {

/// The selected tier's kernels: use_isa() of this thread, else TORCHQ_ISA, else the best this CPU
/// has.
const Kernels& kernels();

/// Tiers this CPU can run, slowest first.
std::vector<std::string> supported_isas();

/// Selects a tier for this thread ("" for the default) and returns what was selected before.
/// Raises ValueError for a tier this CPU lacks.
std::string select_isa(const std::string& isa);

/// Notes which kernel an op ran; TORCHQ_VERBOSE=1 prints a line for it when the op ends.
class OpTrace {
 public:
  explicit OpTrace(const char* op);
  ~OpTrace();
  OpTrace(const OpTrace&) = delete;
  OpTrace& operator=(const OpTrace&) = delete;

  /// `kernel` is a literal such as "gemm"; the tier's name is added.
  void ran(const Kernels& tier, const char* kernel);
  bool verbose() const { return verbose_; }
  void describe(std::string text) { description_ = std::move(text); }

 private:
  const char* op_;
  bool verbose_;
  double start_;
  std::string description_;
};

/// "gemm:avx512_vnni": the kernel and tier of this thread's last op.
std::string last_kernel();

}  // namespace torchq
