// SPDX-License-Identifier: Apache-2.0
// The post-op text, what it folds to, and the epilogue it becomes.
//
// Note [Folded and float chains]
// A chain of sums, linears, per-channel adds and multiplies that ends in at most one relu or clip
// is an affine map of the accumulator and the sum sources, followed by a clamp. It *folds*:
// everything is multiplied out in double, rounded to float32 once, and the kernel computes y =
// fma(acc, M, B), y = fma(old, S, y), clamp, in registers. Any other chain is *interpreted* in real
// units on a float tile, one float32 rounding per step. `post_op_params` holds the numbers of
// either form:
//   folded:       [dst_zero_point] [S of each sum: N values] [lo: N, hi: N, if the chain ends in a
//   clip] interpreted:  [dst_zero_point] [values of each binary: N values] [1 / dst_scale: N, if
//   dst is an integer]
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string_view>

#include "kernels/table.h"

namespace torchq {

struct PostOp {
  enum Kind { kSum, kRelu, kClip, kLinear, kAdd, kMul };
  Kind kind;
  float alpha = 0, beta = 0, scale = 1;  // sum: scale
  int32_t zero_point = 0;                // sum
  bool per_channel = false;              // add, mul: mask 2 rather than 0
  std::optional<DType> dtype = {};       // sum: of its source
};

struct Chain {
  c10::SmallVector<PostOp, 4> ops;
  int sums = 0, binaries = 0;
  bool folds = true;

  bool ends_in(PostOp::Kind kind) const { return !ops.empty() && ops.back().kind == kind; }
  /// Numbers in post_op_params for N channels.
  int64_t num_params(int64_t channels, DType dst) const;
};

/// `sum[:scale[:zero_point[:dtype]]]`, `eltwise_relu|clip|linear[:alpha[:beta[:scale]]]`,
/// `binary_add|mul:mask`, joined by '+'. ValueError for what does not parse, NotImplementedError
/// for what is well-formed but has no kernel.
Chain parse_post_ops(const char* op, std::string_view text);

/// Validated epilogue of one op call. Keeps pointers into the tensors it was given.
class EpilogueBuilder {
 public:
  struct Args {
    const char* op;
    int64_t channels;
    const at::Tensor& multiplier;
    const at::Tensor& offset;
    c10::string_view post_ops;
    const at::Tensor& post_op_params;
    at::TensorList post_op_srcs;
    /// Bound on |accumulator|.
    double max_acc;
  };
  EpilogueBuilder(const Args& args, const at::Tensor& dst);
  const Epilogue& get() const { return epilogue_; }

 private:
  void add_sums(const Args& args, const at::Tensor& dst, const Chain& chain);
  const float* read_folded(const Args& args, const Chain& chain, const float* params);
  const float* read_chain(const Args& args, const Chain& chain, const float* params);
  bool needs_guard(const Args& args) const;

  Epilogue epilogue_{};
  c10::SmallVector<SumSrc, 2> sums_;
  c10::SmallVector<ChainOp, 8> ops_;
  c10::SmallVector<at::Tensor, 2> srcs_;  // made to match dst's strides
};

}  // namespace torchq
