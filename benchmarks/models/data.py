# SPDX-License-Identifier: Apache-2.0
"""The inputs of the networks: from a seed, without files, with the statistics of real ones.

Random pixels without neighborhood would leave a network nothing after its first pools, and white
noise has no outliers; both flatter a quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

__all__ = ["Clips", "Images", "Padded", "Source", "Spectrograms", "Waveforms", "Words"]


class Source(Protocol):
    """Makes a batch of inputs."""

    def __call__(self, count: int, generator: Generator) -> Tensor: ...


def _octaves(count: int, channels: int, size: int, generator: Generator) -> Tensor:
    """Noise of amplitude 1/f, as in photographs, with zero mean and unit deviation each."""
    total = torch.zeros(count, channels, size, size)
    side, amplitude = 4, 1.0
    while side < size:
        noise = torch.randn(count, channels, side, side, generator=generator)
        total += amplitude * F.interpolate(noise, size=(size, size), mode="bilinear")
        side, amplitude = 2 * side, amplitude / 2
    total += amplitude * torch.randn(total.shape, generator=generator)
    dims = (1, 2, 3)
    return (total - total.mean(dims, keepdim=True)) / total.std(dims, keepdim=True)


def _expose(frames: Tensor, generator: Generator) -> Tensor:
    """Contrast from 0.5 to 1.5 and brightness per sample, then the range of normalized bytes."""
    shape = (len(frames), *[1] * (frames.dim() - 1))
    contrast = 0.5 + torch.rand(shape, generator=generator)
    brightness = 0.3 * torch.randn(shape, generator=generator)
    return (contrast * frames + brightness).clamp(-2.1, 2.6)


@dataclass(frozen=True)
class Images:
    """(N, 3, size, size): 1/f noise, contrast and brightness vary, values in [-2.1, 2.6]."""

    size: int

    def __call__(self, count: int, generator: Generator) -> Tensor:
        return _expose(_octaves(count, 3, self.size, generator), generator)


@dataclass(frozen=True)
class Clips:
    """(N, 3, frames, size, size): a window that moves over an image of ``Images``."""

    frames: int
    size: int

    def __call__(self, count: int, generator: Generator) -> Tensor:
        scene = _octaves(count, 3, self.size + 2 * self.frames, generator)
        window = [slice(2 * t, 2 * t + self.size) for t in range(self.frames)]
        return _expose(torch.stack([scene[..., w, w] for w in window], dim=2), generator)


@dataclass(frozen=True)
class Waveforms:
    """(N, 1, samples): three decaying tones and noise, values in [-1, 1]."""

    samples: int

    def __call__(self, count: int, generator: Generator) -> Tensor:
        time = torch.arange(self.samples) / self.samples
        frequency, phase, decay = torch.rand(3, count, 3, 1, generator=generator)
        tones = torch.sin(6.28 * (phase + (4 + 400 * frequency) * time)) * (-4 * decay * time).exp()
        noise = torch.randn(count, self.samples, generator=generator)
        return (0.3 * tones.sum(1) + 0.05 * noise).clamp(-1, 1)[:, None]


@dataclass(frozen=True)
class Words:
    """(N, length) int64: words of a vocabulary, rare ones rarer (density 1 / rank)."""

    length: int
    vocabulary: int

    def __call__(self, count: int, generator: Generator) -> Tensor:
        uniform = torch.rand(count, self.length, generator=generator, dtype=torch.float64)
        return (self.vocabulary**uniform - 1).long().clamp(0, self.vocabulary - 1)


@dataclass(frozen=True)
class Padded:
    """(N, length) int64: ``Words`` from 1 on, an eighth to all of them; the others are 0.

    The zeros stand behind the words, or in front of them (``left``), as generation needs them.
    """

    length: int
    vocabulary: int
    left: bool = False

    def __call__(self, count: int, generator: Generator) -> Tensor:
        words = 1 + Words(self.length, self.vocabulary - 1)(count, generator)
        lengths = torch.randint(self.length // 8, self.length + 1, (count, 1), generator=generator)
        places = torch.arange(self.length)
        return words * ((places.flip(0) if self.left else places) < lengths)


@dataclass(frozen=True)
class Spectrograms:
    """(N, bins, frames): logarithms as Whisper reads them, of noise that comes and goes."""

    bins: int
    frames: int

    def __call__(self, count: int, generator: Generator) -> Tensor:
        slow = torch.randn(count, self.bins // 8, self.frames // 20, generator=generator)
        loud = F.interpolate(slow[:, None], size=(self.bins, self.frames), mode="bilinear")[:, 0]
        power = loud + 0.5 * torch.rand(loud.shape, generator=generator).clamp(min=1e-4).log10()
        return (power.maximum(power.amax((1, 2), keepdim=True) - 8) + 4) / 4
