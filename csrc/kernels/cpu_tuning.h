// SPDX-License-Identifier: Apache-2.0
// All numbers that depend on a CPU, with their unit and where they were measured; tile sizes stay
// with their kernels. What differs between cores stands in rows (CpuTuning), one for each of them.
// Those without a machine follow from 32 KB of L1 and 1 MB of L2. To tune for a new CPU, change
// this file alone.
#pragma once

#include <stdint.h>

namespace torchq::tuning {

// Bytes that stay in L1.

/// Weights of a tile, beside its rows and the next weights.
constexpr int64_t kTileWeightBytes = 24 * 1024;
/// Weights that a matrix unit reads through L1 (1x1 of 256 to 64 channels, 16 KB: 39.2 to 37.2 us;
/// of 256 to 128: 72.6 to 78.7). Larger ones bypass L1, where they would displace the rows (at
/// K = 1024: 104 cycles for 4 products through L1, 72 past it). Emerald Rapids.
constexpr int64_t kNearWeightBytes = 16 * 1024;
/// Half of the smallest L1: columns of depthwise windows, whose rows need the other half.
constexpr int64_t kStashBytes = 16 * 1024;
/// Rows of a group of sliding windows: the second half of the vectors finds them in L1.
constexpr int64_t kSlideBytes = 28 * 1024;
/// Rows that are normalized together, and sources that one call of a binary op reads again.
constexpr int64_t kRowBytesInL1 = 16 * 1024;
/// Rows gathered at a time for a matrix unit, if the weights stay in L2; if they do not.
constexpr int64_t kGatheredBytes = 32 * 1024, kManyGatheredBytes = 512 * 1024;

// Bytes that stay in L2.

/// Weights up to half a core's L2 stay there while tiles stream past.
constexpr int64_t kResidentWeightBytes = 512 * 1024;
/// Source rows that pass through the depthwise kernel at a time, chunk after chunk of channels.
constexpr int64_t kDepthwiseBytes = 256 * 1024;
/// Scores and weights of the rows that a thread works on: with keys and values they stay in L2.
constexpr int64_t kAttentionBytes = 256 * 1024;
/// Gates of a thread's input products that wait for their steps: half of a core's L2.
constexpr int64_t kRnnInputBytes = 512 * 1024;
/// Rows widened to 16 bits, beside the weights of a block.
constexpr int64_t kWidenedRowBytes = 128 * 1024;
/// Columns of depthwise windows. Beyond it a stretch of them is a single pixel.
constexpr int64_t kMaxStashBytes = 1024 * 1024;

// Bytes of weights, by the cache that they come from.

/// Layers with fewer gain nothing from prefetching, wherever the weights are.
constexpr int64_t kFewWeightBytes = 64 * 1024;
/// Fewer do not repay the cost of streams.
constexpr int64_t kStreamedMinBytes = 64 * 1024;
/// Layers between these sizes read their weights from L3. There Zen 5 is faster with fewer streams
/// that prefetch; Zen 4 takes 1.3 times as long with one. Of larger layers some weights come from
/// memory, and fewer streams are slower.
constexpr int64_t kStreamedL2Bytes = int64_t{1} << 20, kStreamedL3Bytes = int64_t{6} << 20;
/// Streams of weights for one or two rows, and for more. Out of memory one row takes 0.89 to 0.96
/// of the time with a fourth stream, out of caches 0.95 to 1.01 (Zen 4). Few streams out of L3: how
/// many for each, and the distance in bytes at which each prefetches.
constexpr int kStreams[] = {4, 3}, kFewStreams[] = {1, 2}, kFewStreamsDistance[] = {8192, 2048};
/// Beyond L2 tiles of three panels save a pass with 9 to 16 rows (`few_rows` in
/// ops/gemm/choose.cpp).
constexpr int64_t kThreePanelBytes = int64_t{1} << 20;
/// Beyond L2 even after a call of the same layer. One tile of a matrix unit's rows does not
/// prefetch them: 16x768->768 takes 9.2 us, with prefetches 12.4 (Emerald Rapids).
constexpr int64_t kFarWeightBytes = 1024 * 1024;
/// Recurrent panels of this size and more, those of 1024 units, are read as one stream: an LSTM
/// takes 0.96 to 0.98 of the time on Zen 4; not measured on Zen 5.
constexpr int64_t kRnnLongPanelBytes = 16 * 1024;
/// Fewest bytes of recurrent weights that gain, as one stream and as two. A GRU of 128 units, 48
/// KB, takes 0.93 of the time as two; an LSTM of 96, 36 KB, 1.00; one of 160, as one stream of 50
/// KB in each of two threads, 1.04. Zen 4.
constexpr int64_t kRnnStreamedMinBytes[] = {64 * 1024, 40 * 1024};

/// Larger embedding tables, those beyond L2, have their rows prefetched this many indices ahead. A
/// million rows of 64 bytes then take 6.6 ns each instead of 20 on one core of a Zen 4; where the
/// table is in a cache, prefetching costs 0.6 ns.
constexpr int64_t kMinPrefetchedTableBytes = 1024 * 1024, kRowPrefetchDistance = 32;

// Rows and quads where one form overtakes another.

/// Rows up to which copies of the weights cost more than they save, clipped ones or 16-bit ones.
/// Measured on Zen 3, against the latter: linear layers of 768x768 take 0.43, 0.60, 0.76 and 0.93
/// of the time with 1, 4, 8 and 16 rows, with 128 rows 1.04; 3x3 of 512 channels, 49 rows, 0.92.
/// Against clipped ones with long tails 16 rows take 0.98 to 1.08, 8 rows 0.82 to 0.9.
constexpr int64_t kSplitBeforeClipped = 16, kSplitBeforeWidened = 64;
/// Work of a sum's epilogue in quads: for 4 rows x 4 panels it takes 38 cycles on Zen 4.
constexpr int64_t kEndQuads = 2;
/// With more regions of a convolution than this, or fewer rows in each, a copy with padding is
/// faster.
constexpr int64_t kMaxRegions = 64, kMinRowsPerRegion = 3;
/// A recurrent layer of batch 1 gains from multiplying later inputs among the products of a step if
/// it has at least a quarter as many inputs as units and at most eight times as many. Zen 4: an
/// LSTM of 256 units takes 1.03 of the time with 40 inputs, 0.90 with 512, 0.98 with 2048; one of
/// 160 units 1.02 with 4096.
constexpr int64_t kMinInputsOfUnits = 4, kMaxInputsPerUnit = 8;
/// Fixed cost of a region in VPDPBUSD: 80 ns on Zen 5.
constexpr double kRegionProducts = 400;
/// Fewer rows are bound by weight bandwidth, and faster without a matrix unit.
constexpr int64_t kMinUnitRows = 8;
/// The same for rows of a recurrent state. Emerald Rapids, 512 units: 8 rows in 0.81 of the time, 6
/// in 0.93, 4 in 1.05.
constexpr int64_t kMinUnitStates = 8;
/// Gathering a row for a matrix unit costs about 100 cycles and pays where it meets this many quads
/// of weights. Emerald Rapids, against VPDPBUSD: 3x3 of 64 to 64 channels, 576 quads, 2.0x; 7x7 of
/// 3 to 64, 168, 0.9x; 1x1 of 144 to 32, 72, 0.7x.
constexpr int64_t kMinGatherQuads = 256;
/// A copy with padding, of which every pixel starts a row that is read in place, pays from fewer
/// on: 3x3 of 16 to 64 channels, 144 quads, 1.6x; of groups of 32, 144, 1.2x to 1.7x, but with a
/// stride of 2 0.8x to 0.9x; of groups of 16, 36, 0.95x. Emerald Rapids.
constexpr int64_t kMinAdjacentQuads = 128;
/// Panels that could multiply a row in the time that it takes to gather it.
constexpr int64_t kGatherPanels = 8;
/// Quads that VPDPBUSD multiplies in the time of a chunk, and in the time in which a unit's sums
/// pass through memory. On Emerald Rapids: 7x7 of 3 to 64 channels, 42 quads in 7 chunks, 1.6x; 3x3
/// of 3 to 32, 9 in 3, 0.9x.
constexpr int64_t kQuadsPerChunk = 2, kQuadsPerUnit = 10;
/// Units of 16 rows that could meet a chunk of a panel in the time that it takes to copy it.
constexpr int64_t kTailUnits = 3;
/// Rows of a batch from which on a recurrent input's weights are read in every step, which costs
/// less than the products' way through memory. Emerald Rapids, 512 units: 64 rows 4 % faster with
/// vectors and 13 % with a matrix unit, 32 rows 3 % with that one; 16 rows are slower.
constexpr int64_t kMinRowsInSteps = 32;

// Threads: work of about 3 us on one core, as long as entering a parallel region takes.

constexpr int64_t kProductGrain = 700'000;      // int8 multiply-accumulates on vectors
constexpr int64_t kMatrixGrain = 8'000'000;     // the same on a matrix unit
constexpr int64_t kStepGrain = 32'000;          // the same per thread and barrier: 0.1 us
constexpr int64_t kCopyGrain = 300'000;         // bytes of pixels
constexpr int64_t kPackRuntimeGrain = 1 << 18;  // bytes of a matrix that is packed in a call
constexpr int64_t kPackGrain = 1 << 16;         // bytes of packed weights, which wait for memory
constexpr int64_t kQuantizeRowGrain = 1 << 17;  // values of rows, and of their ranges
constexpr int64_t kScaleGrain = 1 << 18;        // int32 results of gemm
constexpr int64_t kConvertGrain = 32 * 1024;    // values
constexpr int64_t kEltwiseGrain = 4 * 1024;     // values of a float function
constexpr int64_t kPoolGrain = 100'000;         // values of windows, or that are reduced
constexpr int64_t kRealGrain = 40'000;          // values of a float chain
constexpr int64_t kRoundGrain = 20'000;         // values
constexpr int64_t kEmbeddingGrain = 64 * 1024;  // bytes read and written

/// Turns of a barrier's loop before a thread yields: 20 us on Zen 4, 45 on Emerald Rapids, longer
/// than threads that run are apart.
constexpr int kSpins = 1000;
/// The same where a yield costs a time slice; less than that. Two threads beside two processes that
/// compute, on two cores of Emerald Rapids: an LSTM of 512 units takes 0.8 to 1.7 ms for 32 steps
/// instead of 14 to 21.
constexpr int kMostSpins = 20'000;

}  // namespace torchq::tuning

namespace torchq {

/// What differs between cores. The rows are in runtime/cpu.cpp; those of tiers with AVX-512 and
/// VNNI were measured on Zen 4, Zen 5 and Emerald Rapids. No row changes a result.
struct CpuTuning {
  const char* name;
  /// Distance in bytes at which a tile prefetches its own weights; 0: it does not. Emerald Rapids,
  /// 512 against 0: 1.05 to 1.13x faster from L2 and L3 with 4 to 16 rows, 1.03 to 1.07x with 128
  /// rows and more while the core's other thread is busy, else equal. On Zen 4, 512 loses up to a
  /// quarter from L3. There 3072 gains 5 to 10 % where 6 to 16 rows read 16 MB, nothing from L2,
  /// and costs 1 % with four rows. Zen 5 prefetches the line that the tile reads next.
  int64_t prefetch_distance;
  /// True where prefetching weights that stay in L1 pays.
  bool gains_from_l1;
  /// True where few rows gain from streamed weights (gemm_streamed.h), and from fewer streams that
  /// prefetch, out of L3.
  bool gains_from_streams, gains_from_few_streams;
  /// Largest weights of a pipelined tile (gemm_pipelined.h), in bytes: such tiles read them more
  /// often. 0 on Intel, where conversions and products share their execution ports.
  int64_t pipelined_bytes;
};

/// The row of this CPU, or the one that TORCHQ_CPU names. It is chosen once, when the first op asks
/// for kernels.
extern const CpuTuning* cpu_tuning;

}  // namespace torchq
