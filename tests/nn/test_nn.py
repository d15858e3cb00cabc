# SPDX-License-Identifier: Apache-2.0
"""Quantized modules: bits equal to the oracle's, readable state, clear errors."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import reference
import torch
from flows import graph_of
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq import PostOps, QConfig, QParams
from torchq.quantization.ranges import activation_range

U8 = QParams.per_tensor(0.021, 117)
S8 = QParams.per_tensor(0.034, -9, torch.int8)
WIDE = QParams.per_tensor(0.11, 90)


def random_q(shape: tuple[int, ...], params: QParams) -> Tensor:
    return torch.randint(params.integers[0], params.integers[1] + 1, shape, dtype=params.dtype)


def oracle(module: nn.Module, srcs: list[Tensor]) -> Tensor:
    """Returns the oracle's result for a module's state. srcs: quantized, residual last."""
    if isinstance(module, tnn.QLinear | tnn.QConv1d | tnn.QConv2d | tnn.QConv3d):
        result = _oracle_matmul(module, srcs)
        return result if module.lookup is None else reference.lookup(result, module.lookup.table)
    spec = module.read_spec()
    if isinstance(module, tnn.QLookup):
        return reference.lookup(srcs[0], module.table)
    if isinstance(module, tnn.Quantize):
        return reference.quantize(
            srcs[0], module.src_scale, module.src_zero_point, module.src_dtype
        )  # fmt: skip
    if isinstance(module, tnn.QCat):
        scales, zeros = list(module.scales), list(module.zero_points)
        dst = (scales.pop(), zeros.pop(), module.dst_dtype)
        return reference.concat(srcs, module.dim, scales, zeros, *dst)
    if isinstance(module, tnn.QAdd | tnn.QMul):
        op = reference.add if isinstance(module, tnn.QAdd) else reference.mul
        pairs = zip(module.scales, module.zero_points.tolist(), strict=True)
        flat = [value for pair in pairs for value in pair]
        return op(*srcs, *flat, module.dst_dtype, module.relu)
    arguments = spec["arguments"]
    arguments.pop("contiguous", None)
    if "output_size" in arguments:
        size = arguments["output_size"]
        if module.scales is None:
            return reference.adaptive_avg_pool(srcs[0], size)
        means = reference.adaptive_avg_pool((srcs[0].int() - module.src_zero_point).float(), size)
        dst = reference.quantize(
            means * module.src_scale, module.dst_scale, module.dst_zero_point, module.dst_dtype
        )  # fmt: skip
        return dst.clamp(*activation_range(module.dst_dtype, spec["dst_bits"]))
    padding = (arguments.pop("padding"),) * 2
    kernel, stride = arguments.pop("kernel_size"), arguments.pop("stride")
    if "dilation" in arguments:
        return reference.max_pool(srcs[0], kernel, stride, padding, **arguments)
    zero_point = int(module.src_zero_point)
    return reference.avg_pool(
        srcs[0], kernel, stride, padding, zero_point=zero_point, **arguments
    )  # fmt: skip


def _oracle_matmul(module: Any, srcs: list[Tensor]) -> Tensor:
    spec, is_float = module.read_spec(), module.dst_dtype == torch.float32
    common = {
        "src_scale": module.src_scale,
        "weight_scale": module.weight_scale,
        "dst_scale": None if is_float else module.dst_scale,
        "dst_zero_point": 0 if is_float else module.dst_zero_point,
        "dst_dtype": module.dst_dtype,
        "post_ops": module.post_ops,
        "post_op_values": torch.split(module.post_op_values, spec["post_op_values"]),
        "post_op_srcs": srcs[1:],
    }
    weight, zero_point = module.packed().unpack(), module.src_zero_point
    if isinstance(module, tnn.QLinear):
        return reference.linear(srcs[0], weight, module.bias, zero_point, **common)
    dims = weight.dim() - 2
    g = [module.geometry[i * dims : (i + 1) * dims] for i in range(5)]
    return reference.conv(
        srcs[0], weight, module.bias, zero_point, stride=g[1], padding=(g[2], g[3]), dilation=g[4],
        groups=module.geometry[-2], **common,
    )  # fmt: skip


def check_every_module(model: nn.Module, x: Tensor) -> int:
    """Runs the model; each quantized module must give the oracle's bits. Returns how many did."""
    checked = []
    idle = (tnn.Dequantize, tnn.QuantizedLeaf)

    def hook(module: Any, args: Any, result: Tensor) -> None:
        srcs = list(args[0]) if isinstance(args[0], list) else list(args)
        srcs = [src for src in srcs if src is not None]
        if srcs[0].is_floating_point():
            q = QParams(
                module.src_scale[0], module.src_zero_point[0], module.src_dtype, None, _bits(module)
            )  # fmt: skip
            srcs[0] = reference.quantize(srcs[0], q.scale, q.zero_point, q.dtype)
            srcs[0] = srcs[0].clamp(*q.integers)
        expected = oracle(module, srcs)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected), (type(module).__name__, result, expected)
        checked.append(module)

    handles = [
        module.register_forward_hook(hook)
        for module in model.modules()
        if isinstance(module, tnn.QModule) and not isinstance(module, idle)
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return len(checked)


def _bits(module: Any) -> int:
    return module.read_spec().get("src_bits", 8)


NETWORKS = {
    "resnet": ("resnet", 11, QConfig()),
    "resnet-u7": ("resnet", 11, QConfig(activation_bits=7, weight_bits=7)),
    "resnet-s8": ("resnet", 11, QConfig(activation_dtype=torch.int8)),
    "volumes": ("volumes", 3, QConfig()),
    "geometry": ("geometry", 5, QConfig()),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_whole_network_equals_the_oracle(isa: str, network: str) -> None:
    graph, shape = quantized_network(network)
    assert check_every_module(graph, torch.randn(shape)) == NETWORKS[network][1]


@functools.cache
def quantized_network(network: str) -> tuple[nn.Module, tuple[int, ...]]:
    name, _, config = NETWORKS[network]
    make, shape, _, _ = models.CASES[name]
    model, x = models.randomize(make()), torch.randn(shape)
    return graph_of(torchq.quantize(model, [x, 2 * x], x, config)), shape


DSTS = [None, U8, S8, QParams(U8.scale, torch.tensor(60, dtype=torch.int32), torch.uint8, None, 7)]
CHAINS = ["", "eltwise_relu", "eltwise_clip:-0.5:1", "eltwise_linear:0.5:0.1+eltwise_relu:0.1",
          "sum:0.034:-9:s8+eltwise_relu", "sum:1:0:f32"]  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dst", DSTS, ids=["f32", "u8", "s8", "u7"])
@pytest.mark.parametrize("src", [U8, S8], ids=["u8", "s8"])
def test_linear_and_conv_equal_the_oracle(src: QParams, dst: QParams | None, chain: str) -> None:
    post_ops = PostOps.parse(chain)
    linear = tnn.QLinear.from_float(nn.Linear(37, 21), src, dst, post_ops=post_ops)
    conv = tnn.QConv2d.from_float(
        nn.Conv2d(6, 9, 3, stride=2, groups=3), src, dst, post_ops=post_ops
    )  # fmt: skip
    for module, shape, out in ((linear, (5, 37), (5, 21)), (conv, (2, 6, 9, 8), (2, 9, 4, 3))):
        srcs = [random_q(shape, src)]
        if chain.startswith("sum"):
            srcs.append(torch.randn(out) if "f32" in chain else random_q(out, S8))
        result = module(*srcs)
        assert torch.equal(result, oracle(module, srcs))
        if dst is not None:
            assert dst.integers[0] <= result.min() and result.max() <= dst.integers[1]


@pytest.mark.parametrize("dst", [None, U8, S8], ids=["f32", "u8", "s8"])
@pytest.mark.parametrize("kind", [tnn.QAdd, tnn.QMul])
@pytest.mark.parametrize("relu", [False, True])
def test_binary_equals_the_oracle(kind: Any, dst: QParams | None, relu: bool) -> None:
    module = kind([U8, S8], dst, relu)
    srcs = [random_q((2, 4, 3), U8), random_q((4, 1), S8)]
    assert torch.equal(module(*srcs), oracle(module, srcs))
    as_float = srcs[0], S8.scale * (srcs[1] - S8.zero_point)
    assert torch.equal(module(*as_float), module(*srcs))


def test_contiguous() -> None:
    src = random_q((2, 8, 6, 6), U8).contiguous(memory_format=torch.channels_last)
    conv = nn.Conv2d(8, 4, 3)
    for make in (tnn.QConv2d.from_float, lambda _, *a, **k: tnn.QMaxPool2d(U8, 2, **k)):
        plain, dense = make(conv, U8), make(conv, U8, contiguous=True)
        assert plain(src).is_contiguous(memory_format=torch.channels_last)
        assert dense(src).is_contiguous() and torch.equal(plain(src), dense(src))
        again = tnn.QModule.registry[type(dense).__name__].from_spec(dense.read_spec())
        assert again.contiguous and torch.equal(again.spec, dense.spec)


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize("dst", ["u8", "s8", "f32"])
@pytest.mark.parametrize("src", [U8, S8])
def test_averages_with_parameters_of_their_own(src: QParams, dst: str, bits: int) -> None:
    """scale * mean(q - zero_point), quantized once: the levels of the source do not matter."""
    own: Any = "f32"
    if dst != "f32":
        dtype = torch.uint8 if dst == "u8" else torch.int8
        own = QParams(torch.tensor(0.004), torch.tensor(3, dtype=torch.int32), dtype, None, bits)
    q = random_q((2, 5, 6, 7), src)
    real = reference.adaptive_avg_pool((q.int() - src.zero_point).float(), [1, 1]) * src.scale
    window = nn.AvgPool2d((6, 7))
    for cls, given in ((tnn.QAdaptiveAvgPool2d, nn.AdaptiveAvgPool2d(1)), (tnn.QAvgPool2d, window)):
        module = cls.from_float(given, src, dst=own)
        expected = real
        if dst != "f32":
            expected = reference.quantize(real, own.scale, own.zero_point, own.dtype)
            expected = expected.clamp(*own.integers)
        for pool in (module, torch.jit.script(module), cls.from_spec(module.read_spec())):
            if isinstance(pool, tnn.QModule):
                pool.load_state_dict(module.state_dict())
            assert torch.equal(pool(q), expected)
            assert pool(q).dtype == expected.dtype
        assert (dst == "f32") == (module.dst_dtype == torch.float32)


def test_refold_after_a_change() -> None:
    module = tnn.QLinear.from_float(nn.Linear(5, 3), U8, WIDE)
    src = random_q((4, 5), U8)
    module.dst_scale.fill_(0.5)
    stale = module(src)
    module.refold()
    assert not torch.equal(stale, module(src)) and torch.equal(module(src), oracle(module, [src]))


def test_attr_reads_the_state() -> None:
    conv = tnn.QConv2d.from_float(nn.Conv2d(8, 8, 3, groups=2), U8, WIDE)
    text = "scales:src:0+weights:3+dst:0 zero_points:src:0+dst:0"
    assert str(conv.attr) == text and text in repr(conv)


@pytest.mark.parametrize("src", [torch.float64, torch.int8, torch.int32, torch.bool])
def test_wrong_source_dtype(src: torch.dtype) -> None:
    x = torch.zeros(2, 4, 6, 6).to(src)
    modules = [
        tnn.QConv2d.from_float(nn.Conv2d(4, 4, 3), U8),
        tnn.QMaxPool2d(U8, 2),
        tnn.Quantize(U8),
        tnn.Dequantize(U8),
        tnn.QLookup(torch.tanh, U8, U8),
        lambda x: tnn.QAdd([U8, U8], U8)(x, x),
        lambda x: tnn.QCat([U8, U8], U8)([x, x]),
    ]
    for module in modules:
        with pytest.raises(
            TypeError, match=f"must be float32, bfloat16 or float16, or .*, got {src}"
        ):
            module(x)


def test_wrong_shapes() -> None:
    linear = tnn.QLinear.from_float(nn.Linear(5, 3), U8)
    conv = tnn.QConv2d.from_float(nn.Conv2d(4, 4, 3), U8)
    with pytest.raises(ValueError, match=r"linear: src must have 5 features, got 6"):
        linear(random_q((2, 6), U8))  # as many steps of 4 as 5
    for shape in ((4, 6, 6), (2, 3, 6, 6), (2, 5, 6, 6)):
        with pytest.raises(ValueError, match=r"torchq.conv: "):
            conv(random_q(shape, U8))
    with pytest.raises(ValueError, match=r"torchq.conv: src .* smaller than the kernel"):
        conv(random_q((2, 4, 2, 6), U8))
    with pytest.raises(NotImplementedError, match="padding_mode must be 'zeros', got 'reflect'"):
        tnn.QConv2d.from_float(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), U8)
    with pytest.raises(NotImplementedError, match="return_indices"):
        tnn.QMaxPool2d.from_float(nn.MaxPool2d(2, return_indices=True), U8)
    with pytest.raises(NotImplementedError, match="divisor_override"):
        tnn.QAvgPool2d.from_float(nn.AvgPool2d(2, divisor_override=3), U8)
    with pytest.raises(ValueError, match=r"nn.QMaxPool2d: kernel_size must be one integer or 2"):
        tnn.QMaxPool2d(U8, (2, 3, 4))
    for size in (0, (0, 3), (-1, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"nn.QAdaptiveAvgPool2d: output_size must be 2 sizes"):
            tnn.QAdaptiveAvgPool2d(U8, size)
    residual = tnn.QLinear.from_float(
        nn.Linear(5, 3), U8, U8, post_ops=PostOps().append_sum(0.1, 3, "u8")
    )
    for wrong in (None, torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(2, 3)):
        with pytest.raises((ValueError, TypeError), match=r"torchq.linear: .*post_op_srcs"):
            residual(random_q((2, 5), U8), wrong)


def test_wrong_arguments_of_layers() -> None:
    linear = nn.Linear(5, 3)
    for scale, text in (
        (0.0, "finite float32 values > 0"),
        (-1.0, "> 0, got -1.0"),
        ([1.0, 2.0], "1 or 3"),
    ):
        with pytest.raises(ValueError, match=f"nn: weight_scale must .*{text}"):
            tnn.QLinear.from_float(linear, U8, weight_scale=torch.tensor(scale))
    with pytest.raises(TypeError, match=r"nn.QLinear: src must be of type QParams, got NoneType"):
        tnn.QLinear.from_float(linear, None)
    with pytest.raises(TypeError, match=r"nn.QLinear: post_ops must be of type PostOps, got str"):
        tnn.QLinear.from_float(linear, U8, post_ops="eltwise_relu")


@pytest.mark.parametrize("affine", [False, True])
def test_no_inputs(affine: bool) -> None:
    linear = nn.Linear(0, 3)
    q = tnn.QLinear.from_float(linear, U8, affine=affine)
    assert torch.equal(q(torch.zeros(2, 0)), linear.bias.expand(2, 3))


def test_destinations_of_their_own_per_channel() -> None:
    scale, zero_point = torch.rand(3) + 0.01, torch.tensor([0, 9, 255], dtype=torch.int32)
    dst = QParams(scale, zero_point, torch.uint8, 1)
    src = random_q((7, 5), U8)
    layer = tnn.QLinear.from_float(nn.Linear(5, 3), U8, dst)
    real = tnn.QLinear.from_float(nn.Linear(5, 3), U8)
    real.load_state_dict(
        {k: v for k, v in layer.state_dict().items() if not k.startswith(("dst_", "spec"))},
        strict=False,
    )
    levels = real(src).double() / scale.double() + zero_point
    assert (layer(src).double() - levels.clamp(0, 255)).abs().max() <= 0.5001
    again = tnn.QLinear.from_spec(layer.read_spec())
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(src), layer(src))


def test_empty_batch_and_strides() -> None:
    linear = tnn.QLinear.from_float(nn.Linear(6, 3), U8, U8)
    src = random_q((6, 4), U8)
    assert linear(src[:, :0].t()).shape == (0, 3)
    assert torch.equal(linear(src.t()), linear(src.t().contiguous()))
    assert linear(src[:, 0]).shape == (3,)
