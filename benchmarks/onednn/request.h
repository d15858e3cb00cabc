// SPDX-License-Identifier: Apache-2.0
// From the text of a request (see peer.cpp) to oneDNN's descriptions, attributes and primitives.
#pragma once

#include <algorithm>
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

#if DNNL_VERSION_MAJOR >= 3
/// Scales that blocks of the last two dimensions share.
void set_group_scales(dnnl::primitive_attr& attr, int argument, int mask,
                      const memory::dims& groups) {
#if DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 13
  attr.set_scales(argument, mask, groups);
#else
  throw std::invalid_argument("this oneDNN has no groups of scales");
#endif
}
#endif

/// Builds the attributes of the request and binds the tensors they take at execution.
dnnl::primitive_attr attributes(const Request& request, Arguments& arguments) {
  dnnl::primitive_attr attr;
  for (const auto& tensor : request.tensors()) {
    const std::vector<std::string> field = split(tensor.first, ':');
    if (field.size() < 3) continue;
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
    if (field.size() > 3 && field[0] != "scale")
      throw std::invalid_argument("of the attributes with groups, the peer knows scales");
    if (field.size() > 3) {
      set_group_scales(attr, number, mask, dimensions(field[3]));
      arguments[DNNL_ARG_ATTR_SCALES | number] = tensor.second;
    } else if (field[0] == "scale") {
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

/// Binds every tensor named after an argument, in the layout that the primitive chose for it;
/// `packing` are attributes of the reorders to these layouts.
template <class Primitive>
Job bind_arguments(const Request& request, const typename Primitive::primitive_desc& chosen,
                   Arguments arguments, const dnnl::primitive_attr& packing = {}) {
  for (const auto& [name, tensor] : request.tensors()) {
    if (name.find(':') != std::string::npos) continue;  // an attribute, bound already
    const int number = argument(name);
    const memory::desc wanted = chosen.query_md(dnnl::query::exec_arg_md, number);
    memory given = tensor;
    memory& bound = arguments[number] = given;
    if (wanted == given.get_desc()) continue;
    bound = memory(wanted, cpu());
    const dnnl::reorder::primitive_desc packs(cpu(), given.get_desc(), cpu(), wanted, packing);
    dnnl::reorder(packs).execute(stream(), given, bound);
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

}  // namespace
