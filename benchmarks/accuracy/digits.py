# SPDX-License-Identifier: Apache-2.0
"""A digits net whose channels are rescaled without a change of its function."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.task import Task, seeded

_LARGEST = 10.0


class Net(nn.Module):
    """Convolutions with ReLU between, one of them depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32)
        self.conv3 = nn.Conv2d(32, 64, 1)
        self.conv4 = nn.Conv2d(64, 32, 3, padding=1)
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(conv(x))
        return self.head(x.flatten(1))


def load() -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=seeded(0))
    train, test = order[:597], order[597:]
    model = _trained(images[train], labels[train])
    rescale(model, seeded(1))
    right = labels[test]

    def score(_: Tensor, found: Tensor) -> str:
        return f"{100 * (found.argmax(1) == right).float().mean().item():.1f}"

    with torch.inference_mode():
        own = score(right, model(images[test]))
    return Task(
        name="digits, rescaled",
        about=f"A small net trained on {len(train)} of scikit-learn's digits, {len(test)} others "
        "measure. Channels between its layers are multiplied by 1/10 to 10 and divided out behind "
        f"the ReLU, so that the float function is the same: {own} % right.",
        metric="right, %",
        model=model,
        calibration=list(images[train[:256]].split(32)),
        test=list(images[test].split(64)),
        score=score,
        timed=images[test[:1]],
        variable={0: (0,)},
    )


def _trained(images: Tensor, labels: Tensor) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = seeded(0)
    for _ in range(25):
        for index in torch.randperm(len(images), generator=generator).split(32):
            loss = F.cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def rescale(model: Net, generator: torch.Generator) -> None:
    """Multiply channels in front of each ReLU by 1/10 to 10, and divide what reads them."""
    convs = [model.conv1, model.conv2, model.conv3, model.conv4]
    for first, second in zip(convs, [*convs[1:], model.head], strict=True):
        factor = _LARGEST ** (2 * torch.rand(len(first.weight), generator=generator) - 1)
        first.weight.mul_(factor.view(-1, 1, 1, 1))
        first.bias.mul_(factor)
        if second is model.conv2:  # depthwise: a channel reads one
            second.weight.div_(factor.view(-1, 1, 1, 1))
        else:
            second.weight.view(len(second.weight), len(factor), -1).div_(factor.view(1, -1, 1))
