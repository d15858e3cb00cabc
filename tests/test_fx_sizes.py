# SPDX-License-Identifier: Apache-2.0
"""Numbers that a model's Python code makes of sizes: right for other inputs, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flows import sqnr
from models import Wired
from torch import Tensor, nn

import torchq


class Resized(nn.Module):
    """To a size that Python computes."""

    def __init__(self, size: Callable[[Any], int]) -> None:
        super().__init__()
        self.a, self.size = nn.Conv2d(3, 8, 3), [size]

    def forward(self, x: Tensor) -> Tensor:
        size = self.size[0](x.shape[2])
        return F.interpolate(self.a(x), size=(size, size))


SIZES: dict[str, Callable[[Any], int]] = {
    "int": lambda n: int(n / 2),
    "float": lambda n: int(float(n / 4) * 3),
    "sqrt": lambda n: int(math.sqrt(n * n)),
    "log2": lambda n: 2 * int(math.log2(n)),
    "ceil": lambda n: int(np.ceil(n / 7)) * 7,
    "prod": lambda n: int(np.prod((n, 2))),
    "tensor": lambda n: int(torch.as_tensor(n)),
}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_sizes(name: str) -> None:
    """A conversion to int or float in Python is a constant of the graph: no other passes."""
    model, x = Resized(SIZES[name]).eval(), torch.randn(2, 3, 16, 16)
    quantized = torchq.quantize(model, [x], x)
    assert isinstance(quantized, torch.fx.GraphModule)
    for found in (quantized, torch.jit.script(quantized)):
        for same in (x, x[:1]):
            assert found(same).shape == model(same).shape
        with pytest.raises((RuntimeError, torch.jit.Error), match="size or condition was"):
            found(torch.randn(2, 3, 24, 24))


class Numbers(nn.Module):
    """What ``code`` makes of its input and of a layer's result."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.code = nn.Linear(16, 8), [code]

    def forward(self, x: Tensor) -> Tensor:
        return self.code[0](x, self.a(x))


# whether other sizes pass; those that do not are constants of the graph, and raise
NUMPY: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    "tensor": (True, lambda x, y: np.float64(2) - np.float32(3) * y / np.int64(5)),
    "operators": (True, lambda x, y: y + np.float64(2) * x.shape[1] / np.int64(3)),
    "sqrt": (True, lambda x, y: y / np.sqrt(x.shape[2])),
    "prod": (True, lambda x, y: y.reshape(np.prod(x.shape[:2]), 8)),
    "least": (True, lambda x, y: y[:, : np.minimum(x.shape[1], 6)] * np.clip(x.shape[1], 2, 5)),
    "log": (False, lambda x, y: y[:, : 3 * np.ceil(np.log(x.size(1))).astype("int").item()]),
    "floor": (False, lambda x, y: y * np.maximum(np.floor(x.shape[1] / 3).astype(int), 2).item()),
    "array": (False, lambda x, y: y + torch.from_numpy(np.arange(8.0, dtype="f") * x.shape[1])),
    "out": (False, lambda x, y: y + torch.from_numpy(np.add(1, x.shape[1], out=np.zeros(8, "f")))),
    "isnan": (False, lambda x, y: -y if np.isnan(x.shape[1]) else y),
    "divmod": (False, lambda x, y: y * np.divmod(x.shape[1], 5)[1]),
}


@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.filterwarnings("error:torchq")
def test_numbers_of_numpy(name: str) -> None:
    passes, code = NUMPY[name]
    model, x, other = Numbers(code).eval(), torch.randn(2, 12, 16), torch.randn(3, 52, 16)
    prepared = torchq.prepare(model, x)
    converted = torchq.convert(torchq.calibrate(prepared, [x, other] if passes else [x]))
    assert isinstance(converted, torch.fx.GraphModule)
    with torch.no_grad():
        for given in (x, x[:1], other):
            if given is other and not passes:
                with pytest.raises(RuntimeError, match=r"size or condition was .*test_fx_sizes"):
                    converted(given)
                continue
            assert torch.equal(prepared(given), model(given))
            assert sqnr(model(given), converted(given)) > 25


@pytest.mark.parametrize("name", ["exp", "square"])
def test_tensors_are_not_for_numpy(name: str) -> None:
    def code(x: Tensor, y: Tensor) -> Tensor:
        return y * getattr(np, name)(x.mean())

    with pytest.warns(UserWarning, match=rf"gives a Tensor to numpy.{name} \(test_fx_sizes"):
        torchq.quantize(Numbers(code).eval(), [torch.randn(2, 12, 16)])


class Flattened(nn.Module):
    """Functions of torch that look at their sizes before they see that they are traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
        y = F.pad(self.a(y), (x.shape[0], 0)).narrow(1, x.shape[0], 4)
        y = torch.tile(y, (x.shape[1], 1))
        return y * [1, 2][x.shape[1] - 3]


def test_functions_that_are_given_sizes() -> None:
    model, x = Flattened().eval(), torch.randn(2, 3, 8)
    prepared = torchq.prepare(model, x)
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 8)
        torch.testing.assert_close(prepared(x), model(x))
    with pytest.raises(RuntimeError, match="was 0, got 1"):  # which Python acts on
        prepared(torch.randn(2, 4, 8))


def test_a_shape_compared_with_sizes_of_another_tensor() -> None:
    """As in nn.LSTM, which checks its state: any batch passes that fits, and no other one."""

    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            if state.size() != (x.size(0), 8):
                raise RuntimeError("sizes do not fit")
            return self.fc(x) + state

    model = Checks().eval()
    batches = [(torch.randn(n, 8), torch.randn(n, 8)) for n in (2, 5)]
    converted = torchq.quantize(model, batches[:1])
    assert converted(*batches[1]).shape == (5, 8)
    with pytest.raises(RuntimeError, match="the model was traced where"):
        converted(batches[1][0], batches[0][1])


FREE: dict[str, Callable[[Any], Any]] = {
    "round": lambda shape: round(shape[2] / 3),
    "round_half": lambda shape: round(shape[2] / 2) + round(shape[3]),
    "divmod": lambda shape: divmod(shape[2], 3)[0] + divmod(shape[2], 5)[1],
    "divmod_by": lambda shape: divmod(100, shape[2])[0] + divmod(100, shape[2])[1],
    "trunc": lambda shape: math.trunc(shape[2] / 3),
    "abs": lambda shape: abs(3 - shape[2]),
    "ceil": lambda shape: math.ceil(shape[2] / 3),
    "prod": lambda shape: math.prod(shape[1:]) + math.prod(shape[2:], start=2) + math.prod(()),
    "numel": lambda shape: shape[2:].numel(),
}


@pytest.mark.parametrize("name", FREE)
def test_numbers_of_sizes_that_are_nodes(name: str, tmp_path: Path) -> None:
    """They are right for every size, scripted and saved too."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return m.a(x), torch.ones(1) * FREE[name](x.shape)

    model, x = Wired(forward, a=nn.Conv2d(3, 8, 3)).eval(), torch.randn(2, 3, 16, 16)
    quantized = torchq.quantize(model, [x], x)
    assert isinstance(quantized, torch.fx.GraphModule)
    torchq.save(quantized, tmp_path / "m")
    for found in (quantized, torch.jit.script(quantized), torchq.load(tmp_path / "m")):
        for n in (15, 16, 17, 24):
            y = torch.randn(2, 3, n, n)
            assert torch.equal(found(y)[1], model(y)[1])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """As near as 8 bits are."""
    assert float((found - expected).detach().norm()) <= 0.1 * float(expected.detach().norm())


@pytest.mark.parametrize("name", ["isqrt", "log2", "comb"])
def test_functions_that_torchscript_lacks(name: str) -> None:
    """Their sizes are guarded, and so are rounded digits."""
    functions: dict[str, Callable[[Any], Any]] = {
        "isqrt": math.isqrt, "log2": math.log2, "comb": lambda n: math.comb(n, 2)
    }  # fmt: skip

    def forward(m: Any, x: Tensor) -> Tensor:
        z: Tensor = m.a(x)
        return z * functions[name](x.shape[2]) * round(x.shape[2] / 3, 1)

    model, x = Wired(forward, a=nn.Conv2d(3, 8, 3)).eval(), torch.randn(2, 3, 16, 16)
    quantized = torchq.quantize(model, [x], x)
    for found in (quantized, torch.jit.script(quantized)):
        assert_close(found(x[:1]), model(x[:1]))
        with pytest.raises((RuntimeError, torch.jit.Error), match="size or condition was"):
            found(torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_filter_repeated_for_each_channel_is_a_weight(transposed: bool) -> None:
    """Its number of channels is guarded; those of the batch and of positions are not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = m.a(x)
        weight = m.filter.expand(z.shape[1], -1, -1)
        if transposed:
            return F.conv_transpose1d(z, weight, stride=2, groups=z.size(1))
        return F.conv1d(z, weight, padding=1, groups=weight.size(0))

    model = Wired(forward, a=nn.Conv1d(3, 8, 3)).eval()
    model.register_buffer("filter", torch.tensor([[[0.25, 0.5, 0.25]]]))
    x = torch.randn(4, 3, 16)
    quantized = torchq.quantize(model, [x], x, strict=True)
    for found in (quantized, torch.jit.script(quantized)):
        for y in (x, x[:1], torch.cat([x, x[..., :9]], 2)):
            assert_close(found(y), model(y))


def test_a_failed_check_names_the_line_of_the_model() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[1] == 7)
        return m.a(x)

    model = Wired(forward, a=nn.Linear(8, 8)).eval()
    converted = torchq.quantize(model, [torch.randn(2, 7, 8)])
    with pytest.raises(RuntimeError, match=r"\(test_fx_sizes.py:\d+\)"):
        converted(torch.randn(2, 9, 8))


def looked_for(x: Tensor) -> bool:
    return 9 not in x.shape


def looked_for_by_size(x: Tensor) -> bool:
    return x.shape[1] - 2 in x.size()


def summed(x: Tensor) -> bool:
    return math.fsum(x.shape) < 18


def measured(x: Tensor) -> bool:
    return math.dist(x.shape, (0, 0, 0)) < 11


@pytest.mark.parametrize("question", [looked_for, looked_for_by_size, summed, measured])
def test_questions_about_a_whole_shape(question: Callable[[Tensor], bool]) -> None:
    """The traced way was taken by all inputs, for the shape itself was not guarded."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x) if question(x) else self.b(x)
            return y

    torch.manual_seed(0)
    model = Model().eval()
    prepared = torchq.fx.prepare(model, torch.randn(2, 7, 8))
    for shape in ((2, 7, 8), (2, 9, 8), (3, 7, 8), (2, 10, 8), (2, 11, 8)):
        x = torch.randn(shape)
        try:
            found = prepared(x)
        except RuntimeError as error:
            assert shape != (2, 7, 8) and "a size or condition was" in str(error)
        else:
            assert_close(found, model(x))
