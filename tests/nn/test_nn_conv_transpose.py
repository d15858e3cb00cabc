# SPDX-License-Identifier: Apache-2.0
"""Modules of transposed convolutions: against the oracle, the float module and deployment."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from calls import U8, assert_same, assert_same_deployed
from torch import nn

import torchq.nn as tnn
from torchq import PostOps, QParams

U = QParams.per_tensor(0.021, 117)
S = QParams.per_tensor(0.034, -9, torch.int8)
FLOATS = {
    "1d": (nn.ConvTranspose1d(12, 10, 5, 3, 2, 1), tnn.QConvTranspose1d, (2, 12, 9)),
    "2d": (nn.ConvTranspose2d(8, 12, 3, 2, 1, 1, 2, True, 1), tnn.QConvTranspose2d, (2, 8, 5, 6)),
    "2d_dilated": (
        nn.ConvTranspose2d(8, 6, 3, 1, 2, bias=False, dilation=2),
        tnn.QConvTranspose2d, (1, 8, 5, 6),
    ),
    "3d": (nn.ConvTranspose3d(4, 6, 2, 2), tnn.QConvTranspose3d, (1, 4, 3, 4, 2)),
}  # fmt: skip


@pytest.mark.parametrize("granularity", ("per_channel", "per_tensor"))
@pytest.mark.parametrize("name", FLOATS)
def test_modules(name: str, granularity: str):
    float_module, cls, shape = FLOATS[name]
    src = torch.randint(0, 256, shape, dtype=U8)
    for dst, bits, chain in ((None, 8, ""), (S, 7, "eltwise_relu:0.1"), (U, 8, "sum:0.5")):
        module = cls.from_float(
            float_module, U, dst, granularity=granularity, bits=bits, post_ops=PostOps.parse(chain)
        )
        residual = None
        if "sum" in chain:
            residual = torch.randint(0, 256, float_module(src.float()).shape, dtype=U8)
        got = module(src) if residual is None else module(src, residual)
        spec = module.read_spec()
        dims = len(shape) - 2
        g = [module.geometry[i * dims : (i + 1) * dims] for i in range(6)]
        expected = reference.conv_transpose(
            src,
            module.packed().unpack(),
            module.bias,
            module.src_zero_point,
            stride=g[1],
            padding=(g[2], g[3]),
            dilation=g[4],
            output_padding=g[5],
            groups=spec["groups"],
            src_scale=module.src_scale,
            weight_scale=module.weight_scale,
            dst_scale=None if dst is None else module.dst_scale,
            dst_zero_point=0 if dst is None else module.dst_zero_point,
            dst_dtype=module.dst_dtype,
            post_ops=module.post_ops,
            post_op_srcs=[] if residual is None else [residual],
        )
        assert_same(got, expected)
        restored = cls.from_spec(spec)
        restored.load_state_dict(module.state_dict())
        again = restored(src) if residual is None else restored(src, residual)
        assert_same(again, expected)


@pytest.mark.parametrize("name", FLOATS)
def test_from_float_is_close_to_the_float_module(name: str):
    """Within what 8 bits of source and weight leave: each error is at most half a step."""
    float_module, cls, shape = FLOATS[name]
    src = torch.randint(0, 256, shape, dtype=U8)
    real = float(U.scale) * (src.float() - 117)
    with torch.no_grad():
        expected = float_module(real)
        half_step = torch.full_like(float_module.weight, 1.0)
        module = cls.from_float(float_module, U)
        scale = module.weight_scale.reshape(float_module.groups, 1, -1)
        scale = scale.expand(-1, shape[1] // float_module.groups, -1).reshape(shape[1], -1)
        half_step *= scale.reshape(*scale.shape, *[1] * (len(shape) - 2)) / 2
        bounds = type(float_module)(*_arguments(float_module))
        bounds.weight.copy_(half_step)
        assert ((module(src) - expected).abs() <= bounds(real.abs()) * 1.001 + 1e-4).all()


def _arguments(m: Any) -> list[Any]:
    sizes = (m.kernel_size, m.stride, m.padding, m.output_padding)
    return [m.in_channels, m.out_channels, *sizes, m.groups, False, m.dilation]


def test_module_under_compile_script_and_export():
    float_module, cls, shape = FLOATS["2d"]
    module = cls.from_float(float_module, U, S).eval()
    src = torch.randn(shape)
    expected = module(src)
    assert_same(torch.jit.trace(module, src)(src), expected)
    assert_same_deployed(module, (src,), expected)


def test_a_source_that_requires_grad_is_refused(isa: str):
    module = FLOATS["2d"][1].from_float(FLOATS["2d"][0], U)
    with pytest.raises(RuntimeError, match="requires grad"):
        module(torch.randn(FLOATS["2d"][2], requires_grad=True))
