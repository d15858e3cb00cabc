// SPDX-License-Identifier: Apache-2.0
// The `reference` tier: every kernel in plain loops, and the fallback on other architectures.
// <family>/reference.h states what each entry computes.
#include "kernels/attention/reference.h"

#include "kernels/conv/reference.h"
#include "kernels/embedding/reference.h"
#include "kernels/epilogue/reference.h"
#include "kernels/gemm/reference.h"
#include "kernels/pointwise/reference.h"
#include "kernels/pool/reference.h"
#include "kernels/rnn/reference.h"
#include "kernels/rows/reference.h"

namespace torchq {
namespace {
constexpr Tier kTier = Tier::reference;
}  // namespace

template <>
constinit const GemmKernels Table<kTier, GemmKernels>::entries = {
    .widening = 1,
    .gemm = &gemm,
};

template <>
constinit const PanelKernels Table<kTier, PanelKernels>::entries = {
    .gemm_int4 = &gemm_int4,
    .compensate = &compensate,
    .pack_panel = &pack_panel,
    .sum_bytes = &sum_bytes,
};

template <>
constinit const SmallGroupKernels Table<kTier, SmallGroupKernels>::entries = {
    .small_groups = &small_groups,
};

template <>
constinit const DepthwiseKernels Table<kTier, DepthwiseKernels>::entries = {
    .depthwise_bytes = &depthwise_bytes,
    .depthwise = &depthwise,
};

template <>
constinit const PoolKernels Table<kTier, PoolKernels>::entries = {
    .max_pool = &max_pool,
    .avg_pool = &avg_pool,
};

template <>
constinit const PointwiseKernels Table<kTier, PointwiseKernels>::entries = {
    .convert = &convert,
    .add = &add,
    .mul = &mul,
    .lookup = &lookup,
};

template <>
constinit const RnnKernels Table<kTier, RnnKernels>::entries = {
    .rnn_widening = 1,
    .rnn_input = &rnn_input,
    .rnn_step = &rnn_step,
    .quantize_row = &quantize_row,
};

template <>
constinit const RowKernels Table<kTier, RowKernels>::entries = {
    .epilogue_row = &epilogue_row,
    .row_range = &row_range,
    .softmax = &softmax,
    .row_deviations = &row_deviations,
    .moments = &moments,
    .row_moments = &row_moments,
    .affine = &affine,
    .blend = &blend,
    .reduce = &reduce,
};

template <>
constinit const AttentionKernels Table<kTier, AttentionKernels>::entries = {
    .quantize_symmetric = &quantize_symmetric,
    .attention_weights = &attention_weights,
    .attention_means = &attention_means,
    .compressed_attention = &compressed_attention,
};

template <>
constinit const EmbeddingKernels Table<kTier, EmbeddingKernels>::entries = {
    .embedding = &embedding,
    .embedding_bag = &embedding_bag,
};
}  // namespace torchq
