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
#include "kernels/table.h"

namespace torchq {
constinit const Kernels kReferenceKernels = {
    .isa = "reference",
    .widening = 1,
    .rnn_widening = 1,
    .matrix = nullptr,
    .gemm = &gemm,
    .gemm_narrow = nullptr,
    .gemm_split = nullptr,
    .gemm_groups = nullptr,
    .gemm_int4 = &gemm_int4,
    .small_groups = &small_groups,
    .small_groups_narrow = nullptr,
    .widen = nullptr,
    .clip = nullptr,
    .widen_src = nullptr,
    .compensate = &compensate,
    .pack_panel = &pack_panel,
    .sum_bytes = &sum_bytes,
    .why_no_slide = nullptr,
    .depthwise_bytes = &depthwise_bytes,
    .depthwise = &depthwise,
    .max_pool = &max_pool,
    .avg_pool = &avg_pool,
    .convert = &convert,
    .add = &add,
    .mul = &mul,
    .lookup = &lookup,
    .rnn_input = &rnn_input,
    .rnn_step = &rnn_step,
    .rnn_pieces = nullptr,
    .quantize_row = &quantize_row,
    .epilogue_row = &epilogue_row,
    .row_range = &row_range,
    .softmax = &softmax,
    .moments = &moments,
    .row_moments = &row_moments,
    .affine = &affine,
    .blend = &blend,
    .reduce = &reduce,
    .quantize_symmetric = &quantize_symmetric,
    .attention_weights = &attention_weights,
    .attention_means = &attention_means,
    .embedding = &embedding,
    .embedding_bag = &embedding_bag,
};
}  // namespace torchq
