# SPDX-License-Identifier: Apache-2.0
"""Trains an LSTM and a GRU to read scanned digits row by row, and quantizes them both ways.

python examples/rnn_digits/run.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torchq

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'torchq-cpu[examples]'`.")

HIDDEN = 64


class RowReader(nn.Module):
    """A recurrent network over the rows of an image, then a linear layer on its last state."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(2 * HIDDEN, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.recurrent(images)
        scores: Tensor = self.head(states[:, -1])
        return scores


@dataclass(frozen=True)
class Digits:
    """Images [N, 8 rows, 8 pixels] in [0, 1], and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load() -> Digits:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.4, random_state=0, stratify=labels)
    train_x, test_x = (
        torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 8, 8) for x in split[:2]
    )
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    return Digits(train_x, train_y, test_x, test_y)


def train(model: nn.Module, data: Digits, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.train_labels)).split(64):
            loss = nn.functional.cross_entropy(
                model(data.train_images[batch]), data.train_labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def quantized(model: RowReader, data: Digits, dynamic: bool) -> nn.Module:
    """The model in int8; calibrated on the training images where it is static."""
    config = torchq.QConfig(dynamic=dynamic)
    return torchq.quantize(model, data.train_images.split(256), config=config, strict=True)


@torch.inference_mode()
def decibels(model: nn.Module, small: nn.Module, data: Digits) -> float:
    """Signal-to-noise ratio of the recurrent part's results: all states, and the last ones."""
    images = data.test_images
    return torchq.sqnr(model.recurrent(images), small.recurrent(images))


@torch.inference_mode()
def accuracy(model: nn.Module, data: Digits) -> float:
    right = model(data.test_images).argmax(1) == data.test_labels
    return 100 * float(right.float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="train less")
    epochs = 22 if parser.parse_args().quick else 40
    torch.manual_seed(0)
    data = load()
    problems = []
    for make in (nn.LSTM, nn.GRU):
        # Two layers, both directions.
        options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        model = train(RowReader(make(8, HIDDEN, **options)), data, epochs)
        models = {
            "float": model,
            "int8 static": quantized(model, data, dynamic=False),
            "int8 dynamic": quantized(model, data, dynamic=True),
        }
        times = torchq.milliseconds(models, data.test_images)
        exact = accuracy(model, data)
        print(f"{make.__name__}: {len(data.test_labels)} test images")
        print(f"  {'float':<13}{exact:7.2f} %{times.pop('float'):9.2f} ms")
        if exact <= 95:
            problems.append(f"{make.__name__} in float reaches {exact:.2f} % only")
        for label, ms in times.items():
            reached = accuracy(models[label], data)
            ratio = decibels(model, models[label], data)
            print(
                f"  {label:<13}{reached:7.2f} %{ms:9.2f} ms   {reached - exact:+.2f} points"
                f"   {ratio:.1f} dB"
            )
            if ratio <= 30:
                problems.append(f"{make.__name__} {label} keeps {ratio:.1f} dB only")
            if abs(reached - exact) > 0.5:
                problems.append(f"{make.__name__} {label} differs by {reached - exact:+.2f} points")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
