# SPDX-License-Identifier: Apache-2.0
"""The ops' schemas: programs exported today must load tomorrow, so this list only ever grows.

A new op appends its line. Changing or removing a line breaks saved programs: add an op instead.
"""

from __future__ import annotations

import pytest
import torch
from torch import FunctionSchema

import torchq

OPS = """
pack_linear(Tensor weight) -> (Tensor packed, Tensor compensation, Tensor pair_bound)
unpack_linear(Tensor packed, int out_features, int in_features) -> Tensor
pack_conv(Tensor weight, int groups, int[] dilation) -> (Tensor packed, Tensor compensation, \
Tensor pair_bound)
unpack_conv(Tensor packed, int[] weight_shape, int groups, int[] dilation) -> Tensor
fold(Tensor src_scale, Tensor weight_scale, Tensor? bias, Tensor? dst_scale, \
Tensor? dst_zero_point, int channels, int dst_dtype, str post_ops, Tensor[] post_op_values) -> \
(Tensor multiplier, Tensor offset, Tensor post_op_params)
fold_output_scales(Tensor output_scales, Tensor? bias, int channels, int dst_dtype, str post_ops, \
Tensor[] post_op_values, Tensor? dst_zero_point=None) -> (Tensor multiplier, Tensor offset, \
Tensor post_op_params)
linear(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, Tensor multiplier, \
Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, int in_features, int dst_dtype, \
str post_ops, Tensor post_op_params, Tensor[]? post_op_srcs, \
Tensor? weight_zero_point=None, Tensor? row_sums=None, Tensor? table=None) -> Tensor
conv(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, Tensor multiplier, \
Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, int[] geometry, int dst_dtype, \
str post_ops, Tensor post_op_params, Tensor[]? post_op_srcs, \
Tensor? weight_zero_point=None, Tensor? row_sums=None, Tensor? table=None) -> Tensor
quantize(Tensor src, Tensor scale, Tensor zero_point, int dst_dtype) -> Tensor
dequantize(Tensor src, Tensor scale, Tensor zero_point) -> Tensor
requantize(Tensor src, Tensor src_scale, Tensor src_zero_point, Tensor dst_scale, \
Tensor dst_zero_point, int dst_dtype) -> Tensor
reorder(Tensor src, Tensor output_scales, int dst_dtype, Tensor? src_zero_point=None, \
Tensor? dst_zero_point=None) -> Tensor
lookup(Tensor src, Tensor table) -> Tensor
add(Tensor src0, Tensor src1, Tensor scales, Tensor zero_points, int dst_dtype, bool relu) -> Tensor
mul(Tensor src0, Tensor src1, Tensor scales, Tensor zero_points, int dst_dtype, bool relu) -> Tensor
concat(Tensor[] srcs, Tensor scales, Tensor zero_points, int dim, int dst_dtype) -> Tensor
max_pool(Tensor src, int[] geometry, bool ceil_mode, Tensor? scales=None, \
Tensor? zero_points=None, int? dst_dtype=None, str post_ops=\"\", \
Tensor[]? post_op_srcs=None) -> Tensor
avg_pool(Tensor src, Tensor zero_point, int[] geometry, bool ceil_mode, bool count_include_pad, \
int? divisor_override, Tensor? scales=None, Tensor? zero_points=None, int? dst_dtype=None, \
str post_ops=\"\", Tensor[]? post_op_srcs=None) -> Tensor
adaptive_avg_pool(Tensor src, int[] output_size, Tensor? scales=None, \
Tensor? zero_points=None, int? dst_dtype=None, str post_ops=\"\", \
Tensor[]? post_op_srcs=None) -> Tensor
matmul(Tensor src, Tensor weight, Tensor multiplier, Tensor offset, Tensor? acc_bias, \
Tensor? src_zero_point, Tensor? weight_zero_point, int dst_dtype, str post_ops, \
Tensor post_op_params, Tensor[]? post_op_srcs) -> Tensor
gemm(Tensor a, Tensor b, Tensor? c, bool trans_a, bool trans_b, float alpha, float beta, int ao, \
int bo, str offsetc, Tensor co) -> Tensor
dynamic_linear(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, \
Tensor weight_scale, Tensor? bias, int in_features, bool per_row, str post_ops=\"\", \
Tensor[]? post_op_srcs=None) -> Tensor
dynamic_linear_int4(Tensor src, Tensor weight, Tensor params, Tensor? bias, int in_features, \
int out_features, int group_size, bool symmetric, str post_ops=\"\", \
Tensor[]? post_op_srcs=None) -> Tensor
grouped_linear(Tensor src, Tensor offsets, Tensor weight, Tensor compensation, \
Tensor pair_bound, Tensor weight_scale, Tensor? bias, int in_features, int out_features) -> Tensor
grouped_linear_int4(Tensor src, Tensor offsets, Tensor weight, Tensor params, Tensor? bias, \
int in_features, int out_features, int group_size, bool symmetric) -> Tensor
dynamic_conv(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, \
Tensor weight_scale, Tensor? bias, int[] geometry) -> Tensor
pack_conv_transpose(Tensor weight, int groups, int[] stride, int[] dilation) -> (Tensor packed, \
Tensor compensation, Tensor pair_bound)
unpack_conv_transpose(Tensor packed, int[] weight_shape, int groups, int[] stride, \
int[] dilation) -> Tensor
conv_transpose(Tensor src, Tensor weight, Tensor compensation, Tensor pair_bound, \
Tensor multiplier, Tensor offset, Tensor? acc_bias, Tensor? src_zero_point, int[] geometry, \
int dst_dtype, str post_ops, Tensor post_op_params, Tensor[]? post_op_srcs, \
Tensor? weight_zero_point=None, Tensor? table=None) -> Tensor
rnn(Tensor src, Tensor? batch_sizes, Tensor? h_0, Tensor? c_0, Tensor weight_src, \
Tensor compensation_src, Tensor multiplier_src, Tensor weight_state, Tensor compensation_state, \
Tensor multiplier_state, Tensor bias, Tensor? extra, Tensor? weight_projection, \
Tensor? compensation_projection, Tensor? multiplier_projection, Tensor[] pair_bounds, \
Tensor scales, Tensor zero_points, int[] geometry, int dst_dtype, int state_dtype, \
int h_n_dtype) -> (Tensor dst, Tensor h_n, Tensor c_n)
eltwise(Tensor src, Tensor scales, Tensor zero_points, int dst_dtype, str post_ops, \
Tensor[]? post_op_srcs=None) -> Tensor
binary(Tensor src0, Tensor src1, Tensor? condition, str alg, Tensor scales, Tensor zero_points, \
int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
sum(Tensor[] srcs, Tensor scales, Tensor zero_points, int dst_dtype) -> Tensor
reorder_rounded(Tensor src, Tensor scales, Tensor zero_points, int dst_dtype, str rounding, \
int seed) -> Tensor
softmax(Tensor src, int dim, bool logarithmic, Tensor scales, Tensor zero_points, \
int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
layer_norm(Tensor src, int dims, Tensor? weight, Tensor? bias, float eps, Tensor scales, \
Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
rms_norm(Tensor src, int dims, Tensor? weight, float eps, Tensor scales, Tensor zero_points, \
int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
group_norm(Tensor src, int groups, Tensor? weight, Tensor? bias, float eps, Tensor scales, \
Tensor zero_points, int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
batch_norm(Tensor src, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps, \
Tensor scales, Tensor zero_points, int dst_dtype, str post_ops, \
Tensor[]? post_op_srcs=None) -> Tensor
reduction(Tensor src, str alg, int[] dims, bool keepdim, Tensor scales, Tensor zero_points, \
int dst_dtype, str post_ops, Tensor[]? post_op_srcs=None, float p=2., float eps=0.) -> Tensor
resampling(Tensor src, str alg, int[] size, Tensor scales, Tensor zero_points, int dst_dtype, \
str post_ops, Tensor[]? post_op_srcs=None) -> Tensor
rotary(Tensor src, Tensor cos, Tensor sin) -> Tensor
attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale, \
Tensor scales, Tensor zero_points, int dst_dtype) -> Tensor
dynamic_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, \
float scale) -> Tensor
compress_rows(Tensor src) -> Tensor
compressed_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor
embedding(Tensor weight, Tensor indices, int embedding_dim, int bits) -> Tensor
embedding_bag(Tensor weight, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, \
int embedding_dim, int bits, str mode, bool include_last_offset, int? padding_idx) -> Tensor
""".strip().splitlines()

# No tensors: not part of saved programs.
SETTINGS = """
_select_isa(str isa) -> str
_isa() -> str
_supported_isas() -> str[]
_cpu() -> str
_last_kernel() -> str
_scratch_bytes() -> int
_idle_bytes() -> int
_release_memory() -> int
""".strip().splitlines()


def name_of(line: str) -> str:
    return line[: line.index("(")]


def registered() -> dict[str, FunctionSchema]:
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.removeprefix("torchq::"): s for s in schemas if s.name.startswith("torchq::")}


@pytest.mark.parametrize("line", OPS + SETTINGS, ids=name_of)
def test_schema_is_as_released(line: str):
    schema = registered()[name_of(line)]
    assert str(schema) == f"torchq::{line}"
    assert schema.overload_name == ""


def test_every_op_is_listed():
    public = {name for name in registered() if not name.startswith("_")}
    assert public == set(map(name_of, OPS)), "append the new op"


@pytest.mark.parametrize("line", OPS, ids=name_of)
def test_tags_and_kernels(line: str):
    name = name_of(line)
    op = getattr(torch.ops.torchq, name).default
    assert torch.Tag.pt2_compliant_tag in op.tags
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(f"torchq::{name}", "CPU")
    assert has(f"torchq::{name}", "Meta"), "add its fake kernel to torchq/runtime"
    assert not has(f"torchq::{name}", "CompositeImplicitAutograd")


def test_ops_are_functional_and_without_tensor_list_defaults():
    """A default of [] for a Tensor list aborts the process when the library loads."""
    for schema in registered().values():
        assert not schema.is_mutable, schema
        for argument in schema.arguments:
            assert not argument.is_out and argument.alias_info is None, schema
            if argument.type.str() == "List[Tensor]":
                assert not argument.has_default_value(), schema


def test_ops_name_the_module_of_their_fakes():
    assert torchq.ops.__name__ == "torchq.ops"
    assert all(hasattr(torch.ops.torchq, name_of(line)) for line in OPS)
