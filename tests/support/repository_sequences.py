# SPDX-License-Identifier: Apache-2.0
"""Float networks for sequences, texts and sounds."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from repository import image, model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

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


model("tcn_weight_norm", lambda: torch.randn(2, 4, 40), 14)(
    lambda: TCN(parametrizations.weight_norm)
)
model("tcn_spectral_norm", lambda: torch.randn(2, 4, 40), 14)(
    lambda: TCN(parametrizations.spectral_norm)
)
model("tcn_old_weight_norm", lambda: torch.randn(2, 4, 40), 14)(
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


# BERT with a mask among its inputs; a vocoder; a denoiser with a time embedding


@model(
    "bert",
    lambda: {"input_ids": torch.randint(0, 30, (2, 9)), "attention_mask": torch.ones(2, 9).long()},
    7,
)
class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(30, 32), nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("ids", torch.arange(20).expand(1, -1))
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.dense, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.classifier = nn.Linear(32, 3)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view((*x.size()[:-1], 4, 8)).permute(0, 2, 1, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(torch.float32)) * -10000.0
        h = self.norm(self.word(input_ids) + self.position(self.ids[:, : input_ids.shape[1]]))
        q, k, v = (self.transpose_for_scores(m(h)) for m in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8) + mask
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
        h = self.norm(self.dense(context.view(*context.size()[:-2], 32)) + h)
        h = self.norm(self.down(F.gelu(self.up(h))) + h)
        return {"logits": self.classifier(torch.tanh(h[:, 0])), "hidden": h}


@model("vocoder", lambda: torch.randn(2, 8, 20), 5)
class Vocoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = parametrizations.weight_norm
        self.pre, self.post = norm(nn.Conv1d(8, 16, 7, 1, 3)), norm(nn.Conv1d(8, 1, 7, 1, 3))
        self.up = norm(nn.ConvTranspose1d(16, 8, 8, 4, padding=2))
        self.res = nn.ModuleList(norm(nn.Conv1d(8, 8, 3, dilation=d, padding=d)) for d in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.pre(x), 0.1))
        total = None
        for layer in self.res:
            y = layer(F.leaky_relu(x, 0.1)) + x
            total = y if total is None else total + y
        return torch.tanh(self.post(F.leaky_relu(total / len(self.res))))


@model("denoiser", lambda: (torch.randn(2, 3, 16, 16), torch.tensor([3, 7])), 7)
class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.conv1, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(8, 16)
        self.conv2, self.down = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(8, device=t.device) * -(math.log(10000) / 7))
        angles = t.float()[:, None] * rates[None]
        e = self.time(torch.cat((angles.sin(), angles.cos()), -1))[:, :, None, None]
        h = self.conv2(F.silu(self.norm(self.conv1(x)) * (1 + e) + e))
        return self.out(torch.cat([self.up(self.down(h)), h], 1))
