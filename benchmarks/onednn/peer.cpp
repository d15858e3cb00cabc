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
// are bound to it; `scale:<arg>:<mask>[:<groups>]` and `zero_point:<arg>:<mask>` set attributes,
// `post_op:<i>` is the operand of the i-th post-op that has one. Tensors named dst* come back, in
// that order. With samples=n the answer is seconds=<one figure per sample> instead of tensors.
//
// The same source serves oneDNN 2, for what oneDNN 3 dropped: `output_scale:dst:<mask>` and the
// scale of an eltwise post-op. There, matmul-like primitives are all it offers.
//
// To add a primitive: write its function next to the others and name it in `primitives`.

#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "request.h"

namespace {

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
  return bind_arguments<Primitive>(r, chosen, {}, attr);
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

/// Scale, and shift if the request has one.
dnnl::normalization_flags normalization(const Request& r) {
  dnnl::normalization_flags flags = dnnl::normalization_flags::use_scale;
  if (r.desc("beta").get_ndims() > 0) flags |= dnnl::normalization_flags::use_shift;
  return flags;
}

Job layer_normalization(const Request& r) {
  return prepare<dnnl::layer_normalization_forward>(r, prop_kind::forward_inference, r.desc("src"),
                                                    r.desc("dst"), r.number("epsilon"),
                                                    normalization(r));
}

#if DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 13
Job rms_normalization(const Request& r) {
  return prepare<dnnl::layer_normalization_forward>(
      r, prop_kind::forward_inference, r.desc("src"), r.desc("dst"), r.number("epsilon"),
      normalization(r) | dnnl::normalization_flags::rms_norm);
}

Job group_normalization(const Request& r) {
  return prepare<dnnl::group_normalization_forward>(r, prop_kind::forward_inference, r.desc("src"),
                                                    r.desc("dst"), r.integer("groups"),
                                                    r.number("epsilon"), normalization(r));
}
#endif

Job reduction(const Request& r) {
  return prepare<dnnl::reduction>(r, r.alg(), r.desc("src"), r.desc("dst"), r.number("p"),
                                  r.number("epsilon"));
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
#if DNNL_VERSION_MAJOR > 3 || DNNL_VERSION_MINOR >= 13
    {"rms_normalization", rms_normalization},
    {"group_normalization", group_normalization},
#endif
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
