# SPDX-License-Identifier: Apache-2.0
"""Quantization by torchq and by its peers, of any task's model."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.accuracy.task import Task
from benchmarks.inference.runtimes import nncf_quantized

__all__ = ["contenders"]


def contenders(task: Task) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that make each quantized model."""

    def ours(**options: Any) -> Callable[[], nn.Module]:
        return lambda: torchq.quantize(task.model, task.calibration, **options)

    recipes = {
        name: ours(config=torchq.QConfig(recipe=name)) for name in ("fast", "accurate", "best")
    }
    return {
        "torch.ao, dynamic": lambda: _torch_ao(task),
        "ONNX Runtime, dynamic": lambda: _onnx_runtime(task, static=False),
        "ONNX Runtime, static": lambda: _onnx_runtime(task, static=True),
        "NNCF, OpenVINO": lambda: _nncf(task),
        **{f"torchq, {name}": make for name, make in recipes.items()},
        "torchq, dynamic=True": ours(config=torchq.QConfig(dynamic=True)),
        **task.remedies,
    }


def _torch_ao(task: Task) -> nn.Module:
    from torch.ao.quantization import (
        default_dynamic_qconfig,
        per_channel_dynamic_qconfig,
        quantize_dynamic,
    )

    kinds = {type(part) for part in task.model.modules()}
    if not kinds & {nn.Linear, nn.LSTM, nn.LSTMCell}:
        raise RuntimeError("torch.ao has no dynamic form of these layers")
    config = {kind: per_channel_dynamic_qconfig for kind in (nn.Linear, nn.LSTM)}
    config |= {nn.LSTMCell: default_dynamic_qconfig}
    with _quiet():
        small: nn.Module = quantize_dynamic(copy.deepcopy(task.model), config)
    return small


def _onnx_runtime(task: Task, static: bool) -> nn.Module:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as name, _quiet():
        plain, ready, small = (Path(name) / f"{part}.onnx" for part in ("plain", "ready", "small"))
        _export(task, plain)
        if not static:
            quantization.quantize_dynamic(plain, small, per_channel=True)
            return _OnnxRuntime(small)
        quant_pre_process(plain, ready, skip_symbolic_shape=True)
        quantization.quantize_static(
            ready, small, _Reader(task), per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return _OnnxRuntime(small)


def _nncf(task: Task) -> nn.Module:
    import openvino

    with _quiet():
        model = openvino.convert_model(task.model, example_input=_parts(task.timed))
        items = [[x.numpy() for x in _parts(src)] for src in task.calibration]
        return _OpenVino(nncf_quantized(model, items, task.is_transformer))


def _export(task: Task, path: Path) -> None:
    inputs = _parts(task.timed)
    options: dict[str, Any] = {"input_names": _names(inputs), "opset_version": 18}
    if any(isinstance(part, nn.LSTMCell) for part in task.model.modules()):
        options |= {"dynamo": True, "external_data": False, "verbose": False}
    else:
        axes = {f"x{i}": list(dims) for i, dims in task.variable.items()}
        options |= {"dynamo": False, "dynamic_axes": axes}
    torch.onnx.export(task.model, inputs, str(path), **options)


def _parts(inputs: Any) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _names(inputs: tuple[Tensor, ...]) -> list[str]:
    return [f"x{i}" for i in range(len(inputs))]


def _results(arrays: Any) -> Any:
    found = tuple(torch.from_numpy(array) for array in arrays)
    return found[0] if len(found) == 1 else found


class _OnnxRuntime(nn.Module):
    """A file of ONNX on as many threads as PyTorch has."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(path.read_bytes(), options)

    def forward(self, *inputs: Tensor) -> Any:
        arrays = [x.numpy() for x in inputs]
        return _results(self.session.run(None, dict(zip(_names(inputs), arrays, strict=True))))


class _OpenVino(nn.Module):
    """A model of OpenVINO on as many threads as PyTorch has; what stays float is float32."""

    def __init__(self, model: Any) -> None:
        import openvino

        super().__init__()
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self.compiled = openvino.compile_model(model, "CPU", settings)

    def forward(self, *inputs: Tensor) -> Any:
        found = self.compiled([x.numpy() for x in inputs])
        return _results([found[output].copy() for output in self.compiled.outputs])


class _Reader:
    """Calibration inputs, one by one, as ONNX Runtime asks for them."""

    def __init__(self, task: Task) -> None:
        self.left = iter(task.calibration)

    def get_next(self) -> dict[str, Any] | None:
        inputs = next(self.left, None)
        if inputs is None:
            return None
        parts = _parts(inputs)
        return dict(zip(_names(parts), (x.numpy() for x in parts), strict=True))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep peers from printing."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
