// SPDX-License-Identifier: Apache-2.0
//
// Runs oneDNN primitives for benchmarks/onednn/__init__.py, in a process of its own because torch
// carries another oneDNN under the same symbol names.
//
// One request is a header line and a payload; so is its answer:
//
//   convolution 214016 strides=1x1 ... @src=u8:1x64x56x56:acdb @weights=s8:256x64x1x1:abcd ...
//   ok 802816 implementation=brgconv_1x1:avx512_core_vnni
//   error 0 could not create a primitive descriptor for ... (unimplemented)
//
//   word 1, 2      request: primitive, payload bytes; answer: status, payload bytes
//   key=value      a parameter; lists are joined by 'x'
//   @name=dt:dims:tag   a tensor, whose bytes follow in the payload, in header order
//
// Names of data types, format tags and algorithms are oneDNN's own. Tensors named after an argument
// are bound to it; `scale:<arg>:<mask>` and `zero_point:<arg>:<mask>` set attributes, `post_op:<i>`
// is the operand of the i-th post-op that has one. Tensors named dst* come back, in that order.
// With samples=n the answer is seconds=<one figure per sample> instead of tensors.
//
// The same source serves oneDNN 2, for what oneDNN 3 dropped: `output_scale:dst:<mask>` and the
// scale of an eltwise post-op. There, matmul-like primitives are all it offers.
//
// To add a primitive: write its function next to the others and name it in `primitives`.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_debug.h"

namespace {

using dnnl::algorithm;
using dnnl::memory;
using dnnl::prop_kind;
using Arguments = std::unordered_map<int, memory>;

const dnnl::engine& cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

dnnl::stream& stream() {
  static dnnl::stream stream(cpu());
  return stream;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

/// The value below `end` that oneDNN spells `name`.
template <class Value>
Value by_name(const char* (*spell)(Value), const std::string& name, int end) {
  for (int value = 0; value < end; ++value) {
    if (name == spell(static_cast<Value>(value))) return static_cast<Value>(value);
  }
  throw std::invalid_argument("this oneDNN knows no '" + name + "'");
}

memory::data_type data_type(const std::string& name) {
  return static_cast<memory::data_type>(by_name(dnnl_dt2str, name, 32));
}

memory::format_tag format_tag(const std::string& name) {
  return static_cast<memory::format_tag>(by_name(dnnl_fmt_tag2str, name, dnnl_format_tag_last));
}

algorithm algorithm_named(const std::string& name) {
  static std::map<std::string, algorithm> known;  // the search walks a quarter of a million values
  auto found = known.find(name);
  if (found == known.end()) {
    const auto value = static_cast<algorithm>(by_name(dnnl_alg_kind2str, name, 0x40000));
    found = known.emplace(name, value).first;
  }
  return found->second;
}

memory::dims dimensions(const std::string& text) {
  memory::dims dims;
  for (const std::string& dim : split(text, 'x')) dims.push_back(std::stoll(dim));
  return dims;
}

memory::desc description(const std::string& text) {
  const std::vector<std::string> field = split(text, ':');
  if (field.size() != 3) throw std::invalid_argument("malformed tensor '" + text + "'");
  return {dimensions(field[1]), data_type(field[0]), format_tag(field[2])};
}

/// oneDNN's number for an argument. Two-operand primitives call their first source src0, those with
/// any number of sources part0, part1, ...
int argument(const std::string& name) {
  if (name.rfind("part", 0) == 0) return DNNL_ARG_MULTIPLE_SRC + std::stoi(name.substr(4));
  static const std::map<std::string, int> numbers = {
      {"src", DNNL_ARG_SRC},
      {"src0", DNNL_ARG_SRC_0},
      {"src1", DNNL_ARG_SRC_1},
      {"bias", DNNL_ARG_BIAS},
      {"dst", DNNL_ARG_DST},
      {"weights", DNNL_ARG_WEIGHTS},
      {"dw_weights", DNNL_ARG_ATTR_POST_OP_DW | DNNL_ARG_WEIGHTS},
      {"dw_bias", DNNL_ARG_ATTR_POST_OP_DW | DNNL_ARG_BIAS},
      {"dw_dst", DNNL_ARG_ATTR_POST_OP_DW | DNNL_ARG_DST},
      {"gamma", DNNL_ARG_SCALE},
      {"beta", DNNL_ARG_SHIFT},
      {"src_layer", DNNL_ARG_SRC_LAYER},
      {"src_iter", DNNL_ARG_SRC_ITER},
      {"src_iter_c", DNNL_ARG_SRC_ITER_C},
      {"weights_layer", DNNL_ARG_WEIGHTS_LAYER},
      {"weights_iter", DNNL_ARG_WEIGHTS_ITER},
      {"weights_projection", DNNL_ARG_WEIGHTS_PROJECTION},
      {"dst_layer", DNNL_ARG_DST_LAYER},
      {"dst_iter", DNNL_ARG_DST_ITER},
      {"dst_iter_c", DNNL_ARG_DST_ITER_C},
  };
  const auto found = numbers.find(name);
  if (found == numbers.end()) throw std::invalid_argument("unknown argument '" + name + "'");
  return found->second;
}

class Request {
 public:
  Request(std::istringstream& header, const std::vector<char>& payload) {
    size_t position = 0;
    for (std::string word; header >> word;) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) throw std::invalid_argument("malformed word '" + word + "'");
      const std::string key = word.substr(0, equals), value = word.substr(equals + 1);
      if (key[0] != '@') {
        parameters_[key] = value;
        continue;
      }
      const memory tensor(description(value), cpu());
      const size_t bytes = tensor.get_desc().get_size();
      if (bytes > payload.size() - position) throw std::invalid_argument("payload too short");
      if (bytes > 0) std::memcpy(tensor.get_data_handle(), payload.data() + position, bytes);
      position += bytes;
      tensors_.emplace_back(key.substr(1), tensor);
    }
  }

  const std::vector<std::pair<std::string, memory>>& tensors() const { return tensors_; }

  std::string text(const std::string& key, const std::string& absent = "") const {
    const auto found = parameters_.find(key);
    return found == parameters_.end() ? absent : found->second;
  }
  memory::dims dims(const std::string& key) const { return dimensions(text(key)); }
  float number(const std::string& key) const { return std::stof(text(key, "0")); }
  int integer(const std::string& key) const { return std::stoi(text(key, "0")); }
  algorithm alg() const { return algorithm_named(text("algorithm")); }

  /// The description of a tensor, the empty one if the request has no such tensor.
  memory::desc desc(const std::string& name) const {
    for (const auto& tensor : tensors_) {
      if (tensor.first == name) return tensor.second.get_desc();
    }
    return {};
  }

  /// The same in the layout the primitive prefers.
  memory::desc any(const std::string& name) const {
    const memory::desc plain = desc(name);
#if DNNL_VERSION_MAJOR < 3
    return {plain.dims(), plain.data_type(), memory::format_tag::any};
#else
    return {plain.get_dims(), plain.get_data_type(), memory::format_tag::any};
#endif
  }

  /// The descriptions of part0, part1, ...
  std::vector<memory::desc> parts() const {
    std::vector<memory::desc> found;
    for (const auto& tensor : tensors_) {
      if (tensor.first.rfind("part", 0) == 0) found.push_back(tensor.second.get_desc());
    }
    return found;
  }

 private:
  std::map<std::string, std::string> parameters_;
  std::vector<std::pair<std::string, memory>> tensors_;
};

/// Appends the post-ops of the request and binds their operands.
dnnl::post_ops post_ops(const Request& request, Arguments& arguments) {
  std::vector<memory> operands;
  for (const auto& tensor : request.tensors()) {
    if (tensor.first.rfind("post_op:", 0) == 0) operands.push_back(tensor.second);
  }
  dnnl::post_ops ops;
  size_t next = 0;
  const auto operand = [&](int role) {
    if (next == operands.size()) throw std::invalid_argument("a post-op lacks its tensor");
    arguments[DNNL_ARG_ATTR_MULTIPLE_POST_OP(ops.len()) | role] = operands[next];
    return operands[next++].get_desc();
  };
  for (const std::string& text : split(request.text("post_ops"), '+')) {
    const std::vector<std::string> field = split(text, ':');
    const auto number = [&](size_t index, float absent) {
      return field.size() > index ? std::stof(field[index]) : absent;
    };
    if (field[0] == "sum") {
      const auto type = field.size() > 3 ? data_type(field[3]) : memory::data_type::undef;
      ops.append_sum(number(1, 1), static_cast<int32_t>(number(2, 0)), type);
    } else if (field[0].rfind("eltwise_", 0) == 0) {
#if DNNL_VERSION_MAJOR < 3
      ops.append_eltwise(number(3, 1), algorithm_named(field[0]), number(1, 0), number(2, 0));
#else
      ops.append_eltwise(algorithm_named(field[0]), number(1, 0), number(2, 0));
      // oneDNN 3 dropped the scale of an eltwise post-op: another one stands for it.
      if (number(3, 1) != 1) ops.append_eltwise(algorithm::eltwise_linear, number(3, 1), 0);
#endif
    } else if (field[0].rfind("binary_", 0) == 0) {
      ops.append_binary(algorithm_named(field[0]), operand(DNNL_ARG_SRC_1));
    } else if (field[0] == "prelu") {
      operand(DNNL_ARG_WEIGHTS);
      ops.append_prelu(std::stoi(field.at(1)));
#if DNNL_VERSION_MAJOR >= 3
    } else if (field[0] == "dw_conv") {
      const auto bias = field.size() > 5 ? data_type(field[5]) : memory::data_type::undef;
      ops.append_dw(memory::data_type::s8, bias, request.desc("dst").get_data_type(),
                    std::stoi(field.at(1)), std::stoi(field.at(2)), std::stoi(field.at(3)));
#endif
    } else {
      throw std::invalid_argument("unknown post-op '" + text + "'");
    }
  }
  if (next != operands.size())
    throw std::invalid_argument("more tensors than post-ops to use them");
  return ops;
}

/// Builds the attributes of the request and binds the tensors they take at execution.
dnnl::primitive_attr attributes(const Request& request, Arguments& arguments) {
  dnnl::primitive_attr attr;
  for (const auto& tensor : request.tensors()) {
    const std::vector<std::string> field = split(tensor.first, ':');
    if (field.size() != 3) continue;
    const int number = argument(field[1]), mask = std::stoi(field[2]);
#if DNNL_VERSION_MAJOR < 3
    if (field[0] == "scale")
      throw std::invalid_argument("oneDNN 2 has output scales, not scales of an argument");
    const size_t count = tensor.second.get_desc().get_size() / 4;
    if (field[0] == "output_scale") {
      const auto* values = static_cast<const float*>(tensor.second.get_data_handle());
      attr.set_output_scales(mask, {values, values + count});
    } else {
      const auto* values = static_cast<const int32_t*>(tensor.second.get_data_handle());
      attr.set_zero_points(number, mask, {values, values + count});
    }
#else
    if (field[0] == "output_scale")
      throw std::invalid_argument("oneDNN 3 has scales of arguments, not output scales");
    if (field[0] == "scale") {
      attr.set_scales_mask(number, mask);
      arguments[DNNL_ARG_ATTR_SCALES | number] = tensor.second;
    } else {
      attr.set_zero_points_mask(number, mask);
      arguments[DNNL_ARG_ATTR_ZERO_POINTS | number] = tensor.second;
    }
#endif
  }
  attr.set_post_ops(post_ops(request, arguments));
  return attr;
}

struct Job {
  dnnl::primitive primitive;
  Arguments arguments;
  std::string implementation;
};

/// Binds every tensor named after an argument, in the layout that the primitive chose for it.
template <class Primitive>
Job bind_arguments(const Request& request, const typename Primitive::primitive_desc& chosen,
                   Arguments arguments) {
  for (const auto& [name, tensor] : request.tensors()) {
    if (name.find(':') != std::string::npos) continue;  // an attribute, bound already
    const int number = argument(name);
    const memory::desc wanted = chosen.query_md(dnnl::query::exec_arg_md, number);
    memory given = tensor;
    memory& bound = arguments[number] = given;
    if (wanted == given.get_desc()) continue;
    bound = memory(wanted, cpu());
    dnnl::reorder(given, bound).execute(stream(), given, bound);
    stream().wait();
  }
  return {Primitive(chosen), std::move(arguments), chosen.impl_info_str()};
}

/// Creates a primitive of the request's attributes.
template <class Primitive, class... Operation>
Job prepare(const Request& request, const Operation&... operation) {
  Arguments arguments;
  const dnnl::primitive_attr attr = attributes(request, arguments);
#if DNNL_VERSION_MAJOR < 3
  const typename Primitive::primitive_desc chosen(typename Primitive::desc(operation...), attr,
                                                  cpu());
#else
  const typename Primitive::primitive_desc chosen(cpu(), operation..., attr);
#endif
  return bind_arguments<Primitive>(request, chosen, std::move(arguments));
}

/// With a depthwise post-op `between` describes the source of that one, and dst its destination.
Job convolution(const Request& r) {
  const std::string between = r.text("between");
  return prepare<dnnl::convolution_forward>(
      r, prop_kind::forward_inference, algorithm::convolution_direct, r.desc("src"),
      r.any("weights"), r.desc("bias"), between.empty() ? r.desc("dst") : description(between),
      r.dims("strides"), r.dims("dilates"), r.dims("padding_begin"), r.dims("padding_end"));
}

Job deconvolution(const Request& r) {
  return prepare<dnnl::deconvolution_forward>(
      r, prop_kind::forward_inference, algorithm::deconvolution_direct, r.desc("src"),
      r.any("weights"), r.desc("bias"), r.desc("dst"), r.dims("strides"), r.dims("dilates"),
      r.dims("padding_begin"), r.dims("padding_end"));
}

Job inner_product(const Request& r) {
  return prepare<dnnl::inner_product_forward>(r, prop_kind::forward_inference, r.desc("src"),
                                              r.any("weights"), r.desc("bias"), r.desc("dst"));
}

Job matmul(const Request& r) {
  const bool prepack = r.text("prepack") == "1";
  return prepare<dnnl::matmul>(r, r.desc("src"), prepack ? r.any("weights") : r.desc("weights"),
                               r.desc("bias"), r.desc("dst"));
}

#if DNNL_VERSION_MAJOR >= 3
Job pooling(const Request& r) {
  return prepare<dnnl::pooling_forward>(
      r, prop_kind::forward_inference, r.alg(), r.desc("src"), r.desc("dst"), r.dims("strides"),
      r.dims("kernel"), r.dims("dilates"), r.dims("padding_begin"), r.dims("padding_end"));
}

Job eltwise(const Request& r) {
  return prepare<dnnl::eltwise_forward>(r, prop_kind::forward_inference, r.alg(), r.desc("src"),
                                        r.desc("dst"), r.number("alpha"), r.number("beta"));
}

Job binary(const Request& r) {
  return prepare<dnnl::binary>(r, r.alg(), r.desc("src0"), r.desc("src1"), r.desc("dst"));
}

Job reorder(const Request& r) {
  Arguments arguments;
  const dnnl::primitive_attr attr = attributes(r, arguments);
  const dnnl::reorder::primitive_desc chosen(cpu(), r.desc("src"), cpu(), r.desc("dst"), attr);
  return bind_arguments<dnnl::reorder>(r, chosen, std::move(arguments));
}

/// The factors in a tensor `factors:<argument>:<mask>`, for the weights of a recurrent layer.
std::pair<int, std::vector<float>> weight_factors(const Request& r, const std::string& name) {
  for (const auto& [key, tensor] : r.tensors()) {
    const std::vector<std::string> field = split(key, ':');
    if (field[0] != "factors" || field[1] != name) continue;
    const float* values = static_cast<const float*>(tensor.get_data_handle());
    const size_t count = tensor.get_desc().get_size() / sizeof(float);
    return {std::stoi(field[2]), std::vector<float>(values, values + count)};
  }
  return {0, {}};
}

/// Weights come as f32: oneDNN quantizes and packs them in one reorder.
template <class Primitive, class... Operation>
Job recurrent(const Request& r, const Operation&... operation) {
  dnnl::primitive_attr attr;
  attr.set_rnn_data_qparams(r.number("data_scale"), r.number("data_shift"));
  const auto [mask, factors] = weight_factors(r, "weights");
  attr.set_rnn_weights_qparams(mask, factors);
  const auto [projection_mask, projection] = weight_factors(r, "projection");
  if (!projection.empty()) attr.set_rnn_weights_projection_qparams(projection_mask, projection);
  const typename Primitive::primitive_desc chosen(cpu(), operation..., attr);
  Arguments arguments;
  for (const auto& [name, tensor] : r.tensors()) {
    if (name.find(':') != std::string::npos) continue;
    const int number = argument(name);
    const memory::desc wanted = chosen.query_md(dnnl::query::exec_arg_md, number);
    memory given = tensor;
    memory& bound = arguments[number] = given;
    if (wanted == given.get_desc()) continue;
    bound = memory(wanted, cpu());
    const dnnl::reorder::primitive_desc packs(cpu(), given.get_desc(), cpu(), wanted, attr);
    dnnl::reorder(packs).execute(stream(), given, bound);
    stream().wait();
  }
  return {Primitive(chosen), std::move(arguments), chosen.impl_info_str()};
}

memory::desc packed_weights(const Request& r, const std::string& name) {
  const memory::desc plain = r.desc(name);
  if (plain.get_ndims() == 0) return {};
  return {plain.get_dims(), memory::data_type::s8, memory::format_tag::any};
}

dnnl::rnn_direction direction(const Request& r) {
  const std::string name = r.text("direction");
  if (name == "left2right") return dnnl::rnn_direction::unidirectional_left2right;
  if (name == "right2left") return dnnl::rnn_direction::unidirectional_right2left;
  return dnnl::rnn_direction::bidirectional_concat;
}

Job lstm(const Request& r) {
  return recurrent<dnnl::lstm_forward>(
      r, prop_kind::forward_inference, direction(r), r.desc("src_layer"), r.desc("src_iter"),
      r.desc("src_iter_c"), packed_weights(r, "weights_layer"), packed_weights(r, "weights_iter"),
      memory::desc(), packed_weights(r, "weights_projection"), r.desc("bias"), r.desc("dst_layer"),
      r.desc("dst_iter"), r.desc("dst_iter_c"));
}

Job gru(const Request& r) {
  return recurrent<dnnl::gru_forward>(
      r, prop_kind::forward_inference, direction(r), r.desc("src_layer"), r.desc("src_iter"),
      packed_weights(r, "weights_layer"), packed_weights(r, "weights_iter"), r.desc("bias"),
      r.desc("dst_layer"), r.desc("dst_iter"));
}

Job sum(const Request& r) {
  std::vector<float> scales;
  for (const std::string& scale : split(r.text("scales"), 'x')) scales.push_back(std::stof(scale));
  const dnnl::sum::primitive_desc chosen(cpu(), r.desc("dst"), scales, r.parts());
  return bind_arguments<dnnl::sum>(r, chosen, {});
}

Job concat(const Request& r) {
  Arguments arguments;
  const dnnl::primitive_attr attr = attributes(r, arguments);
  const dnnl::concat::primitive_desc chosen(cpu(), r.desc("dst"), r.integer("axis"), r.parts(),
                                            attr);
  return bind_arguments<dnnl::concat>(r, chosen, std::move(arguments));
}

Job softmax(const Request& r) {
  return prepare<dnnl::softmax_forward>(r, prop_kind::forward_inference, r.alg(), r.desc("src"),
                                        r.desc("dst"), r.integer("axis"));
}

Job layer_normalization(const Request& r) {
  return prepare<dnnl::layer_normalization_forward>(
      r, prop_kind::forward_inference, r.desc("src"), r.desc("dst"), r.number("epsilon"),
      dnnl::normalization_flags::use_scale | dnnl::normalization_flags::use_shift);
}

Job reduction(const Request& r) {
  return prepare<dnnl::reduction>(r, r.alg(), r.desc("src"), r.desc("dst"), 0.f, 0.f);
}

Job resampling(const Request& r) {
  return prepare<dnnl::resampling_forward>(r, prop_kind::forward_inference, r.alg(), r.desc("src"),
                                           r.desc("dst"));
}
#endif

const std::map<std::string, Job (*)(const Request&)> primitives = {
    {"convolution", convolution},
    {"deconvolution", deconvolution},
    {"inner_product", inner_product},
    {"matmul", matmul},
#if DNNL_VERSION_MAJOR >= 3
    {"pooling", pooling},
    {"eltwise", eltwise},
    {"binary", binary},
    {"reorder", reorder},
    {"lstm", lstm},
    {"gru", gru},
    {"sum", sum},
    {"concat", concat},
    {"softmax", softmax},
    {"layer_normalization", layer_normalization},
    {"reduction", reduction},
    {"resampling", resampling},
#endif
};

/// Seconds per execution over `iterations` of them.
double seconds(const Job& job, int iterations) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < iterations; ++i) job.primitive.execute(stream(), job.arguments);
  stream().wait();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / iterations;
}

/// The figures of `samples` samples; without a number of iterations, a sample lasts about 5 ms.
std::string timing(const Job& job, int samples, int iterations) {
  seconds(job, 1);  // the first execution touches new memory
  if (iterations < 1) iterations = std::clamp(static_cast<int>(5e-3 / seconds(job, 3)), 1, 100000);
  std::ostringstream text;
  for (int i = 0; i < samples; ++i) text << (i ? "," : "") << seconds(job, iterations);
  return text.str();
}

struct Answer {
  std::string text;
  std::vector<memory> tensors;
};

Answer run(std::istringstream& header, const std::string& name, const std::vector<char>& payload) {
  const auto found = primitives.find(name);
  if (found == primitives.end()) throw std::invalid_argument("unknown primitive '" + name + "'");
  const Request request(header, payload);
  const Job job = found->second(request);
  Answer answer{"implementation=" + job.implementation, {}};
  const int samples = std::stoi(request.text("samples", "0"));
  if (samples > 0) {
    answer.text += " seconds=" + timing(job, samples, std::stoi(request.text("iterations", "0")));
    return answer;
  }
  job.primitive.execute(stream(), job.arguments);
  stream().wait();
  for (const auto& tensor : request.tensors()) {
    if (tensor.first.rfind("dst", 0) == 0) {
      answer.tensors.push_back(job.arguments.at(argument(tensor.first)));
    }
  }
  return answer;
}

void send(std::FILE* out, const char* status, const Answer& answer) {
  size_t bytes = 0;
  for (const memory& tensor : answer.tensors) bytes += tensor.get_desc().get_size();
  std::fprintf(out, "%s %zu %s\n", status, bytes, answer.text.c_str());
  for (const memory& tensor : answer.tensors) {
    std::fwrite(tensor.get_data_handle(), 1, tensor.get_desc().get_size(), out);
  }
  std::fflush(out);
}

}  // namespace

int main() {
  std::FILE* out = fdopen(dup(STDOUT_FILENO), "wb");
  dup2(STDERR_FILENO, STDOUT_FILENO);  // what oneDNN prints (ONEDNN_VERBOSE) is no answer
  const dnnl_version_t& version = *dnnl_version();
  send(out, "ok",
       {"version=" + std::to_string(version.major) + "." + std::to_string(version.minor) + "." +
            std::to_string(version.patch),
        {}});

  char* line = nullptr;
  size_t capacity = 0;
  while (getline(&line, &capacity, stdin) > 0) {
    std::istringstream header(line);
    std::string name;
    size_t bytes = 0;
    header >> name >> bytes;
    std::vector<char> payload(bytes);
    if (std::fread(payload.data(), 1, bytes, stdin) != bytes) return 1;
    try {
      send(out, "ok", run(header, name, payload));
    } catch (const dnnl::error& error) {
      send(out, "error",
           {std::string(error.what()) + " (" + dnnl_status2str(error.status) + ")", {}});
    } catch (const std::exception& error) {
      send(out, "error", {error.what(), {}});
    }
  }
  return 0;
}
