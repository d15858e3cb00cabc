# SPDX-License-Identifier: Apache-2.0
"""One converted model on every way out of Python: the same bits everywhere."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import torchq
import torchq.nn as tnn
from torchq.ops import LIBRARY_PATH

pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:torchq.*calibration has seen too little",
    "ignore:.*torch.jit.*deprecated",  # DeprecationWarning in torch 2.13, FutureWarning in 2.15
    "ignore:torch.meshgrid:UserWarning",
    "ignore:Using padding='same' with even kernel lengths:UserWarning",
    "ignore:.*is deprecated.*:DeprecationWarning:torch.*",
)


Built = tuple[nn.Module, Tensor, Tensor]


@functools.cache
def build(name: str) -> Built:
    """A converted model, an input and its result."""
    make, shape, _, _ = models.CASES[name]
    model, x = models.randomize(make()), torch.randn(shape)
    converted = torchq.quantize(model, [x, 2 * x], x)
    return converted, x, converted(x)


@pytest.fixture
def resnet() -> Built:
    return build("resnet")


NAMES = ["resnet", "lookups", "geometry", "volumes", "shared_relu6", "root", "tied"]


@pytest.mark.parametrize("name", NAMES)
def test_copies(name: str) -> None:
    model, x, expected = build(name)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert torchq.explain(other).rows == torchq.explain(model).rows


@pytest.mark.parametrize("name", NAMES)
def test_script_save_load(name: str, tmp_path: Path) -> None:
    model, x, expected = build(name)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), expected)
    scripted.save(tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    assert torch.equal(loaded(x), expected)
    assert torch.equal(torch.jit.freeze(loaded.eval())(x), expected)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)
    larger = torch.cat([x, x])
    assert torch.equal(traced(larger), model(larger)) and torch.equal(loaded(larger), model(larger))


def test_a_loaded_graph_without_its_class(resnet: Built, tmp_path: Path) -> None:
    """The graph alone goes every way that the model goes."""
    model, x, expected = resnet
    torchq.save(model, tmp_path / "model")
    graph = torchq.load(tmp_path / "model")
    torch._dynamo.reset()
    ways = [
        torch.jit.script(graph),
        torch.jit.trace(graph, x),
        torch.export.export(graph, (x,)).module(),
        torch.compile(graph, fullgraph=True, backend="aot_eager"),
    ]
    for way in (graph, *ways):
        assert torch.equal(way(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str, tmp_path: Path) -> None:
    model, x, expected = build(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(loaded(x), expected)
    larger = torch.cat([x, x, x])
    assert torch.equal(loaded(larger), model(larger))


SRC = torchq.QParams.per_tensor(0.02, 128)
ALONE = {
    "linear": (tnn.QLinear.from_float(nn.Linear(6, 3, bias=False), SRC, SRC), (4, 6)),
    "affine": (tnn.QLinear.from_float(nn.Linear(6, 3, bias=False), SRC, affine=True), (4, 6)),
    "conv": (tnn.QConv2d.from_float(nn.Conv2d(2, 3, 3, bias=False), SRC), (1, 2, 6, 6)),
    "max": (tnn.QMaxPool2d(SRC, 2), (1, 2, 6, 6)),
    "average": (tnn.QAvgPool2d(SRC, 2), (1, 2, 6, 6)),
    "resample": (tnn.QResample(SRC, [3, 3]), (1, 2, 6, 6)),
}


@pytest.mark.parametrize("name", ALONE)
def test_export_of_one_module(name: str) -> None:
    """As the root, where torch.export numbers its buffers."""
    module, shape = ALONE[name]
    x = torch.randn(shape)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), module(x))


class Named(nn.Module):
    """Its arguments have one shape: nobody sees which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(
        self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None, d: float = 1.0
    ) -> Tensor:
        y = self.fc(a) if b is None else self.fc(a) + b
        return y if c is None else y - 2 * c * d


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("names", ["ca", "dcba"])
def test_arguments_by_keyword(names: str, first: int) -> None:
    """In any order, with arguments between them left out."""
    values = {"a": torch.randn(4, 8), "b": torch.randn(4, 8), "c": torch.randn(4, 8), "d": 0.5}
    inputs = {name: values[name] for name in names}
    model = torchq.quantize(Named().eval(), [inputs])
    expected = model(**inputs)
    args = tuple(inputs.pop("a") for _ in range(first))
    assert torch.equal(model(*args, **inputs), expected)
    for strict in (False, True):
        program = torch.export.export(model, args, inputs, strict=strict)
        assert torch.equal(program.module()(*args, **inputs), expected)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **inputs), expected)


@pytest.mark.parametrize("what", ["model", "state"])
def test_export_of_weights_in_a_mapped_file(what: str, tmp_path: Path) -> None:
    """torch.export.save fails at empty tensors there, so that there must be none."""
    x = torch.randn(2, 8)
    model = torchq.quantize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval(), [x])
    expected, file = model(x), tmp_path / "weights"
    torch.save(model if what == "model" else model.state_dict(), file)
    loaded = torch.load(file, mmap=True, weights_only=what == "state")
    if what == "state":
        model.load_state_dict(loaded, assign=True)
    else:
        model = loaded
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), expected)


def test_compile_aot_eager(resnet: Built) -> None:
    model, x, expected = resnet
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x), expected)
    larger = torch.cat([x, x])
    assert torch.equal(compiled(larger), model(larger))


@pytest.mark.filterwarnings("default")
def test_compile_inductor(resnet: Built) -> None:
    model, x, expected = resnet
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)


@pytest.mark.slow
def test_aot_inductor(resnet: Built, tmp_path: Path) -> None:
    """Its programs call ops without Python, and hand them None where a list of tensors is empty."""
    model, x, expected = resnet
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own pytrees
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        assert torch.equal(torch._inductor.aoti_load_package(path)(x), expected)


LOADERS = {
    # The first two have nothing but torch and the library: no Python of torchq.
    "script": "model = torch.jit.load(path / 'model.pt')",
    "trace": "model = torch.jit.load(path / 'traced.pt')",
    "export": "import torchq; model = torch.export.load(path / 'model.pt2').module()",
    "pickle": "import torchq; model = torch.load(path / 'whole.pt', weights_only=False)",
}


def test_fresh_process(resnet: Built, tmp_path: Path) -> None:
    """Loaded where torchq was never imported, the archives give the same bits."""
    model, x, expected = resnet
    torch.jit.script(model).save(tmp_path / "model.pt")
    torch.jit.trace(model, x).save(tmp_path / "traced.pt")
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save(model, tmp_path / "whole.pt")
    torch.save((x, expected), tmp_path / "data.pt")
    lines = [
        "import pathlib, sys, torch",
        f"path = pathlib.Path({str(tmp_path)!r})",
        f"torch.ops.load_library({str(LIBRARY_PATH)!r})",
        "x, expected = torch.load(path / 'data.pt')",
    ]
    for name, loader in LOADERS.items():
        if name == "export":
            lines.append("assert 'torchq' not in sys.modules")
        lines += [loader, f"assert torch.equal(model(x), expected), {name!r}"]
    # Pickled networks need the classes of these tests.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, env=environment)


def state_copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def at_odd_addresses(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors may return them: byte tensors at any address."""
    moved = {}
    for name, value in state.items():
        value = value.clone()
        if value.element_size() == 1 and value.numel():
            room = torch.empty(value.numel() + 1, dtype=value.dtype)
            value = room[1:].view(value.shape).copy_(value)
            assert value.data_ptr() % 2 == 1
        moved[name] = value
    return moved


def through_a_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("change", [state_copy, at_odd_addresses, through_a_file])
def test_state_dict(resnet: Built, change: Callable[[Any], Any], assign: bool) -> None:
    model, x, expected = resnet
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        if buffer.is_floating_point():
            buffer.zero_()
    other.load_state_dict(change(dict(model.state_dict())), assign=assign)
    assert torch.equal(other(x), expected)


def test_no_warnings(tmp_path: Path) -> None:
    """Import and the whole flow under -W error."""
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import torch, models, torchq
model, x = models.randomize(models.ResNet()), torch.randn(4, 3, 16, 16)
q = torchq.quantize(model, [x], x, strict=True)
str(torchq.explain(q)), repr(q)
torchq.save(q, {str(tmp_path / "q")!r})
assert torch.equal(torchq.load({str(tmp_path / "q")!r}, model)(x), q(x))
torch.export.export(q, (x,))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_cost_of_a_call() -> None:
    """A module costs little more than its op (5.6 us for 4x64x64 on an idle machine)."""
    from torch.utils.benchmark import Timer

    src = torchq.QParams.per_tensor(0.02, 100)
    module = torchq.nn.QLinear.from_float(nn.Linear(64, 64), src, src)
    x = torch.randint(0, 256, (4, 64), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = min(
            Timer("module(x)", timer=thread_time, globals={"module": module, "x": x})
            .timeit(500)
            .mean
            for _ in range(10)
        )  # fmt: skip
    assert best < 30e-6
