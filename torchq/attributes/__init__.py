# SPDX-License-Identifier: Apache-2.0
"""Describes what an op does beside its product: `Attr` and `PostOps`, and the text of both.

``real = scale * (q - zero_point)`` for every quantized tensor. Two conventions, never mixed:

    scales (v3)         dst = post_ops(src_scale * weight_scale[n] * acc + bias[n]) / dst_scale
                              + dst_zero_point
    output scales (v1)  dst = post_ops(output_scale[n] * (acc + bias[n])) + dst_zero_point
                        with output_scale[n] = src_scale * weight_scale[n] / dst_scale

acc is the exact int32 sum. Output scales come first, then the post-ops; dst's scale comes after
the post-ops. A reorder with output scales multiplies by them (give 1/scale to quantize).

A mask says which dims have their own value: bit ``d`` selects dim ``d`` of the logical dims of
*that argument*, and the number of values is the product of the selected dims, in row-major order.
dst is (N, C, ...): mask 2 is per channel. Weights are (OC, IC, ...), mask 1 per channel; grouped
weights (G, OC/G, IC/G, ...): mask 3 is per group and channel, mask 2 is OC/G values that the groups
share. RNN weights are ldigo, mask 24 per gate and channel, and projection weights ldio, mask 8.

A post-op changes the float32 result of an op before the op stores it. Each maps every element
``x`` (real units), in append order. The scales of the sources, or the v1 output scales, are applied
before the chain; the scale and zero point of dst after it.

    sum      x = x + scale * (old - zero_point)   old: a run-time source with the shape of dst
    eltwise  x = scale * f(x)                     see the table below
    binary   x = alg(x, src1)                     comparisons give 1.0 or 0.0; max and min keep a
                                                  NaN in x; select: condition ? x : src1
    prelu    x = x >= 0 ? x : x * weight
    dw_conv  x = depthwise convolution of q, the result so far stored with the scale and zero point
             of ``dst``; what follows belongs to the depthwise convolution

The eltwise algorithms that have parameters, as oneDNN v3 defines them. Where a default is given,
alpha and beta may be left out; the others must be given:

    relu          x > 0 ? x : alpha * x                           alpha 0
    elu           x > 0 ? x : alpha * (exp(x) - 1)                alpha 1
    swish         x / (1 + exp(-alpha * x))                       alpha 1
    soft_relu     log(1 + exp(alpha * x)) / alpha                 alpha 1
    hardsigmoid   min(max(alpha * x + beta, 0), 1)                alpha 1/6, beta 1/2
    hardswish     x * min(max(alpha * x + beta, 0), 1)            alpha 1/6, beta 1/2
    linear        alpha * x + beta                                beta 0
    pow           alpha * x ** beta                               alpha 1
    clip          min(max(x, alpha), beta)

Those without: abs, exp, gelu_erf, gelu_tanh, log, logistic, mish, round (half to even), sqrt,
square, tanh.

Bit ``d`` of a mask selects dim ``d`` of dst's logical dims (N, C, ...): 0 is one value, 2 is one
per channel. Those of linear are (rows, C). Those of matmul are all dims of dst: of (B, M, N), mask
4 is one value per column. The number of values is the product of the selected dims, in row-major
order.

The text joins post-ops with ``+`` and their fields with ``:``, and leaves trailing defaults out:

    sum[:scale[:zero_point[:dtype]]]   eltwise_<alg>[:alpha[:beta[:scale]]]
    binary_<alg>:<mask>[:dtype]        prelu:<mask>
    dw_conv:<kernel>:<stride>:<padding>[:dtype[:bias_dtype]]

Alpha and beta that the text leaves out are 0. It must have those whose default is not 0:
``eltwise_swish:1``. The text holds structure, masks and scalars. The values of binary, prelu and
dw_conv travel beside the text.

Example:
    >>> chain = torchq.PostOps().append_sum(0.5).append_eltwise("clip", 0.0, 6.0)
    >>> chain
    PostOps('sum:0.5+eltwise_clip:0:6')
    >>> torchq.PostOps.parse(str(chain)) == chain
    True
"""
