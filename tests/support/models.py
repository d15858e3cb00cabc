# SPDX-License-Identifier: Apache-2.0
"""Small float networks, each with one way to break a conversion that swaps modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq.nn as tnn

Case = tuple[Callable[[], nn.Module], tuple[int, ...], int, int]
"""A network, its input's shape, how many of its matmuls run in int8, and how many it has."""


def register(
    cases: dict[str, Case], name: str, shape: tuple[int, ...], int8: int, total: int | None = None
) -> Any:
    """Decorates a network, or what makes one."""

    def add(make: Callable[[], nn.Module]) -> Any:
        cases[name] = make, shape, int8, int8 if total is None else total
        return make

    return add


CASES: dict[str, Case] = {}
case = partial(register, CASES)


def randomize(model: nn.Module) -> nn.Module:
    """Batch norms with statistics, so that folding them changes something."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.running_mean is not None:
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.2)
    return model.eval()


class Wired(nn.Module):
    """Modules by name, and the forward as a function of them and the source."""

    def __init__(self, forward: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.wiring = [forward]  # a list: TorchScript and named_modules shall not look inside
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *srcs: Any) -> Any:
        return self.wiring[0](self, *srcs)


def conv(c_in: int = 8, c_out: int = 8, k: int = 3, **kwargs: Any) -> nn.Conv2d:
    kwargs.setdefault("padding", k // 2)
    return nn.Conv2d(c_in, c_out, k, **kwargs)


def register_wired(
    cases: dict[str, Case],
    name: str,
    shape: tuple[int, ...],
    int8: int,
    forward: Callable[..., Any],
    total: int | None = None,
    **modules: Callable[[], Any],
) -> None:
    """``modules`` are functions that make them, so that every test has fresh ones."""
    register(cases, name, shape, int8, total)(
        lambda: Wired(forward, **{key: make() for key, make in modules.items()})
    )


wired = partial(register_wired, CASES)
IMAGE = (2, 8, 10, 10)
TWO = {"a": conv, "b": conv}


def _residual(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) + x)


def _in_place(m: Any, x: Tensor) -> Tensor:
    y, z = m.a(x), m.b(x)
    y += z
    return m.c(y)


def _view_then_write(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    v = y[:, :4]
    m.relu(y)  # changes v, and y itself
    return m.b(torch.cat([v, y[:, 4:]], 1))


def _write_before_add(m: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    y = m.a(x)
    x += 1
    return m.b(m.add(y, x))


def _ask_shape(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    r = F.interpolate(x, size=y.shape[2:])
    return m.b(m.add(y, r))


def _ask_dtype(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    mask = torch.tensor([True, False]).repeat(4)[:, None, None].to(y.dtype) * -2
    return m.b(m.flat(y)) + mask


def _branch_on_value(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y) if y.mean().item() > -100 else y


def _unbind(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).permute(0, 2, 3, 1)
    first, second = y.chunk(2, -1)
    parts = torch.split(first, 2, -1)
    rows = m.lin(parts[0].unbind(1)[0].reshape(2, -1, 2))
    return rows.sum() + m.lin(second[..., 1:3]).select(1, 0)


def _reinterpret(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    bits = y.view(torch.int32)
    return m.b((bits & -65536).view(torch.float32))


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(m.a(x)))


def _other_reader(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.bn(y) + y


def _add_both(m: Any, x: Tensor) -> Tensor:
    return m.c(m.relu(m.add(m.a(x), m.b(x))))


def _stash(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    m.last = y
    return {"out": m.b(y), "pair": (y * 2, ["text"])}


class Output:
    """Not a pytree: its tensors must be found all the same."""

    def __init__(self, hidden: Tensor, out: Tensor) -> None:
        self.hidden, self.out = hidden, out


def _opaque(m: Any, x: Tensor) -> Output:
    y = m.a(x)
    return Output(y, m.b(y))


def _exposed(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * m.b.weight.mean() + m.c.weight.to(x.dtype).sum()


def _lists(m: Any, x: Tensor) -> Tensor:
    for layer, act in zip(m.layers, m.acts, strict=True):
        x = act(layer(x))
    return x


def _script(m: Any, x: Tensor) -> Tensor:
    return m.b(m.f(m.a(x)))


def _lenet(m: Any, x: Tensor) -> Tensor:
    x = m.pool(m.relu(m.a(x)))
    x = m.pool2(m.sig(m.b(x)))
    return m.lin(x.view(x.size(0), -1))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def _shared_relu() -> nn.Module:
    relu = nn.ReLU6()
    layers = [nn.Conv2d(8, 8, 1), relu, nn.Conv2d(8, 8, 1), relu, nn.Conv2d(8, 8, 1)]
    return nn.Sequential(*layers)


def _tied() -> nn.Module:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), second)


def _hooked() -> nn.Module:
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    model[1].register_forward_hook(lambda module, args, result: result + 1)
    return model


wired("residual", IMAGE, 2, _residual, **TWO)
wired("residual_in_place", IMAGE, 3, _in_place, **TWO, c=conv)
wired("functional_relu", IMAGE, 2, lambda m, x: m.b(F.relu(m.a(x))), **TWO)
wired("functional_cat", IMAGE, 3, lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), **TWO,
      c=lambda: conv(16))  # fmt: skip
wired("module_cat", IMAGE, 3, lambda m, x: m.c(m.cat([m.a(x), m.b(x)])), **TWO,
      c=lambda: conv(16), cat=tnn.Cat)  # fmt: skip
wired("views", IMAGE, 2, _unbind, a=conv, lin=lambda: nn.Linear(2, 5))
wired("reinterpret", IMAGE, 2, _reinterpret, **TWO)
wired("view_then_write", IMAGE, 2, _view_then_write, **TWO, relu=lambda: nn.ReLU(inplace=True))
wired("write_before_add", IMAGE, 2, _write_before_add, **TWO, add=tnn.Add)
wired("ask_shape", IMAGE, 2, _ask_shape, a=lambda: conv(stride=2), b=conv, add=tnn.Add)
wired("ask_dtype", IMAGE, 2, _ask_dtype, **TWO, flat=nn.Identity)
wired("item", IMAGE, 2, _branch_on_value, **TWO)
wired("called_twice", IMAGE, 2, _twice, **TWO)
wired("bn_other_reader", IMAGE, 1, _other_reader, a=conv, bn=lambda: nn.BatchNorm2d(8))
wired("add_both", IMAGE, 3, _add_both, **TWO, c=conv, add=tnn.Add, relu=nn.ReLU)
wired("add_residual_first", IMAGE, 2, lambda m, x: m.b(m.add(x, m.a(x))), **TWO, add=tnn.Add)
wired("add_int8_residual", IMAGE, 3, lambda m, x: m.c(m.add(m.b(y := m.a(x)), y)), **TWO, c=conv,
      add=tnn.Add)  # fmt: skip
wired("add_float_destination", IMAGE, 2, lambda m, x: m.add(m.b(y := m.a(x)), y), **TWO,
      add=tnn.Add)  # fmt: skip
wired("add_broadcast", IMAGE, 2, lambda m, x: m.b(m.add(m.a(x), x.mean((2, 3), True))), **TWO,
      add=tnn.Add)  # fmt: skip
wired("add_broadcast_int8", IMAGE, 3, lambda m, x: m.c(m.add(m.b(y := m.a(x)), m.pool(y))), **TWO,
      c=conv, add=tnn.Add, pool=lambda: nn.AdaptiveAvgPool2d(1))  # fmt: skip
wired("add_integer", IMAGE, 2, lambda m, x: m.b(m.add(m.a(x), (x > 0).int())), **TWO, add=tnn.Add)
wired("add_number", IMAGE, 2, lambda m, x: m.b(m.add(m.a(x), 2.0)), **TWO, add=tnn.Add)
wired("add_itself", IMAGE, 2, lambda m, x: m.b(m.add(y := m.a(x), y)), **TWO, add=tnn.Add)
wired("add_keywords", IMAGE, 3, lambda m, x: m.c(m.add(src1=m.a(x), src0=m.b(x))), **TWO, c=conv,
      add=tnn.Add)  # fmt: skip
wired("add_constant", (1, 8, 10, 10), 2, lambda m, x: m.b(m.add(m.a(x), m.p["c"])), **TWO,
      add=tnn.Add, p=lambda: nn.ParameterDict({"c": torch.randn(1, 8, 10, 10)}))  # fmt: skip
wired("mul_gate", IMAGE, 3, lambda m, x: m.c(m.mul(y := m.a(x), m.sig(m.b(m.pool(y))))), **TWO,
      c=conv, mul=tnn.Mul, sig=nn.Sigmoid, pool=lambda: nn.AdaptiveAvgPool2d(1))  # fmt: skip
wired("shared_pool", IMAGE, 2, lambda m, x: m.b(m.p(m.a(m.p(x)))), **TWO, p=lambda: nn.MaxPool2d(2))
wired("pool_two_readers", IMAGE, 2, lambda m, x: (m.b(m.p(y := m.a(x))), y + 1), **TWO,
      p=lambda: nn.MaxPool2d(2))  # fmt: skip
wired("pool_indices", IMAGE, 2, lambda m, x: m.b(m.p(m.a(x))[0]), **TWO,
      p=lambda: nn.MaxPool2d(2, return_indices=True))  # fmt: skip
wired("stash", IMAGE, 2, _stash, **TWO)
wired("exposed", IMAGE, 1, _exposed, **TWO, c=lambda: nn.Linear(2, 2), total=3)
wired("module_list", IMAGE, 3, _lists, acts=lambda: nn.ModuleList([nn.ReLU()] * 3),
      layers=lambda: nn.ModuleList([conv(), conv(), conv()]))  # fmt: skip
wired("script_inside", IMAGE, 2, _script, **TWO, f=lambda: torch.jit.script(nn.Softsign()))
wired("lenet", (2, 3, 32, 32), 3, _lenet, a=lambda: conv(3, 6, 5, padding=0), relu=nn.ReLU,
      b=lambda: conv(6, 16, 5, padding=0), sig=nn.Sigmoid, lin=lambda: nn.Linear(400, 10),
      pool=lambda: nn.MaxPool2d(2), pool2=lambda: nn.AvgPool2d(2))  # fmt: skip
wired("attention", (2, 6, 16), 1, lambda m, x: m.lin(m.mha(x, x, x)[0]), total=2,
      mha=lambda: nn.MultiheadAttention(16, 2, batch_first=True),
      lin=lambda: nn.Linear(16, 8))  # fmt: skip
wired("lstm", (2, 6, 16), 3, lambda m, x: m.b(m.lstm(m.a(x))[0]), a=lambda: nn.Linear(16, 8),
      lstm=lambda: nn.LSTM(8, 8, batch_first=True), b=lambda: nn.Linear(8, 4))  # fmt: skip
wired("stubs", IMAGE, 2, lambda m, x: torch.sin(m.dq(m.b(m.a(m.q(x))))), **TWO, q=tnn.QuantStub,
      dq=tnn.DeQuantStub)  # fmt: skip
wired("linear_bn_3d", (2, 6, 8), 1, lambda m, x: m.bn(m.lin(x)), lin=lambda: nn.Linear(8, 8),
      bn=lambda: nn.BatchNorm1d(6))  # fmt: skip
wired("unbatched", (8, 10, 10), 0, lambda m, x: m.p(m.b(m.a(x))), **TWO,
      p=lambda: nn.MaxPool2d(2), total=2)  # fmt: skip
wired("keyword_layer", (4, 8), 1, lambda m, x: m.lin(input=x), lin=lambda: nn.Linear(8, 8))
wired("never_called", IMAGE, 1, lambda m, x: m.a(x), **TWO, total=2)
wired("forward_directly", IMAGE, 1, lambda m, x: m.b(m.a.forward(x)), **TWO, total=2)
wired("clip_bounds", IMAGE, 3, lambda m, x: m.c(m.h(m.b(m.t(m.a(x))))), **TWO, c=conv,
      h=lambda: nn.Hardtanh(-0.2, 0.3), t=lambda: nn.Hardtanh(-math.inf, 0.5))  # fmt: skip

case("sequential", (4, 8), 2)(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
case("root", (4, 8), 1)(lambda: nn.Linear(8, 4))
case("transformer", (2, 6, 16), 4, 6)(_transformer)
case("shared_relu6", IMAGE, 3)(_shared_relu)
case("tied", (4, 8), 2)(_tied)
case("user_hook", IMAGE, 2)(_hooked)
case("dropout", IMAGE, 2)(
    lambda: nn.Sequential(conv(), nn.Identity(), nn.Dropout(), nn.ReLU(), nn.Dropout2d(), conv())
)
case("in_place_lookup", IMAGE, 2)(lambda: nn.Sequential(conv(), nn.SiLU(inplace=True), conv()))
case("lookups", IMAGE, 5)(
    lambda: nn.Sequential(
        *(conv(), nn.LeakyReLU(0.1), conv(), nn.GELU(), conv(), nn.Tanh(), nn.ELU(), conv()),
        *(nn.Hardswish(), nn.Softplus(), conv()),
    )
)
case("bn_variants", (2, 8, 12), 4)(
    lambda: nn.Sequential(
        *(nn.Conv1d(8, 8, 3, bias=False), nn.BatchNorm1d(8, affine=False), nn.ReLU()),
        *(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU()),
        *(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.ReLU6(), nn.Flatten()),
        *(nn.Linear(80, 6), nn.BatchNorm1d(6)),
    )
)
case("geometry", (2, 8, 13, 11), 5)(
    lambda: nn.Sequential(
        *(nn.Conv2d(8, 16, 3, padding="same", dilation=2), nn.ReLU()),
        *(nn.Conv2d(16, 16, (2, 4), padding="same", groups=16), nn.ReLU()),
        *(nn.Conv2d(16, 12, 3, stride=2, groups=4), nn.Conv2d(12, 6, 2, padding="valid")),
        *(nn.Conv2d(6, 4, 1, bias=False), nn.AvgPool2d(2, padding=1), nn.MaxPool2d(2)),
    )
)
case("reflect", IMAGE, 2)(
    lambda: nn.Sequential(conv(), nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"))
)
case("volumes", (2, 3, 6, 7, 8), 2)(
    lambda: nn.Sequential(
        *(nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(8, 4, 1), nn.AdaptiveAvgPool3d((1, 3, 2))),
    )
)


class Block(nn.Module):
    """A residual block as ResNets have it."""

    def __init__(self, channels: int, residual_first: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.add = tnn.Add()
        self.residual_first = residual_first

    def forward(self, src: Tensor) -> Tensor:
        dst = self.relu(self.bn1(self.conv1(src)))
        dst = self.bn2(self.conv2(dst))
        dst = self.add(src, dst) if self.residual_first else self.add(dst, src)
        return self.relu(dst)


@case("resnet", (2, 3, 16, 16), 8)
class ResNet(nn.Module):
    """Everything at once: stem, blocks, depthwise, lookup, cat, pools and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.act = nn.ReLU6()
        self.pool = nn.MaxPool2d(2)
        self.block1, self.block2 = Block(16), Block(16, residual_first=True)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.hardswish = nn.Hardswish()
        self.cat = tnn.Cat()
        self.mix = nn.Conv2d(32, 24, 1)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(24, 10)

    def forward(self, src: Tensor) -> Tensor:
        dst = self.pool(self.act(self.stem(src)))
        dst = self.block2(self.block1(dst))
        dst = self.mix(self.cat([dst, self.hardswish(self.depthwise(dst))]))
        return self.head(torch.flatten(self.global_pool(dst), 1))
