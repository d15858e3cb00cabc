// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu.h"

#include <c10/util/Exception.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <cstring>
#include <string>

namespace torchq {
namespace {

/// The cores of one row: `family` and `model`, as CPUID counts them, or the implementer and part
/// number of an Arm core.
struct Cores {
  const char* vendor;
  unsigned family, first_model, last_model;
  const char* name;
};

// Of models that are not listed the last row of their vendor and family decides, or "unknown".
constexpr Cores kCores[] = {
    {"AuthenticAMD", 0x19, 0x00, 0x0f, "zen3"},
    {"AuthenticAMD", 0x19, 0x10, 0x1f, "zen4"},
    {"AuthenticAMD", 0x19, 0x20, 0x5f, "zen3"},
    {"AuthenticAMD", 0x19, 0x60, 0xff, "zen4"},
    {"AuthenticAMD", 0x1a, 0x00, 0xff, "zen5"},
    {"GenuineIntel", 0x06, 0x6a, 0x6c, "icelake"},
    {"GenuineIntel", 0x06, 0x97, 0x9a, "alderlake"},
    {"GenuineIntel", 0x06, 0xb7, 0xbf, "alderlake"},
    {"GenuineIntel", 0x06, 0x8f, 0x8f, "sapphirerapids"},
    {"GenuineIntel", 0x06, 0xad, 0xae, "graniterapids"},
    {"GenuineIntel", 0x06, 0xcf, 0xcf, "emeraldrapids"},
    {"Arm", 0x41, 0xd0c, 0xd0c, "neoverse_n1"},
    {"Arm", 0x41, 0xd40, 0xd40, "neoverse_v1"},
    {"Arm", 0x41, 0xd4f, 0xd4f, "neoverse_v2"},
};

// Rows that are like another one have not been measured themselves. Zen 3 and Alder Lake run no
// tier that reads these numbers; emulated tiers do.
constexpr int64_t kKb = 1024;
constexpr CpuTuning kZen4 = {.name = "zen4",
                             .prefetch_distance = 3072,
                             .gains_from_l1 = false,
                             .gains_from_streams = true,
                             .gains_from_few_streams = false,
                             .pipelined_bytes = 128 * kKb};
constexpr CpuTuning kZen5 = {.name = "zen5",
                             .prefetch_distance = 0,
                             .gains_from_l1 = false,
                             .gains_from_streams = true,
                             .gains_from_few_streams = true,
                             .pipelined_bytes = 128 * kKb};
constexpr CpuTuning kEmeraldRapids = {.name = "emeraldrapids",
                                      .prefetch_distance = 512,
                                      .gains_from_l1 = true,
                                      .gains_from_streams = false,
                                      .gains_from_few_streams = false,
                                      .pipelined_bytes = 0};
constexpr CpuTuning kUnknown = {.name = "unknown",
                                .prefetch_distance = 0,
                                .gains_from_l1 = false,
                                .gains_from_streams = false,
                                .gains_from_few_streams = false,
                                .pipelined_bytes = 0};

constexpr CpuTuning like(CpuTuning row, const char* name) {
  row.name = name;
  return row;
}

constexpr CpuTuning kRows[] = {
    like(kZen4, "zen3"),
    kZen4,
    kZen5,
    like(kEmeraldRapids, "icelake"),
    like(kEmeraldRapids, "alderlake"),
    like(kEmeraldRapids, "sapphirerapids"),
    kEmeraldRapids,
    like(kEmeraldRapids, "graniterapids"),
    like(kUnknown, "neoverse_n1"),
    like(kUnknown, "neoverse_v1"),
    like(kUnknown, "neoverse_v2"),
    kUnknown,
};

struct Core {
  std::string vendor;
  unsigned family, model;
};

#if defined(__x86_64__)
Core this_core() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  char vendor[13] = {};
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return {"", 0, 0};
  std::memcpy(vendor, &ebx, 4);
  std::memcpy(vendor + 4, &edx, 4);
  std::memcpy(vendor + 8, &ecx, 4);
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const unsigned base = (eax >> 8) & 15;
  const unsigned family = base == 15 ? base + ((eax >> 20) & 255) : base;
  const unsigned model = ((eax >> 4) & 15) | ((eax >> 12) & 0xf0);
  return {vendor, family, model};
}
#elif defined(__aarch64__)
/// The kernel emulates the register for processes where it says so.
Core this_core() {
  if ((getauxval(AT_HWCAP) & HWCAP_CPUID) == 0) return {"", 0, 0};
  uint64_t midr = 0;
  asm("mrs %0, MIDR_EL1" : "=r"(midr));
  return {"Arm", static_cast<unsigned>(midr >> 24) & 0xff,
          static_cast<unsigned>(midr >> 4) & 0xfff};
}
#else
Core this_core() { return {"", 0, 0}; }
#endif

const char* name_of(const Core& core) {
  const char* nearest = "unknown";
  for (const Cores& row : kCores) {
    if (core.vendor != row.vendor || core.family != row.family) continue;
    if (core.model >= row.first_model && core.model <= row.last_model) return row.name;
    nearest = row.name;
  }
  return nearest;
}

}  // namespace

constinit const CpuTuning* cpu_tuning = &kUnknown;

const CpuTuning& choose_cpu_tuning() {
  const char* asked = std::getenv("TORCHQ_CPU");
  const bool is_asked = asked != nullptr && *asked != '\0';
  const std::string name = is_asked ? asked : name_of(this_core());
  std::string known;
  for (const CpuTuning& row : kRows) {
    if (name == row.name) return *(cpu_tuning = &row);
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  TORCH_CHECK_VALUE(false, "torchq: TORCHQ_CPU must be one of ", known, ", got ", name,
                    ". Leave it unset to take the row of this CPU.");
}

}  // namespace torchq
