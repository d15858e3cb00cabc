# SPDX-License-Identifier: Apache-2.0
"""Layers that a graph fuses or keeps in int8 beside convolutions and linears."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import graph_of, names, sqnr
from models import Wired, conv, randomize
from torch import Tensor, nn

import torchq
import torchq.eager
import torchq.nn as tnn

X = (2, 8, 9, 9)


def convert(model: nn.Module, *shape: int, bound: float = 30) -> nn.Module:
    x = torch.randn(shape or X)
    converted = torchq.quantize(randomize(model), [x, 2 * x], x)
    with torch.no_grad():
        for given in (x, x[:1]):
            assert sqnr(model(given), converted(given)) > bound
    again = torch.jit.script(converted)
    assert torch.equal(again(x), converted(x))
    return converted


# Factors and shifts per channel


@pytest.mark.parametrize(
    "change",
    [
        lambda y, c: y * c,
        lambda y, c: c - y,
        lambda y, c: (y - c) / (c.abs() + 0.5),
        lambda y, c: (-2 * y + 3) * 0.5 + c,
    ],
)
@pytest.mark.parametrize("kind", ["conv", "conv_transpose", "linear"])
def test_constants_fold_into_weights(change: Any, kind: str) -> None:
    make, shape, channels = {
        "conv": (lambda: nn.Conv2d(8, 6, 3), X, (6, 1, 1)),
        "conv_transpose": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, groups=2), X, (1, 6, 1, 1)),
        "linear": (lambda: nn.Linear(9, 6), X, (6,)),
    }[kind]
    constant = torch.randn(channels)
    model = Wired(lambda m, x: torch.relu(change(m.a(x), constant)), a=make())
    assert len(names(convert(model, *shape))) == 1


def test_constants_that_do_not_fold() -> None:
    """Along another dimension, or one that makes the result larger."""
    for constant in (torch.randn(9), torch.randn(1, 8, 9, 9)):
        model = Wired(lambda m, x, c=constant: m.b(m.a(x) + c), a=conv(), b=conv())
        assert "QAdd" in names(convert(model))
    model = Wired(lambda m, x: m.b(m.a(x) + torch.ones(1, 8, 1, 1)), a=conv(8, 1), b=conv())
    assert "QAdd" in names(convert(model))


def test_relu_of_a_sum_and_a_product() -> None:
    for combine in (torch.add, torch.mul):
        model = Wired(lambda m, x, f=combine: m.c(F.relu(f(m.a(x), m.b(x)))), a=conv(), b=conv(),
                      c=conv())  # fmt: skip
        if combine is torch.mul:
            found = convert(model, bound=28)
            assert names(found).count("QLookup") == 0
            assert next(m for m in graph_of(found).modules() if isinstance(m, tnn.QMul)).relu


# Slopes per channel


@pytest.mark.parametrize("clip", [nn.ReLU(), nn.ReLU6()], ids=str)
def test_clip_of_a_lone_batch_norm(clip: nn.Module) -> None:
    """As in DenseNet, where a concatenation is in front of the norm."""
    model = Wired(
        lambda m, x: m.b(m.clip(m.norm(torch.cat((y := m.a(x), y), 1)))),
        a=conv(8, 8),
        norm=nn.BatchNorm2d(16),
        clip=clip,
        b=conv(16, 8),
    )
    assert names(convert(model)) == ["QConv2d", "QCat", "QConv2d", "QConv2d"]


def test_an_empty_sequential_passes_on() -> None:
    """As shortcuts of many residual networks: the sum is fused, and int8."""
    model = Wired(
        lambda m, x: m.c(torch.relu(m.b(y := torch.relu(m.a(x))) + m.shortcut(y))),
        a=conv(), b=conv(), c=conv(), shortcut=nn.Sequential(),
    )  # fmt: skip
    converted = convert(model)
    assert names(converted) == ["QConv2d"] * 3
    assert "u8" in str(graph_of(converted).b.post_ops)


def prelu(channels: int) -> nn.PReLU:
    module = nn.PReLU(channels)
    nn.init.normal_(module.weight)
    return module


def test_slopes_per_channel_are_a_post_op() -> None:
    model = Wired(
        lambda m, x: m.d(m.c(m.q(m.b(m.p(m.bn(m.a(x))) + x) + x))), a=conv(), bn=nn.BatchNorm2d(8),
        p=prelu(8), b=conv(), q=prelu(8), c=nn.ConvTranspose2d(8, 8, 2), d=prelu(8),
    )  # fmt: skip
    found = convert(model, bound=30)
    assert "PReLU" not in names(found)
    assert graph_of(found).a.post_ops == "prelu:2" and graph_of(found).b.post_ops.startswith("sum:")
    assert graph_of(found).b.post_ops.endswith("+prelu:2")
    found = convert(nn.Sequential(nn.Linear(8, 8), prelu(8), nn.Linear(8, 4)), 5, 8)
    assert names(found) == ["QLinear", "QLinear"]


def test_slopes_without_a_matmul_in_front() -> None:
    found = convert(nn.Sequential(nn.Linear(9, 9), prelu(8)))
    (row,) = (row for row in torchq.explain(found).rows if row.kind == "PReLU")
    assert "no convolution or linear in front takes it over" in row.reason


# Interpolation


bilinear = functools.partial(F.interpolate, mode="bilinear")


@pytest.mark.parametrize(
    ("resize", "dtype"),
    [
        (lambda x, y: bilinear(x, scale_factor=2), torch.int8),
        (lambda x, y: bilinear(x, scale_factor=2), torch.uint8),
        (lambda x, y: bilinear(x, scale_factor=(3.0, 1.0)), torch.uint8),
        (lambda x, y: bilinear(x, size=(13, 5), align_corners=False), torch.uint8),
        (lambda x, y: bilinear(x, size=7), torch.uint8),
        (lambda x, y: bilinear(x, size=y.shape[2:]), torch.uint8),
        (lambda x, y: bilinear(x, size=y.size()[-2:]), torch.uint8),
        (lambda x, y: bilinear(x, size=(y.shape[2], 2 * y.shape[3])), torch.uint8),
        (lambda x, y: bilinear(x, y.size(3)), torch.uint8),
    ],
)
def test_bilinear(resize: Any, dtype: torch.dtype) -> None:
    """int8 between convolutions, and what torch computes from the same int8 values."""
    model = Wired(lambda m, x: m.b(resize(m.a(x), x)), a=conv(stride=2), b=conv())
    x = torch.randn(X)
    config = torchq.QConfig(activation_dtype=dtype)
    found = graph_of(torchq.quantize(model.eval(), [x], x, config))
    assert names(found) == ["QConv2d", "QResample", "QConv2d"]
    src = found.a(x)
    scale, zero = found.a.dst_scale, found.a.dst_zero_point
    want = resize(scale.double() * (src.double() - zero), x) / scale.double() + zero
    resample = next(m for m in graph_of(found).modules() if isinstance(m, tnn.QResample))
    got: list[Tensor] = []
    resample.register_forward_hook(lambda m, args, result: got.append(result))
    found(x)
    assert got[0].dtype == dtype
    assert float((got[0].double() - want).abs().max()) <= 0.5 + 1e-5
    scripted = torch.jit.script(torchq.quantize(model, [x], x, config))
    assert torch.equal(scripted(x), found(x))


def test_upsample_modules_in_other_dims() -> None:
    for dims, mode in ((1, "linear"), (3, "trilinear")):
        cls = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
        for options in ({"scale_factor": 2}, {"size": 9}):
            up = nn.Upsample(mode=mode, **options)
            found = convert(nn.Sequential(cls(4, 8, 3), up, cls(8, 4, 1)), 2, 4, *[6] * dims)
            assert names(found)[1] == "QResample"


@pytest.mark.parametrize(
    ("up", "reason"),
    [
        (nn.UpsamplingBilinear2d(scale_factor=2), "align_corners=True has no int8 form"),
        (nn.Upsample(scale_factor=1.5, mode="bilinear"), "only by whole numbers"),
        (nn.Upsample(scale_factor=2, mode="bicubic"), "upsample_bicubic2d has no int8 form"),
    ],
)
def test_other_interpolations_stay_float(up: nn.Module, reason: str) -> None:
    found = convert(nn.Sequential(conv(), up, conv()))
    assert reason in {row.name: row.reason for row in torchq.explain(found).rows}["1"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_nearest(dtype: torch.dtype) -> None:
    """The values of the source, whatever its dtype; torch has no such function of int8."""
    ways = (lambda y: F.interpolate(y, scale_factor=2.0), nn.Upsample(scale_factor=(1, 3)))
    for way in ways:
        model = Wired(lambda m, x, way=way: m.b(way(m.a(x))), a=conv(), b=conv()).eval()
        x = torch.randn(X)
        found = torchq.quantize(model, [x], x, torchq.QConfig(activation_dtype=dtype))
        assert graph_of(found).a.dst_dtype == dtype
        with torch.no_grad():
            assert sqnr(model(x), found(x)) > 30
        for deployed in (torch.jit.script(found), torch.jit.trace(found, x)):
            assert torch.equal(deployed(x), found(x))


# Writing in place


def test_what_is_written_in_place_is_the_result_of_writing() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        z = y
        y.add_(x).mul_(0.5).relu_()
        w = m.b(z)
        w.unsqueeze_(0).squeeze_(0)
        out = torch.empty_like(w)
        out.copy_(w + y)
        return m.c(out)

    found = convert(Wired(forward, a=conv(), b=conv(), c=conv()))
    assert names(found).count("QConv2d") == 3


# Sizes as arguments

SIZED: dict[str, Any] = {
    "avg_pool2d": lambda y: F.avg_pool2d(y, y.size()[2:]),
    "max_pool2d": lambda y: F.max_pool2d(y, y.shape[-2:]),
    "two sizes": lambda y: F.avg_pool2d(y, (y.size(2), y.size(3))),
    "irfft2": lambda y: torch.fft.irfft2(torch.fft.rfft2(y), s=y.shape[-2:]),
    "reshape": lambda y: y.view(y.size(0), y.size(1), -1).mean(-1)[:, :, None, None],
}


@pytest.mark.filterwarnings("ignore:torchq. this call")
@pytest.mark.parametrize("name", SIZED)
def test_sizes_of_other_images(name: str) -> None:
    """Global pools and transforms, as old networks spell them; some make guards on sizes."""
    model = Wired(lambda m, x: m.b(SIZED[name](m.a(x))), a=conv(), b=conv(k=1))
    converted = convert(model, bound=25)
    with torch.no_grad():
        for shape in ((1, 8, 20, 18), (3, 8, 7, 32)):
            assert sqnr(model(x := torch.randn(shape)), converted(x)) > 20


# Padding that is not zeros, and names of overrides


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_moves_values(mode: str, dims: int) -> None:
    """A pad of int8 values and a convolution without padding."""
    cls = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(cls(4, 8, 3), cls(8, 8, 3, padding=1, padding_mode=mode), nn.ReLU())
    found = convert(model, 2, 4, *[7] * dims, bound=26)
    assert names(found) == [f"QConv{dims}d"] * 2
    layers = [m for m in graph_of(found).modules() if isinstance(m, tnn.QModule)]
    assert layers[0].dst_dtype == torch.uint8 and layers[1].post_ops == "eltwise_relu"


ZEROS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...], list[str]]] = {
    "all": (nn.Identity(), nn.ZeroPad2d((1, 0, 2, 1)), X, ["QConv2d"]),
    "cropped": (conv(), nn.ZeroPad2d((-1, 0, 0, 0)), X, ["QConv2d", "QPad", "QConv2d"]),
    "width": (nn.Identity(), nn.ZeroPad1d(2), X, ["QConv2d"]),
    "images": (nn.Identity(), nn.ZeroPad2d(1), (2, 8, 5, 5, 5), ["QConv3d"]),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_in_front_of_a_convolution(name: str) -> None:
    first, pad, shape, expected = ZEROS[name]
    last = nn.Conv3d(8, 8, 3) if len(shape) == 5 else conv(padding=0)
    assert names(convert(nn.Sequential(first, pad, last), *shape)) == expected


def test_zeros_are_those_of_the_state() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.c(m.pool(F.pad(m.a(x), (0, 1, 0, 1))))

    model = randomize(Wired(forward, a=conv(), pool=nn.MaxPool2d(2, 1), c=conv()))
    x = torch.randn(X)
    found, other = torchq.quantize(model, [x]), torchq.quantize(model, [x.abs() * 3 + 2])
    assert not torch.equal(found(x), other(x))
    other.load_state_dict(found.state_dict())
    assert torch.equal(found(x), other(x))


def test_padding_modules() -> None:
    pads = nn.ReflectionPad2d(2), nn.ReplicationPad2d(1), nn.CircularPad2d((1, 0, 2, 0))
    for pad in pads:
        found = convert(nn.Sequential(conv(), pad, conv(padding=0)))
        assert names(found) == ["QConv2d", "QConv2d"]
        assert graph_of(found).get_submodule("0").dst_dtype == torch.uint8


def test_overrides_of_a_module_hold_for_what_it_computes() -> None:
    """Its own forward is traced: the functions in it have names of their own."""
    attention = nn.MultiheadAttention(8, 2)
    model = Wired(lambda m, x: m.b(m.a(x, x, x)[0]), a=attention, b=nn.Linear(8, 8)).eval()
    x = torch.randn(5, 2, 8)
    for pattern, expected in (("a", 1), ("a.out_proj", 2), ("b", 2)):
        found = torchq.quantize(model, [x], x, overrides={pattern: None}, strict=True)
        rows = [row for row in torchq.explain(found).rows if row.is_matmul]
        assert (sum(row.quantized for row in rows), len(rows)) == (expected, 3)
    bits = {"a": torchq.QConfig(weight_bits=7), "a.out_proj": torchq.QConfig()}
    found = torchq.quantize(model, [x], x, overrides=bits)
    assert graph_of(found).get_submodule("a.linear").packed().unpack().abs().max() == 63
    assert graph_of(found).get_submodule("a.out_proj").packed().unpack().abs().max() == 127


# What counts


def test_what_is_not_called_does_not_count() -> None:
    model = Wired(lambda m, x: m.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4)).eval()
    text = str(torchq.explain(torchq.prepare(model, torch.randn(2, 4))))
    assert text.endswith(
        "1 of 1 convolutions and linears run in int8; 1 more are not called with example_inputs"
    )


@pytest.mark.parametrize("flow", [torchq, torchq.eager])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.PReLU])
def test_channels_of_rows_and_of_sequences(kind: Any, flow: Any) -> None:
    """A layer with channels in dim 1 folds into a linear layer only for a source of rows."""
    torch.manual_seed(0)
    part = kind(8)
    for value in part.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.1, 2)
    model = nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 8)).eval()
    rows, sequences = torch.randn(4, 8), torch.randn(4, 8, 8)
    for x, other in ((rows, sequences), (sequences, rows)):
        converted = flow.quantize(model, [x, 2 * x, 3 * x], x)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the graph is for the rank of the example
            for given in (x, other):
                assert torchq.sqnr(model(given), converted(given)) > 20


def test_convolutions_by_other_names() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.ops.aten.conv2d(x, m.w, None, [1, 1], [1, 1])
        y = torch.convolution(y, m.w, m.b, [2, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.convolution(y, m.w, m.b, [2, 1], [1, 1], [1, 1], True, [1, 0], 1)

    model = Wired(forward)
    model.w, model.b = nn.Parameter(torch.randn(8, 8, 3, 3) / 8), nn.Parameter(torch.randn(8))
    assert names(convert(model)) == ["QConv2d", "QConv2d", "QConvTranspose2d"]


# Gates


@pytest.mark.parametrize(
    ("dim", "channels"), [(1, 4), (-1, 8), (-3, 4)], ids=["channels", "columns", "from_behind"]
)
def test_a_gated_linear_unit(dim: int, channels: int) -> None:
    """A table and a product, on views of halves; also as a function."""
    for gate in (nn.GLU(dim), Wired(lambda m, x: F.glu(x, dim=dim))):
        model = Wired(lambda m, x: m.b(m.g(m.a(x))), a=conv(), g=gate, b=nn.Conv2d(channels, 8, 1))
        converted = convert(model, 2, 8, 9, 8)
        assert names(converted) == ["QConv2d", "QLookup", "QMul", "QConv2d"]


def test_a_gate_of_other_sizes() -> None:
    """Odd ones raise, as in the float model."""
    model = Wired(lambda m, x: m.b(F.glu(m.a(x), 2)), a=conv(), b=conv())
    converted = convert(model, 2, 8, 6, 5)
    with torch.no_grad():
        assert sqnr(model(y := torch.randn(2, 8, 8, 7)), converted(y)) > 28
        for odd in (3, 5):
            for run in (model, converted):
                with pytest.raises(RuntimeError):
                    run(torch.randn(2, 8, odd, 5))
