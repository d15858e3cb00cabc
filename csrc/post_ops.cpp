// SPDX-License-Identifier: Apache-2.0
#include "post_ops.h"

#include <ATen/ops/empty_like.h>

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "checks.h"

namespace torchq {
namespace {

constexpr int kMaxPostOps = 32;

/// The next field of `text` up to `separator`, which is removed together with the field.
std::string_view next_field(std::string_view& text, char separator) {
  const size_t end = text.find(separator);
  const std::string_view field = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return field;
}

template <class T>
void read_number(const char* op, std::string_view field, std::string_view post_op, T* value) {
  if (field.empty()) return;
  const auto result = std::from_chars(field.data(), field.data() + field.size(), *value);
  TORCH_CHECK_VALUE(result.ec == std::errc() && result.ptr == field.data() + field.size(),
                    "torchq.", op, ": post_ops: expected a number in '", post_op, "', got '", field,
                    "'. Build the text with torchq.PostOps.");
}

std::optional<DType> read_dtype(const char* op, std::string_view field, std::string_view post_op) {
  constexpr std::string_view names[] = {"u8", "s8", "s32", "f32"};
  if (field.empty()) return {};
  for (int i = 0; i < 4; ++i) {
    if (field == names[i]) return static_cast<DType>(i);
  }
  TORCH_CHECK_VALUE(false, "torchq.", op, ": post_ops: expected u8, s8, s32 or f32 in '", post_op,
                    "', got '", field, "'. Build the text with torchq.PostOps.");
}

PostOp parse_one(const char* op, const std::string_view text) {
  std::string_view rest = text;
  const std::string_view name = next_field(rest, ':');
  PostOp result{};
  if (name == "sum") {
    result.kind = PostOp::kSum;
    read_number(op, next_field(rest, ':'), text, &result.scale);
    read_number(op, next_field(rest, ':'), text, &result.zero_point);
    result.dtype = read_dtype(op, next_field(rest, ':'), text);
  } else if (name == "eltwise_relu" || name == "eltwise_clip" || name == "eltwise_linear") {
    result.kind = name == "eltwise_relu"   ? PostOp::kRelu
                  : name == "eltwise_clip" ? PostOp::kClip
                                           : PostOp::kLinear;
    read_number(op, next_field(rest, ':'), text, &result.alpha);
    read_number(op, next_field(rest, ':'), text, &result.beta);
    read_number(op, next_field(rest, ':'), text, &result.scale);
  } else if (name == "binary_add" || name == "binary_mul") {
    result.kind = name == "binary_add" ? PostOp::kAdd : PostOp::kMul;
    int mask = 0;
    read_number(op, next_field(rest, ':'), text, &mask);
    const std::string_view dtype = next_field(rest, ':');
    TORCH_CHECK_NOT_IMPLEMENTED(
        (mask == 0 || mask == 2) && (dtype.empty() || dtype == "f32"), "torchq.", op, ": post-op '",
        text, "' is not supported: binary post-ops take float32 values, one (mask 0)",
        " or one per channel (mask 2). The nearest form is '", name, ":2'.");
    result.per_channel = mask == 2;
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "torchq.", op, ": post-op '", text,
        "' is not supported; available are sum, eltwise_relu, eltwise_clip, ",
        "eltwise_linear, binary_add and binary_mul.");
  }
  TORCH_CHECK_VALUE(rest.empty(), "torchq.", op, ": post_ops: '", text, "' has extra fields '",
                    rest, "'. Build the text with torchq.PostOps.");
  return result;
}

bool is_affine(PostOp::Kind kind) {
  return kind == PostOp::kSum || kind == PostOp::kLinear || kind == PostOp::kAdd ||
         kind == PostOp::kMul;
}

bool is_bound(const PostOp& p) {
  return p.scale == 1 && (p.kind == PostOp::kClip || (p.kind == PostOp::kRelu && p.alpha == 0));
}

/// The largest |x| of n floats; infinity when one is not a number (compared as integers, so that it
/// vectorizes).
float max_abs(const float* x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float value;
  std::memcpy(&value, &largest, sizeof value);
  return value <= std::numeric_limits<float>::max() ? value
                                                    : std::numeric_limits<float>::infinity();
}

}  // namespace

int64_t Chain::num_params(int64_t channels, DType dst) const {
  if (ops.empty()) return 0;
  if (folds) return 1 + channels * (sums + (ends_in(PostOp::kClip) ? 2 : 0));
  return 1 + channels * (binaries + (dst == DType::f32 ? 0 : 1));
}

Chain parse_post_ops(const char* op, std::string_view text) {
  const auto is_separator = [](char c) { return c == '+' || c == ':'; };
  for (size_t i = 0; i < text.size(); ++i) {
    const bool dangling = i == 0 || i + 1 == text.size() || is_separator(text[i - 1]);
    TORCH_CHECK_VALUE(!is_separator(text[i]) || !dangling, "torchq.", op, ": post_ops: '", text,
                      "' has an empty field at position ", i,
                      ". Build the text with torchq.PostOps.");
  }
  Chain chain;
  while (!text.empty()) {
    chain.ops.push_back(parse_one(op, next_field(text, '+')));
    const PostOp& last = chain.ops.back();
    chain.sums += last.kind == PostOp::kSum;
    chain.binaries += last.kind == PostOp::kAdd || last.kind == PostOp::kMul;
    chain.folds = chain.folds && (is_affine(last.kind) || (text.empty() && is_bound(last)));
  }
  TORCH_CHECK_VALUE(chain.ops.size() <= kMaxPostOps, "torchq.", op, ": post_ops has ",
                    chain.ops.size(), " entries; at most ", kMaxPostOps,
                    " are supported. Run the rest as a separate op.");
  return chain;
}

EpilogueBuilder::EpilogueBuilder(const Args& args, const at::Tensor& dst) {
  const char* op = args.op;
  const DType dtype = dtype_of(op, "dst", dst);
  Epilogue& e = epilogue_;
  e.dst = dst.data_ptr();
  e.dst_dtype = dtype;
  const Chain chain = parse_post_ops(op, {args.post_ops.data(), args.post_ops.size()});
  TORCH_CHECK_VALUE(static_cast<int64_t>(args.post_op_srcs.size()) == chain.sums, "torchq.", op,
                    ": post_ops '", args.post_ops, "' needs ", chain.sums, " sum sources, got ",
                    args.post_op_srcs.size(), ". Pass one tensor per sum in post_op_srcs.");
  check_param(op, "multiplier", args.multiplier, at::kFloat);
  if (args.multiplier.numel() == 0 && args.channels > 0) {
    TORCH_CHECK_VALUE(dtype == DType::s32 && chain.ops.empty(), "torchq.", op,
                      ": an empty multiplier (raw accumulators) needs an int32 destination and no ",
                      "post-ops, got ", dtype_name(dst.scalar_type()), " and post_ops '",
                      args.post_ops, "'. Pass the multiplier that fold returned.");
    e.mode = Epilogue::kRaw;
    return;
  }
  check_param(op, "offset", args.offset, at::kFloat);
  check_param(op, "post_op_params", args.post_op_params, at::kFloat);
  check_numel(op, "multiplier", args.multiplier, args.channels);
  check_numel(op, "offset", args.offset, args.channels);
  check_numel(op, "post_op_params", args.post_op_params, chain.num_params(args.channels, dtype));
  e.multiplier = args.multiplier.const_data_ptr<float>();
  e.offset = args.offset.const_data_ptr<float>();
  e.mode = chain.folds ? Epilogue::kFolded : Epilogue::kChain;
  if (chain.ops.empty()) {
    e.guard = needs_guard(args);
    return;
  }
  const float* params = args.post_op_params.const_data_ptr<float>();
  e.zero_point = *params++;
  add_sums(args, dst, chain);
  if (chain.folds) {
    read_folded(args, chain, params);
    e.guard = needs_guard(args);
  } else {
    read_chain(args, chain, params);
  }
}

void EpilogueBuilder::add_sums(const Args& args, const at::Tensor& dst, const Chain& chain) {
  for (const PostOp& post_op : chain.ops) {
    if (post_op.kind != PostOp::kSum) continue;
    const int64_t i = static_cast<int64_t>(sums_.size());
    const at::Tensor& src = args.post_op_srcs[i];
    const DType dtype = dtype_of(args.op, "post_op_srcs", src);
    check_cpu(args.op, "post_op_srcs", src);
    check_no_grad(args.op, "post_op_srcs", src);
    TORCH_CHECK_TYPE(post_op.dtype.value_or(dtype) == dtype, "torchq.", args.op, ": post_op_srcs[",
                     i, "] must be ", dtype_name(scalar_type(*post_op.dtype)), " as '",
                     args.post_ops, "' says, got ", dtype_name(src.scalar_type()),
                     ". Convert it with reorder.");
    TORCH_CHECK_VALUE(src.sizes() == dst.sizes(), "torchq.", args.op, ": post_op_srcs[", i,
                      "] must have the shape of dst, ", dst.sizes(), ", got ", src.sizes(),
                      ". A sum post-op does not broadcast; expand the source.");
    const auto [lo, hi] = zero_point_range(dtype);
    TORCH_CHECK_VALUE(post_op.zero_point >= lo && post_op.zero_point <= hi, "torchq.", args.op,
                      ": post-op sum has zero point ", post_op.zero_point, " but its ",
                      dtype_name(src.scalar_type()), " source allows ", lo, " to ", hi,
                      ". Only integer sources have zero points other than 0.");
    if (src.strides() == dst.strides()) {
      srcs_.push_back(src);
    } else {
      srcs_.push_back(at::empty_like(dst, src.options()).copy_(src));
    }
    sums_.push_back(
        {srcs_.back().const_data_ptr(), dtype, nullptr, post_op.scale, post_op.zero_point});
  }
  epilogue_.sums = sums_.data();
  epilogue_.num_sums = chain.sums;
}

const float* EpilogueBuilder::read_folded(const Args& args, const Chain& chain,
                                          const float* params) {
  Epilogue& e = epilogue_;
  for (SumSrc& sum : sums_) {
    sum.scale = params;
    params += args.channels;
  }
  if (chain.ends_in(PostOp::kClip)) {
    e.lo = params;
    e.hi = params + args.channels;
    params += 2 * args.channels;
  } else if (chain.ends_in(PostOp::kRelu)) {
    // The conversion to 8 bits clamps at the type's own minimum.
    e.clamp = !(e.dst_dtype == DType::u8 && e.zero_point == 0);
    e.lo_scalar = e.zero_point;
    e.hi_scalar = std::numeric_limits<float>::infinity();
  }
  return params;
}

const float* EpilogueBuilder::read_chain(const Args& args, const Chain& chain,
                                         const float* params) {
  Epilogue& e = epilogue_;
  int sums = 0;
  for (const PostOp& p : chain.ops) {
    ChainOp op{ChainOp::kLinear, p.alpha, p.beta, p.scale, nullptr, 0};
    switch (p.kind) {
      case PostOp::kSum:
        op.kind = ChainOp::kSum;
        op.sum_index = sums++;
        break;
      case PostOp::kRelu:
        op.kind = ChainOp::kRelu;
        break;
      case PostOp::kClip:
        op.kind = ChainOp::kClip;
        break;
      case PostOp::kLinear:
        op.alpha = static_cast<float>(double{p.alpha} * p.scale);
        op.beta = static_cast<float>(double{p.beta} * p.scale);
        break;
      case PostOp::kAdd:
      case PostOp::kMul:
        op.kind = p.kind == PostOp::kAdd ? ChainOp::kAdd : ChainOp::kMul;
        op.values = params;
        params += args.channels;
        break;
    }
    ops_.push_back(op);
  }
  if (e.dst_dtype != DType::f32) {
    e.inv_scale = params;
    params += args.channels;
  }
  e.ops = ops_.data();
  e.num_ops = static_cast<int>(ops_.size());
  return params;
}

/// Whether some input could make |y| reach 2^31, where the conversion alone would wrap.
bool EpilogueBuilder::needs_guard(const Args& args) const {
  const Epilogue& e = epilogue_;
  double bound = double{max_abs(e.multiplier, args.channels)} * args.max_acc +
                 double{max_abs(e.offset, args.channels)};
  for (int s = 0; s < e.num_sums; ++s) {
    const SumSrc& sum = e.sums[s];
    if (!is_int8(sum.dtype)) return true;
    bound += 255.0 * max_abs(sum.scale, args.channels);
  }
  return !(bound < 2147480000.0);  // a margin for the roundings on the way; false for NaN too
}

}  // namespace torchq
