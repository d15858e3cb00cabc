// SPDX-License-Identifier: Apache-2.0
// torchq::attention and torchq::dynamic_attention: checks, and where heads are in their operands.
#include "ops/attention/attention.h"

#include <ATen/DimVector.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/gemm/batches.h"
#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/result_allocator.h"

namespace torchq {

at::Tensor empty_like_queries(const at::Tensor& q, c10::IntArrayRef sizes, at::ScalarType dtype) {
  const int64_t last = static_cast<int64_t>(sizes.size()) - 2;  // the dimension of queries
  int64_t at = last;
  while (q.dim() == last + 2 && at > 0 && q.stride(at - 1) < q.stride(last)) --at;
  c10::SmallVector<int64_t, 5> order(sizes.begin(), sizes.end());
  std::rotate(order.begin() + at, order.begin() + last, order.begin() + last + 1);
  const at::Tensor dst = empty_dst(order, dtype);
  return at == last ? dst : dst.movedim(at, last);
}

at::Tensor read_mask(const char* op, const at::Tensor& given, c10::IntArrayRef sizes) {
  TORCH_CHECK_TYPE(given.scalar_type() == at::kBool || given.scalar_type() == at::kFloat, "torchq.",
                   op, ": mask must be bool (true: attend) or float32 (added), got ",
                   dtype_name(given.scalar_type()), ". Convert it with .float() or .bool().");
  check_cpu(op, "mask", given);
  TORCH_CHECK_VALUE(at::is_expandable_to(given.sizes(), sizes), "torchq.", op,
                    ": mask must broadcast to ", sizes, ", the scores of all heads, got ",
                    given.sizes(), ". Its last dimensions are queries and keys.");
  at::Tensor mask = given;
  for (int64_t d = 0; d < mask.dim(); ++d) {  // what was expanded is computed once
    if (mask.stride(d) == 0 && mask.size(d) > 1) mask = mask.narrow(d, 0, 1);
  }
  if (mask.scalar_type() == at::kBool) {
    const at::Tensor none = at::scalar_tensor(0.0f, at::kFloat);
    mask = at::where(mask, none, at::scalar_tensor(-INFINITY, at::kFloat));
  }
  if (mask.dim() == 0) mask = mask.unsqueeze(0);
  if (mask.size(-1) != sizes.back()) {
    c10::SmallVector<int64_t, 5> full(mask.sizes().begin(), mask.sizes().end());
    full.back() = sizes.back();
    mask = mask.expand(full);
  }
  if (mask.stride(-1) != 1 && sizes.back() > 1) mask = mask.contiguous();
  return mask.dim() == 1 ? mask.unsqueeze(0) : mask;
}

void check_float(const char* op, const char* arg, const at::Tensor& t, const char* remedy) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, "torchq.", op, ": ", arg,
                   " must be float32, got ", dtype_name(t.scalar_type()),
                   ". Convert it with .float()", remedy, ".");
  check_cpu(op, arg, t);
}

void check_scale(const char* op, double scale) {
  TORCH_CHECK_VALUE(std::isfinite(scale) && scale > 0, "torchq.", op,
                    ": scale must be finite and greater than 0, got ", scale,
                    ". The usual is 1 / sqrt(E).");
}

namespace {

void check_shapes(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  double scale) {
  TORCH_CHECK_VALUE(q.dim() >= 2 && k.dim() >= 2 && v.dim() >= 2, "torchq.", op,
                    ": query, key and value must be (..., L, E), (..., S, E) and ",
                    "(..., S, Ev), got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Add the missing dimension with unsqueeze.");
  TORCH_CHECK_VALUE(q.size(-1) == k.size(-1) && k.size(-2) == v.size(-2), "torchq.", op,
                    ": query and key must have as many columns, key and value as ",
                    "many rows, got ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ". Heads are a dimension in front of them.");
  TORCH_CHECK_VALUE(q.size(-1) <= kMaxReduction && k.size(-2) <= kMaxReduction, "torchq.", op,
                    ": S and E must be at most ", kMaxReduction, ", got key ", k.sizes(),
                    "; longer sums could overflow int32. Use float attention.");
  TORCH_CHECK_VALUE(v.size(-1) <= kMaxChannels, "torchq.", op, ": value must have at most ",
                    kMaxChannels, " columns, got ", v.sizes(), ". Split them.");
  check_scale(op, scale);
}

/// Returns the shape that the leading dimensions broadcast to.
at::DimVector batch_of(const char* op, const at::Tensor& q, const at::Tensor& k,
                       const at::Tensor& v) {
  at::DimVector batch;
  for (const at::Tensor* t : {&q, &k, &v}) {
    const c10::IntArrayRef own = t->sizes().slice(0, static_cast<size_t>(t->dim() - 2));
    while (batch.size() < own.size()) batch.insert(batch.begin(), 1);
    for (size_t i = 1; i <= own.size(); ++i) {
      int64_t& size = batch[batch.size() - i];
      const int64_t given = own[own.size() - i];
      TORCH_CHECK_VALUE(size == given || size == 1 || given == 1, "torchq.", op, ": the batch ",
                        "dimensions of query, key and value must broadcast, got ", q.sizes(), ", ",
                        k.sizes(), " and ", v.sizes(),
                        ". Repeat the heads of key and value where there are fewer.");
      size = size == 1 ? given : size;
    }
  }
  return batch;
}

/// Checked arguments of both ops; the constructor reports errors in a fixed order.
struct Call {
  const char* op;
  const at::Tensor &query, &key, &value;
  at::DimVector batch;
  at::Tensor mask, dst;

  Call(OpTrace& trace, const char* name, const at::Tensor& q, const at::Tensor& k,
       const at::Tensor& v, const std::optional<at::Tensor>& mask_arg, bool is_causal, double scale,
       DType to)
      : op(name), query(q), key(k), value(v) {
    check_shapes(op, q, k, v, scale);
    batch = batch_of(op, q, k, v);
    at::DimVector sizes = batch;
    sizes.append({q.size(-2), k.size(-2)});
    if (mask_arg.has_value()) mask = read_mask(op, *mask_arg, sizes);
    TORCH_CHECK_VALUE(!(mask.defined() && is_causal), "torchq.", op, ": is_causal must be false ",
                      "with a mask, got both. Put the triangle into the mask.");
    sizes.back() = v.size(-1);
    dst = empty_like_queries(q, sizes, scalar_type(to));
    trace.describe([&] {
      const char* which = is_causal ? "causal" : mask.defined() ? "mask" : "";
      return describe_call({q, k, v}, dst, which);
    });
    trace.ran(kernels(), "attention");
  }

  /// Returns the offset of every head's matrix, in values.
  std::vector<int64_t> offsets(const at::Tensor& t) const {
    return batch_offsets(t, c10::IntArrayRef(batch.data(), batch.size()));
  }

  Attention attention(bool causal, const Real& to) const {
    return {kernels(),
            query.size(-2),
            key.size(-2),
            query.size(-1),
            value.size(-1),
            causal,
            offsets(dst),
            mask.defined() ? offsets(mask) : std::vector<int64_t>(),
            dst.stride(-2),
            mask,
            {dst.data_ptr(), to.dtype, static_cast<float>(1.0 / to.scale),
             static_cast<float>(to.zero_point)}};
  }
};

/// A tensor with adjacent columns, and where its heads begin.
struct Operand {
  at::Tensor tensor;
  std::vector<int64_t> offset;

  Operand(const Call& call, const at::Tensor& t) : tensor(t), offset(call.offsets(t)) {}
  template <class T>
  const T* head(size_t h) const {
    return static_cast<const T*>(tensor.const_data_ptr()) + offset[h];
  }
};

/// 8-bit operands with one scale and zero point each.
class QuantizedHeads final : public Heads {
 public:
  using Params = c10::SmallVector<Real, 4>;
  QuantizedHeads(ScratchFrame& scratch, const Call& call, const Params& params, double scale)
      : tier_(kernels()),
        params_(params),
        query_(call, padded(scratch, with_unit_stride(call.query, false))),
        key_(call, with_unit_stride(call.key, true)),
        value_(call, with_unit_stride(call.value, true)),
        score_scale_(score_scale(call, params, scale)) {}

  void load(size_t h, Head& head) const override {
    const at::Tensor &k = key_.tensor, &v = value_.tensor;
    const bool v_flip = params_[2].dtype == DType::u8;
    const int32_t q_zero_point = params_[0].zero_point + (params_[0].dtype == DType::s8 ? 128 : 0);
    pack_columns(tier_,
                 {key_.head<uint8_t>(h), k.stride(-1), k.stride(-2), k.size(-1), 0,
                  params_[1].dtype == DType::u8},
                 k.size(-2), padded_keys(k.size(-2)), q_zero_point, head.keys);
    pack_columns(tier_,
                 {value_.head<uint8_t>(h), v.stride(-2), v.stride(-1), v.size(-2), 0, v_flip},
                 v.size(-1), panels_of(v.size(-1)) * kPanel, 0, head.values);
    std::fill_n(head.score_scale, padded_keys(k.size(-2)), score_scale_);
    head.mean_scale = params_[2].scale;
    head.mean_shift =
        -params_[2].scale * static_cast<float>(params_[2].zero_point - (v_flip ? 128 : 0));
  }
  QueryRows queries(ScratchFrame&, size_t h, int64_t first, int64_t) const override {
    const int64_t stride = query_.tensor.stride(-2);
    return {query_.head<uint8_t>(h) + first * stride, stride, params_[0].dtype == DType::s8,
            nullptr};
  }

 private:
  /// An infinite score would pass for a key that is not seen.
  static float score_scale(const Call& call, const Params& params, double scale) {
    const double product = double{params[0].scale} * params[1].scale * scale;
    const double largest = product * 255 * 255 * static_cast<double>(call.query.size(-1));
    TORCH_CHECK_VALUE(largest <= std::numeric_limits<float>::max(), "torchq.", call.op,
                      ": scores must fit float32, got scale ", scale, " with scales ",
                      params[0].scale, " of query and ", params[1].scale, " of key, whose scores ",
                      "may reach ", largest, ". The usual scale is 1 / sqrt(E).");
    return static_cast<float>(product);
  }
  static at::Tensor padded(ScratchFrame& scratch, const at::Tensor& q) {
    return q.size(-1) % kQuad == 0 ? q : copy_for_overread(scratch, q);
  }
  const Kernels& tier_;
  const Params& params_;
  Operand query_, key_, value_;
  float score_scale_;
};

/// Masks add this or less to the score of a key that is not to be seen.
constexpr float kHidden = -1e4f;

/// float32 operands, quantized symmetrically in each call: queries and keys row by row, the values
/// of a head together. Values of keys that no query sees count as 0: padding must not set the scale
/// of a text.
class FloatHeads final : public Heads {
 public:
  FloatHeads(const Call& call, const Attention& attention, double scale)
      : attention_(attention),
        tier_(kernels()),
        query_(call, with_unit_stride(call.query, false)),
        key_(call, with_unit_stride(call.key, false)),
        value_(call, with_unit_stride(call.value, false)),
        scale_(static_cast<float>(scale)) {}

  void load(size_t h, Head& head) const override {
    ScratchFrame scratch;
    const int64_t keys = key_.tensor.size(-2);
    const Rows k = quantized(scratch, key_, h, 0, keys, false);
    for (int64_t i = 0; i < keys; ++i) head.score_scale[i] = k.scale[i] * scale_;
    std::fill(head.score_scale + keys, head.score_scale + padded_keys(keys), scale_);
    pack_columns(tier_, {k.data, 1, k.stride, key_.tensor.size(-1), 0, true}, keys,
                 padded_keys(keys), kZero, head.keys);
    const int64_t size = value_.tensor.size(-1);
    const float* values = seen_values(scratch, h);
    const Rows v = values == nullptr ? quantized(scratch, value_, h, 0, keys, true)
                                     : quantized(scratch, values, size, size, keys, true);
    pack_columns(tier_, {v.data, v.stride, 1, keys, 0, true}, size, panels_of(size) * kPanel, 0,
                 head.values);
    head.mean_scale = v.scale[0];
    head.mean_shift = 0;
  }
  QueryRows queries(ScratchFrame& scratch, size_t h, int64_t first, int64_t count) const override {
    const Rows q = quantized(scratch, query_, h, first, count, false);
    return {q.data, q.stride, false, q.scale};
  }

 private:
  static constexpr int32_t kZero = 128;  // of symmetric values as u8
  struct Rows {
    const uint8_t* data;
    const float* scale;  // of each row, or of all
    int64_t stride;
  };
  Rows quantized(ScratchFrame& scratch, const Operand& operand, size_t h, int64_t first,
                 int64_t count, bool shared) const {
    const int64_t stride = operand.tensor.stride(-2);
    return quantized(scratch, operand.head<float>(h) + first * stride, stride,
                     operand.tensor.size(-1), count, shared);
  }
  Rows quantized(ScratchFrame& scratch, const float* src, int64_t stride, int64_t size,
                 int64_t count, bool shared) const {
    const int64_t padded = quads_of(size) * kQuad;
    uint8_t* bytes = scratch.take<uint8_t>(count, padded);
    float* scale = scratch.take<float>(shared ? 1 : count);
    tier_.quantize_symmetric({src, stride, count, size, shared, bytes, padded, scale});
    return {bytes, scale, padded};
  }
  /// A copy of a head's values with zeros for keys that the mask hides from every query; null
  /// where each is seen. A query from which all keys are hidden weighs them as if it saw them.
  const float* seen_values(ScratchFrame& scratch, size_t h) const {
    if (!attention_.mask.defined()) return nullptr;
    const int64_t keys = attention_.keys, size = value_.tensor.size(-1);
    const int64_t stride = attention_.mask.stride(-2);
    const float* mask = attention_.mask.const_data_ptr<float>() + attention_.mask_offset[h];
    bool* seen = scratch.take<bool>(keys);
    std::fill_n(seen, keys, false);
    for (int64_t i = 0; i < attention_.mask.size(-2); ++i) {
      const float* row = mask + i * stride;
      const bool hides_all = std::all_of(row, row + keys, [](float m) { return m <= kHidden; });
      for (int64_t j = 0; j < keys; ++j) seen[j] |= hides_all || row[j] > kHidden;
      if (std::all_of(seen, seen + keys, [](bool s) { return s; })) return nullptr;
    }
    float* values = scratch.take<float>(keys, size);
    const float* src = value_.head<float>(h);
    for (int64_t j = 0; j < keys; ++j) {
      const float* value = src + j * value_.tensor.stride(-2);
      if (seen[j])
        std::copy_n(value, size, values + j * size);
      else
        std::fill_n(values + j * size, size, 0.0f);
    }
    return values;
  }
  const Attention& attention_;
  const Kernels& tier_;
  Operand query_, key_, value_;
  float scale_;
};

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, bool is_causal, double scale,
                     const at::Tensor& scales, const at::Tensor& zero_points, int64_t dst_dtype) {
  constexpr const char* op = "attention";
  OpTrace trace(op);
  check_src(op, "query", query);
  check_src(op, "key", key);
  check_src(op, "value", value);
  const DType to = dst_dtype_of(op, dst_dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(to != DType::s32, "torchq.attention: dst_dtype must be 0 (uint8), 1 ",
                              "(int8) or 6 (float32), got 3 (int32). Use float32.");
  const auto params = read_params(op, scales, zero_points, {query, key, value}, to);
  const Call call(trace, op, query, key, value, mask, is_causal, scale, to);
  if (is_done(call.dst)) return call.dst;
  if (key.size(-2) == 0) return call.dst.fill_(params[3].zero_point);
  ScratchFrame scratch;
  run_attention(call.attention(is_causal, params[3]), QuantizedHeads(scratch, call, params, scale));
  return call.dst;
}

at::Tensor dynamic_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const std::optional<at::Tensor>& mask,
                             bool is_causal, double scale) {
  constexpr const char* op = "dynamic_attention";
  OpTrace trace(op);
  constexpr const char* remedy = ", or use attention for quantized operands";
  check_float(op, "query", query, remedy);
  check_float(op, "key", key, remedy);
  check_float(op, "value", value, remedy);
  const Call call(trace, op, query, key, value, mask, is_causal, scale, DType::f32);
  if (is_done(call.dst)) return call.dst;
  if (key.size(-2) == 0) return call.dst.fill_(0);
  const Attention run = call.attention(is_causal, {DType::f32, 1, 0});
  run_attention(run, FloatHeads(call, run, scale));
  return call.dst;
}

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, CPU, m) {
  torchq::implement<&torchq::attention>(m, "attention");
  torchq::implement<&torchq::dynamic_attention>(m, "dynamic_attention");
}
