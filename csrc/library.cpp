// SPDX-License-Identifier: Apache-2.0
// Every schema torchq exposes. Kernels bind next to their code in ops/*.cpp; fake kernels are in
// torchq/runtime/fakes.py and matmul_fakes.py. Schemas are append-only once released
// (tests/ops/test_schemas.py).
//
// dst_dtype is a ScalarType's number (uint8 0, int8 1, int32 3, float16 5, float32 6, bfloat16 15):
// an int costs a call 0.6 us less. geometry is one list for the same reason; its layout is in
// ops/conv/geometry.h.
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "runtime/bfloat16.h"
#include "runtime/checks.h"
#include "runtime/dispatch.h"
#include "runtime/glibc.h"
#include "runtime/result_allocator.h"
#include "runtime/scratch.h"

TORCH_LIBRARY(torchq, m) {
  m.set_python_module("torchq.ops");
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  m.def("pack_linear(Tensor weight) -> (Tensor packed, Tensor compensation, Tensor pair_bound)",
        tags);
  m.def("unpack_linear(Tensor packed, int out_features, int in_features) -> Tensor", tags);
  m.def(
      "pack_conv(Tensor weight, int groups, int[] dilation) -> (Tensor packed, "
      "Tensor compensation, Tensor pair_bound)",
      tags);
  m.def("unpack_conv(Tensor packed, int[] weight_shape, int groups, int[] dilation) -> Tensor",
        tags);

  m.def(
      "fold(Tensor src_scale, Tensor weight_scale, Tensor? bias, Tensor? dst_scale, "
      "Tensor? dst_zero_point, int channels, int dst_dtype, str post_ops, "
      "Tensor[] post_op_values) -> (Tensor multiplier, Tensor offset, Tensor post_op_params)",
      tags);
  m.def(
      "fold_output_scales(Tensor output_scales, Tensor? bias, int channels, int dst_dtype, "
      "str post_ops, Tensor[] post_op_values, Tensor? dst_zero_point=None) -> "
      "(Tensor multiplier, Tensor offset, Tensor post_op_params)",
      tags);

  m.def(
      "linear(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, "
      "Tensor multiplier, Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, "
      "int in_features, int dst_dtype, str post_ops, Tensor post_op_params, "
      "Tensor[]? post_op_srcs, Tensor? weight_zero_point=None, Tensor? row_sums=None, "
      "Tensor? table=None) -> Tensor",
      tags);
  m.def(
      "conv(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, Tensor multiplier, "
      "Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, int[] geometry, int dst_dtype, "
      "str post_ops, Tensor post_op_params, Tensor[]? post_op_srcs, "
      "Tensor? weight_zero_point=None, Tensor? row_sums=None, Tensor? table=None) -> Tensor",
      tags);

  m.def(
      "pack_conv_transpose(Tensor weight, int groups, int[] stride, int[] dilation) "
      "-> (Tensor packed, Tensor compensation, Tensor pair_bound)",
      tags);
  m.def(
      "unpack_conv_transpose(Tensor packed, int[] weight_shape, int groups, int[] stride, "
      "int[] dilation) -> Tensor",
      tags);
  m.def(
      "conv_transpose(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, "
      "Tensor multiplier, Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, "
      "int[] geometry, int dst_dtype, str post_ops, Tensor post_op_params, Tensor[]? post_op_srcs, "
      "Tensor? weight_zero_point=None, Tensor? table=None) -> Tensor",
      tags);

  m.def(
      "matmul(Tensor src, Tensor weight, Tensor multiplier, Tensor offset, Tensor? acc_bias, "
      "Tensor? src_zero_point, Tensor? weight_zero_point, int dst_dtype, str post_ops, "
      "Tensor post_op_params, Tensor[]? post_op_srcs) -> Tensor",
      tags);
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float "
      "scale, "
      "Tensor scales, Tensor zero_points, int dst_dtype) -> Tensor",
      tags);
  m.def(
      "dynamic_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
      "float scale) -> Tensor",
      tags);
  m.def("compress_rows(Tensor src) -> Tensor", tags);
  m.def(
      "compressed_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> "
      "Tensor",
      tags);
  m.def(
      "gemm(Tensor a, Tensor b, Tensor? c, bool trans_a, bool trans_b, float alpha, float beta, "
      "int ao, int bo, str offsetc, Tensor co) -> Tensor",
      tags);

  m.def(
      "dynamic_linear(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, "
      "Tensor weight_scale, Tensor? bias, int in_features, bool per_row, str post_ops='', "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);

  // The layout of `weight` and `params` is that of Int4Tile in kernels/gemm/contract.h.
  m.def(
      "dynamic_linear_int4(Tensor src, Tensor weight, Tensor params, Tensor? bias, "
      "int in_features, int out_features, int group_size, bool symmetric, str post_ops='', "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);

  // Each group of rows has a weight of its own: ops/gemm/groups.h says how these are stacked.
  m.def(
      "grouped_linear(Tensor src, Tensor offsets, Tensor weight, Tensor compensation, "
      "Tensor pair_bound, Tensor weight_scale, Tensor? bias, int in_features, int out_features) "
      "-> Tensor",
      tags);
  m.def(
      "grouped_linear_int4(Tensor src, Tensor offsets, Tensor weight, Tensor params, Tensor? bias, "
      "int in_features, int out_features, int group_size, bool symmetric) -> Tensor",
      tags);

  m.def(
      "dynamic_conv(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, "
      "Tensor weight_scale, Tensor? bias, int[] geometry) -> Tensor",
      tags);

  // The row format of `weight` is in ops/embedding/embedding.cpp.
  m.def("embedding(Tensor weight, Tensor indices, int embedding_dim, int bits) -> Tensor", tags);
  m.def(
      "embedding_bag(Tensor weight, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, "
      "int embedding_dim, int bits, str mode, bool include_last_offset, int? padding_idx) "
      "-> Tensor",
      tags);

  m.def("quantize(Tensor src, Tensor scale, Tensor zero_point, int dst_dtype) -> Tensor", tags);
  m.def("dequantize(Tensor src, Tensor scale, Tensor zero_point) -> Tensor", tags);
  m.def(
      "requantize(Tensor src, Tensor src_scale, Tensor src_zero_point, Tensor dst_scale, "
      "Tensor dst_zero_point, int dst_dtype) -> Tensor",
      tags);
  m.def(
      "reorder(Tensor src, Tensor output_scales, int dst_dtype, Tensor? src_zero_point=None, "
      "Tensor? dst_zero_point=None) -> Tensor",
      tags);
  m.def("lookup(Tensor src, Tensor table) -> Tensor", tags);
  m.def(
      "add(Tensor src0, Tensor src1, Tensor scales, Tensor zero_points, int dst_dtype, bool relu) "
      "-> Tensor",
      tags);
  m.def(
      "mul(Tensor src0, Tensor src1, Tensor scales, Tensor zero_points, int dst_dtype, bool relu) "
      "-> Tensor",
      tags);
  m.def(
      "concat(Tensor[] srcs, Tensor scales, Tensor zero_points, int dim, int dst_dtype) -> Tensor",
      tags);
  m.def(
      "max_pool(Tensor src, int[] geometry, bool ceil_mode, Tensor? scales=None, "
      "Tensor? zero_points=None, int? dst_dtype=None, str post_ops=\"\", "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "avg_pool(Tensor src, Tensor zero_point, int[] geometry, bool ceil_mode, "
      "bool count_include_pad, int? divisor_override, Tensor? scales=None, "
      "Tensor? zero_points=None, int? dst_dtype=None, str post_ops=\"\", "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "adaptive_avg_pool(Tensor src, int[] output_size, Tensor? scales=None, "
      "Tensor? zero_points=None, int? dst_dtype=None, str post_ops=\"\", "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "rnn(Tensor src, Tensor? batch_sizes, Tensor? h_0, Tensor? c_0, Tensor weight_src, "
      "Tensor compensation_src, Tensor multiplier_src, Tensor weight_state, "
      "Tensor compensation_state, Tensor multiplier_state, Tensor bias, Tensor? extra, "
      "Tensor? weight_projection, Tensor? compensation_projection, Tensor? multiplier_projection, "
      "Tensor[] pair_bounds, Tensor scales, Tensor zero_points, int[] geometry, int dst_dtype, "
      "int state_dtype, int h_n_dtype) -> (Tensor dst, Tensor h_n, Tensor c_n)",
      tags);

  // In real units (ops/rows/real.h): scales and zero_points are those of the sources, then of dst.
  m.def(
      "eltwise(Tensor src, Tensor scales, Tensor zero_points, int dst_dtype, str post_ops, "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "binary(Tensor src0, Tensor src1, Tensor? condition, str alg, Tensor scales, "
      "Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def("sum(Tensor[] srcs, Tensor scales, Tensor zero_points, int dst_dtype) -> Tensor", tags);
  m.def(
      "reorder_rounded(Tensor src, Tensor scales, Tensor zero_points, int dst_dtype, "
      "str rounding, int seed) -> Tensor",
      tags);
  m.def(
      "softmax(Tensor src, int dim, bool logarithmic, Tensor scales, Tensor zero_points, "
      "int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "layer_norm(Tensor src, int dims, Tensor? weight, Tensor? bias, float eps, Tensor scales, "
      "Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "rms_norm(Tensor src, int dims, Tensor? weight, float eps, Tensor scales, "
      "Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "group_norm(Tensor src, int groups, Tensor? weight, Tensor? bias, float eps, Tensor scales, "
      "Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "batch_norm(Tensor src, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, "
      "float eps, Tensor scales, Tensor zero_points, int dst_dtype, str post_ops, "
      "Tensor[]? post_op_srcs=None) -> Tensor",
      tags);
  m.def(
      "reduction(Tensor src, str alg, int[] dims, bool keepdim, Tensor scales, "
      "Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None, "
      "float p=2.0, float eps=0.0) -> Tensor",
      tags);
  m.def(
      "resampling(Tensor src, str alg, int[] size, Tensor scales, Tensor zero_points, "
      "int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor",
      tags);

  // Computes in float32; the formula is in ops/rows/rotary.cpp.
  m.def("rotary(Tensor src, Tensor cos, Tensor sin) -> Tensor", tags);

  // For the checks of loaded weights (torchq.functional.packing.unproven); exported programs do not
  // call it.
  m.def("_packed_sums(Tensor packed) -> (Tensor compensation, Tensor pair_bound)", tags);

  // Settings and introspection: no tensors, so they bind here.
  m.def("_select_isa(str isa) -> str", &torchq::select_isa);
  m.def("_isa() -> str", []() { return std::string(torchq::kernels().isa); });
  m.def("_supported_isas() -> str[]", &torchq::supported_isas);
  m.def("_cpu() -> str", &torchq::cpu_name);
  m.def("_last_kernel() -> str", &torchq::last_kernel);
  m.def("_scratch_bytes() -> int", &torchq::scratch_bytes);
  m.def("_idle_bytes() -> int", &torchq::idle_bytes);
  m.def("_release_memory() -> int",
        []() { return torchq::release_scratch() + torchq::release_idle(); });
  m.def("_set_timing(bool on) -> bool", &torchq::set_timing);
  m.def("_set_only_checks(bool on) -> bool", &torchq::set_only_checks);
  m.def("_last_us() -> float", &torchq::last_microseconds);
}

namespace torchq {
namespace {

void check_plain(const char* op, const char* arg, const at::Tensor& t) {
  if (!t.defined()) return;
  TORCH_CHECK_TYPE(!t.is_nested(), "torchq.", op, ": ", arg, " must be a dense CPU tensor, got a ",
                   "nested one. Pass its parts one by one, or padded.");
  TORCH_CHECK_TYPE(!t.is_quantized(), "torchq.", op, ": ", arg, " must be a plain tensor, got ",
                   dtype_name(t.scalar_type()), ". Pass .int_repr(), and .q_scale() and ",
                   ".q_zero_point() as its scale and zero point.");
  check_cpu(op, arg, t);
}

/// Boxed, of every op: for tensors of which no op has a kernel.
void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string name = schema.name().substr(std::string("torchq::").size());
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& given = torch::jit::peek(*stack, i, count);
    const char* arg = schema.arguments()[i].name().c_str();
    if (given.isTensor()) check_plain(name.c_str(), arg, given.toTensor());
    if (given.isTensorList())
      for (const at::Tensor& t : given.toTensorVector()) check_plain(name.c_str(), arg, t);
  }
  TORCH_CHECK_TYPE(false, "torchq.", name, ": tensors must be dense CPU tensors, got others.");
}

void check_no_gradient(const c10::OperatorHandle& op, size_t i, const at::Tensor& t) {
  if (!t.defined()) return;
  const bool backward = t.requires_grad() && at::GradMode::is_enabled();
  const bool forward = t._fw_grad(0).defined();
  if (!backward && !forward) return;
  const std::string name = op.schema().name().substr(std::string("torchq::").size());
  const std::string& arg = op.schema().arguments()[i].name();
  TORCH_CHECK(
      !backward, "torchq.", name, ": ", arg,
      " requires grad, but torchq's ops have no backward. Run them under torch.no_grad() or ",
      "torch.inference_mode(), or pass ", arg, ".detach().");
  TORCH_CHECK(!forward, "torchq.", name, ": ", arg,
              " has a tangent, but torchq's ops have no forward-mode derivative. Pass ",
              "torch.autograd.forward_ad.unpack_dual(", arg, ").primal.");
}

/// Boxed, of every op, in front of its kernels. Without it PyTorch takes derivatives of an op for
/// zeros, and only here are those of torch.func seen, whose tensors kernels get unwrapped.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& given = torch::jit::peek(*stack, i, count);
    if (given.isTensor()) {
      check_no_gradient(op, i, given.toTensor());
    } else if (given.isTensorList()) {
      for (const c10::IValue& t : given.toListRef()) check_no_gradient(op, i, t.toTensor());
    }
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

/// Returns whether a list among the arguments, such as a residual, holds a float32 tensor.
bool adds_float32(const torch::jit::Stack& stack) {
  for (const c10::IValue& value : stack) {
    if (!value.isTensorList()) continue;
    for (const c10::IValue& t : value.toListRef())
      if (t.toTensor().scalar_type() == at::kFloat) return true;
  }
  return false;
}

/// Boxed, of the ops whose float forms autocast runs in a half type: rounds their float32 results.
/// A sum with float32 is float32, as promotion of types has it.
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const std::string name = op.schema().name().substr(std::string("torchq::").size());
  TORCH_CHECK_TYPE(is_half_type(dtype), "torchq.", name,
                   ": the dtype of torch.autocast(\"cpu\") must be torch.bfloat16 or ",
                   "torch.float16, got ", dtype_name(dtype),
                   ". Name it, or leave autocast to compute in float32.");
  const bool is_float32 = adds_float32(*stack);
  if (is_float32) {  // else a source of a half type would have the result rounded
    for (c10::IValue& value : *stack) {
      const bool narrow = value.isTensor() && is_half_type(value.toTensor().scalar_type());
      if (narrow) value = value.toTensor().to(at::kFloat);
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  op.callBoxed(stack);
  if (!is_float32) stack->back() = rounded(stack->back().toTensor(), dtype);
}

template <auto* kBoxed>
void implement_all(torch::Library& m) {
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames())
    if (op.getNamespace() == "torchq")
      m.impl(op.name.c_str(), torch::CppFunction::makeFromBoxedFunction<kBoxed>());
}

void refuse_all(torch::Library& m) { implement_all<&refuse>(m); }

}  // namespace
}  // namespace torchq

TORCH_LIBRARY_IMPL(torchq, Autograd, m) { torchq::implement_all<&torchq::refuse_gradients>(m); }
TORCH_LIBRARY_IMPL(torchq, AutocastCPU, m) {
  for (const char* op :
       {"linear", "conv", "conv_transpose", "matmul", "attention", "dynamic_linear",
        "dynamic_linear_int4", "grouped_linear", "grouped_linear_int4", "dynamic_conv",
        "dynamic_attention", "compressed_attention"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&torchq::autocast>());
}
TORCH_LIBRARY_IMPL(torchq, QuantizedCPU, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, SparseCPU, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, SparseCsrCPU, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, NestedTensorCPU, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, AutogradNestedTensor, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, MkldnnCPU, m) { torchq::refuse_all(m); }
TORCH_LIBRARY_IMPL(torchq, CUDA, m) { torchq::refuse_all(m); }
