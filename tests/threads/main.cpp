// SPDX-License-Identifier: Apache-2.0
// Drives what threads share, for ThreadSanitizer: the team's barrier, recurrent layers, scratch
// memory and the cache of results.
#include <ATen/Parallel.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "ops/rnn/choose.h"
#include "runtime/result_allocator.h"
#include "runtime/scratch.h"
#include "runtime/thread_team.h"

namespace torchq {
namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

/// Runs `body(thread)` on four threads.
void on_threads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

/// Between barriers each part writes its own value and reads those of the step before.
void check_barrier(int region_threads) {
  constexpr int kParts = 4, kRounds = 200;
  at::region_threads = region_threads;
  TeamBarrier barrier(kParts);
  int64_t values[2][kParts] = {};
  parallel_team(kParts, [&](int begin, int end) {
    int64_t phase = 0;
    for (int step = 0; step < kRounds; ++step) {
      int64_t sum = 0;
      for (const int64_t value : values[step % 2]) sum += value;
      expect(sum == int64_t{kParts} * step, "a part sees what all wrote before the barrier");
      for (int part = begin; part < end; ++part) values[(step + 1) % 2][part] = step + 1;
      barrier.meet(end - begin, phase);
    }
  });
  at::region_threads = 4;
}

std::mt19937 generator(0);

template <class T>
std::vector<T> random_values(int64_t size, double low, double high) {
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<T> values(static_cast<size_t>(size));
  for (T& value : values) value = static_cast<T>(uniform(generator));
  return values;
}

/// A packed matrix of random weights for all directions.
struct Weight {
  int64_t quads, lanes;
  std::vector<int8_t> packed = random_values<int8_t>(lanes * quads * kQuad, -128, 128);
  std::vector<int32_t> compensation = random_values<int32_t>(lanes, -2000, 2000);
  std::vector<float> multiplier = random_values<float>(lanes, 1e-5, 1e-4);

  Weight(int64_t inputs, int64_t all_lanes) : quads(inputs / kQuad), lanes(all_lanes) {}
  RnnWeight view() const {
    return {packed.data(), compensation.data(), multiplier.data(), quads, false};
  }
};

/// One layer with as many threads as it asks for must give the bits of one thread.
void check_rnn(RnnCell cell, int gates, int directions, bool dynamic) {
  constexpr int64_t kUnits = 128, kInputs = 64, kSteps = 6, kBatch = 4, kRows = kSteps * kBatch;
  const int64_t lanes = directions * gates * kUnits, states = directions * kBatch * kUnits;
  const Weight input(kInputs, lanes), recurrent(kUnits, lanes);
  const auto bias = random_values<float>(lanes, -1, 1), extra = random_values<float>(lanes, -1, 1);
  const auto src = random_values<uint8_t>(kRows * kInputs, 0, 256);
  const auto row_scale = random_values<float>(kRows, 0.5, 2);
  const std::vector<int32_t> row_zero_point(kRows, 128);
  std::vector<int64_t> row_offset, rows(kSteps, kBatch), first;
  for (int64_t r = 0; r < kRows; ++r) row_offset.push_back(r * kInputs);
  for (int64_t t = 0; t < kSteps; ++t) first.push_back(t * kBatch);

  RnnLayer layer{};
  layer.cell = cell;
  layer.directions = directions;
  layer.inputs = kInputs;
  layer.hidden = kUnits;
  layer.gates = gates;
  layer.dynamic = dynamic;
  layer.src = src.data();
  layer.row_offset = row_offset.data();
  layer.row_scale = dynamic ? row_scale.data() : nullptr;
  layer.row_zero_point = row_zero_point.data();
  layer.src_zero_point = 128;
  layer.steps = kSteps;
  layer.batch = kBatch;
  layer.rows = rows.data();
  layer.first = first.data();
  layer.input = input.view();
  layer.recurrent = recurrent.view();
  layer.bias = bias.data();
  layer.extra = cell == RnnCell::kGru ? extra.data() : nullptr;
  layer.state_scale = layer.hidden_scale = {1.0f / 127, 128};
  layer.state_dtype = DType::u8;
  layer.hi = 255;
  layer.dst_dtype = layer.h_n_dtype = DType::f32;

  const auto results = [&](int threads) {
    std::vector<float> dst(static_cast<size_t>(kSteps * states)), h_n(states), c_n(states);
    layer.dst = dst.data();
    layer.h_n = h_n.data();
    layer.c_n = cell == RnnCell::kLstm ? c_n.data() : nullptr;
    at::num_threads = threads;
    const Kernels tier = make_kernels<Tier::reference>("reference");
    run_rnn(layer, choose(layer, tier), tier);
    at::num_threads = 4;
    dst.insert(dst.end(), h_n.begin(), h_n.end());
    dst.insert(dst.end(), c_n.begin(), c_n.end());
    return dst;
  };
  const std::vector<float> one = results(1), four = results(4);
  expect(std::memcmp(one.data(), four.data(), one.size() * sizeof(float)) == 0,
         "a recurrent layer has the same bits on four threads");
  expect(one != std::vector<float>(one.size(), one[0]), "its results differ from each other");
}

/// Frames of growing size while another thread asks for the memory back; the threads of a second
/// round take over the arenas of the first. Threads yield where others should not get in between.
void check_scratch() {
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> at_work = 3;
    on_threads([&](int thread) {
      while (thread == 0 && at_work.load(std::memory_order_relaxed) > 0) {
        expect(release_scratch() >= 0 && scratch_bytes() >= 0, "bytes are not negative");
        std::this_thread::yield();
      }
      for (int64_t i = 0; thread != 0 && i < 100; ++i) {
        const ScratchFrame outer;
        ScratchFrame frame;
        const int64_t size = 1000 * (i % 40 + 1) * thread;
        int64_t* values = frame.take<int64_t>(size);
        for (int64_t j = 0; j < size; j += 100) values[j] = thread * 1000 + i;
        std::this_thread::yield();
        for (int64_t j = 0; j < size; j += 100)
          expect(values[j] == thread * 1000 + i, "scratch is a thread's own");
      }
      at_work.fetch_sub(1, std::memory_order_relaxed);
    });
  }
  release_scratch();
  expect(scratch_bytes() == 0, "nothing is left");
}

/// Results that one thread makes and another one frees, while others ask for the memory back.
void check_results() {
  std::mutex mutex;
  std::vector<at::Tensor> given;
  on_threads([&](int thread) {
    for (int i = 0; i < 200; ++i) {
      const int64_t size = 20'000 + 5'000 * (i % 7);
      at::Tensor dst = empty_dst({size}, at::kByte);
      uint8_t* values = dst.mutable_data_ptr<uint8_t>();
      for (int64_t j = 0; j < size; j += 64) values[j] = static_cast<uint8_t>(thread);
      std::this_thread::yield();
      for (int64_t j = 0; j < size; j += 64) expect(values[j] == thread, "a result is its own");
      if (i % 50 == 0) expect(release_idle() >= 0 && idle_bytes() >= 0, "bytes are not negative");
      const std::lock_guard<std::mutex> lock(mutex);
      if (i % 3 == 0) given.push_back(dst);
      if (i % 5 == 0) given.clear();
    }
  });
}

}  // namespace
}  // namespace torchq

int main() {
  using namespace torchq;
  for (const int threads : {1, 2, 3, 4}) check_barrier(threads);
  for (const bool dynamic : {false, true}) {
    for (const int directions : {1, 2}) {
      check_rnn(RnnCell::kLstm, 4, directions, dynamic);
      check_rnn(RnnCell::kGru, 3, directions, dynamic);
      check_rnn(RnnCell::kGruVanilla, 3, directions, dynamic);
    }
  }
  check_scratch();
  check_results();
  std::puts("threads: no data race");
}
