// SPDX-License-Identifier: Apache-2.0
// From a parsed chain, its parameters and its tensors to the Epilogue that kernels read.
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "epilogue/post_ops.h"
#include "runtime/checks.h"

namespace torchq {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

/// At least the largest |x| of n floats, and at most 1/128 or 1e-40 more; infinity when one is not
/// a number. Compares upper halves: baseline x86-64 has a maximum of 16 bits, and none of 32 (four
/// arrays of 768 took 0.8 us of every call, and take 0.3).
float max_abs(const float* x, int64_t n) {
  using Words = int32_t __attribute__((vector_size(16)));
  using Halves = int16_t __attribute__((vector_size(16)));
  const auto larger = [](Halves a, Halves b) { return a > b ? a : b; };
  Halves most[4] = {};  // independent of each other
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int part = 0; part < 4; ++part) {
      Words bits;
      std::memcpy(&bits, x + i + 4 * part, sizeof bits);
      most[part] = larger(most[part], reinterpret_cast<Halves>(bits & 0x7fff0000));
    }
  }
  int32_t largest = 0;
  if (i > 0) {
    const Halves all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    for (int lane = 0; lane < 8; ++lane) largest = std::max<int32_t>(largest, all[lane]);
  }
  for (; i < n; ++i) largest = std::max(largest, std::bit_cast<int32_t>(x[i]) >> 16 & 0x7fff);
  const float value = std::bit_cast<float>(largest << 16 | 0xffff);
  return value <= std::numeric_limits<float>::max() ? value : kInf;
}

bool is_uniform(const float* x, int64_t n) {
  return n > 0 && std::memcmp(x, x + 1, (n - 1) * sizeof(float)) == 0;
}

using Sizes = c10::SmallVector<int64_t, 5>;
constexpr int64_t kMaskBits = 31;  // of an int; torch's tensors have up to 64 dimensions

}  // namespace

Sizes operand_sizes(const char* op, c10::string_view post_ops, const PostOp& p,
                    const at::Tensor& dst, bool rows) {
  const int64_t dims = rows ? 2 : dst.dim();
  const int64_t largest = (int64_t{1} << std::min<int64_t>(dims, kMaskBits)) - 1;
  TORCH_CHECK_VALUE(p.mask >= 0 && p.mask <= largest, "torchq.", op, ": post_ops '", post_ops,
                    "' must have masks from 0 to ", largest, ", one bit for ",
                    rows ? "all rows and one for the channels" : "each dimension of dst", ", got ",
                    p.mask, ". Mask 2 is one value per channel.");
  Sizes sizes;
  for (int64_t d = 0; d < dst.dim(); ++d) {
    const int64_t bit = rows ? (d + 1 == dst.dim() ? 1 : 0) : d;
    sizes.push_back(bit < kMaskBits && (p.mask >> bit & 1) ? dst.size(d) : 1);
  }
  return sizes;
}

void check_post_op_src(const char* op, c10::string_view post_ops, size_t i, const at::Tensor& src,
                       DType expected, c10::IntArrayRef sizes, const at::Tensor& dst,
                       int32_t zero_point) {
  const DType dtype = dtype_of(op, "post_op_srcs", src);
  check_cpu(op, "post_op_srcs", src);
  TORCH_CHECK_TYPE(expected == dtype, "torchq.", op, ": post_op_srcs[", i, "] must be ",
                   dtype_name(scalar_type(expected)), " as '", post_ops, "' says, got ",
                   dtype_name(src.scalar_type()), ". Convert it with reorder.");
  TORCH_CHECK_VALUE(src.sizes() == sizes, "torchq.", op, ": post_op_srcs[", i, "] must have shape ",
                    sizes, " for post_ops '", post_ops, "' and dst ", dst.sizes(), ", got ",
                    src.sizes(),
                    ". A sum has the shape of dst; a binary has 1 where its mask has no bit.");
  const auto [lo, hi] = zero_point_range(dtype);
  TORCH_CHECK_VALUE(zero_point >= lo && zero_point <= hi, "torchq.", op,
                    ": post-op sum has zero point ", zero_point, " but its ",
                    dtype_name(src.scalar_type()), " source allows ", lo, " to ", hi,
                    ". Only integer sources have zero points other than 0.");
}

EpilogueBuilder::EpilogueBuilder(const Args& args, const at::Tensor& dst) {
  read(args, dst);
  if (args.weight_zero_point != nullptr || args.row_sums != nullptr) {
    add_weight_zero_point(args, dst);
  }
}

void EpilogueBuilder::subtract(const int32_t* row_terms, const int32_t* channel_terms,
                               int64_t channels, int64_t groups) {
  epilogue_.row_terms = row_terms;
  epilogue_.channel_terms = channel_terms;
  epilogue_.channels = static_cast<int>(channels);
  epilogue_.group_channels = static_cast<int>(channels / groups);
  epilogue_.guard = true;
}

void EpilogueBuilder::add_weight_zero_point(const Args& args, const at::Tensor& dst) {
  const char* op = args.op;
  TORCH_CHECK_VALUE(args.weight_zero_point != nullptr, "torchq.", op,
                    ": row_sums must come with a weight_zero_point, got row_sums alone. Leave them "
                    "out: the op computes them.");
  const at::Tensor& zero_point = *args.weight_zero_point;
  check_param(op, "weight_zero_point", zero_point, at::kInt);
  check_numel(op, "weight_zero_point", zero_point, args.channels);
  const int32_t* points = zero_point.const_data_ptr<int32_t>();
  for (int64_t n = 0; n < args.channels; ++n) {
    TORCH_CHECK_VALUE(
        points[n] >= -128 && points[n] <= 127, "torchq.", op,
        ": weight_zero_point must lie in [-128, 127], the range of packed weights, got ", points[n],
        " at index ", n, ". Subtract 128 from those of uint8 weights.");
  }
  if (args.row_sums == nullptr) return;  // the op has taken them off its weights
  const at::Tensor& sums = *args.row_sums;
  TORCH_CHECK_TYPE(sums.scalar_type() == at::kInt, "torchq.", op, ": row_sums must be int32, got ",
                   dtype_name(sums.scalar_type()),
                   ". Pass the raw sums of the op with weights of 1.");
  check_cpu(op, "row_sums", sums);
  Sizes sizes(dst.sizes().begin(), dst.sizes().end());
  const size_t channel_dim = args.rows ? sizes.size() - 1 : 1;
  sizes[channel_dim] = args.groups;
  TORCH_CHECK_VALUE(sums.sizes() == c10::IntArrayRef(sizes), "torchq.", op,
                    ": row_sums must have shape ", c10::IntArrayRef(sizes), ", got ", sums.sizes(),
                    ". There is one sum per row and group; left out, the op computes them.");
  srcs_.push_back(sums.movedim(static_cast<int64_t>(channel_dim), -1).contiguous());
  subtract(srcs_.back().const_data_ptr<int32_t>(), points, args.channels, args.groups);
}

void EpilogueBuilder::read(const Args& args, const at::Tensor& dst) {
  const char* op = args.op;
  const DType dtype = dtype_of(op, "dst", dst);
  Epilogue& e = epilogue_;
  e.dst = dst.data_ptr();
  e.dst_dtype = dtype;
  const Chain chain = parse_post_ops(op, {args.post_ops.data(), args.post_ops.size()});
  TORCH_CHECK_VALUE(static_cast<int64_t>(args.post_op_srcs.size()) == chain.sources, "torchq.", op,
                    ": post_ops '", args.post_ops, "' needs ", chain.sources, " sources, got ",
                    args.post_op_srcs.size(),
                    ". Pass one tensor in post_op_srcs per sum, per binary or prelu with a mask ",
                    "other than 0 and 2, and per condition of a select.");
  TORCH_CHECK_VALUE(args.channels <= kMaxChannels, "torchq.", op, ": dst must have at most ",
                    kMaxChannels, " columns or channels, got ", args.channels,
                    "; kernels count them in 32 bits. Split the weight.");
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
  add_sources(args, dst, chain);
  if (chain.folds) {
    read_folded(args, chain, params);
    e.guard = needs_guard(args);
  } else {
    read_chain(args, chain, params);
  }
}

void EpilogueBuilder::add_sources(const Args& args, const at::Tensor& dst, const Chain& chain) {
  for (const PostOp& p : chain.ops) {
    if (p.kind == PostOp::kSum) {
      const DType dtype = dtype_of(args.op, "post_op_srcs", args.post_op_srcs[sums_.size()]);
      add_source(args, dst, p.dtype.value_or(dtype), dst.sizes(), p.scale, p.zero_point);
    } else if (p.kind == PostOp::kBinary && !p.has_values()) {
      const Sizes sizes = operand_sizes(args.op, args.post_ops, p, dst, args.rows);
      add_source(args, dst, *p.dtype, sizes, 1, 0);
    }
    if (p.is(Binary::select)) {
      const DType dtype = dtype_of(args.op, "post_op_srcs", args.post_op_srcs[sums_.size()]);
      add_source(args, dst, dtype, dst.sizes(), 1, 0);
    }
  }
  epilogue_.sums = sums_.data();
  epilogue_.num_sums = static_cast<int>(sums_.size());
}

void EpilogueBuilder::add_source(const Args& args, const at::Tensor& dst, DType expected,
                                 c10::IntArrayRef sizes, float scale, int32_t zero_point) {
  const size_t i = sums_.size();
  const at::Tensor& src = args.post_op_srcs[i];
  check_post_op_src(args.op, args.post_ops, i, src, expected, sizes, dst, zero_point);
  if (src.sizes() == dst.sizes() && src.strides() == dst.strides()) {
    srcs_.push_back(src);
  } else {
    srcs_.push_back(at::detail::empty_strided_cpu(dst.sizes(), dst.strides(), src.scalar_type()));
    srcs_.back().copy_(src.expand(dst.sizes()));
  }
  sums_.push_back({srcs_.back().const_data_ptr(), expected, nullptr, scale, zero_point});
}

void EpilogueBuilder::read_folded(const Args& args, const Chain& chain, const float* params) {
  Epilogue& e = epilogue_;
  for (SumSrc& sum : sums_) {
    sum.scale = params;
    params += args.channels;
  }
  if (chain.ends_in(Eltwise::kClip)) {
    read_bounds(params, params + args.channels, args.channels);
  } else if (chain.ends_in(Eltwise::kRelu)) {
    // The conversion to 8 bits clamps at the type's own minimum.
    e.clamp = !(e.dst_dtype == DType::u8 && e.zero_point == 0);
    e.lo_scalar = e.zero_point;
    e.hi_scalar = kInf;
  }
}

/// ReLU6 has the same bounds in all channels, and often those of 8 bits: fewer loads, and none of
/// the kernels that finish in registers or bytes needs to step aside.
void EpilogueBuilder::read_bounds(const float* lo, const float* hi, int64_t channels) {
  Epilogue& e = epilogue_;
  if (!is_uniform(lo, channels) || !is_uniform(hi, channels)) {
    e.lo = lo;
    e.hi = hi;
    return;
  }
  e.lo_scalar = *lo;
  e.hi_scalar = *hi;
  const auto [least, most] = zero_point_range(e.dst_dtype);
  e.clamp = !(is_int8(e.dst_dtype) && *lo <= least && *hi >= most);
}

void EpilogueBuilder::read_chain(const Args& args, const Chain& chain, const float* params) {
  Epilogue& e = epilogue_;
  int src = 0;
  for (const PostOp& p : chain.ops) {
    ChainOp op{};
    op.kind = static_cast<ChainOp::Kind>(p.kind);
    op.eltwise = p.eltwise;
    op.binary = p.binary;
    if (p.has_values()) {
      op.values = params;
      params += args.channels;
    } else if (p.kind != PostOp::kEltwise) {
      op.src = src++;
    }
    if (p.is(Binary::select)) op.condition = src++;
    ops_.push_back(op);
  }
  if (e.dst_dtype != DType::f32) e.inv_scale = params;
  e.ops = ops_.data();
  e.num_ops = static_cast<int>(ops_.size());
}

/// Returns true if some input could make |y| reach 2^31, where the conversion alone would wrap, or
/// make y NaN. Bounds count too: parameters made by hand may hold anything.
bool EpilogueBuilder::needs_guard(const Args& args) const {
  constexpr double kLimit = 2147480000.0;  // a margin for the roundings on the way
  const Epilogue& e = epilogue_;
  double bound = double{max_abs(e.multiplier, args.channels)} * args.max_acc +
                 double{max_abs(e.offset, args.channels)};
  for (int s = 0; s < e.num_sums; ++s) {
    const SumSrc& sum = e.sums[s];
    if (!is_int8(sum.dtype)) return true;
    bound += 255.0 * max_abs(sum.scale, args.channels);
  }
  if (e.lo != nullptr) {
    bound += double{max_abs(e.lo, args.channels)} + double{max_abs(e.hi, args.channels)};
  }
  if (e.clamp) {
    bound += std::fabs(double{e.lo_scalar});
    if (e.hi_scalar != kInf) bound += std::fabs(double{e.hi_scalar});
  }
  return !(bound < kLimit);  // also where bound is NaN
}

}  // namespace torchq
