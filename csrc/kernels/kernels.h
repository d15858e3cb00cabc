// SPDX-License-Identifier: Apache-2.0
// The table of one ISA. Including this from isa/<name>.cpp instantiates every kernel for it.
#pragma once

#include "kernels/attention/attention.h"
#include "kernels/conv/depthwise.h"
#include "kernels/conv/small_groups.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/clip.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_int4.h"
#include "kernels/gemm/panels.h"
#include "kernels/gemm/widen.h"
#include "kernels/pointwise/elementwise.h"
#include "kernels/pool/pool.h"
#include "kernels/rnn/rnn.h"
#include "kernels/rows/rows.h"

namespace {

template <class Isa>
constexpr Kernels make_kernels() {
  Kernels k{};
  k.isa = Isa::kName;
  k.widening = Isa::kSteps;
  k.rnn_widening = kRnnSteps<Isa>;
  k.gemm = &gemm<Isa, WeightForm::kWhole>;
  if constexpr (kJoinsGroups<Isa>) k.gemm_groups = &gemm_groups<Isa>;
  k.gemm_int4 = &gemm_int4<Isa>;
  k.small_groups = &small_groups<Isa, false>;
  if constexpr (Isa::kHasNarrow) {
    k.gemm_narrow = &gemm<Isa, WeightForm::kNarrow>;
    k.small_groups_narrow = &small_groups<Isa, true>;
  }
  if constexpr (Isa::kSteps > 1) k.widen = &widen<Isa>;
  if constexpr (kHasExcess<Isa>) k.clip = &clip<Isa>;
  if constexpr (Isa::kWidensSrc) k.gemm_split = &gemm<Isa, WeightForm::kSplit>;
  if constexpr (Isa::kWidensSrc) k.widen_src = &widen_src<Isa>;
  k.compensate = &compensate<Isa>;
  k.pack_panel = &pack_panel<Isa>;
  k.sum_bytes = &sum_bytes<Isa>;
  k.why_no_slide = &why_no_slide<Isa>;
  k.depthwise_bytes = &depthwise_bytes<Isa>;
  k.depthwise = &depthwise<Isa>;
  k.max_pool = &max_pool<Isa>;
  k.avg_pool = &avg_pool<Isa>;
  k.convert = &convert<Isa>;
  k.add = &add_rows<Isa>;
  k.mul = &mul_rows<Isa>;
  k.lookup = &lookup<Isa>;
  k.rnn_input = &rnn_input<VectorTiles<Isa>>;
  k.rnn_step = &rnn_step<VectorTiles<Isa>>;
  if constexpr (kHasWide<Isa>) k.rnn_pieces = &rnn_pieces<Isa>;
  k.quantize_row = &quantize_row<Isa>;
  k.epilogue_row = &epilogue_row<Isa>;
  k.row_range = &row_range<Isa>;
  k.softmax = &softmax<Isa>;
  k.moments = &moments<Isa>;
  k.row_moments = &row_moments<Isa>;
  k.affine = &affine<Isa>;
  k.blend = &blend<Isa>;
  k.reduce = &reduce<Isa>;
  k.quantize_symmetric = &quantize_symmetric<Isa>;
  k.attention_weights = &attention_weights<Isa>;
  k.attention_means = &attention_means<Isa>;
  k.embedding = &embedding<Isa>;
  k.embedding_bag = &embedding_bag<Isa>;
  return k;
}

}  // namespace
