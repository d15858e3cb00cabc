// SPDX-License-Identifier: Apache-2.0
#include "runtime/dispatch.h"

#include <c10/util/Exception.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "kernels/amx/contract.h"
#include "runtime/cpu.h"
#include "runtime/verbose.h"

namespace torchq {
namespace {

struct Entry {
  Kernels kernels;
  bool supported;
};

#if defined(__x86_64__)
/// The 256-bit VPDPBUSD of CPUs that may lack AVX-512.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 4)) != 0;
}

/// Linux keeps the tile registers' 8 KB out of a thread's state until the process asks for them.
bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;  // CPUID 7.0, EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kTile) == 0 || (edx & kInt8) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#elif defined(__aarch64__)
/// SDOT, of Armv8.4 and of most CPUs of Armv8.2.
bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

/// USDOT, of Armv8.6 and of some CPUs before it.
bool has_i8mm() {
  constexpr unsigned long kI8mm = 1ul << 13;
  return (getauxval(AT_HWCAP2) & kI8mm) != 0;
}
#endif

#ifdef TORCHQ_EMULATED
constexpr bool kEmulated = true;  // all tiers need AVX2 only: tests/emulated
#else
constexpr bool kEmulated = false;
#endif

/// Slowest first; the last supported one is the default.
const std::vector<Entry>& tiers() {
  static const std::vector<Entry> all = [] {
    choose_cpu_tuning();
    std::vector<Entry> list = {{make_kernels<Tier::reference>("reference"), true}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    list.push_back({make_kernels<Tier::avx2>("avx2"), avx2});
    list.push_back(
        {make_kernels<Tier::avx2_vnni>("avx2_vnni"), kEmulated || (avx2 && has_avx_vnni())});
    list.push_back({make_kernels<Tier::avx512>("avx512"), kEmulated || avx512});
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    list.push_back({make_kernels<Tier::avx512_vnni>("avx512_vnni"), kEmulated || vnni});
    Kernels amx = make_kernels<Tier::avx512_vnni>("amx");
    amx.matrix = &kAmx;
    list.push_back({amx, kEmulated || (vnni && has_amx())});
#elif defined(__aarch64__)
    list.push_back({make_kernels<Tier::neon>("neon"), true});
    list.push_back({make_kernels<Tier::neon_dotprod>("neon_dotprod"), has_dotprod()});
    list.push_back({make_kernels<Tier::neon_i8mm>("neon_i8mm"), has_i8mm()});
#endif
    return list;
  }();
  return all;
}

const Kernels* find(const std::string& isa, const char* setting) {
  std::string known;
  for (const Entry& tier : tiers()) {
    if (isa == tier.kernels.isa && tier.supported) return &tier.kernels;
    if (tier.supported) known += (known.empty() ? "" : ", ") + std::string(tier.kernels.isa);
  }
  TORCH_CHECK_VALUE(false, "torchq: ", setting, "=", isa,
                    " is not available here; this CPU supports: ", known, ".");
}

const Kernels* default_kernels() {
  static const Kernels* chosen = []() -> const Kernels* {
    const char* isa = std::getenv("TORCHQ_ISA");
    if (isa != nullptr && *isa != '\0') return find(isa, "TORCHQ_ISA");
    const Kernels* best = nullptr;
    for (const Entry& tier : tiers()) {
      if (tier.supported) best = &tier.kernels;
    }
    return best;
  }();
  return chosen;
}

double now_us() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(time).count();
}

thread_local const Kernels* selected = nullptr;
thread_local const char* last_name = "";
thread_local const char* last_isa = "";
thread_local bool timing = false;
thread_local bool checking = false;
thread_local double last_us = 0;

}  // namespace

const Kernels& kernels() { return selected != nullptr ? *selected : *default_kernels(); }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& tier : tiers()) {
    if (tier.supported) names.emplace_back(tier.kernels.isa);
  }
  return names;
}

std::string cpu_name() {
  tiers();
  return cpu_tuning->name;
}

std::string select_isa(const std::string& isa) {
  const std::string before = selected == nullptr ? "" : selected->isa;
  selected = isa.empty() ? nullptr : find(isa, "isa");
  return before;
}

bool only_checks() { return checking; }

bool set_only_checks(bool on) { return std::exchange(checking, on); }

OpTrace::OpTrace(const char* op)
    : op_(op), verbose_(verbosity() > 0 && !checking), timed_(verbose_ || timing) {
  last_name = last_isa = "";  // an op that has nothing to compute runs no kernel
  if (timed_) start_ = now_us();
}

void OpTrace::ran(const Kernels& tier, const char* kernel) {
  last_name = kernel;
  last_isa = tier.isa;
}

OpTrace::~OpTrace() {
  if (!timed_) return;
  last_us = now_us() - start_;
  if (verbose_) {
    std::printf("torchq,exec,%s,%s,%s,%.4g\n", op_, description_.c_str(), last_kernel().c_str(),
                last_us / 1000);
    std::fflush(stdout);
  }
}

std::string last_kernel() {
  return *last_name == '\0' ? "" : std::string(last_name) + ":" + last_isa;
}

bool set_timing(bool on) { return std::exchange(timing, on); }

double last_microseconds() { return last_us; }

}  // namespace torchq
