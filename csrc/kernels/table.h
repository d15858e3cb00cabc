// SPDX-License-Identifier: Apache-2.0
// The contract between the ops (tensors, checks, threads) and the kernels
// (lanes, tiles): plain structs, in each family's contract.h, and one table of
// function pointers per ISA. Kernels allocate nothing, start no thread, throw
// nothing and include no torch header. Each family's reference.h states what
// its entries compute; every other tier returns the same bits.
#pragma once

#include "kernels/attention/contract.h"
#include "kernels/conv/contract.h"
#include "kernels/epilogue/contract.h"
#include "kernels/gemm/contract.h"
#include "kernels/pointwise/contract.h"
#include "kernels/pool/contract.h"
#include "kernels/rnn/contract.h"
#include "kernels/rows/contract.h"

namespace torchq {

struct EmbeddingBags;
struct EmbeddingRows;
struct MatrixUnit;

struct Kernels {
  const char* isa;
  /// Bytes a packed weight byte occupies for `gemm`: 1, or 2 where weights are
  /// widened to 16 bits first.
  int widening;
  /// The same for `rnn_input` and `rnn_step`.
  int rnn_widening;
  /// Matrix unit (amx/contract.h) that takes over from `gemm` where there are
  /// enough rows; or null.
  const MatrixUnit* matrix;
  void (*gemm)(const GemmTile&, const Epilogue&);
  /// Exact only for panels whose pair bound is at most 128, as clipped ones, to
  /// whose products it adds those of `excess`, where `clip` is not null; reads
  /// packed weights as they are. Null where `gemm` already does.
  void (*gemm_narrow)(const GemmTile&, const Epilogue&);
  /// `gemm` with packed weights as they are, widened in registers once for each
  /// tile of rows: for few rows. Null where `gemm` reads them, and on `avx512`.
  void (*gemm_split)(const GemmTile&, const Epilogue&);
  /// The same as `gemm` for the panels of several groups; null where `gemm`
  /// takes them one by one.
  void (*gemm_groups)(const GemmTile&, const Epilogue&);
  /// Rows times panels of 4-bit weights.
  void (*gemm_int4)(const Int4Tile&);
  /// `gemm` and `gemm_narrow` for small groups: dst[row][n] sums over the
  /// inputs of n's group only.
  void (*small_groups)(const GemmTile&, const Epilogue&);
  void (*small_groups_narrow)(const GemmTile&, const Epilogue&);
  /// Widens `bytes` packed weights for `gemm`. Null when `widening` is 1.
  void (*widen)(const int8_t* packed, int64_t bytes, int8_t* dst);
  /// Packed weights as the sum of clipped ones, whose pairs fit 16-bit sums,
  /// and of their excess, which no odd byte has: that of the even bytes, as
  /// 16-bit values, is written for the quads that have any, `index` says for
  /// which. Returns how many; all three have room for `quads`, of which what is
  /// behind the last may be overwritten. Null where `gemm_narrow` knows no
  /// excess.
  int64_t (*clip)(const int8_t* packed, int64_t quads, int8_t* clipped, int8_t* excess,
                  int64_t* index);
  /// Widens the rows of a tile for `gemm`, their runs side by side; s8 become
  /// u8 (`flip`). Null where that does not pay.
  void (*widen_src)(const GemmTile&, uint8_t* dst);
  /// acc_init[n] = bias[n] - zero_point * sum over taps of
  /// compensation[tap][n]; bias may be null.
  void (*compensate)(const int32_t* compensation, int64_t stride, const int32_t* taps, int num_taps,
                     const int32_t* bias, int32_t zero_point, int64_t n, int32_t* acc_init);
  /// dst[ceil(k/4)][16][4], zeros where there is nothing; sums[16] over k.
  void (*pack_panel)(const PanelSource&, int8_t* dst, int32_t* sums);
  /// The sum of u8 values, or of s8 values + 128 (`flip`).
  int32_t (*sum_bytes)(const uint8_t* src, int64_t size, bool flip);
  /// Returns the reason why windows do not slide along a row, the faster of two strategies, or
  /// null. Null: there is one strategy.
  const char* (*why_no_slide)(const DepthwiseLayer&, const Epilogue&);
  /// Bytes of scratch that `depthwise` needs, aligned to 64.
  int64_t (*depthwise_bytes)(const DepthwiseLayer&);
  void (*depthwise)(const DepthwiseLayer&, const DepthwiseRows&, const Epilogue&, void* scratch);
  void (*max_pool)(const PoolRow&);
  void (*avg_pool)(const PoolRow&);
  void (*convert)(const ConvertRow&);
  void (*add)(const BinaryRows&);
  void (*mul)(const BinaryRows&);
  void (*lookup)(const uint8_t* src, const uint8_t* table, uint8_t* dst, int64_t size);
  void (*rnn_input)(const RnnInput&);
  void (*rnn_step)(const RnnStep&);
  /// Returns the number of pieces of RnnLookahead that a step runs; null: none.
  int64_t (*rnn_pieces)(const RnnStep&);
  void (*quantize_row)(QuantizeRow&);
  /// dst[i] = what the operations of a float chain and its end make of x[i], in
  /// real units; their channel is i, dst and sources begin at e.dst and e.sums.
  /// Overwrites x, which has room for whole panels.
  void (*epilogue_row)(float* x, int64_t size, const Epilogue& e);
  /// The smallest and largest of the values and 0; false, and they are nothing,
  /// where not all values are finite.
  bool (*row_range)(const float* src, int64_t size, float* lo, float* hi);
  void (*softmax)(const SoftmaxRow&);
  void (*moments)(const MomentsRows&);
  /// The sums of adjacent values, and of their squares.
  void (*row_moments)(const uint8_t* src, int64_t size, bool is_signed, int64_t* sum,
                      int64_t* squares);
  void (*affine)(const AffineRows&);
  void (*blend)(const BlendRow&);
  void (*reduce)(const ReduceRows&);
  void (*quantize_symmetric)(const SymmetricRows&);
  void (*attention_weights)(const AttentionRows&);
  void (*attention_means)(const AttentionMeans&);
  /// Each returns the position of an index that is no row, or -1
  /// (embedding/contract.h).
  int64_t (*embedding)(const EmbeddingRows&);
  int64_t (*embedding_bag)(const EmbeddingBags&);
};

extern const Kernels kReferenceKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx2VnniKernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512VnniKernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
extern const Kernels kNeonI8mmKernels;
#endif

}  // namespace torchq
