# SPDX-License-Identifier: Apache-2.0
"""In the styles of others: weights that are computed, modules made or sliced on the way."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from repository import image, model
from torch import Tensor, nn

# A normalizing flow: squeezed pixels, an invertible 1x1 convolution, couplings, log determinants


class InvertibleConv(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(c, c))[0])
        self.register_buffer("p", p)
        self.register_buffer("sign", upper.diag().sign())
        self.lower, self.upper = nn.Parameter(lower), nn.Parameter(upper.triu(1))
        self.log_s = nn.Parameter(upper.diag().abs().log())

    def weight(self) -> Tensor:
        lower = self.lower.tril(-1) + torch.eye(len(self.log_s))
        return self.p @ lower @ (self.upper.triu(1) + torch.diag(self.sign * self.log_s.exp()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, _, h, w = x.shape
        return F.conv2d(x, self.weight()[:, :, None, None]), h * w * torch.sum(self.log_s)


class Coupling(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(c // 2, 16, 3, padding=1), nn.ReLU(inplace=True))
        self.out, self.gain = nn.Conv2d(16, c, 3, padding=1), nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        h = self.out(self.net(a)) * torch.exp(self.gain * 0.3)
        scale = torch.sigmoid(h[:, 0::2] + 2)
        log_det = torch.sum(torch.log(scale).view(x.shape[0], -1), 1)
        return torch.cat([a, (b + h[:, 1::2]) * scale], 1), log_det


@model("flow", image(3, 16), 6)
class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([InvertibleConv(12), Coupling(12), InvertibleConv(12)])
        self.last = Coupling(12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous()
        x, total = x.view(b, c * 4, h // 2, w // 2), 0.0
        for step in [*self.steps, self.last]:
            x, log_det = step(x)
            total = total + log_det
        return x, total


# Convolutions modulated for each sample, with equalized learning rates


class EqualLinear(nn.Module):
    def __init__(self, i: int, o: int, bias: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(o, i)), nn.Parameter(torch.zeros(o))
        self.scale, self.start = 1 / math.sqrt(i), bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, bias=self.bias + self.start)


class Modulated(nn.Module):
    def __init__(self, i: int, o: int, up: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, o, i, 3, 3))
        self.style, self.up, self.scale = EqualLinear(16, i, 1.0), up, 1 / math.sqrt(9 * i)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        weight, style = self.weight * self.scale, self.style(w)
        decay = (weight * style.view(b, 1, c, 1, 1)).pow(2).sum([2, 3, 4])
        if self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = F.conv2d(x * style.view(b, c, 1, 1), weight[0], padding=1)
        return F.leaky_relu(x * torch.rsqrt(decay + 1e-8)[..., None, None], 0.2) * math.sqrt(2)


@model("modulated", lambda: torch.randn(2, 16), 7)
class Synthesis(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(EqualLinear(16, 16), nn.LeakyReLU(0.2), EqualLinear(16, 16))
        self.const = nn.Parameter(torch.randn(1, 16, 4, 4))
        self.convs = nn.ModuleList([Modulated(16, 16, False), Modulated(16, 8, True)])
        self.rgb = nn.Conv2d(8, 3, 1)

    def forward(self, z: Tensor, truncation: float = 1.0) -> Tensor:
        w = self.mapping(z * torch.rsqrt(torch.mean(z**2, dim=1, keepdim=True) + 1e-8))
        x = self.const.repeat(z.shape[0], 1, 1, 1)
        for conv in self.convs:
            x = conv(x, w * truncation)
        return self.rgb(x)


# Segmentation: a slice of a Sequential, modules without a name, atrous pyramid, extra arguments


@model("segmentation", image(3, 48), 10)
class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.aspp = nn.ModuleList(
            nn.Conv2d(32, 16, 3, padding=d, dilation=d, bias=False) for d in (1, 2, 4)
        )
        self.low, self.classify = nn.Conv2d(16, 8, 1), nn.Conv2d(24, 5, 1)
        self.image, self.project = nn.Conv2d(32, 16, 1), nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        size = x.shape[-2:]
        low = self.backbone[:2](x)
        x = self.backbone[2:](low)
        pooled = nn.ReLU()(self.image(F.adaptive_avg_pool2d(x, 1)))
        pooled = F.interpolate(pooled, size=x.shape[2:], mode="bilinear", align_corners=False)
        x = self.project(torch.cat([F.relu(conv(x)) for conv in self.aspp] + [pooled], 1))
        x = F.interpolate(x, size=low.shape[2:], mode="bilinear", align_corners=False)
        x = self.classify(torch.cat([nn.Dropout(0.1).eval()(x), self.low(low)], 1))
        return {"out": nn.Upsample(size=size, mode="nearest")(x)}


# Recommendation: a list of indices, and the interactions of what they mean


@model("recommender", lambda: (torch.randn(4, 8), [torch.randint(0, 20, (4,)) for _ in "abc"]), 4)
class Recommender(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(20, d, mode="sum") for _ in range(3))
        self.bot = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, d), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(d + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        x = self.bot(dense)
        ly = [emb(i.unsqueeze(1)) for emb, i in zip(self.emb_l, sparse, strict=True)]
        t = torch.cat([x, *ly], dim=1).view((x.shape[0], -1, x.shape[1]))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        li = torch.tensor([i for i in range(4) for j in range(i)])
        lj = torch.tensor([j for i in range(4) for j in range(i)])
        return self.top(torch.cat([x, z[:, li, lj]], dim=1))


# Speech: position codes that a module keeps for the next call, a mask of lengths, GLU


class Positions(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d
        self.codes: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.codes is None or self.codes.size(0) < x.size(1):
            angle = torch.outer(torch.arange(x.size(1)) / 1.0, torch.rand(self.d // 2) * 0 + 0.3)
            self.codes = torch.cat([angle.sin(), angle.cos()], -1)
        return x + abs(self.codes[: x.size(1)])


@model("speech", lambda: (torch.randn(2, 40, 16), torch.tensor([10, 8])), 7)
class Speech(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, d, 3, 2), nn.ReLU(), nn.Conv2d(d, d, 3, 2), nn.ReLU())
        self.proj, self.positions, self.norm = nn.Linear(d * 3, d), Positions(d), nn.LayerNorm(d)
        self.pw1, self.pw2 = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(d, d, 1)
        self.dw = nn.Conv1d(d, d, 15, padding=7, groups=d)
        self.ctc = nn.Linear(d, 10)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.sub(x.unsqueeze(1))
        b, c, t, f = x.size()
        x = self.positions(self.proj(x.transpose(1, 2).contiguous().view(b, t, c * f)))
        gated = F.glu(self.pw1(self.norm(x).transpose(1, 2)), dim=1)
        x = x + self.pw2(F.silu(self.dw(gated))).transpose(1, 2)
        padding = torch.arange(t)[None] >= lengths[:, None]
        return self.ctc(F.normalize(x, p=2, dim=-1)).masked_fill(padding[..., None], 0.0)


# Language: tokens sorted by their expert, all experts in one grouped product, a router


@model("grouped_experts", lambda: torch.randint(0, 20, (2, 9)), 3)
class Experts(nn.Module):
    def __init__(self, d: int = 16, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.embed, self.router, self.norm = nn.Embedding(20, d), nn.Linear(d, 4), nn.LayerNorm(d)
        self.up = nn.Parameter(torch.randn(experts, 2 * d, d) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, d, d) * 0.2)
        self.before, self.head, self.top = nn.Linear(d, d), nn.Linear(d, 20), top

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.embed(ids)).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(self.top, -1)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        rows = torch.div(order, self.top, rounding_mode="floor")
        count = torch.histc(chosen.reshape(-1).float(), bins=len(self.up), min=0, max=3)
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        gate, value = F.grouped_mm(x[rows], self.up.mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * value, self.down.mT, offs=ends)
        y = y * weights.reshape(-1)[order, None]
        x = torch.zeros_like(x).index_add(0, rows, y) + x
        return self.head(self.norm(x)).unflatten(0, ids.shape)
