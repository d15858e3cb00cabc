# SPDX-License-Identifier: Apache-2.0
"""Quantizes a folder of transformers or sentence-transformers."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

import torchq
from torchq.commands import report
from torchq.commands.samples import find_images, read_texts
from torchq.integrations.compressed_files import METHOD
from torchq.models.inputs import Inputs, call

_LONGEST = 512
"""Tokens of a sample; what is longer is cut."""
Loaded = TypeVar("Loaded")
_WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".safetensors"}


class Folder:
    """A folder with a model, and what the command line says about it.

    Attributes:
        path: of the folder.
        output: file or folder to write.
        dynamic: quantize while loading, and write a folder of the same library.
        method: of a model that is quantized already, or "".
    """

    def __init__(self, path: Path, args: argparse.Namespace, config: torchq.QConfig) -> None:
        """Read config.json, and refuse what cannot be quantized before anything is loaded."""
        self.path, self.output, self.data = path, args.output, args.data
        self.dynamic, self.samples, self.config = args.dynamic, args.samples, config
        self.is_sentences = (path / "modules.json").is_file()
        self._inner = path
        if not (path / "config.json").is_file() and self.is_sentences:
            self._inner = path / str(_read(path / "modules.json")[0].get("path", ""))
        self._facts = _read(self._inner / "config.json")
        self.method = str((self._facts.get("quantization_config") or {}).get("quant_method", ""))
        self._is_compressed = self.method == METHOD
        self.dynamic = self.dynamic or self._is_compressed
        self._check()

    def _check(self) -> None:
        if self._is_compressed and self.data is not None:
            raise ValueError(
                f"torchq quantize: --data must be left out where MODEL has int8 weights, got "
                f"'{self.data}' for '{self.path}'. Compare with the float model in Python."
            )
        if self.method and not self._is_compressed:
            raise ValueError(
                f"torchq quantize: MODEL must be a float model, got '{self.path}', quantized by "
                f"{self.method}. Take the folder it was made from."
            )
        if self.is_sentences and not self.dynamic:
            raise ValueError(
                f"torchq quantize: a folder of sentence-transformers is quantized dynamically, got "
                f"'{self.path}' without --dynamic. Add it."
            )
        if not self.dynamic and self.data is None:
            raise ValueError(
                f"torchq quantize: --data must be given to calibrate '{self.path}', got none. Pass "
                "a text file or a folder of images, or add --dynamic, which needs no data."
            )
        if self.data is not None and not self.data.exists():
            raise ValueError(
                f"torchq quantize: --data must be a text file or a folder of images, got "
                f"'{self.data}', which does not exist. Write one sample per line, say."
            )
        if self.dynamic and self.output.exists() and not _is_empty_folder(self.output):
            raise ValueError(
                f"torchq quantize: OUT must be a new folder, got '{self.output}', which exists. "
                "Name another one, or remove it first."
            )
        if not self.dynamic and self.output.is_dir():
            raise ValueError(
                f"torchq quantize: OUT must be a file without --dynamic, got the folder "
                f"'{self.output}'. Name a file in it, such as model.safetensors."
            )

    def run(self) -> int:
        """Quantize, write, and print the summary."""
        samples = self._samples()
        before = report.stored_bytes(self.path)
        expected = list[object]()
        if self.dynamic:
            if samples:
                expected = self._outputs("float model", self._load(), samples)
            if self._is_compressed:
                qmodel: Any = torchq.from_compressed_tensors(self.path)
            else:
                qmodel = self._load(quantization_config=torchq.TorchqConfig())
            with new_folder(self.output) as folder:
                self._save(qmodel, folder)
        else:
            model = self._load()
            expected = self._outputs("float model", model, samples)
            qmodel = report.static(model, samples, self.config)
            torchq.save(qmodel, self.output)
        part = qmodel[0].auto_model if self.is_sentences else qmodel
        report.summarize(part, self.output, before)
        got = self._outputs("int8 model", qmodel, samples)
        report.print_accuracy(expected, got, report.counted(len(samples), "sample"))
        print(f"load it: {self._how_to_load(type(part).__name__)}")
        return 0

    def _outputs(self, title: str, model: Any, samples: Sequence[object]) -> list[object]:
        run = partial(call, model)
        if self.is_sentences:
            run = partial(model.encode, convert_to_tensor=True, show_progress_bar=False)
        return report.outputs(title, model, run, samples)

    def _how_to_load(self, name: str) -> str:
        output = str(self.output)
        if self.is_sentences:
            return f"SentenceTransformer({output!r}), after `from torchq import TorchqConfig`"
        if self.dynamic:
            return f"{name}.from_pretrained({output!r}), after `from torchq import TorchqConfig`"
        source = f"{name}.from_pretrained({str(self.path)!r})"
        return f"torchq.load({output!r}, {source})"

    def _load(self, **options: object) -> Any:
        """Return the model in float32, or as the options say."""
        if self.is_sentences:
            sentences = _needed("sentence_transformers", "sentence-transformers")
            kwargs = {"device": "cpu", "model_kwargs": {"dtype": torch.float32, **options}}
            return self._loaded(lambda: sentences.SentenceTransformer(str(self.path), **kwargs))
        transformers = _needed("transformers", "torchq-cpu[transformers]")
        names = self._facts.get("architectures") or ["AutoModel"]
        cls = getattr(transformers, names[0], transformers.AutoModel)
        if not options:
            options = {"dtype": torch.float32}
        return self._loaded(lambda: cls.from_pretrained(str(self.path), **options)).eval()

    def _loaded(self, load: Callable[[], Loaded]) -> Loaded:
        """Return what ``load`` returns; the library's errors name the folder, in one line."""
        try:
            return load()
        except Exception as error:  # of another library: anything, on damaged files
            if str(error).startswith("torchq"):
                raise
            raise ValueError(
                f"torchq quantize: MODEL must be a folder that its library loads, got "
                f"'{self.path}': {_first_line(error)}. Copy it anew, or load it in Python to see "
                "where it fails."
            ) from error

    def _save(self, qmodel: Any, folder: Path) -> None:
        if self.is_sentences:
            qmodel.save(str(folder))
            return
        qmodel.save_pretrained(folder)
        for path in self.path.iterdir():  # of tokenizers and processors
            is_weight = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
            if path.is_file() and not is_weight and not (folder / path.name).exists():
                shutil.copy2(path, folder / path.name)

    def _samples(self) -> Sequence[Inputs]:
        """Return the model's inputs, one sample each; none without data."""
        if self.data is None:
            return []
        if self.data.is_dir() and not self.is_sentences:
            return self._images(find_images(self.data, self.samples))
        texts = read_texts(self.data, self.samples)
        if self.is_sentences:
            return texts
        transformers = _needed("transformers", "torchq-cpu[transformers]")
        tokenizer = self._loaded(lambda: transformers.AutoTokenizer.from_pretrained(str(self.path)))
        longest = min(_LONGEST, self._facts.get("max_position_embeddings") or _LONGEST)
        return [
            dict(tokenizer(text, truncation=True, max_length=longest, return_tensors="pt"))
            for text in texts
        ]

    def _images(self, paths: Sequence[Path]) -> Sequence[Inputs]:
        transformers = _needed("transformers", "torchq-cpu[transformers]")
        image = _needed("PIL.Image", "pillow")
        processor = self._loaded(
            lambda: transformers.AutoImageProcessor.from_pretrained(str(self.path))
        )
        batches = []
        for path in paths:
            try:
                with image.open(path) as opened:
                    pixels = opened.convert("RGB")
            except OSError as error:
                raise ValueError(
                    f"torchq quantize: --data must have images that Pillow reads, got '{path}': "
                    f"{_first_line(error)}. Remove it."
                ) from None
            batches.append(dict(processor(pixels, return_tensors="pt")))
        return batches


def _read(path: Path) -> Any:
    """Return the JSON of a file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"torchq quantize: MODEL must be a folder of transformers or sentence-transformers, "
            f"got '{path.parent}', whose {path.name} cannot be read: {_first_line(error)}. Pass "
            "the folder that save_pretrained wrote."
        ) from None


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _needed(module: str, package: str) -> ModuleType:
    """Return a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f"torchq quantize: {module.partition('.')[0]} must be installed for this MODEL, got "
            f"no such module. Run: pip install '{package}'"
        ) from None


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write, which becomes ``output`` in the end, or goes where an error comes."""
    output = output.absolute()
    beside = output.with_name(f".{output.name[:200]}.{secrets.token_hex(8)}.tmp")
    beside.mkdir()
    try:
        yield beside
        os.rename(beside, output)  # also over an empty folder
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
