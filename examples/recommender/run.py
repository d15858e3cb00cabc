# SPDX-License-Identifier: Apache-2.0
"""Trains a small recommender of DLRM's shape on made-up clicks, and quantizes it.

python examples/recommender/run.py

Its tables take nearly all of its memory: they get rows of 8 or 4 bits, and its layers become int8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq

ITEMS, TABLES, DENSE, DIM, STEPS = 2000, 4, 8, 32, 400
Batch = tuple[Tensor, Tensor, Tensor]


class Recommender(nn.Module):
    """A bag of items for each table, a layer for numbers, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ITEMS, DIM, mode="sum") for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(TABLES + 1, TABLES + 1, -1), False)

    def forward(self, numbers: Tensor, items: Tensor, offsets: Tensor) -> Tensor:
        """``items`` and ``offsets`` have a row for each table."""
        x = self.bottom(numbers)
        found = [bag(items[i], offsets[i]) for i, bag in enumerate(self.bags)]
        every = torch.stack([x, *found], 1)
        products = torch.matmul(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        result: Tensor = self.top(torch.cat([x, products], 1)).squeeze(1)
        return result


def batch(size: int, generator: torch.Generator) -> Batch:
    """Numbers, three items of each table for each visitor, and where the bags begin."""
    numbers = torch.randn(size, DENSE, generator=generator)
    items = torch.randint(0, ITEMS, (TABLES, 3 * size), generator=generator)
    return numbers, items, torch.arange(0, 3 * size, 3).repeat(TABLES, 1)


def clicks(data: Batch) -> Tensor:
    """Visitors like items whose numbers leave a small remainder, the more the larger numbers[0]."""
    numbers, items, _ = data
    liked = ((items % 7) < 2).float().view(TABLES, -1, 3).mean(2)
    return (liked.sum(0) - 1.2 + 0.5 * numbers[:, 0] > 0).float()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(STEPS):
        data = batch(512, generator)
        loss = F.binary_cross_entropy_with_logits(model(*data), clicks(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    data, test = [batch(512, generator) for _ in range(4)], batch(5000, generator)
    models = {"float": model}
    for bits in (8, 4):
        config = torchq.QConfig(embedding_bits=bits)
        models[f"{bits}-bit rows"] = torchq.quantize(model, data, config=config)
    for name, other in models.items():
        right = ((other(*test) > 0) == clicks(test).bool()).float().mean()
        size = sum({t.data_ptr(): t.nbytes for t in other.state_dict().values()}.values())
        print(f"{name:12} {100 * right:5.1f} % right, {size / 1024:6.0f} KiB")


if __name__ == "__main__":
    main()
