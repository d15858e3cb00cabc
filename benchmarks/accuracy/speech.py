# SPDX-License-Identifier: Apache-2.0
"""Speech of many voices, synthesised by eSpeak NG, the same in every run."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy.sentences import sentences
from benchmarks.accuracy.task import package

__all__ = ["CALIBRATION_VOICES", "RATE", "TEST_VOICES", "say", "utterances"]

RATE = 16_000
CALIBRATION_VOICES = (
    "f1", "f4", "m1", "m4", "m7", "Andy", "Denis", "belinda", "boris", "linda", "steph2", "david",
)  # fmt: skip
TEST_VOICES = (
    "f2", "f3", "f5", "m2", "m3", "m5", "m6", "m8", "Annie", "Gene", "Jacky", "Lee", "Mario",
    "Michael", "Reed", "adam", "anika", "antonio", "aunty", "benjamin", "caleb", "ed", "edward",
    "gustave", "ian", "john", "kaukovalta", "marcelo", "max", "michel", "miguel", "norbert",
    "pablo", "paul", "pedro", "quincy", "rob", "robert", "steph", "travis",
)  # fmt: skip
_OWN_RATE = 22_050
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)
_SPEED, _PITCH = 1, 3  # espeak_PARAMETER
_UTF8, _TO_CALLBACK = 1, 2


@cache
def _espeak() -> tuple[Any, list[Tensor], Any]:
    """Return the library, where it puts samples, and the callback, which must stay alive."""
    package("espeakng_loader", "espeakng-loader")
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    library.espeak_Initialize(_TO_CALLBACK, 0, str(espeakng_loader.get_data_path()).encode(), 0)
    pieces: list[Tensor] = []

    def receive(samples: Any, count: int, _: Any) -> int:
        if samples and count:
            pieces.append(torch.tensor(samples[:count], dtype=torch.float32))
        return 0

    callback = _CALLBACK(receive)
    library.espeak_SetSynthCallback(callback)
    return library, pieces, callback


def say(text: str, voice: str, speed: int = 165, pitch: int = 50) -> Tensor:
    """Return float32 samples in [-1, 1), 16,000 a second.

    Args:
        text: English.
        voice: one of eSpeak NG's variants.
        speed: words a minute.
        pitch: 0 to 99.
    """
    library, pieces, _ = _espeak()
    pieces.clear()
    if library.espeak_SetVoiceByName(f"en+{voice}".encode()):
        raise RuntimeError(f"eSpeak NG has no voice {voice}")
    library.espeak_SetParameter(_SPEED, speed, 0)
    library.espeak_SetParameter(_PITCH, pitch, 0)
    data = text.encode()
    library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 0, 0, _UTF8, None, None)
    return _resampled(torch.cat(pieces) / 32_768)


def _resampled(wave: Tensor) -> Tensor:
    """Return the wave at RATE, by its spectrum."""
    length = wave.numel() * RATE // _OWN_RATE
    spectrum = torch.fft.rfft(wave)[: length // 2 + 1]
    return torch.fft.irfft(spectrum, length) * (length / wave.numel())


def utterances(voices: tuple[str, ...], each: int, seed: int) -> list[Tensor]:
    """Return ``each`` different sentences of every voice, voice by voice."""
    texts = iter(sentences(len(voices) * each, seed))
    return [say(next(texts), voice) for voice in voices for _ in range(each)]
