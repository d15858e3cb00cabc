# SPDX-License-Identifier: Apache-2.0
"""The patterns of oneDNN's Graph API, and what the flow makes of each: the table of its page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.convert.dispatch import dispatch_of

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "from_onednn.md"
IMAGE, ROWS = torch.randn(2, 8, 10, 10), torch.randn(2, 12, 16)
FLOATS = {"layer_norm", "rms_norm", "group_norm", "softmax", "sigmoid"}


class Model(nn.Module):
    """Layers, and a function of them and of the source."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def conv(channels: int = 8, to: int = 8, kernel: int = 3) -> nn.Module:
    return nn.Conv2d(channels, to, kernel, padding=kernel // 2)


def line(features: int = 16, to: int = 16) -> nn.Module:
    return nn.Linear(features, to)


def heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(line(), norm, line())


def attention(run: Callable[..., Tensor], keys: int = 16) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        count = keys // 8
        return m.out(joined(run(heads(m.q(x)), heads(m.k(x), count), heads(m.v(x), count))))

    return Model(forward, q=line(), k=line(16, keys), v=line(16, keys), out=line())


def bottleneck() -> nn.Module:
    return Model(
        lambda m, x: m.out((m.c(m.b(m.a(x).relu()).relu()) + x).relu()),
        a=conv(8, 4, 1), b=conv(4, 4), c=conv(4, 8, 1), out=conv(),
    )  # fmt: skip


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5 + torch.ones(12, 12).triu(1) * -1e4).softmax(-1) @ v


PATTERNS: dict[str, tuple[nn.Module, Tensor]] = {
    "convolution + bias + batch norm + relu": (
        nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv()),
        IMAGE,
    ),
    "convolution + bias + unary operations": (
        nn.Sequential(conv(), nn.SiLU(), nn.Tanh(), conv()),
        IMAGE,
    ),
    "convolution + bias + binary operations with constants": (
        Model(lambda m, x: m.out(m.a(x) * 2 + 1), a=conv(), out=conv()),
        IMAGE,
    ),
    "convolution + sum + relu": (
        Model(lambda m, x: m.out((m.a(x) + m.b(x)).relu()), a=conv(), b=conv(), out=conv()),
        IMAGE,
    ),
    "residual block of three convolutions": (bottleneck(), IMAGE),
    "transposed convolution + bias + relu": (
        nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU(), conv()),
        IMAGE,
    ),
    "convolution + pooling": (nn.Sequential(conv(), nn.MaxPool2d(2), conv()), IMAGE),
    "convolution + interpolation": (
        nn.Sequential(conv(), nn.Upsample(scale_factor=2, mode="bilinear"), conv()),
        IMAGE,
    ),
    "convolution + mean": (
        Model(lambda m, x: m.out(m.a(x).mean((2, 3))), a=conv(), out=line(8, 4)),
        IMAGE,
    ),
    "concatenation": (
        Model(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(), b=conv(), c=conv(16)),
        IMAGE,
    ),
    "multilayer perceptron": (
        nn.Sequential(line(), nn.ReLU(), line(), nn.ReLU(), line()),
        ROWS,
    ),
    "linear + multiply by a tensor": (
        Model(lambda m, x: m.out(F.gelu(m.a(x)) * x), a=line(), out=line()),
        ROWS,
    ),
    "gated MLP": (
        Model(
            lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)),
            gate=line(16, 32), up=line(16, 32), down=line(32, 16),
        ),
        ROWS,
    ),
    "matmul + scale + add": (
        Model(
            lambda m, x: m.out(m.a(x) @ m.b(x).mT / 4 + torch.ones(12, 12).triu()),
            a=line(), b=line(), out=line(12, 4),
        ),
        ROWS,
    ),
    "scaled dot-product attention": (attention(F.scaled_dot_product_attention), ROWS),
    "attention with matmul, scale, mask, softmax": (attention(spelled_out), ROWS),
    "grouped-query attention": (
        attention(lambda *a: F.scaled_dot_product_attention(*a, enable_gqa=True), keys=8),
        ROWS,
    ),
    "layer norm + quantize": (normed(nn.LayerNorm(16)), ROWS),
    "RMS norm + quantize": (normed(nn.RMSNorm(16)), ROWS),
    "softmax + quantize": (normed(nn.Softmax(-1)), ROWS),
    "group norm + quantize": (nn.Sequential(conv(), nn.GroupNorm(2, 8), conv()), IMAGE),
}  # fmt: skip


def runs(model: nn.Module, src: Tensor) -> str:
    """Return the ops between the first quantization and the last layer, in order."""
    dispatch = dispatch_of(torchq.quantize(model.eval(), [src]))
    assert dispatch is not None
    found = []
    for node in dispatch.graph.graph.nodes:
        if node.op == "call_module":
            found.append(type(dispatch.graph.get_submodule(node.target)).__name__)
        elif getattr(node.target, "__name__", "") in FLOATS:
            found.append(node.target.__name__)
    start = 1 if found[0] == "Quantize" else 0
    return ", ".join(f"`{name}`" for name in found[start:-1])


def table() -> dict[str, str]:
    text = PAGE.read_text().partition("## Graph API")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return {name: ops for name, ops in rows if ops.startswith("`")}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_flow_runs_what_the_page_says(name: str) -> None:
    torch.manual_seed(0)
    assert runs(*PATTERNS[name]) == table()[name]


def test_every_row_has_a_model() -> None:
    assert table().keys() == PATTERNS.keys()
