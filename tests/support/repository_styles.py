# SPDX-License-Identifier: Apache-2.0
"""In the styles of others: Python between the layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from repository import image, model
from torch import Tensor, nn

# Writing to slices, with masks and with indices


@model("shift", lambda: torch.randn(2, 4, 8, 6, 6), 2)
class Shift(nn.Module):
    """Channels move along time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames, (_, time, c, h, w) = x.size(0) * x.size(1), x.size()
        x = self.a(x.view(frames, c, h, w)).view(-1, time, c, h, w)
        out = torch.zeros_like(x)
        out[:, :-1, :2] = x[:, 1:, :2]
        out[:, 1:, 2:4] = x[:, :-1, 2:4]
        out[:, :, 4:] = x[:, :, 4:]
        return self.b(out.view(frames, c, h, w))


@model("decode", image(3, 8), 1)
class Decode(nn.Module):
    """Boxes of a detector, written over what they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 12, 1)
        self.register_buffer("grid", torch.randn(1, 2, 8, 8, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(x.shape[0], 2, 6, 8, 8).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
        y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + self.grid) * 8
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2
        y[:, 0, 0, 0, 5] = 0
        y[y > 60] = 60.0
        y[torch.arange(x.shape[0]), 0, 0, 0, 0] = y[:, 1, 1, 1, 1]
        return y.view(x.shape[0], -1, 6)


@model("experts", lambda: torch.randn(6, 8), 9)
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.sharp = nn.Linear(8, 4, bias=False), 4.0
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(self.gate(x) * self.sharp, -1), 4)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, nth = torch.where(chosen == i)
            y[token] += weights[token, nth, None] * expert(x[token])
        return y


# Functions that TorchScript compiled


@torch.jit.script
def gated(a: Tensor, b: Tensor, n: int) -> Tensor:
    x = a + b
    return torch.tanh(x[:, :n]) * torch.sigmoid(x[:, n:])


@model("gated", lambda: (torch.randn(2, 8, 20), torch.randn(2, 4, 1)), 3)
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(4, 16, 1)
        self.out = nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return self.out(gated(self.a(x), self.c(g), 8))


# A library that asks for classes, and keeps what it works out for a shape


@functools.lru_cache(4)
def _patches(shape: tuple[int, ...], p: int) -> tuple[list[int], list[int], list[int]]:
    b, c, h, w = shape
    split = [b, c, h // p, p, w // p, p]
    return split, [0, 2, 4, 3, 5, 1], [b, (h // p) * (w // p), p * p * c]


def patches(x: Any, p: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"a tensor is expected, got {type(x)}")
    try:
        split, order, joined = _patches(x.shape, p)
    except TypeError:  # symbolic sizes
        split, order, joined = _patches.__wrapped__(x.shape, p)
    return x.reshape(split).permute(order).reshape(joined)


@model("patches", lambda: ([torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)],), 3)
class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(48, 16)
        self.mixer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.forward(item) for item in x]
        x = self.embed(patches(x, 4))
        return x + self.mixer(x)


# nn.Transformer whole, with a mask whose kind it looks for


@model("translation", lambda: (torch.randn(2, 7, 32), torch.randn(2, 5, 32)), 12)
class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(32, 9)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        return self.head(self.body(src, tgt, tgt_mask=mask))


model("synced", image(3, 16), 3)(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(True), nn.Conv2d(8, 8, 3, groups=8),
    nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))))  # fmt: skip


@model("keypoints", image(3, 8), 2)
class Keypoints(nn.Module):
    """Relative to a size, as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        points = self.b(F.relu(self.a(x))).flatten(2).transpose(1, 2)
        return points / torch.tensor([w, h], device=x.device)


@model("powers", image(3, 8), 2)
class Powers(nn.Module):
    """Functions that take a number or a tensor in the same place; sizes given to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.pow(self.a(x), 2)
        x = torch.where(x > 4, 4.0, x) - torch.remainder(x, 3.0)
        x = x.mean((2, 3)) * torch.linspace(0.5, 1, 8).expand(x.shape[0], -1)
        ramp = torch.linspace(0, 1, 6)
        return self.b(x) + ramp.new_ones(x.shape[0], 1) * ramp[x.argmin(-1, keepdim=True) % 6]


# Functions that know their own backward pass


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)


class _Clamp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)


@model("autograd", image(3, 8), 3)
class Autograd(nn.Module):
    """And tensors that are made tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = _Swish.apply(self.a(x), 1.5)
        y = torch.as_tensor(y) + torch.as_tensor(_Clamp.apply(self.b(y)), dtype=torch.float32)
        sizes = torch.as_tensor([y.shape[2], y.shape[3]])
        return self.c(y) + torch.full_like(y, y.amax()) / torch.asarray(sizes).prod()


@model("einsum_attention", lambda: torch.randn(2, 7, 16), 5)
class EinsumAttention(nn.Module):
    """Products as einsum writes them: of heads, with a weight of two dims and of three."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Parameter(torch.randn(4, 4, 16) / 4)
        self.mix, self.graph = nn.Parameter(torch.randn(16, 16) / 4), torch.rand(3, 7, 7)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(2)
        weights = torch.softmax(torch.einsum("blhe,bshe->bhls", q, k) / 2, -1)
        heads = torch.einsum("b h l s, b s h d -> b l h d", weights, v)
        x = x + torch.einsum("blhd,hde->ble", heads, self.out)
        x = x + torch.einsum("oi,...i->...o", self.mix, F.gelu(x))
        return self.head(torch.einsum("kvw,bwc->bkvc", self.graph, x).mean(1))


@model("attempts", lambda: torch.randn(2, 7, 16), 2)
class Attempts(nn.Module):
    """Layers that are given more than some of them take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                x = layer(x)
        return x


@model("state_space", lambda: torch.randn(2, 12, 16), 3)
class StateSpace(nn.Module):
    """A causal depthwise convolution with as many groups as there are channels, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(16, 24), nn.Linear(24, 5)
        self.taps, self.bias = nn.Parameter(torch.randn(24, 4) / 2), nn.Parameter(torch.randn(24))
        self.positions = torch.randn(1, 24, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x).transpose(1, 2)
        channels, length = x.shape[1:]
        y = F.conv1d(x, self.taps.unsqueeze(1), self.bias, padding=3, groups=channels)
        y = F.silu(y[..., :length]) + self.positions[:, :, 64 - length :]
        return self.out(y.transpose(1, 2))


def _value(x: Any, *args: Any) -> Any:
    return x(*args) if callable(x) else x


@model("callables", lambda: torch.randn(2, 9, 16), 3)
class Callables(nn.Module):
    """Asks what it may call; makes numbers of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = _value(self.b, _value(self.a(x)).relu())
        half = int(x.shape[1] / 2)
        return self.c(x[:, :half] + x[:, -half:])
