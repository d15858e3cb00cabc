// SPDX-License-Identifier: Apache-2.0
//
// What this machine can do, for benchmarks/peak.py: loops of one instruction each, on any number of
// threads at once. Every loop names the CPU feature it needs, so the file builds without -m flags
// and runs on any x86-64.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

namespace {

/// Iterations of a loop between two looks at the time: so many that entering, leaving and looking
/// do not count.
constexpr long kRepeats = 1024;

/// What Emerald Rapids reaches of two VPDPBUSD a cycle: 12 sums 4 times an iteration 99.1 %, 16
/// times 100 %, and 10 sums 82 % although their latency is 5 cycles.
constexpr int kUnroll = 16;
#define TORCHQ_UNROLL "16"

#define TORCHQ_ACCUMULATORS_12 "0,1,2,3,4,5,6,7,8,9,10,11"
#define TORCHQ_ACCUMULATORS_14 TORCHQ_ACCUMULATORS_12 ",12,13"
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

__attribute__((target("avx512f"))) void vnni_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept " TORCHQ_UNROLL "\n .irp n," TORCHQ_ACCUMULATORS_14
                 "\n vpdpbusd %%zmm14, %%zmm15, %%zmm\\n\n .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx512f"))) void avx512_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept " TORCHQ_UNROLL "\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n vpmaddwd %%zmm14, %%zmm15, %%zmm13\n vpaddd %%zmm13, %%zmm\\n, %%zmm\\n\n"
                 " .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx2"))) void avx2_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept " TORCHQ_UNROLL "\n .irp n," TORCHQ_ACCUMULATORS_12
                 "\n vpmaddwd %%ymm14, %%ymm15, %%ymm13\n vpaddd %%ymm13, %%ymm\\n, %%ymm\\n\n"
                 " .endr\n .endr" ::
                     : TORCHQ_CLOBBERS);
  }
  asm volatile("vzeroupper" ::: TORCHQ_CLOBBERS);
}

__attribute__((target("avx2"))) void vnni256_loop(const char*, size_t) {
  for (long i = 0; i < kRepeats; ++i) {
    asm volatile(".rept " TORCHQ_UNROLL "\n .irp n," TORCHQ_ACCUMULATORS_12
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

constexpr double kCycles = 64 * kRepeats, kVnniMacs = kUnroll * 14 * 64 * kRepeats;

constexpr Loop kLoops[] = {
    {"clock", clock_loop, kCycles, any_cpu},
    {"vnni256", vnni256_loop, kUnroll * 12 * 32 * kRepeats, has_vnni256},
    {"amx", amx_loop, 6 * 16 * 16 * 64 * kRepeats, has_amx},
    {"avx512", avx512_loop, kUnroll * 12 * 32 * kRepeats, has_avx512},
    {"avx2", avx2_loop, kUnroll * 12 * 16 * kRepeats, has_avx2},
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

/// Runs body(thread) on as many threads, the caller's among them.
template <class Body>
void on_threads(int threads, const Body& body) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
  body(0);
  for (std::thread& other : others) other.join();
}

/// Bursts of VNNI and of additions in turn, about 70 and 20 us: the clock of one is that of the
/// other. (It changes by up to 10 % within milliseconds where others use the same CPU.) Additions
/// that a time slice of another job met, which are few, do not count.
void vnni_window(double seconds, double* macs, double* clock) {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  constexpr int kBurst = 2;
  std::vector<double> times;
  Seconds elapsed{0};
  double units = 0;
  for (auto start = Clock::now(); elapsed.count() < seconds;) {
    for (int call = 0; call < kBurst; ++call) vnni_loop(nullptr, 0);
    const auto middle = Clock::now();
    clock_loop(nullptr, 0);
    const auto end = Clock::now();
    elapsed += middle - start;
    units += kBurst * kVnniMacs;
    times.push_back(Seconds(end - middle).count());
    start = end;
  }
  std::sort(times.begin(), times.end());
  const auto met = std::upper_bound(times.begin(), times.end(), 1.1 * times[times.size() / 2]);
  *macs = units / elapsed.count();
  *clock =
      kCycles * static_cast<double>(met - times.begin()) / std::accumulate(times.begin(), met, 0.0);
}

}  // namespace

/// What the VNNI loop reaches, in MACs a second, and the clock meanwhile: both
/// [thread * windows + window]. Returns 0, or -1 if this CPU lacks the instructions.
extern "C" int torchq_vnni(int threads, double seconds, int windows, double* macs, double* clock) {
  if (!has_vnni()) return -1;
  std::atomic<int> arrived{0};
  on_threads(threads, [&](int thread) {
    for (int window = 0; window < windows; ++window) {
      ++arrived;
      while (arrived < threads * (window + 1)) continue;
      const long at = static_cast<long>(thread) * windows + window;
      vnni_window(seconds, macs + at, clock + at);
    }
  });
  return 0;
}

/// Fills out[thread * windows + window] with units a second: cycles ("clock"), MACs
/// ("vnni256", "amx", "avx512", "avx2") or bytes ("read512", "read256", each thread its own
/// `bytes`, a multiple of 4096). Returns 0, or -1 if this CPU lacks the instructions.
extern "C" int torchq_rates(const char* name, int threads, double seconds, int windows, long bytes,
                            double* out) {
  const Loop* loop = nullptr;
  for (const Loop& candidate : kLoops) {
    if (std::strcmp(candidate.name, name) == 0) loop = &candidate;
  }
  if (loop == nullptr || !loop->supported()) return -1;
  std::atomic<int> arrived{0};
  on_threads(threads, [&](int thread) {
    worker(*loop, threads, seconds, windows, static_cast<size_t>(bytes), arrived,
           out + static_cast<long>(thread) * windows);
  });
  return 0;
}
