// SPDX-License-Identifier: Apache-2.0
//
// What this machine can do, for benchmarks/peak.py: loops of one instruction each, on any number of
// threads at once. Every loop names the CPU feature it needs, so the file builds without -m flags
// and runs on any x86-64.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr long kRepeats = 256;  // iterations of a loop between two looks at the time

#define TORCHQ_ACCUMULATORS_12 "0,1,2,3,4,5,6,7,8,9,10,11"
#define TORCHQ_CLOBBERS                                                                    \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

/// 64 additions, each of which waits for the one before: 64 cycles. Not of a constant, because
/// recent Intel cores fold those while renaming.
void clock_loop(const char*, size_t) {
  long sum = 0;
  const long one = 1;
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept 64\n add %1, %0\n .endr" : "+r"(sum) : "r"(one));
  }
}

/// 12 independent sums hide a latency of 5 cycles at two instructions a cycle.
__attribute__((target("avx512f"))) void vnni_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept 4\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n vpdpbusd %%zmm14, %%zmm15, %%zmm\\n\n .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx512f"))) void avx512_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept 4\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n vpmaddwd %%zmm14, %%zmm15, %%zmm13\n vpaddd %%zmm13, %%zmm\\n, %%zmm\\n\n"
                 " .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx2"))) void avx2_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept 4\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n vpmaddwd %%ymm14, %%ymm15, %%ymm13\n vpaddd %%ymm13, %%ymm\\n, %%ymm\\n\n"
                 " .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx2"))) void vnni256_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept 4\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n %{vex%} vpdpbusd %%ymm14, %%ymm15, %%ymm\\n\n .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

/// Six sums of 16 x 16, each product of which takes 16 cycles and has a latency of 52.
void amx_loop(const char*, size_t) {
  struct alignas(64) {
    unsigned char palette = 1, reserved[15] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config));
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".irp n,0,1,2,3,4,5\n tdpbusd %%tmm7, %%tmm6, %%tmm\\n\n .endr" ::);
  }
  asm volatile("tilerelease" ::);
}

/// Reads `bytes`, a multiple of 512.
__attribute__((target("avx512f"))) void read512_loop(const char* data, size_t bytes) {
  for (const char* end = data + bytes; data < end; data += 512) {
    asm volatile(".irp n,0,1,2,3,4,5,6,7\n vmovdqa64 64*\\n(%0), %%zmm\\n\n .endr" ::"r"(data)
                 : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx2"))) void read256_loop(const char* data, size_t bytes) {
  for (const char* end = data + bytes; data < end; data += 512) {
    asm volatile(
        ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n vmovdqa 32*\\n(%0), %%ymm\\n\n"
        " .endr" ::"r"(data)
        : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

struct Loop {
  const char* name;
  void (*run)(const char* data, size_t bytes);
  double units;  // cycles or MACs a call; 0: the bytes read
  bool (*supported)();
};

bool any_cpu() { return true; }
bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool has_avx512() { return __builtin_cpu_supports("avx512bw"); }
bool has_vnni256() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
/// Asks Linux for the tile registers.
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx >> 24 & 3) == 3 &&
         syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
bool has_avx2() { return __builtin_cpu_supports("avx2"); }

constexpr Loop kLoops[] = {
    {"clock", clock_loop, 64 * kRepeats, any_cpu},
    {"vnni", vnni_loop, 4 * 12 * 64 * kRepeats, has_vnni},
    {"vnni256", vnni256_loop, 4 * 12 * 32 * kRepeats, has_vnni256},
    {"amx", amx_loop, 6 * 16 * 16 * 64 * kRepeats, has_amx},
    {"avx512", avx512_loop, 4 * 12 * 32 * kRepeats, has_avx512},
    {"avx2", avx2_loop, 4 * 12 * 16 * kRepeats, has_avx2},
    {"read512", read512_loop, 0, has_avx512},
    {"read256", read256_loop, 0, has_avx2},
};

/// Units a second over one window of at least `seconds`.
double rate(const Loop& loop, double seconds, const char* data, size_t bytes) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::chrono::duration<double> elapsed{0};
  double units = 0;
  // A look at the time costs as much as reading 4 KB of L1.
  const int calls = loop.units > 0 ? 1 : static_cast<int>(1 + (1 << 20) / bytes);
  while (elapsed.count() < seconds) {
    for (int call = 0; call < calls; ++call) loop.run(data, bytes);
    units += calls * (loop.units > 0 ? loop.units : static_cast<double>(bytes));
    elapsed = Clock::now() - start;
  }
  return units / elapsed.count();
}

/// `windows` windows of one thread, each begun together with those of the other threads.
void worker(const Loop& loop, int threads, double seconds, int windows, size_t bytes,
            std::atomic<int>& arrived, double* out) {
  const std::unique_ptr<char, decltype(&std::free)> data(
      static_cast<char*>(std::aligned_alloc(4096, bytes + 4096)), std::free);
  std::memset(data.get(), 1, bytes);
  loop.run(data.get(), bytes);
  for (int window = 0; window < windows; ++window) {
    ++arrived;
    while (arrived < threads * (window + 1)) continue;
    out[window] = rate(loop, seconds, data.get(), bytes);
  }
}

}  // namespace

/// Fills out[thread * windows + window] with units a second: cycles ("clock"), MACs ("vnni",
/// "vnni256", "amx", "avx512", "avx2") or bytes ("read512", "read256", each thread its own `bytes`,
/// a multiple of 4096). Returns 0, or -1 if this CPU lacks the instructions.
extern "C" int torchq_rates(const char* name, int threads, double seconds, int windows, long bytes,
                            double* out) {
  const Loop* loop = nullptr;
  for (const Loop& candidate : kLoops) {
    if (std::strcmp(candidate.name, name) == 0) loop = &candidate;
  }
  if (loop == nullptr || !loop->supported()) return -1;
  std::atomic<int> arrived{0};
  const auto run = [&](int thread) {
    worker(*loop, threads, seconds, windows, static_cast<size_t>(bytes), arrived,
           out + static_cast<long>(thread) * windows);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
  return 0;
}
