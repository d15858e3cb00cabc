# SPDX-License-Identifier: Apache-2.0
"""half(), to(dtype) and the like of a quantized model raise before anything is changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq

X = torch.linspace(-2, 2, 4 * 6 * 16).reshape(4, 6, 16)
DYNAMIC = torchq.QConfig(dynamic=True)


class Block(nn.Module):
    """A norm in front, layers of several kinds, and a weight that only code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rnn(self.body(self.norm(x)))[0]
        return nn.functional.linear(y, self.weight)


FLOWS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "static": lambda m: torchq.quantize(m, [X]),
    "dynamic": lambda m: torchq.quantize(m, None, X, DYNAMIC),
    "swapped": lambda m: torchq.eager.quantize(m, [X], X),
    "quantize_dynamic": lambda m: torchq.quantize_dynamic(m),
}
CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.float16),
    "type": lambda m: m.type(torch.float64),
    "to like": lambda m: m.to(torch.ones((), dtype=torch.bfloat16)),
}


def variants(model: nn.Module, converted: nn.Module, path: Path) -> Iterator[nn.Module]:
    yield converted
    yield copy.deepcopy(converted)
    yield pickle.loads(pickle.dumps(converted))
    torchq.save(converted, path)
    yield torchq.load(path, model)


@pytest.mark.parametrize("flow", FLOWS)
def test_the_model_is_as_it_was(flow: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    converted = FLOWS[flow](model)
    expected = converted(X)
    for one in variants(model, converted, tmp_path / "model"):
        state = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        for convert in CONVERSIONS.values():
            for part in (one, one.get_submodule("body")):
                with pytest.raises(TypeError, match=r"must stay torch\..*was changed"):
                    convert(part)
        assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())
        assert torch.equal(one(X), expected)


def test_a_graph_alone_and_a_model_whose_weights_only_the_graph_has(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.LayerNorm(16), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.norm(x), self.weight)

    converted = torchq.quantize(Functional().eval(), [X])
    torchq.save(converted, tmp_path / "model")
    alone = torchq.load(tmp_path / "model")
    for one in (converted, alone, copy.deepcopy(alone), pickle.loads(pickle.dumps(alone))):
        with pytest.raises(TypeError, match=r"must stay torch\.float32"):
            one.half()
        assert torch.equal(one(X), converted(X))


def test_the_message_names_the_layer() -> None:
    converted = torchq.quantize_dynamic(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)))
    with pytest.raises(TypeError, match=r"'1\.layer\.weight_scale' must stay torch\.float32"):
        converted.half()


def test_what_changes_no_dtype_is_no_conversion() -> None:
    converted = torchq.quantize(Block().eval(), [X])
    expected = converted(X)
    for same in (converted.float(), converted.cpu(), converted.to(torch.float32)):
        assert same is converted and torch.equal(converted(X), expected)
    state = copy.deepcopy(converted.state_dict())
    converted.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(converted(X), expected)
    moved = copy.deepcopy(converted).to("meta")
    assert {tensor.device.type for tensor in moved.state_dict().values()} >= {"meta"}


def test_devices_without_kernels() -> None:
    converted = torchq.quantize(Block().eval(), [X])
    expected = converted(X)

    def moved(tensor: Tensor) -> Any:
        """Stands for a tensor on a device that this machine may not have."""
        return SimpleNamespace(dtype=tensor.dtype, device=torch.device("cuda", 0))

    with pytest.raises(TypeError, match=r"must stay on the CPU, got a move to cuda:0.*x\.cpu\(\)"):
        converted._apply(moved)
    assert torch.equal(converted(X), expected)


def test_a_float_module_around_a_quantized_one() -> None:
    """PyTorch converts its children in turn: those in front are converted, the model is not."""
    converted = torchq.quantize(Block().eval(), [X])
    around = nn.Sequential(nn.Linear(16, 16), converted)
    expected = converted(X)
    with pytest.raises(TypeError, match="what a float module around it has in front of it may be"):
        around.half()
    assert torch.equal(converted(X), expected)
