# SPDX-License-Identifier: Apache-2.0
"""Transcribes speech with Whisper in int8.

pip install -r examples/transcribe/requirements.txt
python examples/transcribe/run.py --model openai/whisper-tiny speech.wav
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchq

try:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor
except ImportError as error:
    sys.exit(f"{error}: run `pip install -r examples/transcribe/requirements.txt`.")

RATE, PIECE = 16000, 480000


def load(name: str, is_float: bool = False) -> tuple[Any, Any]:
    """Loads processor and model, whose linear layers become int8 as their weights are read."""
    config = None if is_float else torchq.TorchqConfig()
    try:
        processor = WhisperProcessor.from_pretrained(name)
        model = WhisperForConditionalGeneration.from_pretrained(name, quantization_config=config)
    except OSError as error:
        sys.exit(f"No model {name}: give --model a folder, or a name that the Hub has.\n{error}")
    return processor, model


def read(path: Path) -> np.ndarray[Any, Any]:
    """Returns the samples of a WAV file, from -1 to 1."""
    try:
        with wave.open(str(path)) as file:
            form = file.getframerate(), file.getnchannels(), 8 * file.getsampwidth()
            if form != (RATE, 1, 16):
                raise wave.Error(f"rate, channels, bits are {form}, not {(RATE, 1, 16)}")
            data = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    except (wave.Error, EOFError) as error:
        sys.exit(f"{path}: {error}. Run `ffmpeg -i {path} -ar {RATE} -ac 1 out.wav`.")
    return data.astype(np.float32) / 32768


@torch.inference_mode()
def transcribe(processor: Any, model: Any, samples: np.ndarray[Any, Any]) -> str:
    texts = []
    for start in range(0, len(samples), PIECE):
        piece = processor(samples[start : start + PIECE], sampling_rate=RATE, return_tensors="pt")
        tokens = model.generate(piece.input_features)
        texts += processor.batch_decode(tokens, skip_special_tokens=True)
    return " ".join(map(str.strip, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="openai/whisper-tiny")
    parser.add_argument("--float", action="store_true", help="to compare time and text")
    args = parser.parse_args()
    processor, model = load(args.model, args.float)
    for path in args.files:
        samples = read(path)
        start, text = time.perf_counter(), transcribe(processor, model, samples)
        print(f"{path} ({len(samples) / RATE:.1f} s of speech in ", end="")
        print(f"{time.perf_counter() - start:.1f} s): {text}")


if __name__ == "__main__":
    main()
