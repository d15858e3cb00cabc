// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cfenv>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchq {

/// Round to nearest even, no flush to zero, while alive; then whatever the thread had before.
/// Neither fesetround nor torch.set_flush_denormal changes a result, a parsed number or a check.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked, nearest, no FTZ, no DAZ
  unsigned saved_;
#else
  FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
 public:
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace torchq
