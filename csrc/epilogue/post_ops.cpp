// SPDX-License-Identifier: Apache-2.0
// Reads the text of post-ops; epilogue.cpp makes the chain an Epilogue.
#include "epilogue/post_ops.h"

#include <locale.h>

#include <cctype>
#include <cfenv>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string>

#include "runtime/checks.h"
#include "runtime/float_mode.h"

namespace torchq {
namespace {

constexpr int kMaxPostOps = 32;

// In the order of Eltwise::Alg and of Binary.
constexpr std::string_view kEltwiseNames[] = {
    "relu",      "linear",      "clip",      "abs",    "elu",      "exp",  "gelu_erf",
    "gelu_tanh", "hardsigmoid", "hardswish", "log",    "logistic", "mish", "pow",
    "round",     "soft_relu",   "sqrt",      "square", "swish",    "tanh"};
constexpr std::string_view kBinaryNames[] = {"add", "sub", "mul", "div", "max", "min",   "ge",
                                             "gt",  "le",  "lt",  "eq",  "ne",  "select"};
static_assert(std::size(kEltwiseNames) == Eltwise::kTanh + 1);
static_assert(std::size(kBinaryNames) == static_cast<size_t>(Binary::select) + 1);

/// The next field of `text` up to `separator`, which is removed together with the field.
std::string_view next_field(std::string_view& text, char separator) {
  const size_t end = text.find(separator);
  const std::string_view field = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return field;
}

/// Reads the whole of `field`; returns false where it is not a number.
template <class T>
bool parse(std::string_view field, T* value) {
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), *value);
  return error == std::errc() && end == field.data() + field.size();
}

/// The same for float. std::from_chars of float came with GLIBCXX_3.4.29, after manylinux_2_28.
bool parse(std::string_view field, float* value) {
  static const locale_t c_locale = newlocale(LC_ALL_MASK, "C", nullptr);
  // strtof also takes blanks and a plus sign in front, and hexadecimal numbers.
  const auto first = static_cast<unsigned char>(field[0]);
  if (std::isspace(first) || first == '+' || field.find_first_of("xX") != field.npos) return false;
  const std::string text(field);
  char* end = nullptr;
  // strtof rounds as the x87 unit does. FloatMode puts back what fesetround changes beside it.
  const FloatMode mode;
  const int rounding = std::fegetround();
  std::fesetround(FE_TONEAREST);
  *value = strtof_l(text.c_str(), &end, c_locale);
  std::fesetround(rounding);
  return end == text.c_str() + text.size() && std::isfinite(*value);
}

template <class T>
void read_number(const char* op, std::string_view field, std::string_view post_op, T* value) {
  if (field.empty()) return;
  TORCH_CHECK_VALUE(parse(field, value), "torchq.", op, ": post_ops: expected a number in '",
                    post_op, "', got '", field, "'. Build the text with torchq.PostOps.");
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

/// The index of `name` among `names`; ValueError if it is none of them.
template <size_t kCount>
int find_alg(const char* op, std::string_view name, const std::string_view (&names)[kCount],
             std::string_view post_op) {
  for (size_t i = 0; i < kCount; ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  std::string known;
  for (const std::string_view known_name : names) {
    known += (known.empty() ? "" : ", ") + std::string(known_name);
  }
  TORCH_CHECK_VALUE(false, "torchq.", op, ": post_ops: the algorithm in '", post_op,
                    "' must be one of ", known, ", got '", name,
                    "'. Build the text with torchq.PostOps.");
}

PostOp parse_one(const char* op, const std::string_view text) {
  std::string_view rest = text;
  const std::string_view name = next_field(rest, ':');
  const std::string_view kind = name.substr(0, name.find('_'));
  const std::string_view alg = name.substr(std::min(kind.size() + 1, name.size()));
  PostOp result{};
  if (name == "sum") {
    result.kind = PostOp::kSum;
    read_number(op, next_field(rest, ':'), text, &result.scale);
    read_number(op, next_field(rest, ':'), text, &result.zero_point);
    result.dtype = read_dtype(op, next_field(rest, ':'), text);
  } else if (kind == "eltwise") {
    result.kind = PostOp::kEltwise;
    result.eltwise.alg = static_cast<Eltwise::Alg>(find_alg(op, alg, kEltwiseNames, text));
    read_number(op, next_field(rest, ':'), text, &result.eltwise.alpha);
    read_number(op, next_field(rest, ':'), text, &result.eltwise.beta);
    read_number(op, next_field(rest, ':'), text, &result.eltwise.scale);
    TORCH_CHECK_VALUE(!result.is(Eltwise::kClip) || result.eltwise.alpha <= result.eltwise.beta,
                      "torchq.", op, ": post_ops: the bounds of '", text, "' must be in order, ",
                      "lower:upper. Build the text with torchq.PostOps.");
    TORCH_CHECK_VALUE(!result.is(Eltwise::kSoftRelu) || result.eltwise.alpha != 0, "torchq.", op,
                      ": post_ops: alpha of '", text, "', which divides, must not be 0. ",
                      "Build the text with torchq.PostOps.");
  } else if (kind == "binary" || name == "prelu") {
    result.kind = PostOp::kBinary;
    result.binary = name == "prelu" ? Binary::prelu
                                    : static_cast<Binary>(find_alg(op, alg, kBinaryNames, text));
    const std::string_view mask = next_field(rest, ':');
    TORCH_CHECK_VALUE(!mask.empty(), "torchq.", op, ": post_ops: '", text,
                      "' needs the mask of its operand, ':0' for one value, ':2' for one per ",
                      "channel. Build the text with torchq.PostOps.");
    read_number(op, mask, text, &result.mask);
    if (kind == "binary") result.dtype = read_dtype(op, next_field(rest, ':'), text);
    result.dtype = result.dtype.value_or(DType::f32);
  } else {
    TORCH_CHECK_VALUE(false, "torchq.", op, ": post_ops: '", text,
                      "' must be sum, eltwise_<alg>, binary_<alg> or prelu. ",
                      "Build the text with torchq.PostOps.");
  }
  TORCH_CHECK_VALUE(rest.empty(), "torchq.", op, ": post_ops: '", text, "' has extra fields '",
                    rest, "'. Build the text with torchq.PostOps.");
  return result;
}

bool is_affine(const PostOp& p) {
  return p.kind == PostOp::kSum || p.is(Eltwise::kLinear) ||
         (p.has_values() && (p.is(Binary::add) || p.is(Binary::mul)));
}

bool is_bound(const PostOp& p) {
  return p.kind == PostOp::kEltwise && p.eltwise.scale == 1 &&
         (p.is(Eltwise::kClip) || (p.is(Eltwise::kRelu) && p.eltwise.alpha == 0));
}

}  // namespace

int64_t Chain::num_params(int64_t channels, DType dst) const {
  if (ops.empty()) return 0;
  if (folds) return 1 + channels * (sums + (ends_in(Eltwise::kClip) ? 2 : 0));
  return 1 + channels * (values + (dst == DType::f32 ? 0 : 1));
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
    chain.values += last.has_values();
    chain.sources += last.sources();
    chain.folds = chain.folds && (is_affine(last) || (text.empty() && is_bound(last)));
  }
  TORCH_CHECK_VALUE(chain.ops.size() <= kMaxPostOps, "torchq.", op, ": post_ops has ",
                    chain.ops.size(), " entries; at most ", kMaxPostOps,
                    " are supported. Run the rest as a separate op.");
  return chain;
}

}  // namespace torchq
