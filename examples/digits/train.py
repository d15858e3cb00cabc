# SPDX-License-Identifier: Apache-2.0
"""The data, and the float model trained on it."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from model import DigitNet
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64


class Digits(NamedTuple):
    """Images float32 (N, 1, 16, 16), labels int64 (N,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_data() -> Digits:
    """The 1797 scanned 8x8 digits of scikit-learn at 16x16; a third of each class is for tests."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target)
    train, test = train_test_split(
        torch.arange(len(labels)).numpy(), test_size=1 / 3, stratify=digits.target, random_state=0
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def load_or_train(data: Digits, folder: Path, epochs: int) -> tuple[DigitNet, str]:
    """The trained model in eval mode, and where it comes from.

    Weights are kept in ``folder`` under a hash of the two files that define them.
    """
    sources = [Path(__file__), Path(__file__).with_name("model.py")]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    key.update(f"{epochs} {torch.__version__}".encode())
    cache = folder / f"float-{key.hexdigest()[:12]}.pt"
    torch.manual_seed(0)
    model = DigitNet().to(memory_format=torch.channels_last)
    if cache.exists():
        model.load_state_dict(torch.load(cache, weights_only=True))
        return model.eval(), f"weights of an earlier run, {cache} (delete it to train again)"
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # the same weights whatever the number of cores
    train(model, data.train_images, data.train_labels, epochs)
    torch.set_num_threads(threads)
    torch.save(model.state_dict(), cache)
    seconds = time.perf_counter() - start
    return model.eval(), f"trained {epochs} epochs in {seconds:.0f} s, weights kept in {cache}"


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    steps = epochs * math.ceil(len(images) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(BATCH):
            scores = model(augmented(images[batch]))
            loss = F.cross_entropy(scores, labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def augmented(images: Tensor) -> Tensor:
    """Each image turned by up to 0.2 rad, scaled by up to 10 % and moved by up to one pixel."""
    n = len(images)
    angle, zoom = torch.empty(n).uniform_(-0.2, 0.2), torch.empty(n).uniform_(0.9, 1.1)
    shift = torch.empty(n, 2).uniform_(-1, 1) * 2 / images.shape[-1]
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    rows = [torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
