# SPDX-License-Identifier: Apache-2.0
"""Float networks for images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from repository import image, model
from torch import Tensor, nn

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
    """Normalizes channels, first or last, with parameters of its own."""

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
