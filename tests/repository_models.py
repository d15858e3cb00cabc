# SPDX-License-Identifier: Apache-2.0
"""Small models in the styles of many repositories: none is written for quantization."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Case = tuple[Callable[[], nn.Module], Callable[[], Any], int, int]
MODELS: dict[str, Case] = {}  # name -> model, inputs, int8 matmuls, all matmuls


def model(name: str, inputs: Callable[[], Any], int8: int, total: int | None = None) -> Any:
    def add(make: Callable[[], nn.Module]) -> Any:
        MODELS[name] = make, inputs, int8, int8 if total is None else total
        return make

    return add


def image(channels: int = 3, size: int = 32, batch: int = 2) -> Callable[[], Any]:
    return lambda: torch.randn(batch, channels, size, size)


# YOLO: CSP blocks, SPPF, a detection head that returns maps and reshapes them


def autopad(k: int) -> int:
    return k // 2


class Conv(nn.Module):
    default_act = nn.SiLU()

    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, autopad(k), bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = self.default_act if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, c: int, shortcut: bool = True) -> None:
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c, 3), Conv(c, c, 3), shortcut

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C2f(nn.Module):
    def __init__(self, c1: int, c2: int, n: int = 1) -> None:
        super().__init__()
        self.c = c2 // 2
        self.cv1, self.cv2 = Conv(c1, 2 * self.c), Conv((2 + n) * self.c, c2)
        self.m = nn.ModuleList(Bottleneck(self.c) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = Conv(c, c // 2), Conv(c * 2, c)
        self.m = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = [self.cv1(x)]
        y.extend(self.m(y[-1]) for _ in range(3))
        return self.cv2(torch.cat(y, 1))


class Detect(nn.Module):
    def __init__(self, nc: int, ch: list[int]) -> None:
        super().__init__()
        self.no = nc + 4
        self.cv2 = nn.ModuleList(nn.Sequential(Conv(c, 8, 3), nn.Conv2d(8, 4, 1)) for c in ch)
        self.cv3 = nn.ModuleList(nn.Sequential(Conv(c, 8, 3), nn.Conv2d(8, nc, 1)) for c in ch)
        self.register_buffer("stride", torch.tensor([8.0, 16.0]))

    def forward(self, x: list[Tensor]) -> Any:
        shape = x[0].shape
        for i in range(len(x)):
            x[i] = torch.cat((self.cv2[i](x[i]), self.cv3[i](x[i])), 1)
        cat = torch.cat([xi.view(shape[0], self.no, -1) for xi in x], 2)
        box, cls = cat.split((4, self.no - 4), 1)
        return torch.cat((box * self.stride[0], cls.sigmoid()), 1), x


@model("yolo", image(), 20)
class Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c2f, self.down = Conv(3, 8, 3, 2), C2f(8, 16), Conv(16, 16, 3, 2)
        self.sppf, self.up, self.neck = SPPF(16), nn.Upsample(None, 2, "nearest"), C2f(32, 16)
        self.head = Detect(3, [16, 16])

    def forward(self, x: Tensor) -> Any:
        p3 = self.c2f(self.stem(x))
        p4 = self.sppf(self.down(p3))
        n3 = self.neck(torch.cat([self.up(p4), p3], 1))
        return self.head([n3, p4])


# U-Net, with ConvTranspose, F.pad and a bilinear variant


class DoubleConv(nn.Sequential):
    def __init__(self, c1: int, c2: int) -> None:
        super().__init__(
            nn.Conv2d(c1, c2, 3, padding=1, bias=False), nn.BatchNorm2d(c2), nn.ReLU(inplace=True),
            nn.Conv2d(c2, c2, 3, padding=1, bias=False), nn.BatchNorm2d(c2), nn.ReLU(inplace=True),
        )  # fmt: skip


class Up(nn.Module):
    def __init__(self, c1: int, c2: int, bilinear: bool) -> None:
        super().__init__()
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            self.conv = DoubleConv(c1 + c1 // 2, c2)
        else:
            self.up = nn.ConvTranspose2d(c1, c1 // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(c1, c2)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        self.inc, self.down1 = DoubleConv(3, 8), nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(16, 32))
        self.up1, self.up2 = Up(32, 16, bilinear), Up(16, 8, bilinear)
        self.outc = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


model("unet", image(3, 25), 13)(lambda: UNet(False))
model("unet_bilinear", image(3, 25), 11)(lambda: UNet(True))


# ConvNeXt


class LayerNorm(nn.Module):
    """Of channels first or last, with its own parameters."""

    def __init__(self, c: int, eps: float = 1e-6, data_format: str = "channels_last") -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(c) + 0.5), nn.Parameter(torch.randn(c) / 9)
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (c,)

    def forward(self, x: Tensor) -> Tensor:
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm, self.act = LayerNorm(dim), nn.GELU()
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.rand(dim), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        if self.gamma is not None:
            x = self.gamma * x
        return input + x.permute(0, 3, 1, 2)


model("convnext", image(), 8)(lambda: nn.Sequential(
    nn.Conv2d(3, 16, 4, 4), LayerNorm(16, data_format="channels_first"), ConvNeXtBlock(16),
    ConvNeXtBlock(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)))  # fmt: skip


# MLP-Mixer with an einops-like rearrangement


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Sequential(nn.Linear(tokens, 24), nn.GELU(), nn.Linear(24, tokens))
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


@model("mixer", image(3, 16), 10)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4 * 4 * 3, 16)
        self.blocks = nn.ModuleList([MixerBlock(16, 16), MixerBlock(16, 16)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        x = self.proj(x.reshape(b, (h // 4) * (w // 4), 4 * 4 * c))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


# A gated TCN with weight norm and chomping


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class Gated(nn.Module):
    def __init__(self, c: int, dilation: int, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        pad = 2 * dilation
        self.filter = norm(nn.Conv1d(c, c, 3, padding=pad, dilation=dilation))
        self.gate = norm(nn.Conv1d(c, c, 3, padding=pad, dilation=dilation))
        self.chomp, self.skip, self.res = Chomp1d(pad), nn.Conv1d(c, c, 1), nn.Conv1d(c, c, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.chomp(self.filter(x))) * torch.sigmoid(self.chomp(self.gate(x)))
        return self.res(z) + x, self.skip(z)


class TCN(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.start = nn.Conv1d(4, 8, 1)
        self.blocks = nn.ModuleList([Gated(8, 2**i, norm) for i in range(3)])
        self.end = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), 0
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        return self.end(F.relu(skips))


model("tcn_weight_norm", lambda: torch.randn(2, 4, 40), 13)(
    lambda: TCN(parametrizations.weight_norm)
)
model("tcn_spectral_norm", lambda: torch.randn(2, 4, 40), 13)(
    lambda: TCN(parametrizations.spectral_norm)
)
model("tcn_old_weight_norm", lambda: torch.randn(2, 4, 40), 13)(
    lambda: TCN(lambda m: nn.utils.weight_norm(m))
)


# Depthwise-separable audio network, keyword spotting


@model("audio", lambda: torch.randn(2, 1, 40, 49), 6)
class DSCNN(nn.Sequential):
    def __init__(self) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv1"] = nn.Conv2d(1, 16, (10, 4), (2, 2), (5, 1))
        layers["bn1"], layers["relu1"] = nn.BatchNorm2d(16), nn.ReLU()
        for i in range(2):
            layers[f"dw{i}"] = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
            layers[f"bn_dw{i}"], layers[f"relu_dw{i}"] = nn.BatchNorm2d(16), nn.PReLU(16)
            layers[f"pw{i}"] = nn.Conv2d(16, 16, 1)
            layers[f"bn_pw{i}"], layers[f"relu_pw{i}"] = nn.BatchNorm2d(16), nn.ReLU6(True)
        layers["pool"] = nn.AvgPool2d((10, 12))
        layers["flatten"] = nn.Flatten(1)
        layers["fc"] = nn.Linear(64, 6)
        super().__init__(layers)


# Siamese towers that share their modules, and two outputs by name


Output = namedtuple("Output", ["similarity", "first", "second"])


@model("siamese", lambda: (torch.randn(2, 1, 16, 16), torch.randn(2, 1, 16, 16)), 4)
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.fc, self.out = nn.Linear(64, 16), nn.Linear(16, 1)

    def embed(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(self.features(x).view(x.size(0), -1)))

    def forward(self, a: Tensor, b: Tensor) -> Output:
        first, second = self.embed(a), self.embed(b)
        return Output(self.out(torch.abs(first - second)), first, second)


# Functional style: parameters of the model itself


@model("functional", image(3, 16), 3)
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.bias = nn.Parameter(torch.zeros(8))
        self.weights = nn.ParameterList([torch.randn(8, 8, 3, 3) / 8, torch.randn(10, 8)])
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.4]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.2]).view(1, 3, 1, 1), False)
        self.temperature = 2.0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = (x - self.mean) / self.std
        x = F.relu_(F.conv2d(x, self.weight, self.bias, padding=1))
        x = F.leaky_relu_(F.conv2d(x, self.weights[0], stride=2), 0.2)
        x = F.avg_pool2d(x, kernel_size=x.size()[2:]).flatten(start_dim=1)
        logits = F.linear(x, self.weights[1]).div_(self.temperature)
        return {"logits": logits, "probabilities": logits.softmax(dim=-1)}


# Control flow on sizes and options; a part that TorchScript ignores


@model("options", image(8, 15), 3)
class Options(nn.Module):
    def __init__(self, stochastic_depth: float = 0.1) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.head: nn.Module | None = nn.Linear(8, 3)
        self.rate, self.calls = stochastic_depth, 0

    @torch.jit.ignore
    def normalize(self, x: Tensor) -> Tensor:
        return (x * 2).clamp(-3, 3)

    def forward(self, x: Tensor, return_features: bool = False) -> Any:
        assert x.dim() == 4, f"expected 4 dims, got {x.dim()}"
        if x.shape[-1] % 2 != 0:
            x = F.pad(x, (0, 1, 0, 1))
        x = self.normalize(x)
        y = self.a(x)
        while min(y.shape[-2:]) > 6:
            y = F.avg_pool2d(y, 2)
        if self.training and self.rate > 0:
            y = y * torch.bernoulli(torch.full_like(y[:, :1], 1 - self.rate))
        y += self.b(y)
        pooled = y.mean(dim=(-2, -1))
        features = pooled
        return (self.head(pooled), features) if self.head is not None else features


# SE, CBAM and coordinate attention


class CBAM(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Conv2d(c, c // 4, 1, bias=False), nn.ReLU(), nn.Conv2d(c // 4, c, 1, bias=False)
        )
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        s = self.mlp(F.adaptive_avg_pool2d(x, 1)) + self.mlp(F.adaptive_max_pool2d(x, 1))
        x = x * torch.sigmoid(s)
        pooled = torch.cat([x.mean(1, keepdim=True), x.max(dim=1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.spatial(pooled))


class ECA(nn.Module):
    def __init__(self, k: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, k, padding=k // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean((2, 3), keepdim=True)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * y.sigmoid().expand_as(x)


class SELayer(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(c, c // 2, bias=False), nn.ReLU(inplace=True),
            nn.Linear(c // 2, c, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.fc(self.avg_pool(x).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


model("attention_blocks", image(3, 16), 9)(lambda: nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), SELayer(8),
    nn.Conv2d(8, 8, 3, padding=1), CBAM(8), nn.ReLU(), ECA(), nn.Conv2d(8, 4, 1)))  # fmt: skip


# ESPCN and a residual network for super-resolution


class ResidualDense(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(2 * c, c, 3, 1, 1)
        self.lrelu = nn.LeakyReLU(negative_slope=0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.lrelu(self.conv1(x))
        return self.conv2(torch.cat((x, x1), 1)) * 0.2 + x


model("super_resolution", image(3, 12), 7)(lambda: nn.Sequential(
    nn.Conv2d(3, 8, 3, 1, 1), ResidualDense(8), ResidualDense(8), nn.Conv2d(8, 32, 3, 1, 1),
    nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(8, 3, 3, 1, 1), nn.Tanh()))  # fmt: skip


# GroupNorm and weight standardization; a custom activation; channels shuffled


class StdConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class HSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul(F.relu6(x + 3.0, inplace=True)).div(6.0)


class Shuffle(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.data.size()
        return x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)


model("norms", image(3, 16), 5)(lambda: nn.Sequential(
    StdConv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), StdConv2d(8, 8, 3, padding=1),
    nn.InstanceNorm2d(8, affine=True), Swish(), nn.Conv2d(8, 8, 1, groups=4), Shuffle(4),
    nn.Conv2d(8, 8, 3, groups=2), HSwish(), nn.Flatten(), nn.Linear(8 * 196, 4)))  # fmt: skip


# A ViT with a class token and LayerScale, and relative position bias


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2, self.heads = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), heads
        self.table = nn.Parameter(torch.randn(3 * tokens, heads) / 5)
        self.register_buffer("index", torch.randint(0, 3 * tokens, (tokens, tokens)))
        self.scale = (dim // heads) ** -0.5

    def attention(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = (attn + bias.unsqueeze(0)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


@model("vit", image(3, 16), 10)
class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, 32) / 5)
        self.blocks = nn.Sequential(Block(32, 4, 17), Block(32, 4, 17))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# A text classifier and a small GPT with a causal mask in a buffer


@model("gpt", lambda: torch.randint(0, 50, (2, 12)), 9)
class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(50, 32), nn.Embedding(16, 32), nn.Dropout(0.1)
        self.attn = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.proj = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU("tanh"), nn.Linear(64, 32)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def attend(self, i: int, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.attn[i](x).split(32, dim=2)
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj[i](y.transpose(1, 2).contiguous().view(b, t, c))

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for i in range(2):
            x = x + self.attend(i, self.norms[2 * i](x))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x)), None


@model("text_cnn", lambda: {"input_ids": torch.randint(0, 30, (2, 20))}, 4)
class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, (k, 16)) for k in (2, 3, 4)])
        self.fc, self.dropout = nn.Linear(24, 3), nn.Dropout(0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in x]
        return self.fc(self.dropout(torch.cat(x, 1)))


# A GAN's generator; a VAE; PointNet with max over points and a learned transform


model("generator", lambda: torch.randn(2, 16, 1, 1), 4)(lambda: nn.Sequential(
    nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
    nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 8, 3, 2, 1, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
    nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()))  # fmt: skip


@model("pointnet", lambda: torch.randn(2, 3, 30), 7)
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 9)
        self.conv3, self.conv4 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn, self.out = nn.BatchNorm1d(16), nn.Linear(32, 4)

    def transform(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.max(x, 2, keepdim=True)[0].view(-1, 32)
        x = self.fc2(F.relu(self.bn(self.fc1(x))))
        return x.view(-1, 3, 3) + torch.eye(3).view(1, 3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        matrix = self.transform(x)
        x = torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1)
        x = self.conv4(F.relu(self.conv3(x)))
        x, _ = torch.max(x, dim=2)
        return F.log_softmax(self.out(x), dim=1), matrix


@model("vae", image(1, 16), 6)
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ELU(), nn.Flatten())
        self.mu, self.log_var = nn.Linear(512, 8), nn.Linear(512, 8)
        self.decoder = nn.Sequential(
            nn.Linear(8, 128), nn.ELU(), nn.Unflatten(1, (8, 4, 4)),
            nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.SELU(), nn.ConvTranspose2d(4, 1, 4, 2, 1),
            nn.Sigmoid(),
        )  # fmt: skip

    def reparameterize(self, mu: Tensor, log_var: Tensor) -> Tensor:
        if self.training:
            return mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return mu

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        return [self.decoder(self.reparameterize(mu, log_var)), mu, log_var]


# Parametrized weights, a HRNet-like exchange of resolutions, in-place writes to slices


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) / 8


@model("exchange", image(3, 16), 8)
class Exchange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        parametrize.register_parametrization(self.stem, "weight", Positive())
        self.high, self.low = nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 12, 3, 2, 1)
        self.to_low, self.to_high = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 8, 1)
        self.fuse = nn.ModuleDict({"high": nn.Conv2d(8, 4, 1), "low": nn.Conv2d(12, 4, 1)})
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        high, low = F.relu(self.high(x)), F.relu(self.low(x))
        up = F.interpolate(self.to_high(low), size=high.shape[-2:], mode="bilinear",
                           align_corners=True)  # fmt: skip
        high, low = F.relu(high + up), F.relu(low + self.to_low(high))
        y = self.fuse["high"](high)
        y[:, :, ::2, ::2] += self.fuse["low"](low)
        return self.last(y)
