// SPDX-License-Identifier: Apache-2.0
// torchq::fold and torchq::fold_output_scales: from readable scales, bias and post-ops to what the
// hot ops take (Note [Folded and float chains] in post_ops.h). Everything in double, rounded to
// float32 once.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "epilogue/post_ops.h"
#include "runtime/checks.h"
#include "runtime/float_mode.h"

namespace torchq {
namespace {

using Folded = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// One value, or one per channel.
class PerChannel {
 public:
  PerChannel(const char* op, const char* arg, const at::Tensor& t, int64_t channels) {
    check_param(op, arg, t, at::kFloat);
    TORCH_CHECK_VALUE(t.numel() == 1 || t.numel() == channels, "torchq.", op, ": ", arg,
                      " must have 1 or ", channels, " values, one per output channel, got ",
                      t.numel(), ".");
    tensor_ = t;
    data_ = t.const_data_ptr<float>();
    step_ = t.numel() == 1 ? 0 : 1;
    size_ = t.numel();
  }
  double operator[](int64_t n) const { return data_[n * step_]; }
  int64_t size() const { return size_; }
  void check(const char* op, const char* arg, bool positive) const {
    for (int64_t i = 0; i < size_; ++i) {
      TORCH_CHECK_VALUE(std::isfinite(data_[i]) && (!positive || data_[i] > 0), "torchq.", op, ": ",
                        arg, " must be ", positive ? "finite and greater than 0" : "finite",
                        ", got ", data_[i], " at index ", i,
                        ". Check the calibration that produced it.");
    }
  }

 private:
  at::Tensor tensor_;
  const float* data_;
  int64_t step_, size_;
};

struct Problem {
  const char* op;
  int64_t channels;
  DType dst_dtype;
  Chain chain;
  at::TensorList values;
  std::vector<int32_t> dst_zero_points{0};  // one, or one per channel

  double dst_zero_point(int64_t n) const {
    return dst_zero_points[dst_zero_points.size() == 1 ? 0 : static_cast<size_t>(n)];
  }
};

/// The affine map one channel's chain multiplies out to.
struct Affine {
  double acc, constant;
  c10::SmallVector<double, 2> sums;
};

void run_chain(const Problem& p, c10::ArrayRef<PerChannel> values, int64_t n, Affine* a) {
  size_t next_value = 0;
  const auto scale_by = [&](double factor) {
    a->acc *= factor;
    a->constant *= factor;
    for (double& sum : a->sums) sum *= factor;
  };
  for (const PostOp& post_op : p.chain.ops) {
    const Eltwise& eltwise = post_op.eltwise;
    if (post_op.kind == PostOp::kSum) {
      a->sums.push_back(post_op.scale);
      a->constant -= double{post_op.scale} * post_op.zero_point;
    } else if (post_op.is(Eltwise::kLinear)) {
      scale_by(double{eltwise.alpha} * eltwise.scale);
      a->constant += double{eltwise.beta} * eltwise.scale;
    } else if (post_op.is(Binary::add)) {
      a->constant += values[next_value++][n];
    } else if (post_op.is(Binary::mul)) {
      scale_by(values[next_value++][n]);
    }  // else the trailing bound
  }
}

/// A bound in real units as the destination's number.
float quantized_bound(const Problem& p, double bound, double dst_scale, int64_t n) {
  if (p.dst_dtype == DType::f32) return static_cast<float>(bound);
  const double q = std::nearbyint(bound / dst_scale + p.dst_zero_point(n));
  const double lo = p.dst_dtype == DType::u8 ? 0 : p.dst_dtype == DType::s8 ? -128 : -2147483648.0;
  const double hi = p.dst_dtype == DType::u8 ? 255 : p.dst_dtype == DType::s8 ? 127 : 2147483647.0;
  return static_cast<float>(std::fmin(std::fmax(q, lo), hi));
}

/// The values of a binary, which may be integers, as the float32 that the chain computes with.
at::Tensor as_float(const char* op, const at::Tensor& value, DType dtype) {
  check_param(op, "post_op_values", value, scalar_type(dtype));
  return value.to(at::kFloat);
}

/// `start(n)` is the map before the post-ops: acc coefficient and constant, in real units.
template <class Start>
Folded fold_with(const Problem& p, const PerChannel& dst_scale, const Start& start) {
  TORCH_CHECK_VALUE(static_cast<int>(p.values.size()) == p.chain.values, "torchq.", p.op,
                    ": post_op_values must have ", p.chain.values,
                    " tensors, one per binary and prelu with mask 0 or 2, got ", p.values.size(),
                    ". Operands with other masks are sources of the op itself.");
  c10::SmallVector<PerChannel, 4> values;
  size_t next_value = 0;
  for (const PostOp& post_op : p.chain.ops) {
    if (!post_op.has_values()) continue;
    const at::Tensor value = as_float(p.op, p.values[next_value++], *post_op.dtype);
    values.emplace_back(p.op, "post_op_values", value, post_op.per_channel() ? p.channels : 1);
    values.back().check(p.op, "post_op_values", false);
  }
  const int64_t n_channels = p.channels;
  at::Tensor multiplier = at::detail::empty_cpu({n_channels}, at::kFloat);
  at::Tensor offset = at::detail::empty_cpu({n_channels}, at::kFloat);
  at::Tensor params =
      at::detail::empty_cpu({p.chain.num_params(n_channels, p.dst_dtype)}, at::kFloat);
  if (only_checks()) return {multiplier, offset, params};
  float* m = multiplier.mutable_data_ptr<float>();
  float* b = offset.mutable_data_ptr<float>();
  float* q = params.mutable_data_ptr<float>();
  if (params.numel() > 0) *q++ = static_cast<float>(p.dst_zero_point(0));
  for (int64_t n = 0; n < n_channels; ++n) {
    Affine a = start(n);
    if (p.chain.folds) {
      run_chain(p, values, n, &a);
      m[n] = static_cast<float>(a.acc / dst_scale[n]);
      b[n] = static_cast<float>(a.constant / dst_scale[n] + p.dst_zero_point(n));
      for (int s = 0; s < p.chain.sums; ++s) {
        const float sum = static_cast<float>(a.sums[static_cast<size_t>(s)] / dst_scale[n]);
        TORCH_CHECK_VALUE(std::isfinite(sum), "torchq.", p.op, ": channel ", n, " folds sum ", s,
                          " to scale ", sum, ", which float32 cannot hold. Check its scales.");
        q[s * n_channels + n] = sum;
      }
      if (p.chain.ends_in(Eltwise::kClip)) {
        const Eltwise& clip = p.chain.ops.back().eltwise;
        q[p.chain.sums * n_channels + n] = quantized_bound(p, clip.alpha, dst_scale[n], n);
        q[(p.chain.sums + 1) * n_channels + n] = quantized_bound(p, clip.beta, dst_scale[n], n);
      }
    } else {
      m[n] = static_cast<float>(a.acc);
      b[n] = static_cast<float>(a.constant);
      for (int i = 0; i < p.chain.values; ++i) {
        q[i * n_channels + n] = static_cast<float>(values[static_cast<size_t>(i)][n]);
      }
      if (p.dst_dtype != DType::f32) {
        const float inverse = static_cast<float>(1.0 / dst_scale[n]);
        TORCH_CHECK_VALUE(std::isfinite(inverse), "torchq.", p.op,
                          ": 1 / dst_scale must be a finite float32, got scale ", dst_scale[n],
                          " of channel ", n, ". Check the calibration that produced it.");
        q[p.chain.values * n_channels + n] = inverse;
      }
    }
    TORCH_CHECK_VALUE(std::isfinite(m[n]) && std::isfinite(b[n]), "torchq.", p.op, ": channel ", n,
                      " folds to multiplier ", m[n], " and offset ", b[n],
                      ", which float32 cannot hold. Check its scales and bias.");
  }
  return {multiplier, offset, params};
}

Problem make_problem(const char* op, int64_t channels, int64_t dst_dtype, c10::string_view post_ops,
                     at::TensorList values) {
  TORCH_CHECK_VALUE(channels >= 0 && channels <= kMaxChannels, "torchq.", op,
                    ": channels must lie in [0, ", kMaxChannels, "], got ", channels, ".");
  return {op, channels, dst_dtype_of(op, dst_dtype),
          parse_post_ops(op, {post_ops.data(), post_ops.size()}), values};
}

/// One zero point, or one per channel. The latter are in the offsets and bounds alone, so nothing
/// may need them later: a chain in real units, a relu's bound, a NaN that a float source brings.
void set_dst_zero_points(Problem* p, const std::optional<at::Tensor>& given) {
  if (!given.has_value() || given->numel() == 1 || p->channels == 1) {
    p->dst_zero_points = {zero_point_of(p->op, "dst_zero_point", given, p->dst_dtype)};
    return;
  }
  check_param(p->op, "dst_zero_point", *given, at::kInt);
  check_numel(p->op, "dst_zero_point", *given, p->channels);
  if (p->channels == 0) {
    p->dst_zero_points = {0};
    return;
  }
  const auto [lo, hi] = zero_point_range(p->dst_dtype);
  const int32_t* values = given->const_data_ptr<int32_t>();
  for (int64_t n = 0; n < p->channels; ++n) {
    TORCH_CHECK_VALUE(values[n] >= lo && values[n] <= hi, "torchq.", p->op,
                      ": dst_zero_point must lie in [", lo, ", ", hi,
                      "], the range of its tensor, got ", values[n], " at index ", n, ".");
  }
  bool in_offsets = p->chain.folds && !p->chain.ends_in(Eltwise::kRelu);
  for (const PostOp& post_op : p->chain.ops) {
    const bool integers = post_op.dtype.has_value() && post_op.dtype != DType::f32;
    in_offsets = in_offsets && (post_op.kind != PostOp::kSum || integers);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(in_offsets, "torchq.", p->op, ": dst_zero_point per channel must ",
                              "come with post_ops that fold, end in no relu and whose sums name ",
                              "an integer dtype. The nearest supported form is one zero point, or ",
                              "eltwise_clip:0:3.4028235e38 for a relu, or sum:1:0:u8.");
  p->dst_zero_points.assign(values, values + p->channels);
}

Folded fold(const at::Tensor& src_scale, const at::Tensor& weight_scale,
            const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& dst_scale,
            const std::optional<at::Tensor>& dst_zero_point, int64_t channels, int64_t dst_dtype,
            c10::string_view post_ops, at::TensorList post_op_values) {
  const FloatMode mode;
  Problem p = make_problem("fold", channels, dst_dtype, post_ops, post_op_values);
  const at::Tensor one = at::ones({1}, at::kFloat), zero = at::zeros({1}, at::kFloat);
  const PerChannel src("fold", "src_scale", src_scale, 1);
  const PerChannel weight("fold", "weight_scale", weight_scale, channels);
  const PerChannel dst("fold", "dst_scale", dst_scale.value_or(one), channels);
  const PerChannel b("fold", "bias", bias.value_or(zero), bias.has_value() ? channels : 1);
  src.check("fold", "src_scale", true);
  weight.check("fold", "weight_scale", true);
  dst.check("fold", "dst_scale", true);
  b.check("fold", "bias", false);
  TORCH_CHECK_VALUE(!bias.has_value() || bias->numel() == channels, "torchq.fold: bias must have ",
                    channels, " values, got ", b.size(), ".");
  set_dst_zero_points(&p, dst_zero_point);
  TORCH_CHECK_VALUE(
      is_int8(p.dst_dtype) ||
          (!dst_scale.has_value() && p.dst_zero_points.size() == 1 && p.dst_zero_point(0) == 0) ||
          p.dst_dtype == DType::s32,
      "torchq.fold: a float32 destination has no scale and no zero point. Leave them out.");
  return fold_with(p, dst, [&](int64_t n) { return Affine{src[0] * weight[n], b[n], {}}; });
}

Folded fold_output_scales(const at::Tensor& output_scales, const std::optional<at::Tensor>& bias,
                          int64_t channels, int64_t dst_dtype, c10::string_view post_ops,
                          at::TensorList post_op_values,
                          const std::optional<at::Tensor>& dst_zero_point) {
  const FloatMode mode;
  Problem p = make_problem("fold_output_scales", channels, dst_dtype, post_ops, post_op_values);
  const at::Tensor one = at::ones({1}, at::kFloat), zero = at::zeros({1}, at::kFloat);
  const PerChannel scales("fold_output_scales", "output_scales", output_scales, channels);
  const PerChannel b("fold_output_scales", "bias", bias.value_or(zero),
                     bias.has_value() ? channels : 1);
  scales.check("fold_output_scales", "output_scales", false);
  b.check("fold_output_scales", "bias", false);
  TORCH_CHECK_VALUE(!bias.has_value() || bias->numel() == channels,
                    "torchq.fold_output_scales: bias must have ", channels, " values, got ",
                    b.size(), ". Expand it to one per output channel.");
  set_dst_zero_points(&p, dst_zero_point);
  const PerChannel unit("fold_output_scales", "dst_scale", one, 1);
  return fold_with(p, unit, [&](int64_t n) { return Affine{scales[n], b[n] * scales[n], {}}; });
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  m.impl("fold", &torchq::fold);
  m.impl("fold_output_scales", &torchq::fold_output_scales);
}
