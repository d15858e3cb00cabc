// SPDX-License-Identifier: Apache-2.0
// The post-op text, its parameters, and the epilogue made of them.
//
// clang-format off
// Note [Folded and float chains]
// A chain of sums, linears, per-channel adds and multiplies that ends in at most one relu or clip
// is an affine map of the accumulator and the sum sources, followed by a clamp. It *folds*:
// everything is multiplied out in double, rounded to float32 once, and the kernel computes
// y = fma(acc, M, B), y = fma(old, S, y), clamp, in registers. Any other chain is *interpreted* in
// real units on a float tile, one float32 rounding per step. `post_op_params` holds the numbers of
// either form, N being the channels:
//
//   folded       [dst_zero_point] [S of each sum: N] [lo: N] [hi: N]    lo, hi: if a clip ends it
//   interpreted  [dst_zero_point] [values of each binary: N] [1 / dst_scale: N]
//                values: of masks 0 and 2; 1 / dst_scale: if dst is an integer
//
// `post_op_srcs` holds the tensors that vary per call, in the order of the chain: the source of each
// sum, the operand of a binary or prelu with any other mask, the condition of a select.
// clang-format on
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <limits>
#include <optional>
#include <string_view>

#include "kernels/table.h"

namespace torchq {

/// Kernels count the channels of a result in 32 bits.
constexpr int64_t kMaxChannels = std::numeric_limits<int32_t>::max() - 64;

struct PostOp {
  enum Kind { kSum, kEltwise, kBinary };
  Kind kind;
  Eltwise eltwise = {};
  Binary binary = {};
  float scale = 1;                  // sum
  int32_t zero_point = 0;           // sum
  int mask = 0;                     // binary
  std::optional<DType> dtype = {};  // sum: of its source; binary: of its operand

  bool is(Eltwise::Alg alg) const { return kind == kEltwise && eltwise.alg == alg; }
  bool is(Binary alg) const { return kind == kBinary && binary == alg; }
  /// Returns true if the operand is in post_op_params: one value (mask 0) or one per channel (mask
  /// 2).
  bool has_values() const { return kind == kBinary && (mask == 0 || mask == 2); }
  bool per_channel() const { return mask == 2; }
  /// Number of tensors from post_op_srcs.
  int sources() const { return !has_values() * (kind != kEltwise) + is(Binary::select); }
  /// The same in ops in real units (ops/rows/real.h), where post_op_params does not exist.
  int operands() const { return (kind != kEltwise) + is(Binary::select); }
};

struct Chain {
  c10::SmallVector<PostOp, 4> ops;
  int sums = 0;     // sums
  int values = 0;   // binaries whose operand is in post_op_params
  int sources = 0;  // tensors in post_op_srcs
  bool folds = true;

  bool ends_in(Eltwise::Alg alg) const { return !ops.empty() && ops.back().is(alg); }
  /// Numbers in post_op_params for N channels.
  int64_t num_params(int64_t channels, DType dst) const;
};

// clang-format off
/// Reads post-ops joined by '+', each one of
///
///   sum[:scale[:zero_point[:dtype]]]    eltwise_<alg>[:alpha[:beta[:scale]]]
///   binary_<alg>:mask[:dtype]           prelu:mask
///
/// ValueError for what does not parse.
// clang-format on
Chain parse_post_ops(const char* op, std::string_view text);

/// The shape of a binary's operand: dst's dims where the mask selects them, 1 elsewhere. `rows`:
/// see EpilogueBuilder::Args.
c10::SmallVector<int64_t, 5> operand_sizes(const char* op, c10::string_view post_ops,
                                           const PostOp& post_op, const at::Tensor& dst, bool rows);

/// Raises unless post_op_srcs[i] is a dense CPU tensor of this dtype and shape, and may have this
/// zero point.
void check_post_op_src(const char* op, c10::string_view post_ops, size_t i, const at::Tensor& src,
                       DType expected, c10::IntArrayRef sizes, const at::Tensor& dst,
                       int32_t zero_point);

/// The tensor, or null.
inline const at::Tensor* pointer_to(const std::optional<at::Tensor>& t) {
  return t.has_value() ? &*t : nullptr;
}

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
    /// Masks index (rows, channels) of a dst of (rows..., channels), rather than dst's dims.
    bool rows = false;
    /// Zero points of the weights, int32, one per channel, and their factors: the sums of (q - z),
    /// int32 of dst's shape but for `groups` channels. Null: `acc` has them already.
    const at::Tensor* weight_zero_point = nullptr;
    const at::Tensor* row_sums = nullptr;
    int64_t groups = 1;
    /// Byte table applied to dst after the epilogue (ops/pointwise/byte_table.h), or null.
    const at::Tensor* table = nullptr;
  };
  EpilogueBuilder(const Args& args, const at::Tensor& dst);
  /// A chain of nothing, to float32.
  EpilogueBuilder(const float* multiplier, const float* offset, float* dst) {
    epilogue_.mode = Epilogue::kFolded;
    epilogue_.dst_dtype = DType::f32;
    epilogue_.dst = dst;
    epilogue_.multiplier = multiplier;
    epilogue_.offset = offset;
  }
  const Epilogue& get() const { return epilogue_; }
  /// Sets the terms of Note [Weight zero points]: row_terms [rows][groups], channel_terms
  /// [channels].
  void subtract(const int32_t* row_terms, const int32_t* channel_terms, int64_t channels,
                int64_t groups);
  /// Sets Epilogue::row_scale and row_bias.
  void scale_rows(const float* row_scale, const float* row_bias, int64_t channels) {
    epilogue_.row_scale = row_scale;
    epilogue_.row_bias = row_bias;
    epilogue_.channels = static_cast<int>(channels);
  }

 private:
  void read(const Args& args, const at::Tensor& dst);
  void add_sources(const Args& args, const at::Tensor& dst, const Chain& chain);
  void add_source(const Args& args, const at::Tensor& dst, DType expected, c10::IntArrayRef sizes,
                  float scale, int32_t zero_point);
  void read_folded(const Args& args, const Chain& chain, const float* params);
  void read_bounds(const float* lo, const float* hi, int64_t channels);
  void read_chain(const Args& args, const Chain& chain, const float* params);
  void add_weight_zero_point(const Args& args, const at::Tensor& dst);
  bool needs_guard(const Args& args) const;

  Epilogue epilogue_{};
  c10::SmallVector<SumSrc, 2> sums_;
  c10::SmallVector<ChainOp, 8> ops_;
  c10::SmallVector<at::Tensor, 2> srcs_;  // made to match dst's strides
};

}  // namespace torchq
