# SPDX-License-Identifier: Apache-2.0
"""A few bytes of a file can name large sizes; loading refuses them before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.serialization.tensor_file import read_tensors, write_tensors

LARGE = 1 << 16  # a gigabyte for two of them, in the smallest dtype
X = torch.linspace(-1, 1, 12 * 64).reshape(12, 64)
IMAGE = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)

LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "static": (lambda: nn.Linear(64, 16), X, {}),
    "dynamic": (lambda: nn.Linear(64, 16), X, {"dynamic": True}),
    "int4": (lambda: nn.Linear(64, 16), X, {"dynamic": True, "weight_bits": 4}),
    "conv": (lambda: nn.Conv2d(3, 16, 3), IMAGE, {}),
    "transposed": (lambda: nn.ConvTranspose2d(3, 16, 3, 2), IMAGE, {}),
    "lstm": (lambda: nn.LSTM(64, 16), X[:, None], {}),
    "embedding": (lambda: nn.Embedding(12, 16), torch.arange(12), {"embedding_bits": 8}),
}


def _larger(value: Any) -> Any:
    """Return a value of a spec with other sizes: those above 8, which no list of strides has."""
    if isinstance(value, list):
        return [_larger(each) for each in value]
    if isinstance(value, dict):
        fixed = "version", "bits", "src_bits", "state_bits", "group_size"
        return {key: each if key in fixed else _larger(each) for key, each in value.items()}
    return LARGE if isinstance(value, int) and value > 8 else value


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_that_the_file_has_no_tensors_for(name: str, tmp_path: Path) -> None:
    make, x, options = LAYERS[name]
    path, model = tmp_path / "file", nn.Sequential(make())
    qmodel = torchq.quantize(model.eval(), [x], config=torchq.QConfig(**options))
    torchq.save(qmodel, path)
    tensors, metadata = read_tensors(path)
    specs = [key for key in tensors if key.endswith(".spec")]
    assert specs
    for key in specs:
        spec = json.loads(bytes(tensors[key].numpy()))
        tensors[key] = torch.tensor(list(json.dumps(_larger(spec)).encode()), dtype=torch.uint8)
    write_tensors("test", path, tensors, metadata)
    with pytest.raises(ValueError, match="than its tensors allow, got") as error:
        torchq.load(path, nn.Sequential(make()))
    assert str(path) in str(error.value)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.LSTM(256, 256)] * 8)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)[0]
        return x


def test_a_layer_of_many_names_counts_once(tmp_path: Path) -> None:
    model, x = Shared().eval(), torch.rand(3, 2, 256)
    qmodel = torchq.quantize(model, [x])
    torchq.save(qmodel, tmp_path / "file")
    loaded = torchq.load(tmp_path / "file", model)
    assert torch.equal(loaded(x), qmodel(x))
    assert loaded.steps[0] is loaded.steps[7]
