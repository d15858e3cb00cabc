# SPDX-License-Identifier: Apache-2.0
"""In the styles of others: what is written unusually."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from repository import image, model
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
