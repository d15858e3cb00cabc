// SPDX-License-Identifier: Apache-2.0
// Tier selection: detected once, selectable per thread, captured when an op starts.
#pragma once

#include <string>
#include <vector>

#include "kernels/table.h"
#include "runtime/float_mode.h"

namespace torchq {

/// The selected tier's kernels: use_isa() of this thread, else TORCHQ_ISA, else the best this CPU
/// has.
const Kernels& kernels();

/// Tiers this CPU can run, slowest first.
std::vector<std::string> supported_isas();

/// The name of the row that kernels are tuned by, such as "zen4" (kernels/cpu_tuning.h).
std::string cpu_name();

/// Selects a tier for this thread ("" for the default) and returns what was selected before.
/// Raises ValueError for a tier this CPU lacks.
std::string select_isa(const std::string& isa);

// Note [Checks alone]
// A fake kernel calls the op itself on stand-ins: CPU tensors with the dtypes, shapes and strides
// of the arguments, and ones or zeros in them. The op checks its arguments and returns a result
// that nothing wrote. So a traced program raises what the op raises, in the same words. What is
// wrong with values alone shows at run time.

/// Returns true while ops of this thread check their arguments and compute nothing.
bool only_checks();

/// Switches that on or off, and returns what it was.
bool set_only_checks(bool on);

/// Around one op call, from its first line: sets the floating-point mode, notes which kernel ran,
/// measures the call while timing is on, and prints a line for it under TORCHQ_VERBOSE=1.
class OpTrace {
 public:
  explicit OpTrace(const char* op);
  ~OpTrace();
  OpTrace(const OpTrace&) = delete;
  OpTrace& operator=(const OpTrace&) = delete;

  /// `kernel` is a literal such as "gemm"; the tier's name is added.
  void ran(const Kernels& tier, const char* kernel);
  /// Text for the verbose line; `describe` is called only where that is printed.
  template <class Describe>
  void describe(const Describe& describe) {
    if (verbose_) description_ = describe();
  }

 private:
  FloatMode mode_;
  const char* op_;
  bool verbose_, timed_;
  double start_ = 0;
  std::string description_;
};

/// "gemm:avx512_vnni": the kernel and tier of this thread's last op.
std::string last_kernel();

/// Switches timing on or off for this thread, and returns what it was.
bool set_timing(bool on);

/// Microseconds of this thread's last op while timing was on, from the op's entry to its return.
double last_microseconds();

}  // namespace torchq
