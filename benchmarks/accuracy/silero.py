# SPDX-License-Identifier: Apache-2.0
"""silero-vad: speech or none in 32 ms, by convolutions and an LSTM that keeps its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchq
from benchmarks.accuracy import speech
from benchmarks.accuracy.task import Task, changed, package, seeded

_CHUNK, _CONTEXT = 512, 64
_CHUNKS = 1500


class Silero(nn.Module):
    """The network for 16,000 samples a second: a chunk and the state give a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, chunk: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        waves = self.stft_conv(F.pad(chunk.unsqueeze(1), (0, 64), "reflect"))
        power = waves[:, :129].square() + waves[:, 129:].square()
        x = F.relu(self.conv1(power.sqrt()))
        x = F.relu(self.conv4(F.relu(self.conv3(F.relu(self.conv2(x))))))
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        return torch.sigmoid(self.final_conv(F.relu(h).unsqueeze(-1))).squeeze(-1), h, c


def load() -> Task:
    published = torch.jit.load(package("silero_vad", "silero-vad") / "data" / "silero_vad.jit")
    model = Silero().eval().requires_grad_(False)
    weights = published._model.state_dict().values()  # in the same order
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    test = chunks(_recording(speech.TEST_VOICES, 2))[:_CHUNKS]
    _check(model, test, published)
    calibration = chunks(_recording(speech.CALIBRATION_VOICES, 1))[:300]
    inputs = [(chunk, h, c) for chunk, (_, h, c) in _steps(model, calibration)]
    return Task(
        name="silero-vad",
        about=f"{len(inputs)} chunks of 32 ms calibrate, {len(test)} of other voices measure: "
        "synthesised speech with pauses, at 0 to 30 dB above noise. A decision is a probability "
        "above 0.5. SQNR is that of the probabilities.",
        metric="decisions that changed",
        model=model,
        calibration=inputs,
        test=test,
        score=lambda expected, found: changed(expected > 0.5, found > 0.5),
        timed=inputs[100],
        run=probabilities,
        remedies=_remedies(model, inputs, calibration),
    )


def _remedies(
    model: nn.Module, inputs: list[Any], calibration: list[Tensor]
) -> dict[str, Callable[[], nn.Module]]:
    """Return a model that keeps the decisions on its calibration data."""
    expected = probabilities(model, calibration) > 0.5

    def kept(other: nn.Module) -> float:
        found = probabilities(other, calibration) > 0.5
        return 100 * (found == expected).float().mean().item()

    return {
        "torchq.tune(max_drop=0.5)": lambda: torchq.tune(model, inputs, kept, max_drop=0.5).model,
    }


def _recording(voices: tuple[str, ...], seed: int) -> Tensor:
    """Return sentences of all voices with pauses, each at its own level and with its own noise."""
    generator = seeded(seed)
    parts = []
    for wave in speech.utterances(voices, 1, seed):
        level, ratio, before, after = torch.rand(4, generator=generator).tolist()
        wave = F.pad(wave, (int(8000 * before), int(8000 * after)))
        power = wave.square().mean().sqrt()
        noise = torch.randn(wave.numel(), generator=generator).cumsum(0)
        noise = noise - F.avg_pool1d(noise[None], 81, 1, 40, count_include_pad=False)[0]
        noise *= power / noise.square().mean().sqrt() * 10 ** (-1.5 * ratio)
        parts.append((wave + noise) * 10 ** (-level))
    return torch.cat(parts)


def chunks(wave: Tensor) -> list[Tensor]:
    """Return overlapping pieces, as the network takes them."""
    return list(F.pad(wave, (_CONTEXT, 0)).unfold(0, _CONTEXT + _CHUNK, _CHUNK).unsqueeze(1))


def _steps(model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Any]]:
    """Yield each chunk with the state in front of it, as (chunk, (probability, h, c))."""
    h = c = torch.zeros(1, 128)
    for chunk in inputs:
        probability, new_h, new_c = model(chunk, h, c)
        yield chunk, (probability, h, c)
        h, c = new_h, new_c


@torch.inference_mode()
def probabilities(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([step[0] for _, step in _steps(model, inputs)]).flatten()


@torch.inference_mode()
def _check(model: nn.Module, inputs: Sequence[Tensor], published: Any) -> None:
    """Raise RuntimeError where the published program computes something else."""
    published.reset_states()
    theirs = torch.stack([published(chunk[:, _CONTEXT:], speech.RATE) for chunk in inputs])
    if (sqnr := torchq.sqnr(theirs.flatten(), probabilities(model, inputs))) < 60:
        raise RuntimeError(f"silero-vad: the model is {sqnr:.0f} dB from the published one")
