# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime and OpenVINO in processes of their own, with models that their tools quantized."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Runtime", "export", "int8_onnx", "int8_openvino", "nncf_quantized"]

_ROOT = Path(__file__).resolve().parents[2]


class Runtime:
    """A running worker.

    Attributes:
        outputs: what it computed for each batch of inputs.

    Raises:
        RuntimeError: it ended before it was ready; the message is its last line.
    """

    def __init__(
        self, runtime: str, model: Path, inputs: Tensor, threads: int, batch: int = 1
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        np.savez(folder / "inputs.npz", inputs=inputs.numpy())
        files = [str(model), str(folder / "inputs.npz"), str(folder / "outputs.npz")]
        self._errors = folder / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.inference.worker",
                    runtime,
                    *files,
                    str(threads),
                    str(batch),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_ROOT,
            )
        try:
            while self._line() != "ready":
                pass
            self.outputs = list(torch.from_numpy(np.load(folder / "outputs.npz")["outputs"]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._process.communicate()
        self._folder.cleanup()

    def blocks(self, iterations: int, count: int) -> list[float]:
        """Seconds per execution, as benchmarks.timing wants it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{iterations} {count}\n")
        self._process.stdin.flush()
        return [float(word) for word in self._line().split()]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            lines = self._errors.read_text().strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"its process ended with status {status}")
        return line.strip()


def int8_onnx(model: nn.Module, batches: list[Tensor], folder: Path, batch: int = 1) -> Path:
    """Return the file of what ONNX Runtime quantizes; made if it is not in ``folder`` yet.

    Static, QDQ, u8 activations by their minimum and maximum, s8 weights per channel; a model with
    an LSTM is quantized dynamically, which is all that ONNX Runtime has for it. It takes ``batch``
    inputs.
    """
    path = folder / "int8.onnx"
    if not path.exists():
        with _scratch(folder) as scratch:
            plain, fresh = scratch / "float.onnx", scratch / "int8.onnx"
            export(model, batches[0][:batch], plain)
            _quantize(model, plain, fresh, batches, batch)
            fresh.replace(path)
    return path


def int8_openvino(
    model: nn.Module, batches: list[Tensor], folder: Path, is_transformer: bool, batch: int = 1
) -> Path:
    """Return the file of what NNCF quantizes for OpenVINO; made if it is not in ``folder`` yet."""
    import openvino

    path = folder / "int8.xml"
    if not path.exists():
        with _scratch(folder) as scratch:
            src = batches[0][:batch]
            plain = openvino.convert_model(model, example_input=src, input=list(src.shape))
            items = [x.numpy() for some in batches for x in some.split(batch)]
            small = nncf_quantized(plain, items, is_transformer)
            openvino.save_model(small, scratch / path.name, compress_to_fp16=False)
            for part in scratch.glob("*.bin"):
                part.replace(folder / part.name)
            (scratch / path.name).replace(path)
    return path


def nncf_quantized(model: Any, items: list[Any], is_transformer: bool) -> Any:
    """Return a model of OpenVINO in int8, as NNCF's guide quantizes it with calibration data."""
    import nncf

    kind = nncf.ModelType.TRANSFORMER if is_transformer else None
    mixed = nncf.QuantizationPreset.MIXED  # symmetric weights, asymmetric activations
    dataset = nncf.Dataset(items)
    return nncf.quantize(model, dataset, subset_size=len(items), model_type=kind, preset=mixed)


def export(model: nn.Module, example: Tensor, path: Path) -> None:
    common: dict[str, Any] = {"input_names": ["src"], "opset_version": 18}
    try:
        torch.onnx.export(model, (example,), str(path), dynamo=False, **common)
    except Exception:  # the older exporter fails on some code of transformers
        torch.onnx.export(
            model, (example,), str(path), dynamo=True, external_data=False, verbose=False, **common
        )


def _quantize(model: nn.Module, src: Path, dst: Path, batches: list[Tensor], batch: int) -> None:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        quantization.quantize_dynamic(src, dst, per_channel=True)
        return
    ready = src.with_name("ready.onnx")
    quant_pre_process(src, ready, skip_symbolic_shape=True)
    quantization.quantize_static(
        ready,
        dst,
        _Reader(batches, batch),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )


class _Reader:
    """Calibration inputs, ``batch`` of them at a time, as ONNX Runtime asks for them."""

    def __init__(self, batches: list[Tensor], batch: int) -> None:
        self._left = iter([x.numpy() for some in batches for x in some.split(batch)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        src = next(self._left, None)
        return None if src is None else {"src": src}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(self.get_next, None)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Give a folder for unfinished files in ``folder``, while what makes them is quiet."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name, _quiet():
        yield Path(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that exporters and quantizers log."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
