# SPDX-License-Identifier: Apache-2.0
"""resemblyzer: embeddings of voices by three layers of LSTM, and their neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy import speech
from benchmarks.accuracy.minilm import kept
from benchmarks.accuracy.task import Task, package

_MELS, _WINDOW, _STEP, _FRAMES = 40, 400, 160, 160


class VoiceEncoder(nn.Module):
    """Mel spectrograms of 1.6 s to embeddings at unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_MELS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        hidden = self.lstm(mels)[0][:, -1]
        return F.normalize(F.relu(self.linear(hidden)), dim=1)


def load() -> Task:
    file = package("resemblyzer", "resemblyzer") / "pretrained.pt"
    weights = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    model = VoiceEncoder().eval().requires_grad_(False)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    calibration = [mels(x) for x in speech.utterances(speech.CALIBRATION_VOICES, 4, seed=1)]
    test = [mels(x) for x in speech.utterances(speech.TEST_VOICES, 10, seed=2)]
    return Task(
        name="resemblyzer",
        about=f"{len(calibration)} sentences of {len(speech.CALIBRATION_VOICES)} synthesised voices"
        f" calibrate, {len(test)} of {len(speech.TEST_VOICES)} other voices measure, 1.6 s each. "
        "SQNR is that of the embeddings.",
        metric="same nearest neighbour, %",
        model=model,
        calibration=calibration,
        test=test,
        score=kept,
        timed=test[0],
    )


def mels(wave: Tensor) -> Tensor:
    """Return float32 ``[1, 160, 40]``: the power in mel bands of the middle of a wave."""
    wave = wave * (10 ** (-30 / 20) / wave.square().mean().sqrt())
    spectrum = torch.stft(
        wave, _WINDOW, _STEP, window=torch.hann_window(_WINDOW), pad_mode="constant",
        return_complex=True,
    )  # fmt: skip
    bands = (_filters() @ spectrum.abs().square()).t()
    begin = max(len(bands) - _FRAMES, 0) // 2
    bands = bands[begin : begin + _FRAMES]
    return F.pad(bands, (0, 0, 0, _FRAMES - len(bands))).unsqueeze(0)


def _filters() -> Tensor:
    """Return ``[40, 201]``: triangles of equal area on Slaney's mel scale."""
    low = torch.arange(0, 16) * (200 / 3)  # linear below 1 kHz, 15 mel
    edges = torch.linspace(0, 15 + 27 * torch.log(torch.tensor(8.0)) / torch.log(torch.tensor(6.4)),
                           _MELS + 2)  # fmt: skip
    hertz = torch.where(edges < 15, edges * low[1], 1000 * 6.4 ** ((edges - 15) / 27))
    bins = torch.linspace(0, speech.RATE / 2, _WINDOW // 2 + 1)
    up = (bins - hertz[:-2, None]) / (hertz[1:-1] - hertz[:-2])[:, None]
    down = (hertz[2:, None] - bins) / (hertz[2:] - hertz[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0) * (2 / (hertz[2:] - hertz[:-2]))[:, None]
