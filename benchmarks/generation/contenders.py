# SPDX-License-Identifier: Apache-2.0
"""Contenders: each writes a file once, loads it, and says when its tokens came."""

from __future__ import annotations

import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.shapes import Prompt, Shape, Speech, prompt, words, write_gguf

__all__ = ["FLOAT", "Contender", "contenders"]

FLOAT = "PyTorch, float32"
Stamps = list[float]


@dataclass
class Contender(ABC):
    """A model in its own process.

    Attributes:
        shape: the model's.
        folder: with the float model of transformers, and what ``write`` writes.
        threads: that it computes with.
    """

    shape: Shape
    folder: Path
    threads: int

    @abstractmethod
    def needs(self) -> None:
        """Import what the contender needs: not a part of the time to load."""

    def write(self) -> None:  # noqa: B027 - the float model is there
        """Write the model in the contender's form, beside the float one."""

    @abstractmethod
    def load(self) -> None:
        """Load what ``write`` wrote."""

    @abstractmethod
    def generate(self, src: Prompt, count: int) -> Stamps:
        """Generate ``count`` tokens greedily; return ``time.perf_counter`` after each."""


class _Streamer:
    def __init__(self) -> None:
        self.stamps: Stamps = []

    def put(self, value: object) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass


@dataclass
class Torch(Contender):
    """transformers' own ``generate``."""

    dtype: torch.dtype = torch.float32

    def needs(self) -> None:
        torch.set_num_threads(self.threads)
        self.empty()  # transformers imports the code of an architecture when it makes one

    def empty(self) -> torch.nn.Module:
        """Return the model without weights."""
        with torch.device("meta"):
            model: torch.nn.Module = self.shape.auto.from_config(self.shape.make_config())
        return model.eval()

    def load(self) -> None:
        self.model = self.shape.auto.from_pretrained(self.folder, dtype=self.dtype).eval()

    def inputs(self, src: Prompt) -> dict[str, torch.Tensor]:
        """Return what the model's ``forward`` gets."""
        ids = torch.tensor([src.ids])
        if src.features is None:
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {"input_features": src.features.to(self.dtype), "decoder_input_ids": ids}

    def generate(self, src: Prompt, count: int) -> Stamps:
        streamer = _Streamer()
        self.model.generate(
            **self.inputs(src), streamer=streamer, do_sample=False, min_new_tokens=count,
            max_new_tokens=count,
        )  # fmt: skip
        return streamer.stamps[1:]  # the first is the prompt's


@dataclass
class Compiled(Torch):
    """The same with ``torch.compile``, and a cache whose sizes stay as they are."""

    def load(self) -> None:
        super().load()
        self.model.generation_config.cache_implementation = "static"
        self.model.forward = torch.compile(self.model.forward)


@dataclass
class Torchq(Torch):
    """``torchq.quantize`` of the same model."""

    bits: int = 8

    @property
    def path(self) -> Path:
        return self.folder / f"torchq{self.bits}.safetensors"

    def needs(self) -> None:
        super().needs()
        import torchq  # noqa: F401

    def write(self) -> None:
        import torchq

        super().load()
        config = torchq.QConfig(dynamic=True, weight_bits=self.bits, embedding_bits=8)
        example = self.inputs(prompt(self.shape, 16))
        torchq.save(torchq.quantize(self.model, None, example, config), self.path)

    def load(self) -> None:
        import torchq

        self.model = torchq.load(self.path, self.empty())


@dataclass
class CTranslate2(Contender):
    """CTranslate2's int8, converted from the same folder."""

    def needs(self) -> None:
        import ctranslate2  # noqa: F401

        self.names = words(self.shape.words)

    def write(self) -> None:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(self.folder)).convert(
            str(self.folder / "ctranslate2"), quantization="int8", force=True
        )

    def load(self) -> None:
        import ctranslate2

        self.model = ctranslate2.Generator(
            str(self.folder / "ctranslate2"), device="cpu", intra_threads=self.threads,
            compute_type="int8_float32",
        )  # fmt: skip

    def generate(self, src: Prompt, count: int) -> Stamps:
        stamps = Stamps()
        self.model.generate_batch(
            [[self.names[i] for i in src.ids]], max_length=count, min_length=count, end_token=[],
            include_prompt_in_result=False, callback=lambda _: stamps.append(time.perf_counter()),
        )  # fmt: skip
        return stamps


@dataclass
class CTranslate2Speech(CTranslate2):
    """The same for speech, called as faster-whisper calls it."""

    def load(self) -> None:
        import ctranslate2

        self.model = ctranslate2.models.Whisper(
            str(self.folder / "ctranslate2"), device="cpu", intra_threads=self.threads,
            compute_type="int8_float32",
        )  # fmt: skip

    def generate(self, src: Prompt, count: int) -> Stamps:
        """Return evenly spaced times: the runtime tells nothing between the tokens.

        Decoding one token and decoding all of them are two calls on the same encoded audio.
        """
        import ctranslate2

        assert src.features is not None
        features = ctranslate2.StorageView.from_array(src.features.numpy())
        encoded = self.model.encode(features)
        start = time.perf_counter()
        self._decode(encoded, src.ids, 1)
        first = time.perf_counter()
        self._decode(encoded, src.ids, count)
        rest = (time.perf_counter() - first) - (first - start)
        return [first + rest * i / (count - 1) for i in range(count)]

    def _decode(self, encoded: Any, ids: list[int], count: int) -> None:
        """Decode ``count`` tokens: the runtime stops at half of ``max_length``, too."""
        (found,) = self.model.generate(
            encoded, [ids], beam_size=1, max_length=max(2 * count, count + len(ids) - 1),
            suppress_blank=False, suppress_tokens=[self.shape.words],
        )  # fmt: skip
        if len(found.sequences_ids[0]) != count:
            raise RuntimeError(f"{len(found.sequences_ids[0])} tokens came, not {count}")


@dataclass
class LlamaCpp(Contender):
    """llama.cpp, built from source on this machine."""

    bits: int = 8

    @property
    def path(self) -> Path:
        return self.folder / f"q{self.bits}_0.gguf"

    def needs(self) -> None:
        import llama_cpp  # noqa: F401

    def write(self) -> None:
        write_gguf(self.shape, self.folder, self.path, self.bits)

    def load(self) -> None:
        from llama_cpp import Llama

        self.model = Llama(
            str(self.path), n_ctx=2048, n_threads=self.threads, n_threads_batch=self.threads,
            verbose=False,
        )  # fmt: skip

    def generate(self, src: Prompt, count: int) -> Stamps:
        self.model.reset()  # or it keeps the prompt's keys and values
        stamps = Stamps()
        for _ in self.model.generate(src.ids, temp=0.0, repeat_penalty=1.0, reset=True):
            stamps.append(time.perf_counter())
            if len(stamps) == count:
                break
        return stamps


@dataclass
class OpenVino(Contender):
    """OpenVINO GenAI, with what optimum-intel wrote: the program that OPTIMUM_CLI names."""

    bits: int = 8

    @property
    def path(self) -> Path:
        return self.folder / f"openvino{self.bits}"

    def needs(self) -> None:
        import openvino_genai  # noqa: F401

    def write(self) -> None:
        groups = ("--group-size", "32") if self.bits == 4 else ()
        done = subprocess.run(
            [os.environ.get("OPTIMUM_CLI", "optimum-cli"), "export", "openvino",
             "--model", self.folder, "--task", "text-generation-with-past",
             "--weight-format", f"int{self.bits}", *groups, self.path],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"optimum-cli: {done.stderr.strip().splitlines()[-1]}")

    def load(self) -> None:
        import openvino_genai

        self.model = openvino_genai.LLMPipeline(
            str(self.path), "CPU", INFERENCE_NUM_THREADS=self.threads
        )

    def generate(self, src: Prompt, count: int) -> Stamps:
        import openvino
        import openvino_genai

        ids = openvino.Tensor(torch.tensor([src.ids]).numpy())
        mask = openvino.Tensor(torch.ones(1, len(src.ids), dtype=torch.int64).numpy())
        config = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True)
        stamps = Stamps()
        status = openvino_genai.StreamingStatus.RUNNING

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: object) -> object:
                stamps.append(time.perf_counter())
                return status

            def end(self) -> None:
                pass

        self.model.generate(openvino_genai.TokenizedInputs(ids, mask), config, Streamer())
        return stamps


Make = Callable[[Shape, Path, int], Contender]


def _of(cls: type[Contender], **own: Any) -> Make:
    return lambda shape, folder, threads: cls(shape, folder, threads, **own)


_TEXT = {
    FLOAT: _of(Torch),
    "PyTorch, bfloat16": _of(Torch, dtype=torch.bfloat16),
    "torch.compile, bfloat16": _of(Compiled, dtype=torch.bfloat16),
    "CTranslate2, int8": _of(CTranslate2),
    "OpenVINO GenAI, int8": _of(OpenVino),
    "OpenVINO GenAI, int4": _of(OpenVino, bits=4),
    "llama.cpp, Q8_0": _of(LlamaCpp),
    "llama.cpp, Q4_0": _of(LlamaCpp, bits=4),
    "torchq, int8": _of(Torchq),
    "torchq, int4": _of(Torchq, bits=4),
}
_SPEECH = {
    **{name: _TEXT[name] for name in (FLOAT, "PyTorch, bfloat16")},
    "CTranslate2, int8": _of(CTranslate2Speech),
    "torchq, int8": _TEXT["torchq, int8"],
}


def contenders(shape: Shape) -> dict[str, Make]:
    """Return those that run such a model."""
    return _SPEECH if isinstance(shape, Speech) else _TEXT
