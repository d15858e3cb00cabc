# SPDX-License-Identifier: Apache-2.0
"""Modules whose post-ops read tensors at run time, against the oracle and under every compiler."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import reference_matmul
import torch
from calls import F32, S8, S32, U8, assert_same, assert_same_deployed
from cases import random_q
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import PostOps, QParams, saturation

IN, OUT = QParams.per_tensor(0.021, 117), QParams.per_tensor(0.05, -9, S8)
CONVS = {"stride": [1, 1], "padding": ([1, 1], [1, 1]), "dilation": [1, 1]}
# Per name: the float module, the shapes of src and dst, the masks of all dims and of some.
LAYERS: dict[str, Any] = {
    "linear": (lambda: nn.Linear(37, 21), (2, 5, 37), (2, 5, 21), 3, (1, (2, 5, 1))),
    "conv": (
        lambda: nn.Conv2d(6, 9, 3, padding=1),
        (2, 6, 5, 7),
        (2, 9, 5, 7),
        15,
        (12, (1, 1, 5, 7)),
    ),
    "depthwise": (
        lambda: nn.Conv2d(9, 9, 3, padding=1, groups=9),
        (2, 9, 5, 7),
        (2, 9, 5, 7),
        15,
        (1, (2, 1, 1, 1)),
    ),
    "conv_transpose": (
        lambda: nn.ConvTranspose2d(6, 9, 3, padding=1),
        (2, 6, 5, 7),
        (2, 9, 5, 7),
        15,
        (4, (1, 1, 5, 1)),
    ),
}  # fmt: skip


def layer(name: str, dst: QParams | None, chain: PostOps) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = LAYERS[name][0]()
    return module, getattr(tnn, f"Q{type(module).__name__}").from_float(
        module, IN, dst, post_ops=chain
    )


def every_kind(name: str) -> tuple[PostOps, list[Tensor], list[Tensor], str]:
    """A chain, its constants, its sources in order, and its text for the oracle."""
    _, _, shape, full, (some, part) = LAYERS[name]
    channels = shape[-1] if name == "linear" else shape[1]
    constant = torch.randint(-9, 9, (channels,), dtype=S32)
    chain = PostOps.parse(f"binary_add:{full}:s8+sum:0.03:4:u8+prelu:{some}")
    chain.append_binary("sub", constant, 2).append_binary("select", torch.tensor(0.5), 0)
    chain.append_binary("max", None, some)
    srcs = [random_q(shape, S8, 1), random_q(shape, U8, 2), torch.randn(part)]
    srcs += [random_q(shape, U8, 3) % 2, torch.randn(part)]
    text = f"binary_add:{full}:s8+sum:0.03:4:u8+prelu:{some}"
    text += f"+binary_sub:2+binary_select:0+binary_max:{some}"
    return chain, [constant.float(), torch.tensor([0.5])], srcs, text


def expected(name: str, q: Any, src: Tensor, values: list[Tensor], srcs: list[Tensor], text: str):
    args = {
        "src": src, "weight": q.packed().unpack(), "bias": q.bias, "src_zero_point": 117,
        "src_scale": q.src_scale, "weight_scale": q.weight_scale,
        "dst_scale": None if q.dst_dtype == F32 else q.dst_scale,
        "dst_zero_point": 0 if q.dst_dtype == F32 else -9, "dst_dtype": q.dst_dtype,
        "post_ops": text, "post_op_values": values, "post_op_srcs": srcs,
    }  # fmt: skip
    if name == "linear":
        return reference.linear(**args)
    if name == "conv_transpose":
        return reference.conv_transpose(**args, **CONVS, output_padding=[0, 0], groups=1)
    return reference.conv(**args, **CONVS, groups=9 if name == "depthwise" else 1)


@pytest.mark.parametrize("dst", [None, OUT], ids=["float", "int8"])
@pytest.mark.parametrize("name", LAYERS)
def test_operands_of_any_mask_and_dtype(name: str, dst: QParams | None, isa: str):
    chain, values, srcs, text = every_kind(name)
    _, q = layer(name, dst, chain)
    src = random_q(LAYERS[name][1], U8)
    want = expected(name, q, src, values, srcs, text)
    assert_same(q(src, None, srcs), want)
    with pytest.raises(ValueError, match="needs 5 sources, got 4"):
        q(src, None, srcs[1:])


@pytest.mark.parametrize("name", LAYERS)
def test_the_residual_is_the_first_source(name: str):
    _, _, shape, full, _ = LAYERS[name]
    _, q = layer(name, OUT, PostOps.parse(f"sum:0.5+binary_mul:{full}"))
    src, old, factor = random_q(LAYERS[name][1], U8), random_q(shape, S8), torch.rand(shape)
    assert_same(q(src, old, [factor]), q(src, None, [old, factor]))
    assert_same(q(src, residual=old, post_op_srcs=[factor]), q(src, None, [old, factor]))


class Model(nn.Module):
    def __init__(self, q: nn.Module) -> None:
        super().__init__()
        self.q = q

    def forward(self, src: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
        return self.q(src, a, [b, c, d, e])


@pytest.mark.parametrize("name", ["linear", "conv", "conv_transpose"])
def test_under_script_export_compile_and_saved(name: str, tmp_path: Any):
    chain, _, srcs, _ = every_kind(name)
    _, q = layer(name, OUT, chain)
    model, args = Model(q).eval(), (random_q(LAYERS[name][1], U8), *srcs)
    want = model(*args)
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    assert_same(torch.jit.load(tmp_path / "model.pt")(*args), want)
    assert_same_deployed(model, args, want)
    torchq.save(model, tmp_path / "model")
    loaded = torchq.load(tmp_path / "model", Model(nn.Identity()))
    assert_same(loaded(*args), want)
    assert repr(loaded.q) == repr(q)


def test_in_front_of_a_depthwise_convolution_and_behind():
    module = nn.Conv2d(9, 9, 3, padding=1, groups=9)
    behind = tnn.QConv2d.from_float(module, OUT, None, post_ops=PostOps.parse("binary_mul:15"))
    first = tnn.QConv2d.from_float(nn.Conv2d(6, 9, 1), IN, OUT, dw=behind)
    src, factor = random_q((2, 6, 5, 7), U8), torch.rand(2, 9, 5, 7)
    middle = tnn.QConv2d.from_float(nn.Conv2d(6, 9, 1), IN, OUT)
    with torch.no_grad():
        middle.load_state_dict({k: v for k, v in first.state_dict().items() if "dw." not in k})
    assert_same(first(src, None, [factor]), behind(middle(src), None, [factor]))
    with pytest.raises(
        NotImplementedError, match=r"in front of dw must have no sum and no operand"
    ):
        tnn.QConv2d.from_float(
            nn.Conv2d(6, 9, 1), IN, OUT, dw=behind, post_ops=PostOps.parse("binary_add:15")
        )


def test_a_product_with_an_attention_mask(isa: str):
    a, b = QParams.per_tensor(0.02, 100), QParams.per_tensor(0.03, -5, S8)
    chain = PostOps.parse("eltwise_linear:0.125+binary_add:3+binary_mul:1")
    query, key = random_q((2, 3, 5, 16), U8), random_q((2, 3, 7, 16), S8).mT
    mask, rows = torch.randn(2, 3, 5, 7), torch.rand(2, 3, 5, 1)
    for dst in (None, OUT):
        q = tnn.QMatMul([a, b], dst, chain)
        scales = {} if dst is None else {"dst_scale": dst.scale, "dst_zero_point": -9}
        want = reference_matmul.matmul(
            query, key, None, 100, -5, src_scale=a.scale, weight_scale=b.scale,
            dst_dtype=q.dst_dtype, post_ops=str(chain), post_op_srcs=[mask, rows], **scales,
        )  # fmt: skip
        assert_same(q(query, key, [mask, rows]), want)
        assert_same(torch.jit.script(q)(query, key, [mask, rows]), want)
    for text in ("binary_add:2", "binary_add:0", "dw_conv:3:1:1"):
        with pytest.raises(NotImplementedError, match=r"nn\.QMatMul: post_ops must be eltwise or"):
            tnn.QMatMul([a, b], None, PostOps.parse(text))


def test_emulation_reads_them_too():
    """7 bits of weights cannot saturate: the emulation returns what the module does."""
    for name in LAYERS:
        chain, _, srcs, _ = every_kind(name)
        module, _ = layer(name, None, chain)
        kind = getattr(tnn, f"Q{type(module).__name__}")
        q = kind.from_float(module, IN, None, bits=7, post_ops=chain)
        src = random_q(LAYERS[name][1], U8)
        got = saturation.emulate_module(q, src, None, post_op_srcs=srcs)
        torch.testing.assert_close(got, q(src, None, srcs), rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="must be 5 tensors"):
            saturation.emulate_module(q, src, srcs[0])
        report = saturation.emulate(Model(q), [(src, *srcs)])
        assert report.layers[0].changed == 0 and report.layers[0].outputs == got.numel()


def test_constants_of_other_masks_are_refused_with_what_works():
    for chain in (
        PostOps().append_binary("mul", torch.ones(4), 1),
        PostOps().append_prelu(torch.ones(12), 3),
    ):
        with pytest.raises(NotImplementedError, match=r"mask 0 or 2.*in post_op_srcs of each call"):
            tnn.QLinear.from_float(nn.Linear(8, 3), IN, None, post_ops=chain)
    with pytest.raises(ValueError, match="values must be present"):
        tnn.QLinear.from_float(nn.Linear(8, 3), IN, None, post_ops=PostOps.parse("binary_mul:2"))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("zero_point", [0, 7])
def test_a_relu_in_front_of_one_scale_per_channel(name: str, zero_point: int) -> None:
    """The result is the float one's, rounded to each channel's step."""
    plain = layer(name, None, PostOps().append_eltwise("relu"))[1]
    _, src_shape, dst_shape, *_ = LAYERS[name]
    src, count = random_q(src_shape, U8), dst_shape[-1] if name == "linear" else dst_shape[1]
    expected, scale = plain(src), torch.exp2(torch.arange(count) % 5 - 4.0)
    zeros = torch.full((count,), zero_point, dtype=torch.int32)
    dst = QParams(scale, zeros, U8, 1)
    found = layer(name, dst, PostOps().append_eltwise("relu"))[1]
    assert_same_deployed(found, (src,), found(src))
    steps = scale if name == "linear" else scale.view(-1, *[1] * (len(dst_shape) - 2))
    got = (found(src).float() - zero_point) * steps
    largest = (255 - zero_point) * steps
    assert bool(((got - torch.minimum(expected, largest)).abs() <= 0.5001 * steps).all())
