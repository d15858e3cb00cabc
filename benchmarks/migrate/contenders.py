# SPDX-License-Identifier: Apache-2.0
"""The code that a user writes for each contender; these functions' lines are counted.

Each takes a float model and calibration batches, and returns the quantized model; those of ONNX
Runtime, the path of its file.
"""

from __future__ import annotations

import ast
import copy
import inspect
import shutil
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.inference.runtimes import export

__all__ = ["CONTENDERS", "RUNTIME", "code_of", "lines_of", "why_absent"]

Make = Callable[[nn.Module, list[Tensor]], Any]
RUNTIME = "ONNX Runtime"


def ao_dynamic(model: nn.Module, batches: list[Tensor]) -> Any:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(model, {nn.Linear, nn.LSTM})


def ao_embedding(model: nn.Module, batches: list[Tensor]) -> Any:
    from torch.ao import quantization as ao

    table, linear = ao.float_qparams_weight_only_qconfig, ao.default_dynamic_qconfig
    return ao.quantize_dynamic(model, {nn.EmbeddingBag: table, nn.Linear: linear})


def ao_static(model: nn.Module, batches: list[Tensor]) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.backends.quantized.engine = "x86"
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (batches[0],))
    with torch.inference_mode():
        for batch in batches:
            prepared(batch)
    return convert_fx(prepared)


def torchao_eager(model: nn.Module, batches: list[Tensor]) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def torchao_compiled(model: nn.Module, batches: list[Tensor]) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(model)


def onnx_dynamic(model: nn.Module, batches: list[Tensor]) -> Any:
    from onnxruntime.quantization import quantize_dynamic

    export(model, batches[0][:1], Path("float.onnx"))
    quantize_dynamic("float.onnx", "int8.onnx", per_channel=True)
    return Path("int8.onnx")


def onnx_static(model: nn.Module, batches: list[Tensor]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(torch.cat(batches).split(1))

        def get_next(self) -> Any:
            src = next(self.left, None)
            return None if src is None else {"src": src.numpy()}

    export(model, batches[0][:1], Path("float.onnx"))
    quantize_static("float.onnx", "int8.onnx", Reader(), per_channel=True)
    return Path("int8.onnx")


def torchq_dynamic(model: nn.Module, batches: list[Tensor]) -> Any:
    return torchq.quantize_dynamic(model)


def torchq_embedding(model: nn.Module, batches: list[Tensor]) -> Any:
    return torchq.quantize_dynamic(model, {nn.EmbeddingBag, nn.Linear})


def torchq_static(model: nn.Module, batches: list[Tensor]) -> Any:
    return torchq.quantize(model, batches)


CONTENDERS: dict[str, dict[str, Make]] = {
    "torch.ao": {"dynamic": ao_dynamic, "static": ao_static, "embedding": ao_embedding},
    "torchao": {"dynamic": torchao_eager, "embedding": torchao_eager},
    "torchao, compiled": {"dynamic": torchao_compiled, "embedding": torchao_compiled},
    RUNTIME: {"dynamic": onnx_dynamic, "static": onnx_static, "embedding": onnx_dynamic},
    "torchq dynamic": {"dynamic": torchq_dynamic, "embedding": torchq_embedding},
    "torchq static": {"dynamic": torchq_static, "static": torchq_static},
}
"""Contender -> kind of model -> what to write for it; nothing where it quantizes none of it."""


def why_absent(name: str, kind: str) -> str:
    """Why a contender takes no part here, or ""."""
    packages = {"torchao": "torchao", "torchao, compiled": "torchao", RUNTIME: "onnxruntime"}
    if find_spec(packages.get(name, "torch")) is None:
        return f"{packages[name]} is not installed"
    if name == "torchao, compiled" and not (shutil.which("g++") or shutil.which("clang++")):
        return "no C++ compiler"
    if kind == "embedding" and name.startswith("torchq") and not hasattr(
        torchq.nn, "QEmbeddingBag"
    ):  # fmt: skip
        return "this version has no QEmbeddingBag"
    return ""


def code_of(make: Make) -> str:
    """The body of a function without comments and blank lines."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(make)))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(ast.unparse(statement) for statement in function.body)


def lines_of(make: Make) -> int:
    """How many lines a user writes, imports included."""
    lines = [line for line in code_of(make).splitlines() if line.strip()]
    return len(lines) + ("torchq." in code_of(make))  # `import torchq`, at the top of this file
