// SPDX-License-Identifier: Apache-2.0
// Runs every check on every tier of this CPU, and counts the cases of each entry of the table.
#include <signal.h>

#include <cstdio>
#include <map>

#include "check.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace torchq {
namespace {

uint64_t state = 88172645463325252u;
const char* current_tier = "";
const char* current_entry = "";
std::string current_parameters;
std::map<std::string, int> cases;
int failures = 0;

void report_crash(int) {
  std::printf("%s, %s: crashed: %s\n", current_tier, current_entry, current_parameters.c_str());
  std::fflush(stdout);
  _exit(1);
}

std::vector<Kernels> tiers() {
#if defined(__aarch64__)
  constexpr unsigned long kI8mm = 1ul << 13;  // HWCAP2
  std::vector<Kernels> list = {make_kernels<Tier::neon>("neon")};
  const auto add = [&](const Kernels& tier, bool supported) {
    if (supported) return list.push_back(tier);
    std::printf("%s: not on this CPU\n", tier.isa);
  };
  add(make_kernels<Tier::neon_dotprod>("neon_dotprod"), getauxval(AT_HWCAP) & HWCAP_ASIMDDP);
  add(make_kernels<Tier::neon_i8mm>("neon_i8mm"), getauxval(AT_HWCAP2) & kI8mm);
  return list;
#else
  return {make_kernels<Tier::avx2>("avx2")};
#endif
}

/// Returns the names of the entries that the tier has and no check compares.
std::string left_out(const Kernels& k) {
  std::string names;
  const auto add = [&](const char* name, bool exists) {
    if (exists && cases[name] == 0) names += std::string(" ") + name;
  };
#define ENTRY(name) add(#name, k.name != nullptr)
  // isa, two widenings, matrix, why_no_slide and depthwise_bytes are no entries.
  static_assert(sizeof(Kernels) == (38 + 6) * sizeof(void*), "an ENTRY is missing below");
  ENTRY(gemm), ENTRY(gemm_narrow), ENTRY(gemm_split), ENTRY(gemm_groups), ENTRY(gemm_int4),
      ENTRY(small_groups), ENTRY(small_groups_narrow), ENTRY(widen), ENTRY(clip), ENTRY(widen_src),
      ENTRY(compensate), ENTRY(pack_panel), ENTRY(sum_bytes), ENTRY(depthwise), ENTRY(max_pool),
      ENTRY(avg_pool), ENTRY(convert), ENTRY(add), ENTRY(mul), ENTRY(lookup), ENTRY(rnn_input),
      ENTRY(rnn_step), ENTRY(quantize_row), ENTRY(epilogue_row), ENTRY(row_range), ENTRY(softmax),
      ENTRY(row_deviations), ENTRY(moments), ENTRY(row_moments), ENTRY(affine), ENTRY(blend),
      ENTRY(reduce), ENTRY(quantize_symmetric), ENTRY(attention_weights), ENTRY(attention_means),
      ENTRY(compressed_attention), ENTRY(embedding), ENTRY(embedding_bag);
#undef ENTRY
  return names;
}

}  // namespace

uint64_t random_bits() {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return (state * 2685821657736338717u) >> 16;
}

int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1));
}

float within(float bound) {
  return bound * (static_cast<float>(between(0, 1 << 24)) * 0x1p-23f - 1.0f);
}

float any_float(float bound) {
  using Limits = std::numeric_limits<float>;
  if (!chance(12)) return within(bound);
  return pick({Limits::quiet_NaN(), -Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(),
               Limits::max(), Limits::denorm_min(), -3 * Limits::denorm_min(), Limits::min(), 0.0f,
               -0.0f, 0x1p31f, -0x1p31f, 0x1.fffffep30f, 0.5f, -1.5f, 2.5f});
}

Buffer<uint8_t> random_values(int64_t size, DType dtype) {
  if (dtype != DType::f32) return random_bytes(size * size_of(dtype));
  const Buffer<float> values = any_floats(size, 300.0f);
  Buffer<uint8_t> bytes(values.bytes());
  std::memcpy(bytes.data(), values.data(), static_cast<size_t>(values.bytes()));
  return bytes;
}

void begin_case(const char* entry, const std::string& parameters) {
  current_entry = entry;
  current_parameters = parameters;
  ++cases[entry];
}

void expect_same(const char* what, const void* reference, const void* tested, int64_t bytes) {
  const auto *expected = static_cast<const uint8_t*>(reference),
             *got = static_cast<const uint8_t*>(tested);
  int64_t i = 0;
  while (i < bytes && expected[i] == got[i]) ++i;
  if (i == bytes) return;
  std::printf("%s, %s: byte %lld of %s is %d, not %d: %s\n", current_tier, current_entry,
              static_cast<long long>(i), what, got[i], expected[i], current_parameters.c_str());
  ++failures;
}

Buffer<int8_t> widened(const Kernels& k, int widening, const Buffer<int8_t>& packed) {
  if (widening == 1) return packed;
  Buffer<int8_t> wide(packed.size() * widening);
  k.widen(packed.data(), packed.size(), wide.data());
  return wide;
}

int check_all() {
  struct sigaction action{};
  action.sa_handler = &report_crash;
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL}) sigaction(signal, &action, nullptr);
  for (const Kernels& tier : tiers()) {
    current_tier = tier.isa;
    cases.clear();
    for (const auto check : {&check_gemm, &check_conv, &check_pointwise, &check_rnn, &check_rows,
                             &check_attention, &check_embedding}) {
      check(tier);
    }
    std::printf("%s:", tier.isa);
    for (const auto& [entry, count] : cases) {
      if (count > 0) std::printf(" %s %d", entry.c_str(), count);
    }
    const std::string missing = left_out(tier);
    std::printf("\n%s: %s%s\n", tier.isa,
                missing.empty() ? "every entry is compared" : "not compared:", missing.c_str());
#if defined(__aarch64__)
    failures += !missing.empty();
#endif
  }
  std::printf(failures == 0 ? "all bits agree with the reference\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace torchq

int main() { return torchq::check_all(); }
