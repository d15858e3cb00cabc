# SPDX-License-Identifier: Apache-2.0
"""Post-ops: what an op does to its float32 result before storing it, and the text of a chain.

Each post-op maps every element ``x`` (real units) in append order. The scales of the sources, or
the v1 output scales, are applied before the chain; the scale and zero point of dst after it.

    sum      x = x + scale * (old - zero_point)   old: a run-time source with the shape of dst
    eltwise  x = scale * f(x)                     relu: x > 0 ? x : alpha * x;
                                                  linear: alpha * x + beta;
                                                  clip: min(max(x, alpha), beta)
             The other eltwise algorithms: see csrc/kernels/table.h, in the words of oneDNN.
    binary   x = alg(x, src1)                     comparisons give 1.0 or 0.0; max and min keep a
                                                  NaN in x; select: condition ? x : src1
    prelu    x = x >= 0 ? x : x * weight
    dw_conv  x = depthwise convolution of q, the result so far stored with the scale and zero point
             of ``dst``; what follows belongs to the depthwise convolution

Bit ``d`` of a mask selects dim ``d`` of dst's logical dims (N, C, ...), for linear and matmul
(rows, C): 0 is one value, 2 is one per channel. The number of values is the product of the selected
dims, in row-major order.

The text joins post-ops with ``+`` and their fields with ``:``, and omits trailing defaults:

    sum[:scale[:zero_point[:dtype]]]   eltwise_<alg>[:alpha[:beta[:scale]]]
    binary_<alg>:<mask>[:dtype]        prelu:<mask>
    dw_conv:<kernel>:<stride>:<padding>[:dtype[:bias_dtype]]

It holds structure, masks and scalars. The values of binary, prelu and dw_conv travel beside it.
"""

from torchq.chains import (
    BINARY_ALGS,
    CHANNEL_MASKS,
    ELTWISE_ALGS,
    MAX_POST_OPS,
    Binary,
    DwConv,
    Eltwise,
    PostOp,
    PostOps,
    PReLU,
    Sum,
    foldable,
    post_ops_of,
)
from torchq.compose import compose

__all__ = [
    "BINARY_ALGS",
    "CHANNEL_MASKS",
    "ELTWISE_ALGS",
    "MAX_POST_OPS",
    "Binary",
    "DwConv",
    "Eltwise",
    "PReLU",
    "PostOp",
    "PostOps",
    "Sum",
    "compose",
    "foldable",
    "post_ops_of",
]
